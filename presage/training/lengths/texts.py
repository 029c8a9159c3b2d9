"""Choose the text features of a length predictor on held-out tasks: none, relevant terms, or all terms.

As for next agents (`training/semantic_state.py`): for each candidate, a few boosted trees on the logarithm of the
remaining tokens are fitted on the learning part of the training tasks and scored on the calibration part. The simplest
candidate within one standard error of the best is chosen. Sketches are fitted on the learning part only, so the
calibration part acts as new texts. Without a sketch, the predictor still uses prompt sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy.stats import rankdata

from presage.datasets.tasks import task_folds
from presage.errors import ConfigurationError, InputError
from presage.features.lengths import LengthEncoder, LengthRows, prompts_and_answers
from presage.features.sketch import Corpus, Sketch
from presage.features.states import Candidate
from presage.predictors.length.linear import trials
from presage.training.selection import simplest

Texts = Literal["auto", "text", "none"]
TEXTS: Final[tuple[Texts, ...]] = ("auto", "text", "none")

SKETCH_SIZE: Final = 48

_LARGEST: Final = 0.9
_JUDGED: Final = (0.5, 0.9)
"""Quantiles a candidate is tried at: a word that goes with a loop moves the upper ones more than the median."""

_RELEVANT: Final = "relevant text"
_CANDIDATES: Final[Mapping[Texts, tuple[Candidate, ...]]] = {
    "auto": ("none", "relevant text", "text"),
    "text": ("relevant text", "text"),
    "none": ("none",),
}


@dataclass(frozen=True, eq=False)
class LengthTexts:
    """The prompts of n LLM steps and the answers before them.

    Attributes:
        rows: the steps, without sketches.
        corpus: 2 n rows, first all prompts.
        fold: int64 [2 n], equal for steps of one task.
    """

    rows: LengthRows
    corpus: Corpus
    fold: NDArray[np.int64]

    @classmethod
    def of(cls, table: pa.Table, rows: LengthRows, seed: int) -> LengthTexts | None:
        """Of a trace and its rows; None where no step of it has a text.

        A term is relevant if more or less work than usual is left where it occurs, among steps of the same agent and
        workflow type.
        """
        llm = np.flatnonzero(pc.equal(table["kind"], "llm").to_numpy())
        prompts, answers = prompts_and_answers(table)
        texts = [of[row] for of in (prompts, answers) for row in llm.tolist()]
        if not any(texts):
            return None
        group = rows.workflow_type * (len(rows.vocabulary.agents) + 1) + rows.agent
        corpus = Corpus.of(
            texts,
            np.tile(rows.task, 2),
            np.tile(group, 2).astype(np.int32),
            np.repeat(np.arange(2, dtype=np.int8), len(rows)),
            np.tile(_standing(rows, group), (2, 1)),
        )
        return cls(rows, corpus, np.tile(task_folds(rows.task, seed), 2))

    def fit(
        self,
        encoder: LengthEncoder,
        *,
        relevant: bool,
        seed: int,
        size: int = SKETCH_SIZE,
        learning: NDArray[np.bool_] | None = None,
    ) -> tuple[LengthEncoder, LengthRows]:
        """Fits a sketch.

        Args:
            encoder: that made the rows, without a sketch.
            relevant: keep only terms that go with what is left.
            seed: of the sketch.
            size: S, dimensions wanted.
            learning: bool [n], the rows whose texts are learnt; None for all.

        Returns:
            The encoder with the sketch, and all rows with their sketches. Those of rows that chose relevant terms are
            out of fold. All others are as serving makes them: terms chosen without a label flatter no row, while
            sketches that differ from fold to fold show trees the fold of a row.

        Raises:
            InputError: there is nothing a sketch could learn from.
        """
        mine = np.tile(np.ones(len(self.rows), bool) if learning is None else learning, 2)
        part = self.corpus.take(mine)
        sketch, known = Sketch.fit(part, self.fold[mine], relevant=relevant, size=size, seed=seed)
        found = np.empty((len(mine), sketch.size), np.float32)
        found[mine] = sketch.out_of_fold(part, self.fold[mine], known) if relevant else sketch.rows(part)
        found[~mine] = sketch.rows(self.corpus.take(~mine))
        numbers = np.concatenate([self.rows.numbers, *np.split(found, 2)], axis=1)
        return replace(encoder, sketch=sketch), replace(self.rows, numbers=numbers)


def _standing(rows: LengthRows, group: NDArray[np.int32]) -> NDArray[np.float32]:
    """How much is left of a row's work among the rows of its group: its rank, 0 to 1, and whether it is among the
    largest tenth; NaN where what is left is not known. float32 [n, 2]."""
    standing = np.full((len(rows), 2), np.nan, np.float32)
    for one in np.unique(group):
        inside = np.flatnonzero((group == one) & rows.labelled)
        if len(inside):
            rank = (rankdata(rows.remaining[inside]) - 0.5) / len(inside)
            standing[inside] = np.stack([rank, rank > _LARGEST], axis=1)
    return standing


@dataclass(frozen=True)
class TextChoice:
    """The chosen candidate and the comparison behind it.

    Attributes:
        name: the candidate.
        encoder: with its sketch.
        rows: the training rows with its features.
        losses: pinball loss of each candidate on calibration steps, on the logarithm, summed over two quantiles, with
            the standard error (over tasks) of its difference to the best; empty where there was nothing to compare.
        refused: candidates that could not be fitted, and why.
    """

    name: Candidate
    encoder: LengthEncoder
    rows: LengthRows
    losses: Mapping[str, tuple[float, float]]
    refused: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """As the metrics have it."""
        return {
            "chosen": self.name,
            "validation_log_error": {name: {"error": of, "se": se} for name, (of, se) in self.losses.items()},
            "refused": dict(self.refused),
        }


def choose_texts(
    table: pa.Table,
    encoder: LengthEncoder,
    rows: LengthRows,
    apart: NDArray[np.bool_],
    texts: Texts,
    seed: int,
    report: Callable[[str], None],
) -> TextChoice:
    """The sketch that forecasts best on the calibration tasks.

    Args:
        table: the training trace.
        encoder: without a sketch.
        rows: of the trace, by that encoder.
        apart: bool [n], the rows of calibration tasks.
        texts: "auto" for the best there is, or what is wanted.
        seed: of everything drawn.
        report: called with the candidate that is being tried.

    Raises:
        ConfigurationError: texts are wanted, but the traces have none.
        InputError: texts are wanted, but there is nothing to learn from them.
    """
    read = LengthTexts.of(table, rows, seed) if texts != "none" else None
    if texts == "text" and read is None:
        raise ConfigurationError(
            "--states text, but no LLM step of the training traces has an input_text, and none follows an output_text: "
            "record texts, or use --states none"
        )
    judged = apart & rows.labelled
    compared = texts != "none" and judged.any() and bool((~apart & rows.labelled).any())
    tried: dict[Candidate, LengthRows] = {}
    refused: dict[str, str] = {}
    for name in _CANDIDATES[texts] if read is not None else _CANDIDATES["none"]:
        if name == "none" or read is None:
            tried[name] = rows
            continue
        report(f"trying texts: {name}")
        try:
            tried[name] = read.fit(encoder, relevant=name == _RELEVANT, seed=seed, learning=~apart)[1]
        except InputError as error:
            refused[name] = str(error)
    if not tried:
        raise InputError(next(iter(refused.values())))
    chosen: Candidate = next(iter(tried))
    losses: dict[str, tuple[float, float]] = {}
    if len(tried) > 1 and compared:
        errors: dict[Candidate, NDArray[np.float64]] = {}
        labels = np.log1p(rows.remaining.astype(np.float64))
        # Every task has weight 1; weighted by steps, a few long workflows would dominate.
        _, index, steps = np.unique(rows.task[judged], return_inverse=True, return_counts=True)
        share = 1.0 / steps[index]
        for name, seen in tried.items():
            asked = [(labels, quantile) for quantile in _JUDGED]
            own = trials(_inputs(seen), asked, ~apart & rows.labelled, judged, seed)
            errors[name] = np.stack([np.sum(own, axis=0) * share, share])
        chosen, losses = simplest(errors, rows.task[judged])
    if chosen == "none" or read is None:
        return TextChoice(chosen, encoder, rows, losses, refused)
    report("reading texts")
    return TextChoice(chosen, *read.fit(encoder, relevant=chosen == _RELEVANT, seed=seed), losses, refused)


def _inputs(rows: LengthRows) -> NDArray[np.float32]:
    """What the trial reads, float32 [n, D]; LightGBM knows gaps."""
    named = np.stack([rows.workflow_type, rows.agent, rows.model], axis=1)
    return np.concatenate([named, rows.numbers], axis=1, dtype=np.float32)
