"""A heap of entries of which many do not stand any more: skipped when they come up, and dropped a few at a time.

An entry that is replaced stays where it is, since to find it would cost more than to skip it. So that they do not pile
up, the heap is gone through again and again; at once that would take milliseconds in which an engine waits. So there
are two heaps: when half of the young one may be stale it becomes the old one, and every call of `sweep` moves what
stands of the old one's last few entries to a new young one. Without its last entry a heap is still a heap. Where n
entries stand there are never more than half as many again as 64 + 2 n.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

FEW: Final = 8
"""Entries that a sweep looks at, at least: twice as many as are pushed, or it would never come to an end."""

_SLACK: Final = 64


class LazyHeap:
    """The lowest entry first.

    Args:
        stands: whether an entry does.
        gone: told of each entry that was dropped, since it did not.
    """

    def __init__(self, stands: Callable[[bytes], bool], gone: Callable[[bytes], None]) -> None:
        self._stands = stands
        self._gone = gone
        self._young: list[bytes] = []
        self._old: list[bytes] = []

    def __len__(self) -> int:
        """Entries, those that do not stand among them."""
        return len(self._young) + len(self._old)

    def __iter__(self) -> Iterator[bytes]:
        """Entries that stand, in no order."""
        return filter(self._stands, chain(self._young, self._old))

    def push(self, entry: bytes) -> None:
        """One that stands."""
        heapq.heappush(self._young, entry)

    def first(self) -> bytes | None:
        """The lowest that stands, which stays; None if there is none."""
        while heap := self._lower():
            if self._stands(heap[0]):
                return heap[0]
            self._gone(heapq.heappop(heap))
        return None

    def pop(self) -> bytes:
        """Takes what `first` has answered."""
        return heapq.heappop(self._lower())

    def sweep(self, pushed: int, standing: int) -> None:
        """Drops a few that do not stand, where there may be more of them than of others.

        Args:
            pushed: entries since the last time.
            standing: how many stand, at most.
        """
        if not self._old:
            if len(self._young) <= _SLACK + 2 * standing:
                return
            self._old, self._young = self._young, []
        for _ in range(min(len(self._old), max(FEW, 2 * pushed))):
            entry = self._old.pop()
            if self._stands(entry):
                heapq.heappush(self._young, entry)
            else:
                self._gone(entry)

    def _lower(self) -> list[bytes]:
        young, old = self._young, self._old
        return old if old and not (young and young[0] < old[0]) else young
