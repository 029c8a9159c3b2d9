"""Whom the policy would have run first, where it is in shadow: a second queue that vLLM does not see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from presage.serving_hooks.vllm.waiting import Order, WaitingQueue


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
