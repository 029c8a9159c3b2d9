"""Evaluate predictors of lengths and of context growth, and baselines, on held-out traces.

A predictor is a function from rows to quantiles, so one code path evaluates Presage's predictor, every baseline and the
oracle of a synthetic process. All are evaluated on the steps with a known length. Steps of truncated workflows are left
out and counted. If mostly long workflows are truncated, the remaining steps are biased towards short lengths, equally
for every model.

Lengths may contain estimates of counts that the trace lacks (`features/missing_counts.py`). Those steps are evaluated
with all others, so that long workflows do not drop out, and are counted; beside that stand the figures of the workflows
whose every output count was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.errors import TraceError
from presage.features.rows import CONTEXT_TARGETS, LabelledRows
from presage.predictors.length.context import KIND as CONTEXT_GROWTH
from presage.predictors.length.predictor import KIND as REMAINING_LENGTH
from presage.training.length.queue import QueueFigures, compare, queued
from presage.training.metrics import RESAMPLES, json_values
from presage.training.quantiles import (
    Predict,
    QuantileEvaluation,
    QuantileFigures,
    bins,
    evaluate_quantiles,
    measure,
    median_column,
)


@dataclass(frozen=True)
class LengthEvaluation(QuantileEvaluation):
    """Figures of one length predictor on W workflows.

    Attributes:
        queue: the value of the ranking; None if no workflow has the length of every step, or these are contexts.
        bins: steps grouped by the forecast median, with forecast and actual lengths.
        cut, unknown: steps left out because their workflow was truncated, and because a count is missing.
        estimated: evaluated steps whose length contains an estimated count.
        recorded: figures of the workflows without one; None if every workflow is, or none.
    """

    queue: QueueFigures | None
    bins: tuple[Mapping[str, float], ...]
    target: str
    cut: int
    unknown: int
    estimated: int
    recorded: QuantileFigures | None

    def to_dict(self) -> dict[str, Any]:
        """See `QuantileEvaluation.to_dict`."""
        return json_values(
            {
                "kind": CONTEXT_GROWTH if self.target in CONTEXT_TARGETS else REMAINING_LENGTH,
                "model": None,
                "version": None,
                "target": self.target,
                **self.figures.to_dict(),
                "left_out_steps": {"cut": self.cut, "count missing": self.unknown},
                "estimated_steps": self.estimated,
                "recorded": self.recorded,
                **self.tables(),
                "queue": self.queue,
                "bins": self.bins,
            }
        )


def evaluate(
    predict: Predict,
    rows: LabelledRows,
    quantiles: tuple[float, ...],
    seed: int,
    *,
    estimated: NDArray[np.bool_] | None = None,
    baselines: Mapping[str, Predict] | None = None,
    profiles: Mapping[str, LabelledRows] | None = None,
    resamples: int = RESAMPLES,
) -> LengthEvaluation:
    """Evaluate a predictor and baselines; arguments as of `evaluate_quantiles`.

    `estimated`, bool [n], marks the rows whose label contains an estimate; None if no row's does. The seed is also that
    of the queue's arrivals. Raises TraceError without a known length.
    """
    labelled = rows.labelled
    cut = int((rows.lower_bound & ~labelled).sum())
    if not labelled.any():
        raise TraceError(
            f"of {len(rows)} steps none has a known length ({cut} are of workflows that were cut): nothing can be "
            "judged; give traces with output_tokens and at least one complete workflow"
        )
    evaluation, forecast = evaluate_quantiles(
        predict,
        rows,
        quantiles,
        seed,
        scaled=lambda tokens: tokens,
        unit="tokens",
        baselines=baselines,
        profiles=profiles,
        resamples=resamples,
    )
    median = forecast[:, median_column(quantiles)]
    marked = labelled & (np.zeros(len(rows), bool) if estimated is None else estimated)
    return LengthEvaluation(
        **vars(evaluation),
        queue=_queue(rows, median, seed),
        bins=bins(median[labelled], rows.label[labelled]),
        target=rows.target,
        cut=cut,
        unknown=int((~labelled).sum()) - cut,
        estimated=int(marked.sum()),
        recorded=_recorded(rows, forecast, marked, quantiles, seed, resamples) if marked.any() else None,
    )


def _recorded(
    rows: LabelledRows,
    forecast: NDArray[np.float32],
    estimated: NDArray[np.bool_],
    quantiles: tuple[float, ...],
    seed: int,
    resamples: int,
) -> QuantileFigures | None:
    """Figures of the workflows without an estimate; None if there is none."""
    within = rows.labelled & ~np.isin(rows.workflow, rows.workflow[estimated])
    if not within.any():
        return None
    workflow = np.unique(rows.workflow[within], return_inverse=True)[1]
    arrival = np.diff(rows.workflow, prepend=-1)[within] != 0
    rng = np.random.default_rng(seed)
    return measure(forecast[within], rows.label[within], workflow, arrival, quantiles, rng, resamples)


def _queue(rows: LabelledRows, median: NDArray[np.float32], seed: int) -> QueueFigures | None:
    """The queue over workflows in which every step has a known length."""
    waiting = queued(rows) if rows.target not in CONTEXT_TARGETS else None
    if waiting is None:
        return None
    policy = "shortest total, predicted" if rows.target == "remaining" else "shortest step, predicted"
    return compare(waiting.work, {policy: median[waiting.taken].astype(np.float64)}, waiting.offsets, seed)
