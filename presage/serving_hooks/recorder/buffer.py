"""The buffer between the engine thread and the writer thread, and the clock that both use."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from presage.serving_hooks.counts import RECORDER, EventCounts
from presage.serving_hooks.recorder.rows import FULL, RowQueue

Handler = Callable[..., None]

_CLOSED: Final = "recorder closed"
_SET_BACK_S: Final = 1.0


class WallClock:
    """Time of day that never goes back: read once at the start, then advanced by a monotonic clock.

    So the rows of a workflow are in the order in which its steps started, and no step ends before it starts, even if
    the machine's clock is set back. Only `monotonic` may be called by more than one thread.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self.monotonic = wall, monotonic
        self._wall_start, self._monotonic_start = wall(), monotonic()
        self._last_us = 0
        self._behind_s = 0.0

    def at_us(self, monotonic_s: float) -> int:
        """Microseconds since 1970 at a monotonic time; call it with rising times."""
        at = int((self._wall_start + monotonic_s - self._monotonic_start) * 1e6)
        if at < self._last_us:
            return self._last_us
        self._last_us = at
        return at

    def set_back(self) -> bool:
        """Whether the machine's clock was set back by more than a second since the last call."""
        behind = self._wall_start + self.monotonic() - self._monotonic_start - self._wall()
        before, self._behind_s = self._behind_s, behind
        return behind - before > _SET_BACK_S


class EventBuffer:
    """Events in the order in which they happened, each a handler and its arguments. Bounded, and without a lock.

    The engine thread puts, the writer thread drains. Each writes only its own counts and byte counter; the difference
    is the bytes that wait.

    Args:
        events: how many may wait.
        size: bytes that may wait, approximately, here and in the queue of the rows made of them.
    """

    def __init__(
        self, events: int, size: int, queue: RowQueue, put_counts: EventCounts, drain_counts: EventCounts
    ) -> None:
        self._most, self._size, self._queue = events, size, queue
        self._put_counts, self._drain_counts = put_counts, drain_counts
        self._waiting: deque[tuple[Handler, tuple[Any, ...], int]] = deque()
        self._put_bytes = self._drained_bytes = 0
        self._drained_to_s = -math.inf
        self._reason = FULL

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """Approximate memory of everything that waits, here and in the queue."""
        return self._put_bytes - self._drained_bytes + self._queue.waiting_bytes

    def put(self, handler: Handler, args: tuple[Any, ...], size: int = 0, *, always: bool = False) -> bool:
        """Adds an event, or drops and counts it; returns whether it was added.

        Args:
            handler: called by the writer thread.
            args: its arguments; the first is the time of the event by the monotonic clock, in seconds.
            size: bytes of the large ones among them.
            always: never drop it. Only for events that end something already added, which they cannot outnumber.
        """
        waits = self._put_bytes - self._drained_bytes + self._queue.waiting_bytes  # inlined: a call costs more
        full = len(self._waiting) >= self._most or (size and waits + size > self._size)
        if full and not always:
            self._put_counts.add(RECORDER, "dropped", self._reason)
            return False
        self._put_bytes += size
        self._waiting.append((handler, args, size))
        return True

    def fits(self, size: int) -> bool:
        """Whether there is room for this many bytes more."""
        return not size or self.waiting_bytes + size <= self._size

    def close(self) -> None:
        """Drops every later event."""
        self._most, self._reason = 0, _CLOSED

    def drained_to_s(self, now_s: float) -> float:
        """Every event before this time has been handled."""
        return self._drained_to_s if self._waiting else now_s

    def drain(self, most: int) -> bool:
        """Handles up to `most` events, oldest first; returns whether more wait."""
        for _ in range(most):
            if not self._waiting:
                return False
            handler, args, size = self._waiting.popleft()
            self._drained_bytes += size
            self._drained_to_s = args[0]
            try:
                handler(*args)
            except Exception as error:
                self._drain_counts.add(RECORDER, "failed", type(error).__name__)
        return bool(self._waiting)
