"""Train and evaluate a return-time predictor and baselines.

As in `presage.training.length.train`: test tasks are split off first, vocabularies come from the training part, and a
selection part of it selects the estimator; the other training tasks calibrate its quantiles. Missing token counts are
estimated as there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa

from presage.datasets.describe import describe
from presage.datasets.schema import digest
from presage.datasets.split import Split
from presage.datasets.tasks import task_keys
from presage.features.input_profiles import PROFILES
from presage.features.missing_counts import CountEstimates
from presage.features.return_times import ReturnEncoder, return_rows
from presage.features.rows import LabelledRows
from presage.features.served_steps import served_steps
from presage.predictors.return_time.baselines import RETURN_BASELINES
from presage.predictors.return_time.predictor import ReturnTimeConfig, ReturnTimePredictor
from presage.training.baselines import check_names
from presage.training.length.train import SELECTION_FRACTION
from presage.training.quantiles import FLOOR, row_latency_us, rows_under_profiles
from presage.training.return_time.evaluate import ReturnEvaluation, evaluate
from presage.training.sets import (
    SHARED_TASKS,
    check_known_agents,
    set_apart,
    shared_tasks,
    tasks_apart,
    workflow_names,
)
from presage.training.training import Judged, Progress, Training, fit_baselines, named_digests, versions
from presage.wording import counted

ReturnTraining = Training[ReturnTimePredictor, ReturnEvaluation]


def train_return_times(
    table: pa.Table,
    test: pa.Table | None = None,
    config: ReturnTimeConfig | None = None,
    *,
    seed: int = 0,
    baselines: Sequence[str] = tuple(RETURN_BASELINES),
    name: str | None = None,
    progress: Progress | None = None,
) -> ReturnTraining:
    """Fit a predictor and baselines and evaluate them on the same held-out workflows.

    Args:
        table: a valid trace.
        test: a valid test trace; None splits off a fifth of the tasks of `table`, the latest if times are recorded.
        seed: of the splits, of every fit and of the bootstrap.
        baselines: keys of `RETURN_BASELINES`.

    Raises:
        ConfigurationError: an unknown baseline.
        TraceError: too few traces to split, or no known return time.
    """
    check_names(baselines, RETURN_BASELINES)
    parts = set_apart(table, test, seed)
    fitted = fit_return_times(parts.train, config, seed=seed, progress=progress)
    return assess_return_times(fitted, parts, baselines=baselines, name=name, progress=progress)


@dataclass(frozen=True)
class FittedReturnTimes:
    """A fitted predictor; `counts` estimates missing token counts; `learning`, its training rows, of which `selection`
    is a part; `seconds` is the time of the fit.
    """

    predictor: ReturnTimePredictor
    counts: CountEstimates
    learning: LabelledRows
    selection: LabelledRows
    seconds: float


def fit_return_times(
    table: pa.Table,
    config: ReturnTimeConfig | None = None,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> FittedReturnTimes:
    """Fit a predictor on all of a valid trace; arguments as in `train_return_times`."""
    table = served_steps(table)
    counts = CountEstimates.fit(table, seed)
    encoder = ReturnEncoder.fit(table)
    rows = return_rows(counts.fill(table).table, encoder)
    apart = tasks_apart(rows.task, rows.workflow_type, SELECTION_FRACTION, seed)
    begun = time.perf_counter()
    predictor = ReturnTimePredictor(config, seed).fit(
        rows.take(~apart), rows.take(apart), encoder=encoder, trained_on=task_keys(table), progress=progress
    )
    return FittedReturnTimes(predictor, counts, rows, rows.take(apart), time.perf_counter() - begun)


def assess_return_times(
    fitted: FittedReturnTimes,
    parts: Split,
    *,
    baselines: Sequence[str] = tuple(RETURN_BASELINES),
    name: str | None = None,
    progress: Progress | None = None,
) -> ReturnTraining:
    """Fit baselines where a predictor was fitted, on the training part, and evaluate all of them on the test set.

    Raises ConfigurationError for an unknown baseline, and TraceError if no step has a known return time, or the
    predictor knows none of the agents.
    """
    check_names(baselines, RETURN_BASELINES)
    report, predictor = progress or (lambda _, __: None), fitted.predictor
    learning = fitted.learning
    encoder, quantiles, seed = predictor.encoder, predictor.quantiles, predictor.seed
    check_known_agents(parts.test, encoder.course.vocabulary)
    held = return_rows(fitted.counts.fill(parts.test).table, encoder)
    predicts = fit_baselines(baselines, lambda of: RETURN_BASELINES[of](learning, encoder, quantiles), report)

    report("judging on the test set", None)
    evaluation = evaluate(
        predictor.predict,
        predictor.predict_end,
        held,
        quantiles,
        seed,
        baselines=predicts,
        profiles=rows_under_profiles(held, predictor.encoder.observed),
    )
    digests = {
        "training traces": f"sha256:{digest(parts.train)}",
        "test traces": f"sha256:{digest(parts.test)}",
    }
    training_data = {
        "digest": digests["training traces"],
        "workflows": learning.workflows,
        "steps": len(learning),
        "split": parts.rule,
    }
    metrics = {
        **evaluation.to_dict(),
        "model": name,
        "data": {
            "training": _size(learning),
            "of these for selection": _size(fitted.selection),
            "split": parts.rule,
            SHARED_TASKS: shared_tasks(parts),
            "training steps with a known return time": int(learning.labelled.sum()),
            "training steps that ended a workflow": int(np.isinf(learning.label).sum()),
            "seed": seed,
            **named_digests(digests),
        },
        "estimators": {
            of: {f"{q:g}": loss for q, loss in zip(quantiles, losses, strict=True)}
            for of, losses in predictor.losses.items()
        },
        "traces": describe(parts.train),
        "config": {**asdict(predictor.config), "chosen": predictor.estimator.name},
        "versions": versions(),
        "fit_seconds": round(fitted.seconds, 2),
        "latency_us": row_latency_us(held, predictor.forecast_row),
        "size_bytes": None,
    }
    return ReturnTraining(predictor, metrics, training_data, evaluation, digests)


def _size(rows: LabelledRows) -> str:
    return f"{counted(rows.workflows, 'workflow')}, {counted(len(rows), 'LLM step')}"


def evaluate_return_times(
    predictor: ReturnTimePredictor, table: pa.Table, seed: int, *, profile: str | None = None
) -> Judged[ReturnEvaluation]:
    """Evaluate a fitted predictor on a valid trace that it was not trained on, beside `FLOOR`.

    With `profile`, use this input profile only; otherwise use all inputs, and each profile in addition. Raises
    TraceError if no step has a known return time, or the predictor knows none of the agents.
    """
    table = served_steps(table)
    check_known_agents(table, predictor.encoder.course.vocabulary)
    rows = return_rows(CountEstimates.fit(table, seed).fill(table).table, predictor.encoder)
    if profile is not None:
        rows = predictor.encoder.observed(rows, PROFILES[profile])
    constant = RETURN_BASELINES[FLOOR](rows, predictor.encoder, predictor.quantiles) if rows.labelled.any() else None
    evaluation = evaluate(
        predictor.predict,
        predictor.predict_end,
        rows,
        predictor.quantiles,
        seed,
        baselines={} if constant is None else {FLOOR: constant},
        profiles=rows_under_profiles(rows, predictor.encoder.observed) if profile is None else None,
    )
    return Judged(evaluation, row_latency_us(rows, predictor.forecast_row), workflow_names(table))
