"""Train and evaluate a predictor of lengths or of context growth, and baselines; see `quantile_trainings`.

`ablate` retrains with one group of features withheld from training, selection and evaluation, as if the trace did not
record it. If two groups carry the same information, withholding one of them has no effect, although it may matter when
the other is absent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.tasks import task_keys
from presage.features.history import PROGRESS
from presage.features.lengths import LengthEncoder, length_rows
from presage.features.missing_counts import CountEstimates, FilledTrace
from presage.features.rows import CONTEXT_TARGETS, PROMPT, LabelledRows, Target
from presage.features.served_steps import served_steps
from presage.predictors.length.baselines import CONTEXT_BASELINES, LENGTH_BASELINES
from presage.predictors.length.context import ContextGrowthPredictor
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.quantiles.choice import QuantileConfig
from presage.training.length.evaluate import LengthEvaluation, evaluate
from presage.training.length.texts import TextChoice, Texts, choose_texts
from presage.training.quantile_trainings import SELECTION_FRACTION, Family, FittedQuantiles, size
from presage.training.quantiles import Predict, QuantileDifference, QuantileFigures, difference
from presage.training.sets import tasks_apart
from presage.training.training import Progress, Training

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
    return FittedQuantiles(
        predictor,
        counts,
        choice.rows,
        time.perf_counter() - begun,
        parts={"training": size(inner), "selection": size(selection)},
        facts={
            "training steps of workflows that were cut": int(choice.rows.lower_bound.sum()),
            "texts": choice.name if choice.encoder.sketch is not None else "not recorded, or not read",
        },
        further={"state_choice": choice.to_dict()},
    )


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


AGENTS: Final = "agents, this one and before"
MODEL: Final = "model"

GROUPS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "sizes of the prompt": PROMPT,
        "words of the prompt": ("prompt_",),
        "words of the last answer": ("answer_",),
        "progress and tokens so far": PROGRESS,
        AGENTS: ("agent_", "calls_", "since_"),
        MODEL: (),
    }
)
"""Columns of `LengthEncoder.names` by group; a name that ends in "_" is a prefix. The step's agent and the model are
replaced by names unknown to training. The workflow type is in no group, because quantiles are calibrated by it."""


def ablate(
    table: pa.Table,
    test: pa.Table,
    config: QuantileConfig | None = None,
    *,
    seed: int = 0,
) -> dict[str, QuantileDifference]:
    """Train with all features and once without each group that the traces have, and evaluate on `test` (other tasks).

    With the estimator "auto", the estimators may differ. Returns by group the figures without it minus those with all
    features; above 0 the group helps. Raises TraceError for too few traces to split, or no known output tokens.
    """
    config = config or QuantileConfig()
    counts = CountEstimates.fit(table, seed)
    choice, apart = _features(counts.fill(table).table, "remaining", "auto", seed, lambda _, __: None)
    encoder, learning = choice.encoder, choice.rows
    held = length_rows(counts.fill(served_steps(test)).table, encoder)

    def figures(group: str | None) -> QuantileFigures:
        rows, judged = (without(of, encoder, group) if group else of for of in (learning, held))
        predictor = RemainingLengthPredictor(config, seed).fit(rows.take(~apart), rows.take(apart), encoder=encoder)
        return evaluate(predictor.predict, judged, config.quantiles, seed).figures

    whole = figures(None)
    groups = [group for group in GROUPS if _varies(learning, encoder, group)]
    return {group: difference(figures(group), whole, seed) for group in groups}


def without(rows: LabelledRows, encoder: LengthEncoder, group: str) -> LabelledRows:
    """The same rows with a group of `GROUPS` unknown."""
    numbers = rows.numbers.copy()
    numbers[:, _columns(encoder, group)] = np.nan
    agent, model = len(encoder.vocabulary.agents), len(encoder.models)
    return replace(
        rows,
        numbers=numbers,
        agent=np.full_like(rows.agent, agent) if group == AGENTS else rows.agent,
        model=np.full_like(rows.model, model) if group == MODEL else rows.model,
    )


def _varies(rows: LabelledRows, encoder: LengthEncoder, group: str) -> bool:
    if group in (AGENTS, MODEL):
        values = rows.agent if group == AGENTS else rows.model
        return bool((values != values[0]).any())
    numbers = rows.numbers[:, _columns(encoder, group)]
    return bool(not np.isnan(numbers).all() and (numbers != numbers[:1]).any())


def _columns(encoder: LengthEncoder, group: str) -> list[int]:
    wanted, named = GROUPS[group], PROMPT + PROGRESS
    begin = tuple(name for name in wanted if name not in named)
    # "prompt_tokens" is a size, not a word of the prompt: a full name precedes a prefix.
    return [
        i for i, name in enumerate(encoder.names) if name in wanted or (name not in named and name.startswith(begin))
    ]
