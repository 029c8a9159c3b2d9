"""Evaluate return-time predictors and baselines on held-out traces.

Loss and coverage are of the logarithm of seconds: a forecast that is wrong by a factor costs the same at a second and
at an hour. They are of steps after which the workflow returned at a known time; the probability of END is evaluated on
all steps of which it is known whether the workflow returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.errors import TraceError
from presage.features.rows import LabelledRows
from presage.predictors.return_time.baselines import Predict
from presage.training.baselines import Behind, by_profile, worst
from presage.training.metrics import RESAMPLES, json_values
from presage.training.quantiles import (
    QuantileDifference,
    QuantileFigures,
    bins,
    difference,
    headline,
    lost,
    measure,
    median_column,
)

UNIT = "log seconds"


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
class ReturnEvaluation:
    """Figures of one return-time predictor on W workflows.

    Attributes:
        figures: on the steps whose workflow returned; the registry's gates compare their counts by workflow.
        by_workflow_type: the same within each type, `"unknown"` for those not in the vocabulary.
        type_of: workflow type of each of the W workflows.
        bins: steps grouped by the forecast median, with forecast and actual times, seconds.
        left_out: number of steps without a known return time, by reason.
    """

    figures: QuantileFigures
    by_workflow_type: Mapping[str, QuantileFigures]
    type_of: tuple[str, ...]
    baselines: Mapping[str, QuantileFigures]
    differences: Mapping[str, QuantileDifference]
    behind: tuple[Behind, ...]
    profiles: Mapping[str, Mapping[str, Any]]
    end: EndFigures | None
    bins: tuple[Mapping[str, float], ...]
    left_out: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """The object that `train-predictor` prints, as JSON values; the caller sets "model" and "version"."""
        return json_values(
            {
                "kind": "return-time",
                "model": None,
                "version": None,
                **self.figures.to_dict(),
                "end": self.end,
                "left_out_steps": self.left_out,
                "by_workflow_type": self.by_workflow_type,
                "baselines": self.baselines,
                "differences": {name: of.to_dict(self.figures.quantiles) for name, of in self.differences.items()},
                "behind": worst(self.behind),
                "profiles": self.profiles,
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
    """Evaluate a predictor and baselines on rows that they were not trained on.

    Args:
        predict, predict_end: rows to milliseconds [n, Q], and to probabilities of END [n].
        rows: n steps, those of a workflow one after the other.
        quantiles: Q, ascending: what `predict` and the baselines forecast.
        seed: of the bootstrap, whose resamples all predictors share.
        profiles: `rows` as seen under each input profile; profiles with equal inputs share one object.

    Raises TraceError if no step has a known return time.
    """
    known, ended = rows.labelled, np.isinf(rows.label)
    left_out = {"the workflow ended": int(ended.sum()), "cut": int((rows.lower_bound & ~known).sum())}
    left_out["a time is missing"] = int((~known).sum()) - sum(left_out.values())
    if not known.any():
        raise TraceError(
            f"of {len(rows)} steps none has a known return time: nothing can be judged; give traces with started_at "
            "and ended_at, and workflows of two steps or more"
        )
    first = np.diff(rows.workflow, prepend=-1) != 0
    baselines = baselines or {}

    def judge(
        forecast: NDArray[np.float32],
        within: NDArray[np.bool_] = known,
        workflow: NDArray[np.integer] = rows.workflow[known],
    ) -> QuantileFigures:
        times, rng = _log_seconds(rows.label[within]), np.random.default_rng(seed)
        return measure(_log_seconds(forecast[within]), times, workflow, first[within], quantiles, rng, resamples)

    def profile(shown: LabelledRows, rivals: Mapping[str, Predict]) -> dict[str, Any]:
        ours = judge(predict(shown))
        theirs = {name: judge(of(shown)) for name, of in rivals.items()}
        gaps = {name: difference(ours, of, seed, resamples) for name, of in theirs.items()}
        return headline(ours, lost(gaps, theirs, quantiles, UNIT))

    forecast = predict(rows)
    figures = judge(forecast)
    names = (*rows.vocabulary.workflow_types, "unknown")
    by_type = {}
    for index in np.unique(rows.workflow_type[known]):
        within = known & (rows.workflow_type == index)
        by_type[names[index]] = judge(forecast, within, np.unique(rows.workflow[within], return_inverse=True)[1])
    others = {name: judge(baseline(rows)) for name, baseline in baselines.items()}
    type_of = np.full(len(figures.positions), len(names) - 1)
    type_of[rows.workflow[known]] = rows.workflow_type[known]
    against = {name: difference(figures, of, seed, resamples) for name, of in others.items()}
    losses = lost(against, others, quantiles, UNIT)
    median = forecast[known, median_column(quantiles)]
    return ReturnEvaluation(
        figures=figures,
        by_workflow_type=by_type,
        type_of=tuple(names[index] for index in type_of),
        baselines=others,
        differences=against,
        behind=losses,
        profiles=by_profile(profiles or {}, baselines, profile, {id(rows): headline(figures, losses)}),
        end=_end(predict_end(rows), rows),
        bins=bins(median / np.float32(1e3), rows.label[known] / np.float32(1e3)),
        left_out=left_out,
    )


def _log_seconds(milliseconds: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.log(np.maximum(milliseconds, 1.0).astype(np.float64) / 1e3)


def _end(predicted: NDArray[np.float64], rows: LabelledRows) -> EndFigures | None:
    """None if no workflow ended."""
    known = ~np.isnan(rows.label)
    ended = np.isinf(rows.label[known])
    if not ended.any():
        return None

    def losses(p: NDArray[np.float64]) -> tuple[float, float]:
        p = np.clip(p, 1e-6, 1.0 - 1e-6)
        return float(np.square(p - ended).mean()), float(-np.log(np.where(ended, p, 1.0 - p)).mean())

    ours, usual = losses(predicted[known]), losses(np.full(len(ended), ended.mean()))
    return EndFigures(len(ended), int(ended.sum()), *ours, *usual)
