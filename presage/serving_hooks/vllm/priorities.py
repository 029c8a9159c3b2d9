"""Keys of requests: shortest total job first within the classes of vLLM's `priority`.

With vLLM's `priority` scheduling a client's number is a class, lower first, and our key orders requests within it.
With `fcfs` vLLM ignores that number, and so do we. Under `priority` vLLM also preempts by that number: class and key
are folded into it, and the client's number is restored when the policy ends.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from typing import Any, Final

from presage.serving_hooks.policies.priority import PriorityConfig, ShortestTotalJobFirst, vllm_priority
from presage.serving_hooks.vllm.engine import EngineRequest
from presage.serving_hooks.vllm.modes import Switch
from presage.serving_hooks.vllm.waiting import Order

_CLASS: Final = 2**64
"""More than any level and number of tokens, so that a key never leaves its class."""


class Priorities:
    """Keys of all requests in the engine.

    Args:
        config: S and Q.
        medians: of each workflow type; see `ShortestTotalJobFirst`.
        classes: whether vLLM schedules by `priority`.
        switch: off after a failure.

    Attributes:
        acts: whether vLLM schedules by the keys; in shadow they are only computed.
    """

    def __init__(self, config: PriorityConfig, medians: Mapping[str, float], classes: bool, switch: Switch) -> None:
        self.switch = switch
        self.acts = True
        self._policy = ShortestTotalJobFirst(config, medians)
        self._classes = classes
        self._given: dict[str, int] = {}
        self._unranked: set[str] = set()
        self._middle = statistics.median(medians.values()) if medians else math.inf

    def add(
        self,
        request: EngineRequest,
        iteration: int,
        workflow_type: str,
        remaining_tokens: float | None,
        ranked: bool = True,
    ) -> None:
        """A request arrives; one that is not `ranked` is queued as if its remaining work were unknown."""
        self.rank(request.request_id, ranked)
        if self._classes:
            self._given[request.request_id] = request.priority
        self.switch.attempt(self._add, request, iteration, workflow_type, remaining_tokens)

    def rank(self, request_id: str, ranked: bool) -> None:
        """Sets whether a request is ordered by its own remaining work; this may change its key."""
        (self._unranked.discard if ranked else self._unranked.add)(request_id)

    def unranked(self, request_id: str) -> bool:
        """Whether a request is queued as if its remaining work were unknown."""
        return request_id in self._unranked

    def key(self, request: EngineRequest) -> Order:
        """The key of a request; its arrival after the policy has failed."""
        given, level, remaining, arrival = self.wanted(request)
        return given, level, self._middle if request.request_id in self._unranked else remaining, arrival

    def wanted(self, request: EngineRequest) -> tuple[int, int, float, float]:
        """The key a request would have if it were ranked."""
        given = self._given.get(request.request_id, 0)
        if self.switch.on:
            try:
                key = self._policy.key(request.request_id)
                return given, key.level, key.remaining_tokens, key.arrival
            except Exception as error:
                self.switch.off(error)
        return given, 0, math.inf, request.arrival_time

    def aged(self) -> dict[str, int]:
        """How often ageing promoted and demoted a request."""
        return {"promoted": self._policy.promoted, "demoted": self._policy.demoted}

    def age(self, iteration: int) -> list[str]:
        """Before an iteration: ids of the requests whose keys fell."""
        return self._changed(self._policy.age, iteration)

    def selected(self, request_ids: Collection[str], iteration: int) -> list[str]:
        """After an iteration: ids of the requests whose keys rose."""
        return self._changed(self._policy.selected, request_ids, iteration)

    def fold(self, request: EngineRequest) -> None:
        """Writes the key into vLLM's `priority`, where vLLM uses it."""
        if self._classes and self.acts:
            self.switch.attempt(self._fold, request)

    def give_back(self, request: EngineRequest) -> None:
        """Restores the client's `priority`."""
        request.priority = self._given.get(request.request_id, request.priority)

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {"priorities": len(self._given) + len(self._unranked), **self._policy.debug_state()}

    def left(self, request_id: str) -> None:
        """A request has left the engine."""
        self._given.pop(request_id, None)
        self._unranked.discard(request_id)
        self._policy.remove(request_id)

    def _add(self, request: EngineRequest, iteration: int, workflow_type: str, remaining_tokens: float | None) -> None:
        self._policy.add(request.request_id, iteration, request.arrival_time, workflow_type, remaining_tokens)
        self.fold(request)

    def _fold(self, request: EngineRequest) -> None:
        key, unranked = self._policy.key(request.request_id), request.request_id in self._unranked
        remaining_tokens = self._middle if unranked else key.remaining_tokens
        request.priority = self._given[request.request_id] * _CLASS + vllm_priority(key.level, remaining_tokens)

    def _changed(self, ask: Any, *args: Any) -> list[str]:
        if self.switch.on:
            try:
                return list(ask(*args))
            except Exception as error:
                self.switch.off(error)
        return []
