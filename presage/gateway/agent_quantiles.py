"""Output tokens and return times of each agent, as served here lately: known before any model forecasts.

A ring of the latest values for each agent of a workflow type, and beside it the same values sorted.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from typing import Final

MOST_VALUES: Final = 256
LEAST_VALUES: Final = 8
"""Fewer tell no quantile."""
MOST_AGENTS: Final = 10_000

Quantiles = tuple[float, float]
"""p50 and p99."""


class RecentQuantiles:
    """Quantiles of the latest values by key; the least recently used keys are dropped."""

    def __init__(self, most_keys: int = MOST_AGENTS) -> None:
        self._most = most_keys
        self._of: OrderedDict[tuple[str, str], tuple[deque[float], list[float]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def add(self, key: tuple[str, str], value: float) -> None:
        """Another value; infinity for what never came."""
        if math.isnan(value):
            return
        ring, ranked = self._of.setdefault(key, (deque(), []))
        self._of.move_to_end(key)
        ring.append(value)
        insort(ranked, value)
        if len(ring) > MOST_VALUES:
            del ranked[bisect_left(ranked, ring.popleft())]
        if len(self._of) > self._most:
            self._of.popitem(last=False)

    def at(self, key: tuple[str, str], probability: float) -> float | None:
        """The smallest value that a share of `probability` does not exceed; None with too few values."""
        ranked = self._of[key][1] if key in self._of else []
        if len(ranked) < LEAST_VALUES:
            return None
        return ranked[min(len(ranked) - 1, math.ceil(probability * len(ranked)) - 1)]

    def finite(self, key: tuple[str, str]) -> Quantiles | None:
        """p50 and p99 of the finite values; None with too few."""
        ranked = self._of[key][1] if key in self._of else []
        count = bisect_left(ranked, math.inf)
        if count < LEAST_VALUES:
            return None
        return ranked[math.ceil(0.5 * count) - 1], ranked[math.ceil(0.99 * count) - 1]
