"""The keys of requests: shortest total job first, inside the classes an operator has made with vLLM's `priority`.

With vLLM's `priority` scheduling the number a client gives is a class, the lower first, and our key orders within it;
with `fcfs`, where vLLM ignores that number, so do we. Under `priority` vLLM also chooses whom to preempt by that
number: so class and key are folded into it, and it is given back when the policy ends.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from typing import Any, Final

from presage.serving_hooks.policies.priority import PriorityConfig, ShortestTotalJobFirst, vllm_priority
from presage.serving_hooks.vllm.modes import Switch
from presage.serving_hooks.vllm.waiting import Order

_CLASS: Final = 2**64
"""More than any level and any number of tokens: a class is never left."""


class Priorities:
    """Keys of all requests in the engine.

    Args:
        config: S and Q.
        medians: of each workflow type, as `ShortestTotalJobFirst` has them.
        classes: whether vLLM schedules by `priority`.
        switch: off once a key has failed.

    Attributes:
        acts: vLLM goes by the keys; without, they are only known.
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
        request: Any,
        iteration: int,
        workflow_type: str,
        remaining_tokens: float | None,
        ranked: bool = True,
    ) -> None:
        """A request arrives; one that is not `ranked` stands where those stand whose work nobody knows."""
        self.rank(request.request_id, ranked)
        if self._classes:
            self._given[request.request_id] = request.priority
        self.switch.attempt(self._add, request, iteration, workflow_type, remaining_tokens)

    def rank(self, request_id: str, ranked: bool) -> None:
        """Whether a request has a place of its own from now on; its key may be another."""
        (self._unranked.discard if ranked else self._unranked.add)(request_id)

    def unranked(self, request_id: str) -> bool:
        """Whether it has none."""
        return request_id in self._unranked

    def key(self, request: Any) -> Order:
        """Where a request stands; by arrival, once the policy has failed."""
        given, level, remaining, arrival = self.wanted(request)
        return given, level, self._middle if request.request_id in self._unranked else remaining, arrival

    def wanted(self, request: Any) -> tuple[int, int, float, float]:
        """Where it would stand if it had a place of its own."""
        given = self._given.get(request.request_id, 0)
        if self.switch.on:
            try:
                key = self._policy.key(request.request_id)
                return given, key.level, key.remaining_tokens, key.arrival
            except Exception as error:
                self.switch.off(error)
        return given, 0, math.inf, request.arrival_time

    def aged(self) -> dict[str, int]:
        """How often ageing has taken a request up a level, and down one."""
        return {"promoted": self._policy.promoted, "demoted": self._policy.demoted}

    def age(self, iteration: int) -> list[str]:
        """Before an iteration: the requests whose keys have fallen."""
        return self._changed(self._policy.age, iteration)

    def selected(self, request_ids: Collection[str], iteration: int) -> list[str]:
        """After an iteration: the requests whose keys have risen."""
        return self._changed(self._policy.selected, request_ids, iteration)

    def fold(self, request: Any) -> None:
        """vLLM's own number follows the key, where it means anything to vLLM."""
        if self._classes and self.acts:
            self.switch.attempt(self._fold, request)

    def give_back(self, request: Any) -> None:
        """vLLM's own number is what the client gave."""
        request.priority = self._given.get(request.request_id, request.priority)

    def left(self, request_id: str) -> None:
        """A request has left the engine."""
        self._given.pop(request_id, None)
        self._unranked.discard(request_id)
        self._policy.remove(request_id)

    def _add(self, request: Any, iteration: int, workflow_type: str, remaining_tokens: float | None) -> None:
        self._policy.add(request.request_id, iteration, request.arrival_time, workflow_type, remaining_tokens)
        self.fold(request)

    def _fold(self, request: Any) -> None:
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
