"""The time of day that never goes back: read once, and counted on by a clock that only rises.

Rows of a workflow are in the order of their starts, and a step does not end before it starts, whoever sets the
machine's clock. That it was set back is counted; times of this engine go on as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_SET_BACK_S: Final = 1.0


class WallClock:
    """Microseconds since 1970, never falling. Of one thread, but for `rising`.

    Args:
        wall: seconds since 1970, as the machine has them.
        rising: seconds, rising.
    """

    def __init__(self, wall: Callable[[], float] = time.time, rising: Callable[[], float] = time.monotonic) -> None:
        self._wall, self.rising = wall, rising
        self._began, self._from = wall(), rising()
        self._last = 0
        self._behind = 0.0

    def at_us(self, rising_s: float) -> int:
        """What it was when the rising clock stood there; asked in the order of the times."""
        at = int((self._began + rising_s - self._from) * 1e6)
        if at < self._last:
            return self._last
        self._last = at
        return at

    def set_back(self) -> bool:
        """Whether the machine's clock was set back by more than a second since this was last asked."""
        behind = self._began + self.rising() - self._from - self._wall()
        before, self._behind = self._behind, behind
        return behind - before > _SET_BACK_S
