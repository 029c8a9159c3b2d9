"""Kendall's tau distance: how far a ranking by forecast is from the ranking by truth (Chimera, appendix B.2).

The share of pairs of steps that the forecast puts the wrong way round; a pair it ties counts half, so that a constant,
which ranks nothing, has exactly 0.5. A pair whose truth is equal has no right way round and is left out, so that the
truth itself has 0.

Pairs are counted for each step, not only in all, because intervals are by workflow
(`presage.predictors.bootstrap.pair_ratio_cis`).
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


def discordance(truth: NDArray[np.floating], forecast: NDArray[np.floating]) -> tuple[NDArray[np.float64], ...]:
    """Of each step the pairs it stands in wrongly, and all its pairs.

    Args:
        truth: [n], finite.
        forecast: [n], finite.

    Returns:
        Discordant pairs and pairs with unequal truth, float64 [n] each; each pair is counted at both its steps.
    """
    order, low = (np.unique(values, return_inverse=True)[1].astype(np.int64) for values in (truth, forecast))
    sizes = np.bincount(order, minlength=1)
    pairs = len(order) - sizes[order]
    # Once upwards and once, everything reversed, downwards: a step is wronged from both sides.
    wrong = _overtaken(order, low) + _overtaken(order.max(initial=0) - order, low.max(initial=0) - low)
    return wrong, pairs.astype(np.float64)


def tau_distance(truth: NDArray[np.floating], forecast: NDArray[np.floating]) -> float:
    """Kendall's tau distance between 0 and 1, NaN where all truths are equal; [n] finite numbers each."""
    wrong, pairs = discordance(truth, forecast)
    return float(wrong.sum() / pairs.sum()) if pairs.any() else float("nan")


@njit(cache=True)
def _overtaken(truth: NDArray[np.int64], forecast: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of each step, the steps of lesser truth whose forecast is greater (1) or equal (1/2); ranks from 0, float64 [n].

    A Fenwick tree over the ranks of the forecasts holds the steps of lesser truth: n log n.
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
    """How many steps in the tree have a lesser rank."""
    count = 0
    while rank > 0:
        count += tree[rank]
        rank -= rank & -rank
    return count
