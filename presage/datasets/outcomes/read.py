"""Outcomes from any mix of files: what every command that takes OUTCOMES calls first.

Rows of one prompt are joined across files. Where a model has several rows for a prompt, its label is their mean, and
so are its tokens and its cost; the reading says how many rows that concerns, and how many prompts and models are
contradicted. What is kept is each prompt once and five numbers a row.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.datasets.outcomes.rows import NO_LABEL, OutcomeRow, files_of, outcome_rows
from presage.datasets.outcomes.schema import Outcomes
from presage.errors import TraceError

_TELL_EVERY: Final = 8192


@dataclass(frozen=True)
class OutcomesRead:
    """Outcomes, and what was found on the way.

    Attributes:
        outcomes: of all files together.
        rows: with a label.
        duplicates: rows beyond the first of their prompt and model.
        contradictions: pairs of a prompt and a model whose rows have different labels.
        skipped: how many rows were left out for each reason: those without a label, and under `skip_bad` the bad ones.
    """

    outcomes: Outcomes
    rows: int
    duplicates: int
    contradictions: int
    skipped: Mapping[str, int]


def read_outcomes(
    paths: Sequence[str | Path], skip_bad: bool = False, progress: Callable[[int], None] | None = None
) -> OutcomesRead:
    """Reads outcomes.

    Args:
        paths: `.jsonl`, `.jsonl.gz`, `.json`, `.csv`, `.csv.gz` and `.parquet` files, or folders of them.
        skip_bad: count bad rows instead of raising.
        progress: called with the number of rows read since its last call.

    Raises:
        TraceError: a file is missing or damaged, a row is not as wanted (names file, row and column), or no row has a
            label.
    """
    if not paths:
        raise TraceError("no outcomes given: name at least one .jsonl, .jsonl.gz, .csv or .parquet file")
    gathered, skipped = _Gathered(), Counter[str]()

    def on_bad(message: str, reason: str) -> None:
        if not skip_bad:
            raise TraceError(message)
        skipped[reason] += 1

    read = 0
    for file in [file for path in paths for file in files_of(Path(path))]:
        for row in outcome_rows(file, on_bad):
            if row is None:
                skipped[NO_LABEL] += 1
            else:
                gathered.add(row)
            read += 1
            if progress is not None and read % _TELL_EVERY == 0:
                progress(_TELL_EVERY)
    if progress is not None and read % _TELL_EVERY:
        progress(read % _TELL_EVERY)
    if not len(gathered.correct):
        found = ", ".join(f"{count} × {reason}" for reason, count in sorted(skipped.items())) or "the files are empty"
        raise TraceError(f"no row with a label among the outcomes ({found}); rows with correct 0 or 1 are wanted")
    return gathered.finish(dict(skipped))


class _Gathered:
    """Rows on their way into a matrix."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.task: list[str | None] = []
        self.row_of: dict[str, int] = {}
        self.model_of: dict[str, int] = {}
        self.row, self.model = array("q"), array("q")
        self.correct, self.tokens, self.cost = array("d"), array("d"), array("d")

    def add(self, row: OutcomeRow) -> None:
        at = self.row_of.setdefault(row.key, len(self.prompts))
        if at == len(self.prompts):
            self.prompts.append(row.prompt)
            self.task.append(row.task)
        elif self.task[at] is None:
            self.task[at] = row.task
        self.row.append(at)
        self.model.append(self.model_of.setdefault(row.model, len(self.model_of)))
        self.correct.append(row.correct)
        self.tokens.append(row.output_tokens)
        self.cost.append(row.cost)

    def finish(self, skipped: Mapping[str, int]) -> OutcomesRead:
        models = sorted(self.model_of)
        column = np.empty(len(models), np.int64)
        column[[self.model_of[name] for name in models]] = np.arange(len(models))
        shape = (len(self.prompts), len(models))
        cell = np.frombuffer(self.row, np.int64) * len(models) + column[np.frombuffer(self.model, np.int64)]
        correct = np.frombuffer(self.correct)
        matrix, labels = _mean(cell, correct, shape)
        return OutcomesRead(
            Outcomes(
                tuple(self.prompts),
                tuple(models),
                matrix,
                _mean(cell, np.frombuffer(self.tokens), shape)[0],
                _mean(cell, np.frombuffer(self.cost), shape)[0],
                tuple(self.task),
            ),
            rows=len(correct),
            duplicates=len(correct) - int((labels > 0).sum()),
            contradictions=_contradicted(cell, correct, shape),
            skipped=skipped,
        )


def _mean(
    cell: NDArray[np.int64], values: NDArray[np.float64], shape: tuple[int, int]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Mean of the values of each cell, float32 `shape`, NaN where there is none, and their count."""
    known = ~np.isnan(values)
    size = shape[0] * shape[1]
    count = np.bincount(cell[known], minlength=size)
    total = np.bincount(cell[known], weights=values[known], minlength=size)
    mean = np.divide(total, count, out=np.full(size, np.nan), where=count > 0)
    return mean.astype(np.float32).reshape(shape), count.reshape(shape)


def _contradicted(cell: NDArray[np.int64], correct: NDArray[np.float64], shape: tuple[int, int]) -> int:
    size = shape[0] * shape[1]
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, cell, correct)
    np.maximum.at(high, cell, correct)
    return int((low < high).sum())
