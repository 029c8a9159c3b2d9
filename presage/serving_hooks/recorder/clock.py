"""The time of day that never goes back: read once, and counted on by a clock that only rises.

Rows of a workflow are in the order of their starts, and a step does not end before it starts, whoever sets the
machine's clock. That it was set back is counted; times of this engine go on as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_SET_BACK_S: Final = 1.0


class Clock:
    """Microseconds since 1970, never falling. One thread calls `now_us`, another may call `set_back`.

    Args:
        wall: seconds since 1970, as the machine has them.
        rising: seconds, rising.
    """

    def __init__(self, wall: Callable[[], float] = time.time, rising: Callable[[], float] = time.monotonic) -> None:
        self._wall, self.rising = wall, rising
        self._began, self._from = wall(), rising()
        self._last = 0
        self._behind = 0.0

    def now_us(self) -> int:
        """Now."""
        now = int((self._began + self.rising() - self._from) * 1e6)
        if now < self._last:
            return self._last
        self._last = now
        return now

    def set_back(self) -> bool:
        """Whether the machine's clock was set back by more than a second since this was last asked."""
        behind = self._began + self.rising() - self._from - self._wall()
        before, self._behind = self._behind, behind
        return behind - before > _SET_BACK_S
