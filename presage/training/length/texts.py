"""Choose the text features of a length predictor on held-out tasks: none, relevant terms, or all terms.

By the rule of `training/selection.py`, with a few boosted trees on the logarithm of the remaining tokens. Sketches are
fitted on the learning part of the training tasks only, so the selection part acts as new texts. Without a sketch, the
predictor still uses prompt sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.stats import rankdata

from presage.datasets.tasks import task_folds
from presage.errors import ConfigurationError, InputError
from presage.features.lengths import LengthEncoder, prompts_and_answers
from presage.features.rows import LabelledRows
from presage.features.sketch import Corpus, Sketch
from presage.features.states import Candidate
from presage.predictors.quantiles.linear import trials
from presage.training.selection import Choice, simplest

Texts = Literal["auto", "text", "none"]

SKETCH_SIZE: Final = 48

_LARGEST: Final = 0.9
_QUANTILES: Final = (0.5, 0.9)
"""Of the loss: a word that precedes a loop moves the upper quantiles more than the median."""

_RELEVANT: Final = "relevant text"
_CANDIDATES: Final[Mapping[Texts, tuple[Candidate, ...]]] = {
    "auto": ("none", _RELEVANT, "text"),
    "text": (_RELEVANT, "text"),
    "none": ("none",),
}


@dataclass(frozen=True, eq=False)
class LengthTexts:
    """The prompts of n LLM steps and the answers before them: `corpus` has 2 n rows, first all prompts; `fold`, int64
    [2 n], is equal for steps of one task; `rows` are the steps without sketches.
    """

    rows: LabelledRows
    corpus: Corpus
    fold: NDArray[np.int64]

    @classmethod
    def of(cls, table: pa.Table, rows: LabelledRows, seed: int) -> LengthTexts | None:
        """Of served steps and their rows; None if no step has a text.

        A term is relevant if the remaining tokens differ from the usual where it occurs, among steps of the same agent
        and workflow type.
        """
        prompts, answers = prompts_and_answers(table)
        texts = prompts + answers
        if not any(texts):
            return None
        group = rows.workflow_type * (len(rows.vocabulary.agents) + 1) + rows.agent
        corpus = Corpus.of(
            texts,
            np.tile(rows.task, 2),
            np.tile(group, 2).astype(np.int32),
            np.repeat(np.arange(2, dtype=np.int8), len(rows)),
            np.tile(_ranks(rows, group), (2, 1)),
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
    ) -> tuple[LengthEncoder, LabelledRows]:
        """Fit a sketch.

        Args:
            encoder: of the rows, without a sketch.
            relevant: keep only relevant terms.
            size: S, maximum dimensions.
            learning: bool [n], the rows to fit on; None for all.

        Returns:
            The encoder with the sketch, and all rows with their sketches. Sketches of relevant terms are out of fold
            for the rows they were fitted on. All others are as in serving: terms chosen without labels do not
            overfit, while sketches that differ from fold to fold would reveal the fold of a row to the trees.

        Raises InputError if the texts are insufficient for a sketch.
        """
        mine = np.tile(np.ones(len(self.rows), bool) if learning is None else learning, 2)
        part = self.corpus.take(mine)
        sketch, known_terms = Sketch.fit(part, self.fold[mine], relevant=relevant, size=size, seed=seed)
        vectors = np.empty((len(mine), sketch.size), np.float32)
        vectors[mine] = sketch.out_of_fold(part, self.fold[mine], known_terms) if relevant else sketch.rows(part)
        vectors[~mine] = sketch.rows(self.corpus.take(~mine))
        numbers = np.concatenate([self.rows.numbers, *np.split(vectors, 2)], axis=1)
        return replace(encoder, sketch=sketch), replace(self.rows, numbers=numbers)


def _ranks(rows: LabelledRows, group: NDArray[np.int32]) -> NDArray[np.float32]:
    """Rank of a row's remaining tokens in its group, 0..1, and whether it is in the largest tenth; float32 [n, 2]."""
    ranks = np.full((len(rows), 2), np.nan, np.float32)
    for number in np.unique(group):
        inside = np.flatnonzero((group == number) & rows.labelled)
        if len(inside):
            rank = (rankdata(rows.label[inside]) - 0.5) / len(inside)
            ranks[inside] = np.stack([rank, rank > _LARGEST], axis=1)
    return ranks


@dataclass(frozen=True)
class TextChoice(Choice):
    """The encoder and the training rows with the chosen text features; losses are sums over two quantiles."""

    keys: ClassVar = ("validation_log_error", "error")

    encoder: LengthEncoder
    rows: LabelledRows


def choose_texts(
    table: pa.Table,
    encoder: LengthEncoder,
    rows: LabelledRows,
    apart: NDArray[np.bool_],
    texts: Texts,
    seed: int,
    report: Callable[[str], None],
) -> TextChoice:
    """Choose the text features on the selection tasks, the rows `apart` (bool [n]).

    `encoder` has no sketch yet and made `rows`; `texts` is "auto" to compare all candidates, "text" or "none".

    Raises:
        ConfigurationError: texts are requested, but the traces have none.
        InputError: texts are requested, but insufficient for a sketch.
    """
    read = LengthTexts.of(table, rows, seed) if texts != "none" else None
    if texts == "text" and read is None:
        raise ConfigurationError(
            "--states text, but no LLM step of the training traces has an input_text, and none follows an output_text: "
            "record texts, or use --states none"
        )
    tried: dict[Candidate, LabelledRows] = {}
    refused: dict[str, str] = {}
    for name in _CANDIDATES["none" if read is None else texts]:
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
    learning, judged = ~apart & rows.labelled, apart & rows.labelled
    if len(tried) > 1 and judged.any() and learning.any():
        labels = np.log1p(rows.label.astype(np.float64))
        asked = [(labels, quantile) for quantile in _QUANTILES]
        # Every task has weight 1; weighted by steps, a few long workflows would dominate.
        _, index, steps = np.unique(rows.task[judged], return_inverse=True, return_counts=True)
        share = 1.0 / steps[index]
        errors: dict[Candidate, NDArray[np.float64]] = {}
        for name, seen in tried.items():
            own = trials(_inputs(seen), asked, learning, judged, seed)
            errors[name] = np.stack([np.sum(own, axis=0) * share, share])
        chosen, losses = simplest(errors, rows.task[judged])
    if chosen == "none" or read is None:
        return TextChoice(chosen, losses, refused, encoder, rows)
    report("reading texts")
    return TextChoice(chosen, losses, refused, *read.fit(encoder, relevant=chosen == _RELEVANT, seed=seed))


def _inputs(rows: LabelledRows) -> NDArray[np.float32]:
    """Inputs of the trial trees, float32 [n, D], with NaN."""
    named = np.stack([rows.workflow_type, rows.agent, rows.model], axis=1)
    return np.concatenate([named, rows.numbers], axis=1, dtype=np.float32)
