"""Evaluate length predictors and baselines on held-out traces.

A predictor is a function from rows to quantiles, so one code path evaluates Presage's predictor, every baseline and the
oracle of a synthetic process. All are evaluated on the steps with a known length. Steps of truncated workflows are left
out and counted. If mostly long workflows are truncated, the remaining steps are biased towards short lengths, equally
for every model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.errors import TraceError
from presage.features.rows import LabelledRows
from presage.training.baselines import Behind, by_profile, worst
from presage.training.length.queue import QueueFigures, compare, queued
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

Predict = Callable[[LabelledRows], NDArray[np.float32]]
"""Rows to quantiles [n, Q], tokens."""


@dataclass(frozen=True)
class LengthEvaluation:
    """Figures of one length predictor on W workflows.

    Attributes:
        figures: on all evaluated steps; the registry's gates compare their counts by workflow.
        by_workflow_type: the same within each type, `"unknown"` for those not in the vocabulary.
        type_of: workflow type of each of the W workflows.
        queue: the value of the ranking; None if no workflow has the length of every step.
        bins: steps grouped by the forecast median, with forecast and actual lengths.
        cut, unknown: steps left out because their workflow was truncated, and because a count is missing.
    """

    figures: QuantileFigures
    by_workflow_type: Mapping[str, QuantileFigures]
    type_of: tuple[str, ...]
    baselines: Mapping[str, QuantileFigures]
    differences: Mapping[str, QuantileDifference]
    behind: tuple[Behind, ...]
    profiles: Mapping[str, Mapping[str, Any]]
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
                "by_workflow_type": self.by_workflow_type,
                "baselines": self.baselines,
                "differences": {name: of.to_dict(self.figures.quantiles) for name, of in self.differences.items()},
                "behind": worst(self.behind),
                "profiles": self.profiles,
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
    """Evaluate a predictor and baselines on rows that they were not trained on; raises TraceError without a known
    length.

    Args:
        rows: n steps, those of a workflow one after the other.
        quantiles: Q, ascending: what `predict` and the baselines forecast.
        seed: of the bootstrap, whose resamples all predictors share, and of the queue's arrivals.
        profiles: `rows` as seen under each input profile; profiles with equal inputs share one object.
    """
    known = rows.labelled
    cut = int((rows.lower_bound & ~known).sum())
    if not known.any():
        raise TraceError(
            f"of {len(rows)} steps none has a known length ({cut} are of workflows that were cut): nothing can be "
            "judged; give traces with output_tokens and at least one complete workflow"
        )
    first = np.diff(rows.workflow, prepend=-1) != 0
    baselines = baselines or {}

    def judge(
        forecast: NDArray[np.float32],
        within: NDArray[np.bool_] = known,
        workflow: NDArray[np.integer] = rows.workflow[known],
    ) -> QuantileFigures:
        truth, rng = rows.label[within], np.random.default_rng(seed)
        return measure(forecast[within], truth, workflow, first[within], quantiles, rng, resamples)

    def profile(shown: LabelledRows, rivals: Mapping[str, Predict]) -> dict[str, Any]:
        ours = judge(predict(shown))
        theirs = {name: judge(of(shown)) for name, of in rivals.items()}
        gaps = {name: difference(ours, of, seed, resamples) for name, of in theirs.items()}
        return headline(ours, lost(gaps, theirs, quantiles))

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
    median = forecast[:, median_column(quantiles)]
    against = {name: difference(figures, of, seed, resamples) for name, of in others.items()}
    losses = lost(against, others, quantiles)
    return LengthEvaluation(
        figures=figures,
        by_workflow_type=by_type,
        type_of=tuple(names[index] for index in type_of),
        baselines=others,
        differences=against,
        behind=losses,
        profiles=by_profile(profiles or {}, baselines, profile, {id(rows): headline(figures, losses)}),
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
