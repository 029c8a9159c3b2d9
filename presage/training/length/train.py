"""Train and evaluate a predictor of lengths or of context growth, and baselines; see `quantile_trainings`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.tasks import task_keys
from presage.features.agent_names import AgentNames
from presage.features.lengths import LengthEncoder, length_rows
from presage.features.missing_counts import CountEstimates, FilledTrace
from presage.features.rows import CONTEXT_TARGETS, LabelledRows, Target
from presage.features.served_steps import served_steps
from presage.predictors.length.baselines import CONTEXT_BASELINES, LENGTH_BASELINES
from presage.predictors.length.context import ContextGrowthPredictor
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.quantiles.choice import QuantileConfig
from presage.training.length.evaluate import LengthEvaluation, evaluate
from presage.training.length.texts import TextChoice, Texts, choose_texts
from presage.training.quantile_trainings import SELECTION_FRACTION, Family, FittedQuantiles, size
from presage.training.quantiles import Predict
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
    predictor.agent_names = AgentNames.of_traces(table)
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
