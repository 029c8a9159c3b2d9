"""Between the engine's thread, which tells, and the one that writes, which hears: calls, no lock, and never too many.

One thread tells, one hears. Each writes only its own counter of bytes, so their difference is what waits. Whoever hears
does so often and whatever the disk does; so calls wait here only for as long as its thread is kept from running.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

from presage.serving_hooks.recorder.queue import FULL, Queue

Told = Callable[..., None]

CLOSED: Final = "dropped: recorder closed"


class Tape:
    """Calls in the order in which they were made.

    Args:
        calls: how many may wait.
        size: bytes that may wait, about, here and in the queue.
        queue: where what was heard waits on.
        counts: of the thread that tells; what is dropped is counted there.
        heard: of the thread that hears; calls that fail are counted there.
    """

    def __init__(self, calls: int, size: int, queue: Queue, counts: Counter[str], heard: Counter[str]) -> None:
        self._most, self._size, self._queue = calls, size, queue
        self._counts, self._heard = counts, heard
        self._waiting: deque[tuple[Told, tuple[Any, ...], int]] = deque()
        self._given = self._taken = 0
        self._heard_to_s = -math.inf
        self._why = FULL

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """About how much memory waits, here and in the queue."""
        return self._given - self._taken + self._queue.waiting_bytes

    def tell(self, what: Told, args: tuple[Any, ...], size: int = 0, *, always: bool = False) -> bool:
        """Takes a call, or drops and counts it; whether it was taken.

        Args:
            what: is to be called.
            args: with what; first of all when it was told, seconds of the rising clock.
            size: bytes of the large ones among them.
            always: drop it in no case: it ends what was taken, so there are no more of these than of those.
        """
        waits = self._given - self._taken + self._queue.waiting_bytes  # spelt out: a call costs more than the sum
        full = len(self._waiting) >= self._most or (size and waits + size > self._size)
        if full and not always:
            self._counts[self._why] += 1
            return False
        self._given += size
        self._waiting.append((what, args, size))
        return True

    def fits(self, size: int) -> bool:
        """Whether so many bytes more may wait."""
        return not size or self.waiting_bytes + size <= self._size

    def close(self) -> None:
        """Nothing more is taken."""
        self._most, self._why = 0, CLOSED

    def heard_to_s(self, now_s: float) -> float:
        """All that was told before this time was heard."""
        return self._heard_to_s if self._waiting else now_s

    def hear(self, most: int) -> bool:
        """Makes the calls that have waited longest, `most` of them; whether more wait."""
        for _ in range(most):
            if not self._waiting:
                return False
            what, args, size = self._waiting.popleft()
            self._taken += size
            self._heard_to_s = args[0]
            try:
                what(*args)
            except Exception as error:
                self._heard[f"failed: {type(error).__name__}"] += 1
        return bool(self._waiting)
