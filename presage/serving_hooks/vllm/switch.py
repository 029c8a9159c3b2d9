"""A policy is on until it fails; then it is off, and the engine goes on without it.

A request must never suffer from our mistakes, and a policy that has failed once may hold half of a thought: so it is
not tried again. The log names the kind of error and where it came from, never its message, which might repeat a
prompt.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class Switch:
    """Whether one policy is on.

    Args:
        name: of the policy.
        counts: where a failure is counted, as "name: kind of error".
        takes: switches of what cannot do without it.

    Attributes:
        on: it has not failed.
        reason: the kind of error that switched it off.
    """

    __slots__ = ("_counts", "_takes", "name", "on", "reason")

    def __init__(self, name: str, counts: Counter[str], takes: tuple[Switch, ...] = ()) -> None:
        self.name = name
        self.on = True
        self.reason: str | None = None
        self._counts = counts
        self._takes = takes

    def attempt(self, do: Callable[..., object], *args: Any) -> None:
        """Calls `do`, if it is on; an exception switches it off and goes no further."""
        if self.on:
            try:
                do(*args)
            except Exception as error:
                self.off(error)

    def off(self, error: Exception) -> None:
        """It has failed."""
        self._counts[f"{self.name}: {type(error).__name__}"] += 1
        if not self.on:
            return
        self.on, self.reason = False, type(error).__name__
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].name}, line {frames[-1].lineno}" if frames else "unknown place"
        logger.error("%s is off from here on: %s in %s; vLLM goes on without it", self.name, self.reason, where)
        for other in self._takes:
            other.off(error)
