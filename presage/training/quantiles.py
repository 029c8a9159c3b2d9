"""Ranking, loss and coverage of forecast quantiles: of lengths in tokens, of return times in log seconds.

All figures but the ranking are ratios of sums over workflows, with intervals by bootstrap over workflows. The caller
leaves out and counts steps with an unknown length (no count recorded, or a truncated workflow).

Rankings are compared by Kendall's tau distance (Chimera, appendix B.2): the share of pairs of steps that the forecast
orders wrongly. A pair tied by the forecast counts half, so a constant has exactly 0.5. Pairs of equal lengths are left
out, so a perfect forecast has 0. Pairs are counted by step, because intervals are by workflow
(`presage.predictors.common.bootstrap.pair_ratio_cis`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.special import ndtri

from presage.features.input_profiles import Sources
from presage.features.rows import LabelledRows
from presage.predictors.common.bootstrap import QuantileCounts, enough_beyond, pair_ratio_cis, ratio_cis, share_ci
from presage.training.baselines import Behind, behind, by_profile, worst
from presage.training.configuration import Limits
from presage.training.metrics import RESAMPLES, Estimate, Interval, by_workflow, json_values
from presage.training.sets import under_profiles
from presage.training.training import median_us


def discordance(truth: NDArray[np.floating], forecast: NDArray[np.floating]) -> tuple[NDArray[np.float64], ...]:
    """For each of n steps, how many of its pairs are ordered wrongly, and how many pairs with unequal truth it has.

    Both are float64 [n], from truth and forecast, finite [n]; each pair is counted at both its steps.
    """
    order, low = (np.unique(values, return_inverse=True)[1].astype(np.int64) for values in (truth, forecast))
    sizes = np.bincount(order, minlength=1)
    pairs = len(order) - sizes[order]
    # One pass upwards and one reversed, so that each discordant pair counts at both of its steps.
    wrong = _overtaken(order, low) + _overtaken(order.max(initial=0) - order, low.max(initial=0) - low)
    return wrong, pairs.astype(np.float64)


@njit(cache=True)
def _overtaken(truth: NDArray[np.int64], forecast: NDArray[np.int64]) -> NDArray[np.float64]:
    """For each step, the number of shorter steps with a longer (1) or equal (1/2) forecast; ranks from 0, float64 [n].

    A Fenwick tree over the ranks of the forecasts holds the shorter steps: O(n log n).
    """
    n = len(truth)
    wrong = np.zeros(n, np.float64)
    if n == 0:
        return wrong
    order = np.argsort(truth)
    size = forecast.max() + 1
    tree = np.zeros(size + 1, np.int64)
    start = 0
    while start < n:
        stop = start
        while stop < n and truth[order[stop]] == truth[order[start]]:
            row = order[stop]
            wrong[row] = start - (_below(tree, forecast[row] + 1) + _below(tree, forecast[row])) / 2
            stop += 1
        for place in range(start, stop):
            node = forecast[order[place]] + 1
            while node <= size:
                tree[node] += 1
                node += node & -node
        start = stop
    return wrong


@njit(cache=True)
def _below(tree: NDArray[np.int64], rank: int) -> int:
    count = 0
    while rank > 0:
        count += tree[rank]
        rank -= rank & -rank
    return count


LIMITS: Final[Limits] = dict.fromkeys(("floor", "min_evidence"), (1, math.inf))

FLOOR: Final = "constant"
"""The baseline of an evaluation: the best constant, fitted on the evaluated steps themselves."""

BINS: Final = 10
"""Number of equal-sized groups, by forecast, in which forecast and outcome are compared."""

SCOPES: Final = ("all", "arrival")
"""Which steps a ranking is of: all, or only the first of each workflow."""


@dataclass(frozen=True)
class QuantileFigures(QuantileCounts):
    """Figures on n steps of W workflows, at Q quantiles, beside their counts.

    Attributes:
        quantiles: Q, ascending.
        tau_distance: of the median's ranking, by scope: 0 is the true order, .5 a random one.
        pinball: tokens a step, Q of them.
        coverage: share of steps whose length is at most the quantile, Q of them.
        width: from the median to each quantile, tokens, the mean of n; Q of them, negative below the median.
    """

    quantiles: tuple[float, ...]
    tau_distance: Mapping[str, Estimate]
    pinball: tuple[Estimate, ...]
    coverage: tuple[Estimate, ...]
    width: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values; quantiles are keys such as "0.9"."""
        values: dict[str, Any] = {}
        for figure in ("tau_distance", "pinball", "coverage"):
            estimates = getattr(self, figure)
            by_name = estimates if figure == "tau_distance" else by_quantile(self.quantiles, estimates)
            values[figure] = {name: estimate.value for name, estimate in by_name.items()}
            values[f"{figure}_ci95"] = {name: estimate.ci95 for name, estimate in by_name.items()}
        return json_values(
            {
                **values,
                "width": by_quantile(self.quantiles, self.width),
                "workflows": int((self.positions > 0).sum()),
                "steps": int(self.positions.sum()),
            }
        )


Figure = TypeVar("Figure")


def by_quantile(quantiles: Sequence[float], figures: Sequence[Figure]) -> dict[str, Figure]:
    """Figures by quantile, under keys such as "0.9"."""
    return {f"{q:g}": figure for q, figure in zip(quantiles, figures, strict=True)}


def measure(
    forecast: NDArray[np.floating],
    truth: NDArray[np.floating],
    workflow: NDArray[np.integer],
    arrival: NDArray[np.bool_],
    quantiles: Sequence[float],
    rng: np.random.Generator,
    resamples: int = RESAMPLES,
) -> QuantileFigures:
    """Compare quantiles of n steps with the actual lengths.

    Args:
        forecast: [n, Q] tokens.
        truth: [n] tokens, finite.
        workflow: [n], the workflow of each step, 0..W-1.
        arrival: bool [n], the steps at which workflows arrive.
        quantiles: Q, ascending, each between 0 and 1.

    Raises ValueError for inconsistent shapes, no step, or a number that is not finite.
    """
    steps, size = forecast.shape
    if not steps or truth.shape != (steps,) or workflow.shape != (steps,) or size != len(quantiles):
        raise ValueError(
            f"got forecasts {forecast.shape}, truth {truth.shape}, workflow {workflow.shape} and {len(quantiles)} "
            "quantiles; wanted [n, Q], [n], [n] and Q, n > 0"
        )
    if not (np.isfinite(forecast).all() and np.isfinite(truth).all()):
        raise ValueError("a forecast or a length is not finite; leave steps without a known length out")
    quantile_values, lengths = forecast.astype(np.float64), truth.astype(np.float64)
    workflows = int(workflow.max()) + 1
    positions = np.bincount(workflow, minlength=workflows)
    levels = np.asarray(quantiles, np.float64)
    error = lengths[:, None] - quantile_values
    loss = by_workflow(np.maximum(levels * error, (levels - 1) * error), workflow, workflows)
    covered = by_workflow(lengths[:, None] <= quantile_values, workflow, workflows)
    median = quantile_values[:, median_column(quantiles)]

    wrong: dict[str, NDArray[np.float64]] = {}
    pairs: dict[str, NDArray[np.float64]] = {}
    for scope, rows in zip(SCOPES, (np.arange(steps), np.flatnonzero(arrival)), strict=True):
        counted = discordance(lengths[rows], median[rows])
        wrong[scope], pairs[scope] = (
            np.bincount(workflow[rows], count, workflows).astype(np.float64) for count in counted
        )
    seed = int(rng.integers(2**63))  # all figures share the resamples of workflows
    ranks, ends = intervals(wrong, pairs, loss, positions, seed, resamples)
    shares = [share_ci(of_quantile, positions, np.random.default_rng(seed), resamples) for of_quantile in covered.T]
    return QuantileFigures(
        quantiles=tuple(quantiles),
        tau_distance={
            scope: Estimate(float(wrong[scope].sum() / total) if (total := pairs[scope].sum()) else math.nan, rank)
            for scope, rank in ranks.items()
        },
        pinball=tuple(
            Estimate(float(of_quantile.sum() / steps), end) for of_quantile, end in zip(loss.T, ends, strict=True)
        ),
        coverage=tuple(
            Estimate(float(of_quantile.sum() / steps), end) for of_quantile, end in zip(covered.T, shares, strict=True)
        ),
        width=tuple(float((quantile_values[:, q] - median).mean()) for q in range(size)),
        wrong=wrong,
        pairs=pairs,
        loss=loss,
        covered=covered.astype(np.int64),
        positions=positions.astype(np.int64),
    )


def intervals(
    wrong: Mapping[str, NDArray[np.float64]],
    pairs: Mapping[str, NDArray[np.float64]],
    loss: NDArray[np.float64],
    positions: NDArray[np.integer],
    seed: int,
    resamples: int,
) -> tuple[dict[str, Interval], list[Interval]]:
    """Intervals of the tau distance, by scope, and of the Q pinball losses, or of differences of them.

    Arguments as the fields of `QuantileFigures`; differences have those of `wrong` and `loss`.
    """
    all_wrong, all_pairs = (np.stack([by_scope[scope] for scope in SCOPES], axis=1) for by_scope in (wrong, pairs))
    ranks = pair_ratio_cis(all_wrong, all_pairs, np.random.default_rng(seed), resamples)
    below = np.repeat(positions[:, None], loss.shape[1], axis=1)
    ends = ratio_cis(loss, below, np.random.default_rng(seed), resamples)
    return dict(zip(SCOPES, ranks, strict=True)), ends


def median_column(quantiles: Sequence[float]) -> int:
    """Which of the quantiles ranks: the first at or above the median, else the last."""
    return min(int(np.searchsorted(quantiles, 0.5)), len(quantiles) - 1)


@dataclass(frozen=True)
class QuantileDifference:
    """Figures of the first predictor minus those of the second on the same steps; below 0 the first is better.

    Attributes:
        tau_distance: by scope; pinball: tokens a step, Q of them.
    """

    tau_distance: Mapping[str, Estimate]
    pinball: tuple[Estimate, ...]

    def to_dict(self, quantiles: Sequence[float]) -> dict[str, Any]:
        """JSON values; quantiles are keys such as "0.9"."""
        return json_values({"tau_distance": self.tau_distance, "pinball": by_quantile(quantiles, self.pinball)})


def difference(
    ours: QuantileFigures, theirs: QuantileFigures, seed: int, resamples: int = RESAMPLES
) -> QuantileDifference:
    """First minus second, with paired intervals."""
    wrong = {scope: ours.wrong[scope] - theirs.wrong[scope] for scope in SCOPES}
    ranks, ends = intervals(wrong, ours.pairs, ours.loss - theirs.loss, ours.positions, seed, resamples)
    return QuantileDifference(
        tau_distance={
            scope: Estimate(ours.tau_distance[scope].value - theirs.tau_distance[scope].value, rank)
            for scope, rank in ranks.items()
        },
        pinball=tuple(
            Estimate(mine.value - its.value, end)
            for mine, its, end in zip(ours.pinball, theirs.pinball, ends, strict=True)
        ),
    )


def _headline(figures: QuantileFigures, lost: tuple[Behind, ...]) -> dict[str, Any]:
    """Figures under one input profile (`features/input_profiles.py`), as JSON values."""
    kept = [f"{figure}{suffix}" for figure in ("tau_distance", "pinball", "coverage") for suffix in ("", "_ci95")]
    values = figures.to_dict()
    return {key: values[key] for key in kept} | {"behind": worst(lost)}


def _lost(
    against: Mapping[str, QuantileDifference],
    baselines: Mapping[str, QuantileFigures],
    quantiles: Sequence[float],
    unit: str,
) -> tuple[Behind, ...]:
    """The comparisons that a baseline won; `unit` is that of the pinball loss."""
    lost = []
    for name, gap in against.items():
        own = baselines[name]
        steps = int(own.positions.sum())
        compared = [
            (f"in pinball loss at {q:g}, {unit} a step,", by, figure)
            for q, by, figure in zip(quantiles, gap.pinball, own.pinball, strict=True)
            if enough_beyond(steps, q)
        ]
        for scope in SCOPES:
            where = f"in tau distance of {'all' if scope == 'all' else 'first'} steps"
            compared.append((where, gap.tau_distance[scope], own.tau_distance[scope]))
        for where, by, figure in compared:
            lost += behind(name, where, by.value, _widened(by, len(compared) * len(against)), figure.value)
    return tuple(lost)


def _widened(estimate: Estimate, comparisons: int) -> Interval:
    """The 95 % interval that holds for all of so many comparisons at once (Bonferroni, on a normal scale).

    Otherwise one of the dozens of comparisons of a training is lost by chance, and a gate refuses the version for it.
    """
    share = ndtri(1.0 - 0.025 / comparisons) / ndtri(0.975)
    low, high = (estimate.value + share * (end - estimate.value) for end in estimate.ci95)
    return float(low), float(high)


Predict = Callable[[LabelledRows], NDArray[np.float32]]
"""Rows to quantiles [n, Q], in the unit of the labels."""


@dataclass(frozen=True)
class QuantileEvaluation:
    """Figures of one predictor of quantiles on W workflows.

    Attributes:
        figures: on all evaluated steps; the registry's gates compare their counts by workflow.
        by_workflow_type: the same within each type, `"unknown"` for those not in the vocabulary.
        type_of: workflow type of each of the W workflows.
    """

    figures: QuantileFigures
    by_workflow_type: Mapping[str, QuantileFigures]
    type_of: tuple[str, ...]
    baselines: Mapping[str, QuantileFigures]
    differences: Mapping[str, QuantileDifference]
    behind: tuple[Behind, ...]
    profiles: Mapping[str, Mapping[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """The object that `train-predictor` prints, as JSON values; the caller sets "model" and "version"."""
        raise NotImplementedError

    def tables(self) -> dict[str, Any]:
        """What the object that `train-predictor` prints has beside the figures."""
        return {
            "by_workflow_type": self.by_workflow_type,
            "baselines": self.baselines,
            "differences": {name: gap.to_dict(self.figures.quantiles) for name, gap in self.differences.items()},
            "behind": worst(self.behind),
            "profiles": self.profiles,
        }


def evaluate_quantiles(
    predict: Predict,
    rows: LabelledRows,
    quantiles: tuple[float, ...],
    seed: int,
    *,
    scaled: Callable[[NDArray[np.float32]], NDArray[np.floating]],
    unit: str,
    baselines: Mapping[str, Predict] | None,
    profiles: Mapping[str, LabelledRows] | None,
    resamples: int,
) -> tuple[QuantileEvaluation, NDArray[np.float32]]:
    """Evaluate a predictor and baselines on rows that they were not trained on, of which one or more have a label.

    Args:
        rows: n steps, those of a workflow one after the other.
        quantiles: Q, ascending: what `predict` and the baselines forecast.
        seed: of the bootstrap, whose resamples all predictors share.
        scaled: labels and forecasts in the unit of loss and coverage.
        unit: of the loss.
        profiles: `rows` as seen under each input profile; profiles with equal inputs share one object.

    Returns:
        The evaluation, and the forecasts [n, Q].
    """
    labelled, first = rows.labelled, np.diff(rows.workflow, prepend=-1) != 0
    baselines = baselines or {}

    def judge(
        forecast: NDArray[np.float32],
        within: NDArray[np.bool_] = labelled,
        workflow: NDArray[np.integer] = rows.workflow[labelled],
    ) -> QuantileFigures:
        truth, rng = scaled(rows.label[within]), np.random.default_rng(seed)
        return measure(scaled(forecast[within]), truth, workflow, first[within], quantiles, rng, resamples)

    def profile(shown: LabelledRows, rivals: Mapping[str, Predict]) -> dict[str, Any]:
        ours = judge(predict(shown))
        theirs = {name: judge(rival(shown)) for name, rival in rivals.items()}
        gaps = {name: difference(ours, rival, seed, resamples) for name, rival in theirs.items()}
        return _headline(ours, _lost(gaps, theirs, quantiles, unit))

    forecast = predict(rows)
    figures = judge(forecast)
    names = (*rows.vocabulary.workflow_types, "unknown")
    by_type = {}
    for index in np.unique(rows.workflow_type[labelled]):
        within = labelled & (rows.workflow_type == index)
        by_type[names[index]] = judge(forecast, within, np.unique(rows.workflow[within], return_inverse=True)[1])
    others = {name: judge(baseline(rows)) for name, baseline in baselines.items()}
    type_of = np.full(len(figures.positions), len(names) - 1)
    type_of[rows.workflow[labelled]] = rows.workflow_type[labelled]
    against = {name: difference(figures, other, seed, resamples) for name, other in others.items()}
    losses = _lost(against, others, quantiles, unit)
    evaluation = QuantileEvaluation(
        figures=figures,
        by_workflow_type=by_type,
        type_of=tuple(names[index] for index in type_of),
        baselines=others,
        differences=against,
        behind=losses,
        profiles=by_profile(profiles or {}, baselines, profile, {id(rows): _headline(figures, losses)}),
    )
    return evaluation, forecast


def bins(median: NDArray[np.float32], truth: NDArray[np.float32]) -> tuple[dict[str, float], ...]:
    """Steps in equal-sized groups by the forecast median [n], with forecast and outcome of each."""
    groups = np.array_split(np.argsort(median, kind="stable"), min(BINS, len(median)))
    groups_shown = []
    for rows in groups:
        low, middle, high = np.quantile(truth[rows], [0.1, 0.5, 0.9]).tolist()
        groups_shown.append(
            {
                "steps": len(rows),
                "forecast": float(np.median(median[rows])),
                "truth_p10": low,
                "truth_p50": middle,
                "truth_p90": high,
            }
        )
    return tuple(groups_shown)


def rows_under_profiles(
    rows: LabelledRows, observed: Callable[[LabelledRows, Sources], LabelledRows]
) -> dict[str, LabelledRows]:
    """The rows as seen under each input profile; profiles with equal inputs share one object."""

    def alike(mine: LabelledRows, other: LabelledRows) -> bool:
        return np.array_equal(mine.numbers, other.numbers, equal_nan=True) and np.array_equal(mine.model, other.model)

    return under_profiles(rows, lambda sources: observed(rows, sources), alike)


_TIMED: Final = 1000


def row_latency_us(rows: LabelledRows, forecast: Callable[[int, int, int, NDArray[np.float32]], object]) -> float:
    """Median time of `forecast` of one row, microseconds, over a thousand rows on one thread."""
    columns = (rows.workflow_type, rows.agent, rows.model)
    arguments = [(*map(int, row), numbers) for *row, numbers in zip(*columns, rows.numbers, strict=True)][:_TIMED]
    return median_us(lambda i: forecast(*arguments[i % len(arguments)]), _TIMED)
