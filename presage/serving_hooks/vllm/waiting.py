"""Waiting requests in the order of policies/priority.py, in place of vLLM's queues: the same methods.

One lazy heap: a key that has changed pushes a new entry, the old one is skipped when it comes up. What vLLM puts back
in front, because it could not start or was preempted, goes to where its key says.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Order = tuple[float, ...]
"""The lower runs first; all of a queue have the same length."""


class WaitingQueue:
    """Requests by key; equal keys in the order in which they came.

    Args:
        key: of a request; asked when it is added, and when `moved` says that it has changed. Must not raise.
    """

    def __init__(self, key: Callable[[Any], Order]) -> None:
        self._key = key
        self._waiting: dict[str, tuple[Order, int, Any]] = {}
        self._heap: list[tuple[Order, int, Any]] = []
        self._next = itertools.count()

    def add_request(self, request: Any) -> None:
        """A request begins to wait."""
        entry = (self._key(request), next(self._next), request)
        self._waiting[request.request_id] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 2 * len(self._waiting):
            self._heap = list(self._waiting.values())
            heapq.heapify(self._heap)

    def prepend_request(self, request: Any) -> None:
        """A request waits again."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Requests wait again."""
        for request in requests:
            self.add_request(request)

    def moved(self, request_id: str) -> None:
        """The key of a request has changed. No error if it does not wait here."""
        entry = self._waiting.get(request_id)
        if entry is not None:
            self.add_request(entry[-1])

    def peek_request(self) -> Any:
        """The request to run next, which stays.

        Raises:
            IndexError: none waits.
        """
        while self._heap:
            entry = self._heap[0]
            if self._waiting.get(entry[-1].request_id) is entry:
                return entry[-1]
            heapq.heappop(self._heap)
        raise IndexError("peek from an empty queue")  # vLLM's words

    def pop_request(self) -> Any:
        """The request to run next.

        Raises:
            IndexError: none waits.
        """
        request = self.peek_request()
        heapq.heappop(self._heap)
        del self._waiting[request.request_id]
        return request

    def remove_request(self, request: Any) -> None:
        """This request waits no longer.

        Raises:
            ValueError: it did not wait.
        """
        if request not in self:
            raise ValueError("the request does not wait in this queue")
        del self._waiting[request.request_id]

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """These requests, where they wait here, wait no longer."""
        for request in requests:
            if request in self:
                del self._waiting[request.request_id]

    def __contains__(self, request: Any) -> bool:
        entry = self._waiting.get(request.request_id)
        return entry is not None and entry[-1] is request

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Any]:
        """The first to run first. Sorts: for what happens seldom."""
        return iter([entry[-1] for entry in sorted(self._waiting.values())])
