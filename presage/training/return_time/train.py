"""Train and evaluate a return-time predictor and baselines; see `quantile_trainings`.

Loss and coverage are of the logarithm of seconds: a forecast that is wrong by a factor costs the same at a second and
at an hour. They are of steps after which the workflow returned at a known time; the probability of END is evaluated on
all steps of which it is known whether the workflow returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.tasks import task_keys
from presage.errors import TraceError
from presage.features.agent_names import AgentNames
from presage.features.missing_counts import CountEstimates, FilledTrace
from presage.features.return_times import ReturnEncoder, return_rows
from presage.features.rows import LabelledRows
from presage.features.served_steps import served_steps
from presage.predictors.return_time.baselines import RETURN_BASELINES
from presage.predictors.return_time.predictor import ReturnTimeConfig, ReturnTimePredictor
from presage.training.metrics import RESAMPLES, json_values
from presage.training.quantile_trainings import SELECTION_FRACTION, Family, FittedQuantiles, size
from presage.training.quantiles import Predict, QuantileEvaluation, bins, evaluate_quantiles, median_column
from presage.training.sets import check_known_agents, tasks_apart
from presage.training.training import Progress

_UNIT = "log seconds"


@dataclass(frozen=True)
class EndFigures:
    """Whether the workflow ended with a step: Brier score and log loss (nats a step), beside the share that ended."""

    steps: int
    ended: int
    brier: float
    nll: float
    brier_base_rate: float
    nll_base_rate: float


@dataclass(frozen=True)
class ReturnEvaluation(QuantileEvaluation):
    """Figures of one return-time predictor on W workflows; the quantiles are judged where the workflow returned.

    Attributes:
        end: None if no workflow ended.
        bins: steps grouped by the forecast median, with forecast and actual times, seconds.
        left_out: number of steps without a known return time, by reason.
    """

    end: EndFigures | None
    bins: tuple[Mapping[str, float], ...]
    left_out: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """See `QuantileEvaluation.to_dict`."""
        return json_values(
            {
                "kind": "return-time",
                "model": None,
                "version": None,
                **self.figures.to_dict(),
                "end": self.end,
                "left_out_steps": self.left_out,
                **self.tables(),
                "bins": self.bins,
            }
        )


def evaluate(
    predict: Predict,
    predict_end: Callable[[LabelledRows], NDArray[np.float64]],
    rows: LabelledRows,
    quantiles: tuple[float, ...],
    seed: int,
    *,
    baselines: Mapping[str, Predict] | None = None,
    profiles: Mapping[str, LabelledRows] | None = None,
    resamples: int = RESAMPLES,
) -> ReturnEvaluation:
    """Evaluate a predictor and baselines; arguments as of `evaluate_quantiles`.

    Args:
        predict, predict_end: rows to milliseconds [n, Q], and to probabilities of END [n].

    Raises TraceError if no step has a known return time.
    """
    labelled, ended = rows.labelled, np.isinf(rows.label)
    left_out = {"the workflow ended": int(ended.sum()), "cut": int((rows.lower_bound & ~labelled).sum())}
    left_out["a time is missing"] = int((~labelled).sum()) - sum(left_out.values())
    if not labelled.any():
        raise TraceError(
            f"of {len(rows)} steps none has a known return time: nothing can be judged; give traces with started_at "
            "and ended_at, and workflows of two steps or more"
        )
    evaluation, forecast = evaluate_quantiles(
        predict,
        rows,
        quantiles,
        seed,
        scaled=_log_seconds,
        unit=_UNIT,
        baselines=baselines,
        profiles=profiles,
        resamples=resamples,
    )
    median = forecast[labelled, median_column(quantiles)]
    return ReturnEvaluation(
        **vars(evaluation),
        end=_end(predict_end(rows), rows),
        bins=bins(median / np.float32(1e3), rows.label[labelled] / np.float32(1e3)),
        left_out=left_out,
    )


def _log_seconds(milliseconds: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.log(np.maximum(milliseconds, 1.0).astype(np.float64) / 1e3)


def _end(predicted: NDArray[np.float64], rows: LabelledRows) -> EndFigures | None:
    """None if no workflow ended."""
    labelled = ~np.isnan(rows.label)
    ended = np.isinf(rows.label[labelled])
    if not ended.any():
        return None

    def losses(p: NDArray[np.float64]) -> tuple[float, float]:
        p = np.clip(p, 1e-6, 1.0 - 1e-6)
        return float(np.square(p - ended).mean()), float(-np.log(np.where(ended, p, 1.0 - p)).mean())

    ours, usual = losses(predicted[labelled]), losses(np.full(len(ended), ended.mean()))
    return EndFigures(len(ended), int(ended.sum()), *ours, *usual)


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
