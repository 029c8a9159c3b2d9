"""Waiting requests ordered by key, with the methods of vLLM's queues, which they replace.

A sorted list, kept by bisection; a lazy heap would keep thousands of stale entries and their requests. A request that
vLLM puts back in front (it could not start, or was preempted) is placed by its key; in a queue that imitates vLLM's
first-come order, in front of equal keys.

A held request is counted, found and removed like any other, but never chosen. vLLM tests `bool(queue)` for a request to
choose and `len(queue)` for work, so an engine with only held requests stays awake.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Order = tuple[float | str, ...]
"""The lower runs first; all of a queue have the same length and kinds."""


def holds_none(request: Any) -> bool:
    """A `held` that holds no request."""
    return False


class WaitingQueue:
    """Requests by key; equal keys in the order in which they came. `key` and `held` must not raise.

    Args:
        key: of a request; called when it is added, and by `moved`.
        held: whether a request is skipped; called when it is added, and by `refile`.
        in_front: prepended requests come before equal keys, the last prepended first, as in vLLM's first-come queue.
    """

    def __init__(
        self, key: Callable[[Any], Order], held: Callable[[Any], bool] = holds_none, *, in_front: bool = False
    ) -> None:
        self._key = key
        self._is_held = held
        self._in_front = in_front
        self._waiting: dict[str, tuple[Order, int, Any]] = {}
        self._held: set[str] = set()
        self._line: list[tuple[Order, int, Any]] = []  # those that are not held
        self._next = itertools.count()
        self._before = itertools.count(-1, -1)

    def add_request(self, request: Any) -> None:
        """A request begins to wait."""
        self._enter(request, next(self._next))

    def prepend_request(self, request: Any) -> None:
        """A request waits again."""
        self._enter(request, next(self._before if self._in_front else self._next))

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Requests wait again."""
        for request in requests:
            self.prepend_request(request)

    def refile(self, request_id: str) -> None:
        """Updates whether a request is held; its key has not changed. Ignores a request that does not wait here."""
        entry = self._waiting.get(request_id)
        if entry is None:
            return
        held = self._is_held(entry[-1])
        if held and request_id not in self._held:
            self._held.add(request_id)
            self._take_out(entry)
        elif not held and request_id in self._held:
            self._held.remove(request_id)
            insort(self._line, entry)

    def moved(self, request_id: str) -> None:
        """Updates a request's key; whether it is held has not changed. Ignores a request that does not wait here."""
        known = self._waiting.get(request_id)
        if known is not None:
            entry = self._waiting[request_id] = (self._key(known[-1]), next(self._next), known[-1])
            if request_id not in self._held:
                self._take_out(known)
                insort(self._line, entry)

    def place(self, request_id: str) -> int | None:
        """The place, from 1, of a request among those that are not held; None if it is held or does not wait here."""
        entry = self._waiting.get(request_id)
        return None if entry is None or request_id in self._held else bisect_left(self._line, entry) + 1

    def peek_request(self) -> Any:
        """The next request to run, which stays in the queue.

        Raises:
            IndexError: none waits.
        """
        if not self._line:
            raise IndexError("peek from an empty queue")  # vLLM's words
        return self._line[0][-1]

    def pop_request(self) -> Any:
        """Removes and returns the next request to run.

        Raises:
            IndexError: none waits.
        """
        request = self.peek_request()
        self._leave(request)
        return request

    def remove_request(self, request: Any) -> None:
        """Removes a request.

        Raises:
            ValueError: it did not wait.
        """
        if request not in self:
            raise ValueError("the request does not wait in this queue")
        self._leave(request)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Removes those of these requests that wait here."""
        for request in requests:
            if request in self:
                self._leave(request)

    def __contains__(self, request: Any) -> bool:
        entry = self._waiting.get(request.request_id)
        return entry is not None and entry[-1] is request

    def __bool__(self) -> bool:
        """Whether a request can be chosen."""
        return len(self._waiting) > len(self._held)

    def __len__(self) -> int:
        """Waiting requests, held ones included."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Any]:
        """In the order of their keys, held ones included. Sorts, so not for every iteration."""
        return iter([entry[-1] for entry in sorted(self._waiting.values())])

    def _enter(self, request: Any, number: int) -> None:
        if request.request_id in self._waiting:
            self._leave(request)
        entry = self._waiting[request.request_id] = (self._key(request), number, request)
        if self._is_held(request):
            self._held.add(request.request_id)
        else:
            insort(self._line, entry)

    def _leave(self, request: Any) -> None:
        entry = self._waiting.pop(request.request_id)
        if request.request_id in self._held:
            self._held.remove(request.request_id)
        else:
            self._take_out(entry)

    def _take_out(self, entry: tuple[Order, int, Any]) -> None:
        at = bisect_left(self._line, entry)
        if at < len(self._line) and self._line[at] is entry:
            del self._line[at]
        else:  # NaN keys are not ordered
            self._line = [other for other in self._line if other is not entry]


class ShadowOrder(WaitingQueue):
    """The order the priority policy would run requests in, while it is in shadow.

    Args:
        watched: whether the policy is in shadow for a request.

    Attributes:
        counts: requests that began ("begun"), and those before which the policy would have run another ("otherwise").
    """

    def __init__(
        self, key: Callable[[Any], Order], held: Callable[[Any], bool], watched: Callable[[str], bool]
    ) -> None:
        super().__init__(key, held)
        self.counts: Counter[str] = Counter()
        self._watched = watched

    def begun(self, request_ids: Iterable[str]) -> None:
        """vLLM has selected these for the first time, in this order."""
        for request_id in request_ids:
            if request_id in self._waiting and self._watched(request_id):
                self.counts["begun"] += 1
                first = self.peek_request().request_id if self else request_id
                self.counts["otherwise"] += first != request_id
            self.left(request_id)

    def left(self, request_id: str) -> None:
        """A request waits no longer; unknown ones are ignored."""
        entry = self._waiting.get(request_id)
        if entry is not None:
            self._leave(entry[-1])
