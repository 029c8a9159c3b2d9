"""How long a decode step takes and how much the engine prefills a second: running means, by the caller's clock.

A step lasts from when it was scheduled, or the one before it was done if that was later, to when its output is there.
Steps that fetch ahead are left out: the means are of what the engine does for clients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_WINDOW: Final = 64
"""Steps after which the older ones fade."""


class _Mean:
    """A running mean; None before the first number."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._seen = 0

    def add(self, number: float) -> None:
        self._seen = min(self._seen + 1, _WINDOW)
        before = self.value or 0.0
        self.value = before + (number - before) / self._seen


class Pace:
    """Steps under way and means of those done.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._under_way: dict[int, tuple[float, int, bool]] = {}
        self._done_at = 0.0
        self._decode, self._tokens, self._seconds = _Mean(), _Mean(), _Mean()

    def scheduled(self, step: int, prefilled: int, counts: bool) -> None:
        """A step is on its way.

        Args:
            step: its name.
            prefilled: prompt tokens in it.
            counts: it decodes or prefills for clients, and nothing else.
        """
        self._under_way[step] = self._clock(), prefilled, counts

    def done(self, step: int) -> None:
        """The output of a step is there. No error for a step nobody named."""
        now = self._clock()
        at, prefilled, counts = self._under_way.pop(step, (now, 0, False))
        if counts:
            self._add(prefilled, now - max(at, self._done_at))
        self._done_at = now

    @property
    def step_s(self) -> float:
        """Seconds of a decode step; 0 while none is known, so that nothing fits into it."""
        return self._decode.value or 0.0

    @property
    def prefilled_per_s(self) -> float:
        """Prompt tokens a second, of steps that prefill; 0 while none is known."""
        tokens, seconds = self._tokens.value, self._seconds.value
        return tokens / seconds if tokens and seconds else 0.0

    def _add(self, prefilled: int, seconds: float) -> None:
        if prefilled:
            self._tokens.add(prefilled)
            self._seconds.add(seconds)
        else:
            self._decode.add(seconds)
