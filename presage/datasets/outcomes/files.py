"""Files of outcomes: JSONL, CSV or Parquet, read in portions.

A row is a prompt, a model and whether the model solved it, and optionally the task, output tokens, cost, and a group
that no split divides; other columns are ignored. Rows of one prompt are joined across files; several rows of one prompt
and model are averaged. Error messages never contain a prompt.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa

from presage.atomic_file import write_file
from presage.datasets.adapters import is_trace
from presage.datasets.adapters.files.text import JSON_SUFFIXES, CsvRows, Documents, Place, files_of
from presage.datasets.outcomes import Outcomes, normalise
from presage.datasets.schema import misspelt, require_columns
from presage.datasets.store.parts import first_line, is_store, open_parquet, row_batches
from presage.errors import TraceError


@dataclass(frozen=True)
class OutcomesRead:
    """Outcomes of all files together, and counts of their rows."""

    outcomes: Outcomes
    rows: int  # with a label
    duplicates: int  # rows beyond the first of their prompt and model
    contradictions: int  # pairs of a prompt and a model whose rows have different labels
    skipped: Mapping[str, int]  # rows by reason: those without a label, and with `skip_bad` the bad ones


def read_outcomes(
    paths: str | Path | Sequence[str | Path], skip_bad: bool = False, progress: Callable[[int], None] = lambda _: None
) -> OutcomesRead:
    """Read outcomes.

    Args:
        paths: `.jsonl`, `.jsonl.gz`, `.json`, `.csv`, `.csv.gz` and `.parquet` files, or folders of them; one or more.
        skip_bad: count bad rows instead of raising.
        progress: called with the number of rows of each file.

    Raises TraceError if a file is missing, damaged or a trace, a row is malformed (names file, row and column), or no
    row has a label.
    """
    paths = [paths] if isinstance(paths, str | Path) else paths
    if not paths:
        raise TraceError("no outcomes given: name at least one .jsonl, .jsonl.gz, .csv or .parquet file")
    gathered, skipped = GatheredOutcomes(), Counter[str]()

    def on_bad(message: str, reason: str) -> None:
        if not skip_bad:
            raise TraceError(message)
        skipped[reason] += 1

    if trace := next((path for path in map(Path, paths) if is_trace(path)), None):
        raise TraceError(
            f"{trace}: this is a trace{' store' if is_store(trace) else ''}; a router learns from outcomes: rows with "
            "prompt, model and correct (docs/router.md)"
        )
    files = [file for path in paths for file in files_of(Path(path), _SUFFIXES)]
    if other := [file for file in files if not file.name.endswith(_SUFFIXES)]:
        raise TraceError(f"{other[0]}: outcomes are read from {', '.join(_SUFFIXES)} files: rename or convert the file")
    for file in files:
        read = 0
        for row in outcome_rows(file, on_bad):
            read += 1
            if row is None:
                skipped[NO_LABEL] += 1
            else:
                gathered.add(row)
        progress(read)
    if not gathered.prompts:
        reasons = ", ".join(f"{count} × {reason}" for reason, count in sorted(skipped.items())) or "the files are empty"
        raise TraceError(f"no row with a label among the outcomes ({reasons}); expected rows with correct 0 or 1")
    return gathered.finish(dict(skipped))


class GatheredOutcomes:
    """Rows joined by prompt and model."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.task: list[str | None] = []
        self.group: list[str | None] = []
        self.row_of: dict[str, int] = {}
        self.model_of: dict[str, int] = {}
        self.row, self.model = array("q"), array("q")
        self.numbers = {name: array("d") for name in _NUMBERS}

    def add(self, row: OutcomeRow) -> None:
        """Adds a row."""
        row_number = self.row_of.setdefault(row.prompt, len(self.prompts))
        if row_number == len(self.prompts):
            self.prompts.append(row.prompt)
            self.task.append(row.task)
            self.group.append(row.group)
        else:
            self.task[row_number] = row.task if self.task[row_number] is None else self.task[row_number]
            self.group[row_number] = row.group if self.group[row_number] is None else self.group[row_number]
        self.row.append(row_number)
        self.model.append(self.model_of.setdefault(row.model, len(self.model_of)))
        for name, values in self.numbers.items():
            values.append(getattr(row, name))

    def finish(self, skipped: Mapping[str, int]) -> OutcomesRead:
        """All rows together; at least one."""
        models = sorted(self.model_of)
        column = np.argsort([self.model_of[name] for name in models])  # of each model, in the order first read
        keys = [np.frombuffer(self.row, np.int64), column[np.frombuffer(self.model, np.int64)]]
        cells = pd.DataFrame({name: np.frombuffer(values) for name, values in self.numbers.items()}).groupby(keys)
        means = cells.mean()  # of the known values
        matrices = np.full((len(_NUMBERS), len(self.prompts), len(models)), np.nan, np.float32)
        matrices[:, means.index.get_level_values(0), means.index.get_level_values(1)] = means.to_numpy().T
        correct, tokens, cost = matrices
        return OutcomesRead(
            Outcomes(
                tuple(self.prompts),
                tuple(models),
                correct,
                tokens,
                cost,
                tuple(self.task),
                tuple(self.group) if any(self.group) else (),
            ),
            rows=len(self.row),
            duplicates=len(self.row) - len(means),
            contradictions=int((cells["correct"].nunique() > 1).sum()),
            skipped=skipped,
        )


_NUMBERS: Final = ("correct", "output_tokens", "cost")
REQUIRED: Final = ("prompt", "model", "correct")
_COLUMNS: Final = (*REQUIRED, "task", "output_tokens", "cost", "group")
PARQUET: Final = ".parquet"
CSV: Final = (".csv", ".csv.gz")
_SUFFIXES: Final = (*JSON_SUFFIXES, PARQUET, *CSV)
NO_LABEL: Final = "no label"


class OutcomeRow(NamedTuple):
    """One validated row; NaN for unknown numbers."""

    prompt: str
    model: str
    correct: float
    task: str | None
    output_tokens: float
    cost: float
    group: str | None = None


OnBad = Callable[[str, str], None]
"""Called with a bad row: a message that names file, row and column, and a short phrase for counting. Raises to stop."""


class _BadRowError(Exception):
    def __init__(self, column: str, message: str, reason: str) -> None:
        self.column, self.message, self.reason = column, message, reason


def outcome_rows(file: Path, on_bad: OnBad) -> Iterator[OutcomeRow | None]:
    """The rows of a file; None for a row whose `correct` is null."""
    if file.name.endswith(PARQUET):
        rows = _parquet(file)
    else:
        rows = _csv(file, on_bad) if file.name.endswith(CSV) else _json(file, on_bad)
    for place, row in rows:
        try:
            yield _checked(row)
        except _BadRowError as bad:
            column = f', column "{bad.column}"' if bad.column else ""
            on_bad(f"{file}, {place}{column}: {bad.message}", bad.reason)


def _json(file: Path, on_bad: OnBad) -> Iterator[tuple[str, Any]]:
    def torn(place: Place, message: str, reason: str, line: bytes) -> None:
        on_bad(f"{file}, line {place.line}: {message}", f"line with {reason}")

    for place, document in Documents([file], torn, msgspec.json.decode):
        yield f"line {place.line}", document


def _csv(file: Path, on_bad: OnBad) -> Iterator[tuple[str, Any]]:
    rows = CsvRows(file)
    require_columns(rows.names, str(file), REQUIRED, _COLUMNS)
    for row in rows:
        if row.problem:
            on_bad(f"{file}, line {row.line}: {row.problem}", f"line with {row.reason}")
            continue
        fields: dict[str, Any] = dict(zip(rows.names, row.fields, strict=True))
        meant = {name: _meant(fields[name]) for name in _NUMBERS if name in fields}
        yield f"line {row.line}", fields | meant | {name: fields.get(name) or None for name in ("task", "group")}


def _meant(field: str) -> bool | float | str | None:
    """A CSV field as a number or boolean, else unchanged."""
    word = field.strip().lower()
    if word in ("true", "false"):
        return word == "true"
    try:
        return float(word) if word else None
    except ValueError:
        return field


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with open_parquet(file) as opened:
            names = opened.schema_arrow.names
            require_columns(names, str(file), REQUIRED, _COLUMNS)
            row = 0
            for table, _ in row_batches(opened, [name for name in _COLUMNS if name in names]):
                for fields in table.to_pylist():
                    row += 1
                    yield f"row {row}", fields
    except (pa.ArrowException, OSError) as error:
        message = f"{file}: cannot be read as Parquet ({first_line(error)}): copy or write the file again"
        raise TraceError(message) from error


def _checked(row: Any) -> OutcomeRow | None:
    if not isinstance(row, Mapping):
        message = f"a JSON {type(row).__name__}; expected one JSON object a line: repair it"
        raise _BadRowError("", message, "no JSON object")
    for column in REQUIRED:
        if column not in row:
            message = "missing; expected prompt, model and correct in every row: add it"
            message += misspelt(row, (column,), _COLUMNS)
            raise _BadRowError(column, message, f"no {column}")
    prompt, model = _text(row, "prompt"), _text(row, "model")
    if not normalise(prompt):
        message = "no text but white space; expected the text of the request: drop the row"
        raise _BadRowError("prompt", message, "no text")
    tokens, cost = _amount(row, "output_tokens"), _amount(row, "cost")
    task, group = (None if row.get(name) is None else _text(row, name) for name in ("task", "group"))
    correct = row["correct"]
    if correct is None or correct != correct:  # NaN of a float column without pandas' nulls
        return None
    if not isinstance(correct, bool | int | float) or not 0 <= correct <= 1:
        what = str(correct) if isinstance(correct, int | float) else f"type {type(correct).__name__}"
        message = f"{what}; expected 0 or 1, or a share of tries between them: correct it"
        raise _BadRowError("correct", message, "label not 0..1")
    return OutcomeRow(prompt, model, float(correct), task, tokens, cost, group)


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise _wrong_type(value, column, "a string")
    if not value:
        raise _BadRowError(column, "an empty string; expected text: drop the row or fill it in", f"no {column}")
    return value


def _amount(row: Mapping[str, Any], column: str) -> float:
    value = row.get(column)
    if value is None or value != value:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_type(value, column, "a number")
    if not 0 <= value < math.inf:
        message = f"{value}; expected a finite number, 0 or more: correct it"
        raise _BadRowError(column, message, f"{column} out of range")
    return float(value)


def _wrong_type(value: Any, column: str, wanted: str) -> _BadRowError:
    message = f"type {type(value).__name__}; expected {wanted}: convert it"
    return _BadRowError(column, message, f"{column} of a wrong type")


def write_outcomes(outcomes: Outcomes, path: Path) -> int:
    """Write a `.jsonl` file atomically, in place of an existing one; returns its rows. Raises OutputError."""
    rows = np.argwhere(~np.isnan(outcomes.correct)).tolist()
    lines = [json.dumps(_row(outcomes, prompt, model), ensure_ascii=False) + "\n" for prompt, model in rows]
    write_file(path, "".join(lines).encode())
    return len(rows)


def _row(outcomes: Outcomes, prompt: int, model: int) -> dict[str, object]:
    correct, tokens, cost = (
        float(matrix[prompt, model]) for matrix in (outcomes.correct, outcomes.output_tokens, outcomes.cost)
    )
    row: dict[str, object] = {"prompt": outcomes.prompts[prompt], "model": outcomes.models[model], "correct": correct}
    if outcomes.task[prompt] is not None:
        row["task"] = outcomes.task[prompt]
    if outcomes.group and outcomes.group[prompt] is not None:
        row["group"] = outcomes.group[prompt]
    if not np.isnan(tokens):
        row["output_tokens"] = int(tokens)
    if not np.isnan(cost):
        row["cost"] = cost
    return row
