"""Bootstrap confidence intervals over workflows.

The steps of one workflow are not independent, so whole workflows are resampled, with replacement. The statistic is a
ratio of sums (correct forecasts to positions), not a mean of ratios: long workflows weigh more. Percentile intervals
are too narrow below about ten workflows, and have no width for one; callers report the number of workflows.

Arrays hold one number for each of W workflows. Equal states of `rng` give equal intervals, the lower and the upper end;
both are NaN where the denominator is zero everywhere. `level` is the coverage.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

STEPS_BEYOND: Final = 10
"""Expected steps beyond a quantile, below which its pinball loss is no reason to prefer another forecast: without
misses the loss is the width alone, and a bootstrap cannot draw the misses that were not seen."""


def steps_beyond(steps: int, q: float) -> float:
    """Number of `steps` expected beyond quantile q, on its rarer side; whole numbers are exact."""
    return round(steps * min(q, 1.0 - q), 9)  # else 100 steps at .9 are a little less than 10


def enough_beyond(steps: int, q: float) -> bool:
    """Whether a pinball loss at q on so many steps is a reason to prefer a forecast."""
    return steps_beyond(steps, q) >= STEPS_BEYOND


CHUNK = 4_000_000
"""Weights drawn at a time: 32 MB, whatever the number of workflows."""

_Z95 = 1.959964


@dataclass(frozen=True)
class MomentCounts:
    """How next-agent forecasts of one moment did. W workflows with n steps, K horizons, B reliability bins.

    Attributes:
        nll: negative log-likelihood of the outcome, nats a position, K of them; NaN without positions.
        ece: expected calibration error of the likeliest outcome's probability (Guo et al., 2017, eq. 3), likewise.
        correct: int64 [W, K], positions where the likeliest outcome occurred.
        positions: int64 [W, K], positions judged (none after END or past a cut).
        workflow: int64 [n], the row of `correct` that each step belongs to.
        surprise: float64 [n, K], the NLL of each step's outcome, nats; NaN if masked or not in the vocabulary.
        bin_gaps: float64 [W, K, B], hits less confidence in each of B reliability bins; `ece` is the sum over bins of
            the sizes of their totals over workflows, by the number of positions.
    """

    nll: tuple[float, ...]
    ece: tuple[float, ...]
    correct: NDArray[np.int64]
    positions: NDArray[np.int64]
    workflow: NDArray[np.int64]
    surprise: NDArray[np.float64]
    bin_gaps: NDArray[np.float64]


@dataclass(frozen=True)
class QuantileCounts:
    """How forecasts of Q quantiles did in each of W workflows.

    Attributes:
        wrong: float64 [W] by scope, discordant pairs of each workflow's steps.
        pairs: float64 [W] by scope, pairs of each workflow's steps.
        loss: float64 [W, Q], sum of the pinball loss of each workflow's steps, tokens.
        covered: int64 [W, Q], steps covered: their length is at most the quantile.
        positions: int64 [W], steps evaluated.
    """

    wrong: Mapping[str, NDArray[np.float64]]
    pairs: Mapping[str, NDArray[np.float64]]
    loss: NDArray[np.float64]
    covered: NDArray[np.int64]
    positions: NDArray[np.int64]


def ratio_ci(
    numerator: NDArray[Any],
    denominator: NDArray[Any],
    rng: np.random.Generator,
    resamples: int = 1000,
    level: float = 0.95,
) -> tuple[float, float]:
    """Percentile interval of `sum(numerator) / sum(denominator)`, `[W]` each, over resampled workflows.

    With the difference of two predictors' counts as numerator, a resample draws the same workflows for both, so their
    common difficulty cancels.

    Raises ValueError for other shapes, or no workflow.
    """
    if numerator.ndim != 1 or numerator.shape != denominator.shape or not len(numerator):
        raise ValueError(
            f"got shapes {numerator.shape} and {denominator.shape}; expected one number a workflow, [W], W > 0, in both"
        )
    if not denominator.any():
        return float("nan"), float("nan")
    return ratio_cis(numerator[:, None], denominator[:, None], rng, resamples, level)[0]


def ratio_cis(
    numerators: NDArray[Any],
    denominators: NDArray[Any],
    rng: np.random.Generator,
    resamples: int = 1000,
    level: float = 0.95,
) -> list[tuple[float, float]]:
    """Intervals of M ratios, `[W, M]` each, from the same resamples, at about the cost of one."""
    workflows, ratios = numerators.shape
    sums = np.concatenate([numerators, denominators], axis=1).astype(np.float64)  # [W, 2M]
    drawn = np.concatenate([weights @ sums for weights in resample_weights(workflows, rng, resamples)])
    ends = []
    for above, below in zip(*np.split(drawn.T, [ratios]), strict=True):
        shares = above[below > 0] / below[below > 0]
        low, high = np.quantile(shares, [(1 - level) / 2, (1 + level) / 2]) if len(shares) else (np.nan, np.nan)
        ends.append((float(low), float(high)))
    return ends


def resample_weights(groups: int, rng: np.random.Generator, resamples: int) -> Iterator[NDArray[np.int64]]:
    """How often a resample draws each group, `[some, groups]`, `resamples` rows in all."""
    for start in range(0, resamples, rows := max(1, CHUNK // groups)):
        yield rng.multinomial(groups, np.full(groups, 1 / groups), size=min(rows, resamples - start))


def pair_ratio_cis(
    numerators: NDArray[Any],
    denominators: NDArray[Any],
    rng: np.random.Generator,
    resamples: int = 1000,
) -> list[tuple[float, float]]:
    """Intervals of M shares of pairs, such as Kendall's tau distance, or of differences of such shares.

    `denominators`, `[W, M]`, are all pairs of each workflow's steps, `numerators` those counted; each pair counts at
    both of its steps. Drawing a workflow twice doubles its pairs with every other workflow. To first order (Hoeffding's
    projection) a resample moves the share by twice what it moves the ratio of the workflows' own sums, so resamples
    need not be ranked again. Intervals lie within 0 and 1, those of differences within −1 and 1.
    """
    ends = ratio_cis(numerators, denominators, rng, resamples)
    totals = denominators.sum(axis=0)
    shares = np.divide(numerators.sum(axis=0), totals, out=np.full(len(totals), np.nan), where=totals > 0)
    least = -1.0 if (numerators < 0).any() else 0.0
    reach = [(2 * low - share, 2 * high - share) for (low, high), share in zip(ends, shares.tolist(), strict=True)]
    return [(float(np.clip(low, least, 1)), float(np.clip(high, least, 1))) for low, high in reach]


def share_ci(
    hits: NDArray[Any], positions: NDArray[Any], rng: np.random.Generator, resamples: int = 1000
) -> tuple[float, float]:
    """95 % interval of a share; Wilson's over workflows if the share is 0 or 1, where all resamples are equal."""
    count, total = hits.sum(), positions.sum()
    if total and count in (0, total):
        workflows = int((positions > 0).sum())  # the steps of a workflow are not independent: it counts once
        reach = _Z95**2 / (workflows + _Z95**2)
        return (0.0, reach) if count == 0 else (1.0 - reach, 1.0)
    return ratio_ci(hits, positions, rng, resamples)
