"""Waiting requests by key, in place of vLLM's queues: the same methods. Some of them may be held.

One sorted list: what comes is put in its place and what goes is taken out, by bisection. (A lazy heap would keep what
it skips later, thousands of entries and the requests in them.) What vLLM puts back in front, because it could not start
or was preempted, goes to where its key says; among equal keys in front of all where the queue stands for vLLM's own
first-come order.

A held request waits here as any other does: it is counted, found and removed, and only the choice of the next request
passes it by. vLLM asks a queue for its truth to see whether there is anything to choose, and for its length to see
whether there is anything to do; so an engine with none but held requests stays awake, and does not stand still for want
of a choice.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Order = tuple[float | str, ...]
"""The lower runs first; all of a queue have the same length and kinds."""


def nobody(request: Any) -> bool:
    """Holds no request."""
    return False


class WaitingQueue:
    """Requests by key; equal keys in the order in which they came.

    Args:
        key: of a request; asked when it is added, and when `moved` says that it has changed. Must not raise.
        held: whether a request is passed by; asked when it is added, and when `refile` says that it may have changed.
            Must not raise.
        in_front: what is prepended comes before equal keys, the last prepended first, as in vLLM's first-come queue.
    """

    def __init__(
        self, key: Callable[[Any], Order], held: Callable[[Any], bool] = nobody, *, in_front: bool = False
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
        """Whether a request is held may have changed; where it stands has not. No error if it does not wait here."""
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
        """The key of a request has changed; whether it is held has not. No error if it does not wait here."""
        known = self._waiting.get(request_id)
        if known is not None:
            entry = self._waiting[request_id] = (self._key(known[-1]), next(self._next), known[-1])
            if request_id not in self._held:
                self._take_out(known)
                insort(self._line, entry)

    def peek_request(self) -> Any:
        """The request to run next, which stays.

        Raises:
            IndexError: none waits.
        """
        if not self._line:
            raise IndexError("peek from an empty queue")  # vLLM's words
        return self._line[0][-1]

    def pop_request(self) -> Any:
        """The request to run next.

        Raises:
            IndexError: none waits.
        """
        request = self.peek_request()
        self._leave(request)
        return request

    def remove_request(self, request: Any) -> None:
        """This request waits no longer.

        Raises:
            ValueError: it did not wait.
        """
        if request not in self:
            raise ValueError("the request does not wait in this queue")
        self._leave(request)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """These requests, where they wait here, wait no longer."""
        for request in requests:
            if request in self:
                self._leave(request)

    def __contains__(self, request: Any) -> bool:
        entry = self._waiting.get(request.request_id)
        return entry is not None and entry[-1] is request

    def __bool__(self) -> bool:
        """Whether there is a request to choose."""
        return len(self._waiting) > len(self._held)

    def __len__(self) -> int:
        """Requests that wait, held or not."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Any]:
        """The first to run first, the held ones where they would stand. Sorts: for what happens seldom."""
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
        if at == len(self._line) or self._line[at] is not entry:  # a time of NaN has no place in any order
            at = next(place for place, other in enumerate(self._line) if other is entry)
        del self._line[at]


class ShadowOrder:
    """Requests that have not begun, in the order of the policy.

    Args:
        key: where a request would stand. Must not raise.
        held: whether a request waits for another reason. Must not raise.
        watched: whether a request is one the policy is in shadow for.

    Attributes:
        counts: requests that began ("begun"), and those of them before which the policy had another ("otherwise").
    """

    def __init__(
        self, key: Callable[[Any], Order], held: Callable[[Any], bool], watched: Callable[[str], bool]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._queue = WaitingQueue(key, held)
        self._watched = watched
        self._known: dict[str, Any] = {}

    def arrives(self, request: Any) -> None:
        """A request begins to wait."""
        self._known[request.request_id] = request
        self._queue.add_request(request)

    def moved(self, request_id: str) -> None:
        """Its key has changed. No error if it does not wait here."""
        self._queue.moved(request_id)

    def refile(self, request_id: str) -> None:
        """Whether it is held may have changed. No error if it does not wait here."""
        self._queue.refile(request_id)

    def begun(self, request_ids: Iterable[str]) -> None:
        """vLLM has selected these for the first time, in this order."""
        for request_id in request_ids:
            if request_id in self._known and self._watched(request_id):
                self.counts["begun"] += 1
                first = self._queue.peek_request().request_id if self._queue else request_id
                self.counts["otherwise"] += first != request_id
            self.left(request_id)

    def left(self, request_id: str) -> None:
        """It waits no longer. No error if it is not there."""
        request = self._known.pop(request_id, None)
        if request is not None:
            self._queue.remove_requests([request])
