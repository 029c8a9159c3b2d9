"""What quality costs: accuracy and cost of routing as the weight of cost grows, next to single models.

At trade-off λ the model of highest p − λ · (its mean cost / the dearest model's) is taken. λ = 0 looks at success
alone, a large λ takes the cheapest. Costs are those of the rows, else output tokens; where a cell has none, its
model's mean stands in. Mean costs are those of the judged prompts: a price list, not a forecast.

How sure the curve is: an interval of the accuracy at each trade-off, by bootstrap over prompts, prices as they are. One
draw of prompts serves all points and everything judged on the same prompts with the same seed, so the points of a curve
move together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.datasets.outcomes import Outcomes
from presage.predictors.common.bootstrap import ratio_cis
from presage.training.router.metrics import judged_prompts

TRADE_OFFS: Final = (0.0, *np.geomspace(0.002, 20.0, 40).round(5).tolist())
SLACKS: Final = (0.0, 0.01, 0.02, 0.05)


@dataclass(frozen=True)
class TradeOffPoint:
    """A way to choose models: mean cost and accuracy over the prompts; `trade_off` is λ."""

    trade_off: float
    cost: float
    accuracy: float


@dataclass(frozen=True)
class CostQuality:
    """The curve on the prompts with a label of every model.

    Attributes:
        unit: "cost", or "output tokens".
        points: of rising λ.
        singles: mean cost and accuracy of each model, by name.
        area: mean over the costs from the cheapest single model to the dearest of the best accuracy at that cost or
            below, 0..1.
        area_of_singles: the same of single models, each mixed at random with the next: what needs no router.
        at_slack: for each slack, the cheapest point whose accuracy is the best single model's less the slack or more,
            chosen on these very prompts; None where there is none.
    """

    unit: str
    points: tuple[TradeOffPoint, ...]
    singles: dict[str, tuple[float, float]]
    area: float
    area_of_singles: float
    at_slack: dict[float, TradeOffPoint | None]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "unit": self.unit,
            "points": [asdict(point) for point in self.points],
            "singles": {name: {"cost": cost, "accuracy": of} for name, (cost, of) in self.singles.items()},
            "area": self.area,
            "area_of_singles": self.area_of_singles,
            "at_slack": {f"{s:g}": asdict(p) if p is not None else None for s, p in self.at_slack.items()},
        }


@dataclass(frozen=True, eq=False)
class Priced:
    """The n' prompts with a label of every model, and what each answer to them costs.

    Attributes:
        unit: "cost", or "output tokens".
        whole: bool [n], which of the n prompts they are.
        paid: float64 [n', M].
        truth: float64 [n', M], labels.
        price: float64 [M], each model's mean cost as a share of the dearest model's.
    """

    unit: str
    whole: NDArray[np.bool_]
    paid: NDArray[np.float64]
    truth: NDArray[np.float64]
    price: NDArray[np.float64]

    def taken(self, predicted: NDArray[np.floating], trade_off: float) -> NDArray[np.int64]:
        """The model taken for each of the n' prompts at λ, int64 [n', 1], from probabilities [n', M]."""
        return np.asarray((predicted - trade_off * self.price).argmax(axis=1)[:, None])


def priced(outcomes: Outcomes) -> Priced | None:
    """What the outcomes say of costs; None where some model's cost or no prompt is known whole."""
    unit, cost = ("cost", outcomes.cost) if _known(outcomes.cost) else ("output tokens", outcomes.output_tokens)
    whole = judged_prompts(outcomes.correct)
    if not _known(cost) or not whole.any():
        return None
    mean = np.nanmean(cost.astype(np.float64), axis=0)
    paid = np.where(np.isnan(cost), mean, cost)[whole]
    return Priced(unit, whole, paid, outcomes.correct[whole].astype(np.float64), mean / max(float(mean.max()), 1e-30))


def cost_quality(
    probabilities: NDArray[np.floating], outcomes: Outcomes, trade_offs: Sequence[float] = TRADE_OFFS
) -> CostQuality | None:
    """The curve of probabilities [n, M] on their outcomes; None where some model's cost or no prompt is known whole."""
    known = priced(outcomes)
    if known is None:
        return None
    paid, truth, predicted = known.paid, known.truth, probabilities[known.whole].astype(np.float64)
    points = []
    for weight in trade_offs:
        taken = known.taken(predicted, weight)
        spent, solved = (float(np.take_along_axis(of, taken, axis=1).mean()) for of in (paid, truth))
        points.append(TradeOffPoint(weight, spent, solved))
    singles = {name: (float(paid[:, m].mean()), float(truth[:, m].mean())) for m, name in enumerate(outcomes.models)}
    costs = np.array([spent for spent, _ in singles.values()])
    best = max(of for _, of in singles.values())
    return CostQuality(
        unit=known.unit,
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
    """Mean over costs in [low, high] of the best accuracy among (cost, accuracy) points at that cost or below.

    Below the cheapest point its accuracy counts; with low = high it is the best accuracy at that cost.
    """
    ordered = sorted(points)
    costs, best = (np.array(column) for column in zip(*ordered, strict=True))
    best = np.maximum.accumulate(best)
    edges = np.concatenate([[low], costs[(costs > low) & (costs < high)], [high]])
    at = np.maximum(np.searchsorted(costs, edges[:-1], side="right") - 1, 0)
    widths = np.diff(edges)
    return float((best[at] * widths).sum() / widths.sum()) if high > low else float(best[at[0]])


def _hull_area(singles: Sequence[tuple[float, float]]) -> float:
    """Mean accuracy over the costs of single models under their upper hull: straight lines are mixtures of two."""
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
    costs, of = (np.array(column) for column in zip(*hull, strict=True))
    if high <= costs[0]:
        return float(of[-1])
    costs, of = np.append(costs, high), np.append(of, of[-1])
    return float(np.trapezoid(of, costs) / (high - costs[0]))


def _turns_up(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b lies on or below the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) <= (c[1] - a[1]) * (b[0] - a[0])


def _known(cost: NDArray[np.float32]) -> bool:
    """Whether each model has a cost somewhere."""
    return bool((~np.isnan(cost)).any(axis=0).all())


def accuracy_cis(
    probabilities: NDArray[np.floating], outcomes: Outcomes, seed: int, trade_offs: Sequence[float] = TRADE_OFFS
) -> tuple[tuple[float, float], ...]:
    """The 95 % interval of the accuracy at each point of `cost_quality(probabilities, outcomes, trade_offs)`.

    Args:
        probabilities: [n, M].
        outcomes: of the same n prompts and M models.
        seed: of the bootstrap.
        trade_offs: of the points.

    Returns:
        An interval a trade-off; none where costs are not known.
    """
    known = priced(outcomes)
    if known is None:
        return ()
    predicted = probabilities[known.whole].astype(np.float64)
    hits = np.concatenate(
        [np.take_along_axis(known.truth, known.taken(predicted, w), axis=1) for w in trade_offs], axis=1
    )
    return tuple(ratio_cis(hits, np.ones_like(hits), np.random.default_rng(seed)))
