"""Train and evaluate a return-time predictor and baselines; see `quantile_trainings`."""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np
import pyarrow as pa

from presage.datasets.tasks import task_keys
from presage.features.agent_names import AgentNames
from presage.features.missing_counts import CountEstimates, FilledTrace
from presage.features.return_times import ReturnEncoder, return_rows
from presage.features.rows import LabelledRows
from presage.features.served_steps import served_steps
from presage.predictors.return_time.baselines import RETURN_BASELINES
from presage.predictors.return_time.predictor import ReturnTimeConfig, ReturnTimePredictor
from presage.training.quantile_trainings import SELECTION_FRACTION, Family, FittedQuantiles, size
from presage.training.quantiles import Predict
from presage.training.return_time.evaluate import ReturnEvaluation, evaluate
from presage.training.sets import check_known_agents, tasks_apart
from presage.training.training import Progress


def fit_return_times(
    table: pa.Table,
    config: ReturnTimeConfig | None = None,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> FittedQuantiles[ReturnTimePredictor]:
    """Fit a predictor on all of a valid trace; raises TraceError for no known return time."""
    table = served_steps(table)
    counts = CountEstimates.fit(table, seed)
    encoder = ReturnEncoder.fit(table)
    rows = return_rows(counts.fill(table).table, encoder)
    apart = tasks_apart(rows.task, rows.workflow_type, SELECTION_FRACTION, seed)
    begun = time.perf_counter()
    predictor = ReturnTimePredictor(config, seed).fit(
        rows.take(~apart), rows.take(apart), encoder=encoder, trained_on=task_keys(table), progress=progress
    )
    predictor.agent_names = AgentNames.of_traces(table)
    return FittedQuantiles(
        predictor,
        counts,
        rows,
        time.perf_counter() - begun,
        parts={"training": size(rows), "of these for selection": size(rows.take(apart))},
        facts={
            "training steps with a known return time": int(rows.labelled.sum()),
            "training steps that ended a workflow": int(np.isinf(rows.label).sum()),
        },
        further={},
    )


def _baseline(predictor: ReturnTimePredictor, name: str, rows: LabelledRows) -> Predict:
    if not rows.labelled.any():  # nothing to fit on; the evaluation says so
        return predictor.predict
    return RETURN_BASELINES[name](rows, predictor.encoder, predictor.quantiles)


def _judge(
    predictor: ReturnTimePredictor, rows: LabelledRows, filled: FilledTrace, *, seed: int, **rivals: Any
) -> ReturnEvaluation:
    check_known_agents(filled.table, predictor.vocabulary)
    return evaluate(predictor.predict, predictor.predict_end, rows, predictor.quantiles, seed, **rivals)


RETURNS: Final = Family(
    fit_return_times,
    names=lambda _: RETURN_BASELINES,
    baseline=_baseline,
    judge=_judge,
    forecast=lambda predictor: predictor.forecast_row,
)
train_return_times, assess_return_times, evaluate_return_times = RETURNS.train, RETURNS.assess, RETURNS.evaluate
