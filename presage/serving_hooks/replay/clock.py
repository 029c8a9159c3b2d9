"""Virtual time: moved on by whoever runs an engine, looked at by all."""

from __future__ import annotations


class Clock:
    """Virtual time.

    Attributes:
        now: seconds.
    """

    now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now
