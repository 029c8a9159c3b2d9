"""Evaluate length predictors and baselines on held-out traces.

A predictor is a function from rows to quantiles, so one code path evaluates Presage's predictor, every baseline and the
oracle of a synthetic process. All are evaluated on the steps with a known length. Steps of truncated workflows are left
out and counted. If mostly long workflows are truncated, the remaining steps are biased towards short lengths, equally
for every model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.errors import TraceError
from presage.features.rows import LabelledRows
from presage.training.baselines import Behind, behind, by_profile, worst
from presage.training.length.metrics import SCOPES, LengthFigures, by_quantile, intervals, measure, median_column
from presage.training.length.queue import QueueFigures, compare, queued
from presage.training.metrics import RESAMPLES, Estimate, json_values

BINS: Final = 10
"""Number of equal-sized groups, by forecast, in which forecast and actual length are compared."""

Predict = Callable[[LabelledRows], NDArray[np.float32]]
"""Rows to quantiles [n, Q], tokens."""


@dataclass(frozen=True)
class LengthDifference:
    """Figures of the first predictor minus those of the second on the same steps; below 0 the first is better.

    Attributes:
        tau_distance: by scope; pinball: tokens a step, Q of them.
    """

    tau_distance: Mapping[str, Estimate]
    pinball: tuple[Estimate, ...]

    def to_dict(self, quantiles: Sequence[float]) -> dict[str, Any]:
        """JSON values; quantiles are keys such as "0.9"."""
        return json_values({"tau_distance": self.tau_distance, "pinball": by_quantile(quantiles, self.pinball)})


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

    figures: LengthFigures
    by_workflow_type: Mapping[str, LengthFigures]
    type_of: tuple[str, ...]
    baselines: Mapping[str, LengthFigures]
    differences: Mapping[str, LengthDifference]
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
    ) -> LengthFigures:
        truth, rng = rows.label[within], np.random.default_rng(seed)
        return measure(forecast[within], truth, workflow, first[within], quantiles, rng, resamples)

    def profile(shown: LabelledRows, rivals: Mapping[str, Predict]) -> dict[str, Any]:
        ours = judge(predict(shown))
        theirs = {name: judge(of(shown)) for name, of in rivals.items()}
        gaps = {name: difference(ours, of, seed, resamples) for name, of in theirs.items()}
        return _headline(ours, _lost(gaps, theirs, quantiles))

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
    lost = _lost(against, others, quantiles)
    return LengthEvaluation(
        figures=figures,
        by_workflow_type=by_type,
        type_of=tuple(names[index] for index in type_of),
        baselines=others,
        differences=against,
        behind=lost,
        profiles=by_profile(profiles or {}, baselines, profile, {id(rows): _headline(figures, lost)}),
        queue=_queue(rows, median, seed),
        bins=_bins(median[known], rows.label[known]),
        target=rows.target,
        cut=cut,
        unknown=int((~known).sum()) - cut,
    )


def difference(ours: LengthFigures, theirs: LengthFigures, seed: int, resamples: int = RESAMPLES) -> LengthDifference:
    """First minus second, with paired intervals."""
    wrong = {scope: ours.wrong[scope] - theirs.wrong[scope] for scope in SCOPES}
    ranks, ends = intervals(wrong, ours.pairs, ours.loss - theirs.loss, ours.positions, seed, resamples)
    return LengthDifference(
        tau_distance={
            scope: Estimate(ours.tau_distance[scope].value - theirs.tau_distance[scope].value, rank)
            for scope, rank in ranks.items()
        },
        pinball=tuple(
            Estimate(mine.value - its.value, end)
            for mine, its, end in zip(ours.pinball, theirs.pinball, ends, strict=True)
        ),
    )


def _headline(figures: LengthFigures, lost: tuple[Behind, ...]) -> dict[str, Any]:
    """Figures under one input profile (`features/input_profiles.py`), as JSON values."""
    kept = [f"{figure}{of}" for figure in ("tau_distance", "pinball", "coverage") for of in ("", "_ci95")]
    found = figures.to_dict()
    return {key: found[key] for key in kept} | {"behind": worst(lost)}


def _lost(
    against: Mapping[str, LengthDifference], baselines: Mapping[str, LengthFigures], quantiles: Sequence[float]
) -> tuple[Behind, ...]:
    found = []
    for name, gap in against.items():
        own = baselines[name]
        named = [f"in pinball loss at {q:g}, tokens a step," for q in quantiles]
        named += [f"in tau distance of {'all' if scope == 'all' else 'first'} steps" for scope in SCOPES]
        gaps = *gap.pinball, *(gap.tau_distance[scope] for scope in SCOPES)
        figures = *own.pinball, *(own.tau_distance[scope] for scope in SCOPES)
        for at, by, figure in zip(named, gaps, figures, strict=True):
            found += behind(name, at, by.value, by.ci95, figure.value)
    return tuple(found)


def _queue(rows: LabelledRows, median: NDArray[np.float32], seed: int) -> QueueFigures | None:
    """The queue over workflows in which every step has a known length."""
    waiting = queued(rows)
    if waiting is None:
        return None
    policy = "shortest total, predicted" if rows.target == "remaining" else "shortest step, predicted"
    return compare(waiting.work, {policy: median[waiting.taken].astype(np.float64)}, waiting.offsets, seed)


def _bins(median: NDArray[np.float32], truth: NDArray[np.float32]) -> tuple[dict[str, float], ...]:
    groups = np.array_split(np.argsort(median, kind="stable"), min(BINS, len(median)))
    found = []
    for rows in groups:
        low, middle, high = np.quantile(truth[rows], [0.1, 0.5, 0.9]).tolist()
        found.append(
            {
                "steps": len(rows),
                "forecast": float(np.median(median[rows])),
                "truth_p10": low,
                "truth_p50": middle,
                "truth_p90": high,
            }
        )
    return tuple(found)
