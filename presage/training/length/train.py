"""Train and evaluate a predictor of lengths or of context growth, and baselines; see `quantile_trainings`.

The text features (none, relevant terms, or all terms) are chosen on held-out tasks by the rule of
`training/selection.py`, with a few boosted trees on the logarithm of the remaining tokens. Sketches are fitted on the
learning part of the training tasks only, so the selection part acts as new texts. Without a sketch, the predictor still
uses prompt sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.stats import rankdata

from presage.datasets.tasks import task_folds, task_keys
from presage.errors import ConfigurationError, InputError
from presage.features.agent_names import AgentNames
from presage.features.lengths import LengthEncoder, length_rows, prompts_and_answers
from presage.features.missing_counts import CountEstimates, FilledTrace
from presage.features.rows import CONTEXT_TARGETS, LabelledRows, Target
from presage.features.served_steps import served_steps
from presage.features.sketch import Corpus, Sketch
from presage.features.states import Candidate
from presage.predictors.length.baselines import CONTEXT_BASELINES, LENGTH_BASELINES
from presage.predictors.length.context import ContextGrowthPredictor
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.quantiles.choice import QuantileConfig
from presage.predictors.quantiles.linear import trials
from presage.training.length.evaluate import LengthEvaluation, evaluate
from presage.training.quantile_trainings import SELECTION_FRACTION, Family, FittedQuantiles, size
from presage.training.quantiles import Predict
from presage.training.selection import Choice, simplest
from presage.training.sets import tasks_apart
from presage.training.training import Progress, Training

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


LengthTraining = Training[RemainingLengthPredictor, LengthEvaluation]


def baselines_of(target: Target | None) -> Mapping[str, Callable[[LabelledRows, Sequence[float]], Predict]]:
    """The baselines of a target, by name."""
    return CONTEXT_BASELINES if target in CONTEXT_TARGETS else LENGTH_BASELINES


def fit_lengths(
    table: pa.Table,
    config: QuantileConfig | None = None,
    *,
    target: Target = "remaining",
    seed: int = 0,
    texts: Texts = "auto",
    progress: Progress | None = None,
) -> FittedQuantiles[RemainingLengthPredictor]:
    """Fit a predictor on all of a valid trace.

    Args:
        target: "remaining" tokens of this and all later steps, or those of this "step" alone; or one of
            `CONTEXT_TARGETS`, for a predictor of context growth.
        texts: "auto" uses texts if held-out tasks show that they help; "text" and "none" force the choice.

    Raises:
        ConfigurationError: texts that the traces lack are requested.
        InputError: texts are requested, but insufficient for a sketch.
        TraceError: no known output tokens.
    """
    report = progress or (lambda _, __: None)
    report("reading prompts", None)
    counts = CountEstimates.fit(table, seed)
    choice, apart = _features(counts.fill(table).table, target, texts, seed, report)
    inner, selection = choice.rows.take(~apart), choice.rows.take(apart)
    begun = time.perf_counter()
    of_target = ContextGrowthPredictor if target in CONTEXT_TARGETS else RemainingLengthPredictor
    predictor = of_target(config, seed).fit(
        inner, selection, encoder=choice.encoder, trained_on=task_keys(table), progress=report
    )
    predictor.agent_names = AgentNames.of_traces(table)
    return FittedQuantiles(
        predictor,
        counts,
        choice.rows,
        time.perf_counter() - begun,
        parts={"training": size(inner), "selection": size(selection)},
        facts={
            "training steps of workflows that were cut": int(choice.rows.lower_bound.sum()),
            "texts": choice.name if choice.encoder.sketch is not None else _why_not_read(table, choice, texts),
        },
        further={"state_choice": choice.to_dict()},
    )


def _why_not_read(table: pa.Table, choice: TextChoice, texts: Texts) -> str:
    """Why the texts of a training trace are not read."""
    if all(table[name].null_count == len(table) for name in ("input_text", "output_text")):
        return "not recorded"
    if texts == "none":
        return "recorded, not read: --states none"
    if choice.refused:
        return "recorded, not read: too few for a sketch"
    return "recorded, not read: they did not help on the tasks set apart"


def _features(
    table: pa.Table, target: Target, texts: Texts, seed: int, report: Progress
) -> tuple[TextChoice, NDArray[np.bool_]]:
    """The chosen features of a training trace, and the mask of its selection rows."""
    table = served_steps(table)
    encoder = LengthEncoder.fit(table)
    rows = length_rows(table, encoder, target)
    apart = tasks_apart(rows.task, rows.workflow_type, SELECTION_FRACTION, seed)
    return choose_texts(table, encoder, rows, apart, texts, seed, lambda doing: report(doing, None)), apart


def _judge(
    predictor: RemainingLengthPredictor, rows: LabelledRows, filled: FilledTrace, *, seed: int, **rivals: Any
) -> LengthEvaluation:
    marked = _estimated(filled, rows)
    return evaluate(predictor.predict, rows, predictor.quantiles, seed, estimated=marked, **rivals)


def _estimated(filled: FilledTrace, rows: LabelledRows) -> NDArray[np.bool_]:
    """The rows of served steps whose label contains an estimated count, bool [n], or may: it depends on later steps."""
    own = filled.estimated["output_tokens"]
    if rows.target in CONTEXT_TARGETS:
        own = own | filled.estimated["input_tokens"]
    if rows.target == "step":
        return own
    later = np.cumsum(own[::-1])[::-1]  # estimates in this row and all after it
    by_workflow = np.bincount(rows.workflow, own)
    of_others = (np.cumsum(by_workflow[::-1])[::-1] - by_workflow)[rows.workflow]
    return np.asarray(later > of_others)


LENGTHS: Final = Family(
    fit_lengths,
    names=baselines_of,
    baseline=lambda predictor, name, rows: baselines_of(predictor.target)[name](rows, predictor.quantiles),
    judge=_judge,
    forecast=lambda predictor: predictor.predict_one,
)
train_lengths, assess_lengths, evaluate_lengths = LENGTHS.train, LENGTHS.assess, LENGTHS.evaluate
