"""How long requests were held back, as a histogram: each once, when it begins or its client gives it up.

Those that were never held are not in it. A request that is held, let in, and held again before its turn came counts the
seconds of both times, and none of those in between.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Any, Final

UP_TO_S: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds: from what a newcomer waits for the next decision to what `held_at_most_s` is if nothing is set."""


class HeldTimes:
    """Counts requests by the seconds they were held."""

    def __init__(self) -> None:
        self._counts = [0] * (len(UP_TO_S) + 1)
        self._sum_s = 0.0

    def observe(self, held_s: float) -> None:
        """One request was held so many seconds; 0, and it was not held."""
        if held_s > 0:
            self._counts[bisect_left(UP_TO_S, held_s)] += 1
            self._sum_s += held_s

    def status(self) -> dict[str, Any]:
        """Requests held for so many seconds or less, by Prometheus' names of the bounds, and all seconds together."""
        bounds = [*map(str, UP_TO_S), "+Inf"]
        return {"up_to_s": dict(zip(bounds, accumulate(self._counts), strict=True)), "sum_s": self._sum_s}
