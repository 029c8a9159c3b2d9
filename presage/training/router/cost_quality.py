"""Cost against accuracy of a router at several trade-offs, compared with single models.

At trade-off λ the router picks the model with the highest p − λ · (its mean cost / the most expensive model's). λ = 0
ignores costs; a large λ picks the cheapest model. Costs are those of the rows, else output tokens; a missing cell gets
its model's mean. Mean costs are those of the evaluated prompts: a price list, not a forecast.

Intervals of the accuracy are by bootstrap over prompts, with fixed prices. All points, and all evaluations on the same
prompts with the same seed, share the resamples, so the points of a curve move together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.datasets.outcomes import Outcomes
from presage.predictors.common.bootstrap import ratio_cis
from presage.training.metrics import Interval, json_values
from presage.training.router.metrics import judged_prompts

TRADE_OFFS: Final = (0.0, *np.geomspace(0.002, 20.0, 40).round(5).tolist())
SLACKS: Final = (0.0, 0.01, 0.02, 0.05)


@dataclass(frozen=True)
class TradeOffPoint:
    """Mean cost and accuracy over the prompts at a trade-off λ."""

    trade_off: float
    cost: float
    accuracy: float


@dataclass(frozen=True)
class CostQuality:
    """The curve on the prompts with a label of every model.

    Attributes:
        unit: "cost", or "output tokens".
        points: by ascending λ.
        singles: mean cost and accuracy of each model, by name.
        area: best accuracy at a cost or below, averaged over costs from the cheapest to the most expensive single
            model, 0..1.
        area_of_singles: the same for random mixtures of single models, which need no router.
        at_slack: for each slack, the cheapest point whose accuracy is at least the best single model's minus the
            slack, chosen on these prompts; None if no point qualifies.
    """

    unit: str
    points: tuple[TradeOffPoint, ...]
    singles: dict[str, tuple[float, float]]
    area: float
    area_of_singles: float
    at_slack: dict[float, TradeOffPoint | None]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        singles = {name: {"cost": cost, "accuracy": accuracy} for name, (cost, accuracy) in self.singles.items()}
        at_slack = {f"{slack:g}": point for slack, point in self.at_slack.items()}
        return json_values({**vars(self), "singles": singles, "at_slack": at_slack})


@dataclass(frozen=True, eq=False)
class Priced:
    """The n' prompts with a label of every model (bool [n], `whole`), with costs and labels of their answers, float64
    [n', M].

    `price`, float64 [M], is each model's mean cost as a share of the most expensive model's.
    """

    unit: str
    whole: NDArray[np.bool_]
    paid: NDArray[np.float64]
    labels: NDArray[np.float64]
    price: NDArray[np.float64]

    def taken(self, predicted: NDArray[np.floating], trade_off: float) -> NDArray[np.int64]:
        """The model picked for each of the n' prompts at λ, int64 [n', 1], from probabilities [n', M]."""
        return np.asarray((predicted - trade_off * self.price).argmax(axis=1)[:, None])


def priced(outcomes: Outcomes) -> Priced | None:
    """Costs in the outcomes; None if a model has no cost or no prompt has a label of every model."""
    unit, cost = ("cost", outcomes.cost) if _known(outcomes.cost) else ("output tokens", outcomes.output_tokens)
    whole = judged_prompts(outcomes.correct)
    if not _known(cost) or not whole.any():
        return None
    mean = np.nanmean(cost.astype(np.float64), axis=0)
    paid = np.where(np.isnan(cost), mean, cost)[whole]
    return Priced(unit, whole, paid, outcomes.correct[whole].astype(np.float64), mean / max(float(mean.max()), 1e-30))


def cost_quality(probabilities: NDArray[np.floating], outcomes: Outcomes) -> CostQuality | None:
    """The curve of probabilities [n, M]; None if a model has no cost or no prompt has a label of every model."""
    priced_prompts = priced(outcomes)
    if priced_prompts is None:
        return None
    paid, labels, predicted = (
        priced_prompts.paid,
        priced_prompts.labels,
        probabilities[priced_prompts.whole].astype(np.float64),
    )
    points = []
    for weight in TRADE_OFFS:
        taken = priced_prompts.taken(predicted, weight)
        spent, solved = (float(np.take_along_axis(values, taken, axis=1).mean()) for values in (paid, labels))
        points.append(TradeOffPoint(weight, spent, solved))
    singles = {name: (float(paid[:, m].mean()), float(labels[:, m].mean())) for m, name in enumerate(outcomes.models)}
    costs = np.array([spent for spent, _ in singles.values()])
    best = max(accuracy for _, accuracy in singles.values())
    return CostQuality(
        unit=priced_prompts.unit,
        points=tuple(points),
        singles=singles,
        area=area_under([(p.cost, p.accuracy) for p in points], float(costs.min()), float(costs.max())),
        area_of_singles=_hull_area(list(singles.values())),
        at_slack={
            slack: min((p for p in points if p.accuracy >= best - slack), key=lambda p: p.cost, default=None)
            for slack in SLACKS
        },
    )


def area_under(points: Sequence[tuple[float, float]], low: float, high: float) -> float:
    """Best accuracy among (cost, accuracy) points at a cost or below, averaged over costs in [low, high].

    Costs below the cheapest point use its accuracy; with low = high the result is the best accuracy at that cost.
    """
    ordered = sorted(points)
    costs, best = (np.array(column) for column in zip(*ordered, strict=True))
    best = np.maximum.accumulate(best)
    edges = np.concatenate([[low], costs[(costs > low) & (costs < high)], [high]])
    best_until = np.maximum(np.searchsorted(costs, edges[:-1], side="right") - 1, 0)
    widths = np.diff(edges)
    return float((best[best_until] * widths).sum() / widths.sum()) if high > low else float(best[best_until[0]])


def _hull_area(singles: Sequence[tuple[float, float]]) -> float:
    """Mean accuracy of the upper hull of single models; its segments are random mixtures of two models."""
    hull: list[tuple[float, float]] = []
    best = -np.inf
    for point in sorted(singles, key=lambda p: (p[0], -p[1])):
        if point[1] <= best:
            continue
        best = point[1]
        while len(hull) > 1 and _turns_up(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    high = max(cost for cost, _ in singles)
    costs, accuracies = (np.array(column) for column in zip(*hull, strict=True))
    if high <= costs[0]:
        return float(accuracies[-1])
    costs, accuracies = np.append(costs, high), np.append(accuracies, accuracies[-1])
    return float(np.trapezoid(accuracies, costs) / (high - costs[0]))


def _turns_up(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b lies on or below the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) <= (c[1] - a[1]) * (b[0] - a[0])


def _known(cost: NDArray[np.float32]) -> bool:
    """Whether every model has at least one cost."""
    return bool((~np.isnan(cost)).any(axis=0).all())


def accuracy_cis(probabilities: NDArray[np.floating], outcomes: Outcomes, seed: int) -> tuple[Interval, ...]:
    """Interval of the accuracy at each point of `cost_quality(probabilities, outcomes)`; empty without costs."""
    priced_prompts = priced(outcomes)
    if priced_prompts is None:
        return ()
    predicted = probabilities[priced_prompts.whole].astype(np.float64)
    hits = np.concatenate(
        [np.take_along_axis(priced_prompts.labels, priced_prompts.taken(predicted, w), axis=1) for w in TRADE_OFFS],
        axis=1,
    )
    return tuple(ratio_cis(hits, np.ones_like(hits), np.random.default_rng(seed)))
