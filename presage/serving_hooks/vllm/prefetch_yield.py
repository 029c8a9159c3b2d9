"""What came of the blocks fetched ahead: found by a step of a client, or given up before.

A block is known by what it holds, so one that was given up in between is not taken for the one that was fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Held = Callable[[int], object]
"""What vLLM calls the contents of a block; None for nothing the cache knows."""


class Yield:
    """Blocks fetched and not yet asked for, and counts of the others.

    Args:
        held: of a block id.

    Attributes:
        fetched, used: blocks.
    """

    def __init__(self, held: Held) -> None:
        self.fetched = self.used = 0
        self._held = held
        self._open: dict[int, object] = {}
        self._wasted = 0

    def add(self, blocks: Iterable[int]) -> None:
        """These were fetched just now."""
        for block in blocks:
            self._wasted += block in self._open
            self._open[block] = self._held(block)
            self.fetched += 1

    def found(self, blocks: Iterable[int]) -> None:
        """A step of a client found these."""
        for block in blocks:
            if block in self._open:
                as_fetched = self._open.pop(block) == self._held(block)
                self.used += as_fetched
                self._wasted += not as_fetched

    def wasted(self) -> int:
        """Blocks given up before anybody asked for them. Costs O(blocks not yet asked for)."""
        gone = [block for block, held in self._open.items() if held != self._held(block)]
        for block in gone:
            del self._open[block]
        self._wasted += len(gone)
        return self._wasted
