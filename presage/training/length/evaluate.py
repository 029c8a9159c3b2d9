"""Evaluate length predictors and baselines on held-out traces.

A predictor is a function from rows to quantiles, so one code path evaluates Presage's predictor, every baseline and the
oracle of a synthetic process. All are evaluated on the steps with a known length. Steps of truncated workflows are left
out and counted. If mostly long workflows are truncated, the remaining steps are biased towards short lengths, equally
for every model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.errors import TraceError
from presage.features.rows import LabelledRows
from presage.training.length.queue import QueueFigures, compare, queued
from presage.training.metrics import RESAMPLES, json_values
from presage.training.quantiles import Predict, QuantileEvaluation, bins, evaluate_quantiles, median_column


@dataclass(frozen=True)
class LengthEvaluation(QuantileEvaluation):
    """Figures of one length predictor on W workflows.

    Attributes:
        queue: the value of the ranking; None if no workflow has the length of every step.
        bins: steps grouped by the forecast median, with forecast and actual lengths.
        cut, unknown: steps left out because their workflow was truncated, and because a count is missing.
    """

    queue: QueueFigures | None
    bins: tuple[Mapping[str, float], ...]
    target: str
    cut: int
    unknown: int

    def to_dict(self) -> dict[str, Any]:
        """The object that `train-predictor` prints, as JSON values; the caller sets "model" and "version"."""
        return json_values(
            {
                "kind": "remaining-length",
                "model": None,
                "version": None,
                "target": self.target,
                **self.figures.to_dict(),
                "left_out_steps": {"cut": self.cut, "count missing": self.unknown},
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
    baselines: Mapping[str, Predict] | None = None,
    profiles: Mapping[str, LabelledRows] | None = None,
    resamples: int = RESAMPLES,
) -> LengthEvaluation:
    """Evaluate a predictor and baselines; arguments as of `evaluate_quantiles`.

    The seed is also that of the queue's arrivals. Raises TraceError without a known length.
    """
    known = rows.labelled
    cut = int((rows.lower_bound & ~known).sum())
    if not known.any():
        raise TraceError(
            f"of {len(rows)} steps none has a known length ({cut} are of workflows that were cut): nothing can be "
            "judged; give traces with output_tokens and at least one complete workflow"
        )
    found, forecast = evaluate_quantiles(
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
    return LengthEvaluation(
        **vars(found),
        queue=_queue(rows, median, seed),
        bins=bins(median[known], rows.label[known]),
        target=rows.target,
        cut=cut,
        unknown=int((~known).sum()) - cut,
    )


def _queue(rows: LabelledRows, median: NDArray[np.float32], seed: int) -> QueueFigures | None:
    """The queue over workflows in which every step has a known length."""
    waiting = queued(rows)
    if waiting is None:
        return None
    policy = "shortest total, predicted" if rows.target == "remaining" else "shortest step, predicted"
    return compare(waiting.work, {policy: median[waiting.taken].astype(np.float64)}, waiting.offsets, seed)
