"""How long iterations take, and histograms of seconds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from itertools import accumulate
from typing import Final, Generic, TypeVar

from presage.serving_hooks.policies.workload import IterationCost, IterationCosts, RecomputingShare
from presage.serving_hooks.status import SecondsStatus

UP_TO_S: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds: from the wait of a new workflow for the next decision to thrice the default of `held_at_most_s`."""

_FIT_EVERY_S: Final = 2.0
_UNDER_WAY: Final = 64
"""Iterations in flight, more than any pipeline has; those without an update are dropped."""

Facts = TypeVar("Facts")


class Seconds:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(UP_TO_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Counts a duration."""
        self._counts[bisect_left(UP_TO_S, seconds)] += 1
        self._sum_s += seconds

    def status(self) -> SecondsStatus:
        """Cumulative counts by Prometheus' names of the bounds, and the sum of seconds."""
        bounds = [*map(str, UP_TO_S), "+Inf"]
        return SecondsStatus(dict(zip(bounds, accumulate(self._counts), strict=True)), self._sum_s)


class IterationTimer(Generic[Facts]):
    """Durations of iterations, each with some facts about it.

    An iteration lasts from its scheduling, or from the previous update if that is later, to the update with its output:
    this is the rate at which a busy engine completes iterations, whatever overlaps. The first iteration after an idle
    time counts from its own start. Work of vLLM after an update is not measured unless it overlaps.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[object, Facts, float]] = deque(maxlen=_UNDER_WAY)
        self._updated_at = -math.inf

    def scheduled(self, output: object, facts: Facts, began_at: float) -> None:
        """Records the start of an iteration."""
        self._under_way.append((output, facts, began_at))

    def updated(self, output: object, now: float) -> tuple[Facts, float] | None:
        """Facts and seconds of the iteration with this output; None if it is unknown. Outputs arrive in order."""
        before, self._updated_at = self._updated_at, now
        while self._under_way:
            known, facts, began_at = self._under_way.popleft()
            if known is output:
                return facts, now - max(began_at, before)
        return None


class IterationTimes(IterationTimer[tuple[int, int]]):
    """The cost model of iterations, from their decoded and prefilled tokens and their durations.

    Attributes:
        recomputing: share of the time that is spent on lost contexts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recomputing = RecomputingShare()
        self._times = IterationCost()
        self._fit_at = -math.inf
        self._costs: IterationCosts | None = None

    def updated(self, output: object, now: float) -> tuple[tuple[int, int], float] | None:
        """See `IterationTimer.updated`."""
        timed = super().updated(output, now)
        if timed is not None:
            self._times.observe(*timed[0], timed[1])
            self.recomputing.computes(timed[1])
        return timed

    def costs(self, now: float) -> IterationCosts | None:
        """The cost model, fitted every few seconds; the last fit while too few iterations prefill."""
        if now >= self._fit_at:
            self._fit_at, self._costs = now + _FIT_EVERY_S, self._times.fit() or self._costs
        return self._costs
