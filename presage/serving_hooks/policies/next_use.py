"""When a workflow comes back, given the time it has been away, and the expected wait for a use of its blocks.

Ours; no paper has it. A forecast of return times gives a distribution of R, the time from the completion of a step to
the workflow's next request, and the probability that there is none (END). After e seconds without a request the
expected wait for a use is the time spent waiting per return,

    W(e) = min over t of E[min(R − e, t) | R > e] / P(R − e ≤ t | R > e)

the reciprocal of the Gittins index of a block that is worth one hit (with END as R = ∞). For a certain R it is R − e:
evicting the greatest wait first is then Belady's rule. A workflow that has probably ended has a long wait, a heavy tail
one that grows while the workflow is away. W is computed at knots, the quantiles of R: between two knots the expected
moment of return, knot + W(knot), stays as it is.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

LEAST_S: Final = 0.01
"""The shortest wait that is told from others, seconds; also that of a request which has arrived."""

LONGEST_S: Final = 1e9
"""Longer waits, and unbounded ones, count as this: decades."""

_TAIL: Final = (0.2, 5.0)
"""Least and greatest exponent of the Pareto tail beyond the last quantile."""


class Stage(NamedTuple):
    """The forecast between two knots.

    Attributes:
        began_s, until_s: the knots, seconds since the completion of the step.
        wait_s: expected wait for a use at `began_s`.
    """

    began_s: float
    wait_s: float
    until_s: float


class ReturnCurve:
    """The distribution of a workflow's return time.

    Args:
        quantiles: Q rising numbers in (0, 1); at least one.
        seconds: at each quantile, given that the workflow returns. Values that are no time are bounded to one, values
            that fall are raised to their predecessor's.
        end: probability that the workflow does not return.
    """

    __slots__ = ("_knots", "_levels", "end")

    def __init__(self, quantiles: Sequence[float], seconds: Sequence[float], end: float = 0.0) -> None:
        knots, last = [], LEAST_S
        for value in seconds:
            last = max(last, min(value, LONGEST_S) if value == value else LONGEST_S)  # NaN is unequal to itself
            knots.append(last)
        first = knots[0] ** 2 / knots[1] if len(knots) > 1 else knots[0]
        self._knots = (max(first, LEAST_S), *knots)
        self._levels = (0.0, *quantiles)
        self.end = min(max(end, 0.0), 1.0) if end == end else 0.0

    def at(self, elapsed_s: float) -> Stage:
        """The stage after so many seconds without a request."""
        knots = self._knots
        last = len(knots) - 1
        if elapsed_s >= knots[last]:
            return self._beyond(elapsed_s)
        place = 0
        while place < last and knots[place + 1] <= elapsed_s:
            place += 1
        began = knots[place] if elapsed_s >= knots[0] else 0.0
        return Stage(began, self._wait(place, began), knots[place + 1] if began else knots[0])

    def within_s(self, share: float) -> float:
        """Seconds within which the workflow returns with probability `share`, given that it returns."""
        knots, levels = self._knots, self._levels
        for place in range(1, len(knots)):
            if levels[place] >= share:
                part = (share - levels[place - 1]) / (levels[place] - levels[place - 1])
                return float(knots[place - 1] * (knots[place] / knots[place - 1]) ** part)
        fall = (1.0 - share) / (1.0 - levels[-1])
        return float(min(knots[-1] * fall ** (-1.0 / self._tail()), LONGEST_S)) if fall > 0 else LONGEST_S

    def _wait(self, place: int, now: float) -> float:
        """W at `now`, which lies in the cell that begins at knot `place` or before."""
        knots, levels, returns = self._knots, self._levels, 1.0 - self.end
        left = 1.0 - returns * levels[place]  # P(R > now)
        reached = waited = 0.0
        best = math.inf
        for i in range(place, len(knots) - 1):
            low, high = knots[i], knots[i + 1]
            mass = returns * (levels[i + 1] - levels[i])
            reached += mass
            waited += mass * (math.sqrt(low * high) - now)
            if reached > 0:
                best = min(best, (waited + (left - reached) * (high - now)) / reached)
        return min(max(best, LEAST_S), LONGEST_S)

    def _beyond(self, elapsed_s: float) -> Stage:
        """Beyond the last quantile a Pareto tail through the last two: its hazard is exponent / time."""
        if elapsed_s >= LONGEST_S:
            return Stage(LONGEST_S, LONGEST_S, math.inf)
        last, tail = self._knots[-1], self._tail()
        began = last * 2.0 ** math.floor(math.log2(elapsed_s / last))
        still = (1.0 - self.end) * (1.0 - self._levels[-1]) * (began / last) ** -tail
        returns = still / (still + self.end) if still > 0 else 0.0
        wait = began / tail / returns if returns > 0 else LONGEST_S
        return Stage(began, min(max(wait, LEAST_S), LONGEST_S), 2.0 * began)

    def _tail(self) -> float:
        knots, levels = self._knots, self._levels
        over = math.log(knots[-1] / knots[-2])
        fall = math.log((1.0 - levels[-2]) / (1.0 - levels[-1]))
        return min(max(fall / over, _TAIL[0]), _TAIL[1]) if over > 0 else _TAIL[1]


READY: Final = ReturnCurve((0.99,), (LEAST_S,))
"""Of a workflow whose request has arrived and waits to be computed."""

_MOST_TYPES: Final = 10_000


class StepPace:
    """Typical seconds from the arrival of a workflow's step to that of its next step, by workflow type.

    A running geometric mean, since pauses differ a hundredfold. The least recently used types are dropped.
    """

    def __init__(self) -> None:
        self._types: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._all = 0, 0.0

    def __len__(self) -> int:
        return len(self._types)

    def observe(self, workflow_type: str, seconds: float) -> None:
        """A workflow of this type sent a request so long after its previous one; no time is ignored."""
        if not 0.0 <= seconds < LONGEST_S:
            return
        log = math.log(max(seconds, LEAST_S))
        self._all = _renewed(self._all, log)
        self._types[workflow_type] = _renewed(self._types.pop(workflow_type, (0, 0.0)), log)
        if len(self._types) > _MOST_TYPES:
            self._types.popitem(last=False)

    def step_s(self, workflow_type: str) -> float | None:
        """The typical time of this type, else of all types; None before the first."""
        count, log = self._types.get(workflow_type, self._all)
        return math.exp(log) if count else None


def _renewed(mean: tuple[int, float], value: float) -> tuple[int, float]:
    """A mean of the first 50 values, exponentially weighted after them."""
    count, average = mean
    return count + 1, average + (value - average) / min(count + 1, 50)


def paced(step_s: float, end: float) -> ReturnCurve:
    """The next request of a workflow of which no more is known than the pace of its type: in about `step_s`."""
    return ReturnCurve((0.25, 0.5, 0.75, 0.9), (step_s / 2, step_s, 2 * step_s, 4 * step_s), end)
