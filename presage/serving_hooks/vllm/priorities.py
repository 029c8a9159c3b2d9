"""The keys of requests: shortest total job first, inside the classes an operator has made with vLLM's `priority`.

With vLLM's `priority` scheduling the number a client gives is a class, the lower first, and our key orders within it;
with `fcfs`, where vLLM ignores that number, so do we. Under `priority` vLLM also chooses whom to preempt by that
number: so class and key are folded into it, and it is given back when the policy ends.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from presage.serving_hooks.policies.polarity import vllm_priority
from presage.serving_hooks.policies.priority import PriorityConfig, ShortestTotalJobFirst
from presage.serving_hooks.vllm.switch import Switch
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
    """

    def __init__(self, config: PriorityConfig, medians: Mapping[str, float], classes: bool, switch: Switch) -> None:
        self.switch = switch
        self._policy = ShortestTotalJobFirst(config, medians)
        self._classes = classes
        self._given: dict[str, int] = {}

    def add(self, request: Any, iteration: int, workflow_type: str, remaining_tokens: float | None) -> None:
        """A request arrives."""
        if self._classes:
            self._given[request.request_id] = request.priority
        self.switch.attempt(self._add, request, iteration, workflow_type, remaining_tokens)

    def key(self, request: Any) -> Order:
        """Where a request stands; by arrival, once the policy has failed."""
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
        if self._classes:
            self.switch.attempt(self._fold, request)

    def give_back(self, request: Any) -> None:
        """vLLM's own number is what the client gave."""
        request.priority = self._given.get(request.request_id, request.priority)

    def left(self, request_id: str) -> None:
        """A request has left the engine."""
        self._given.pop(request_id, None)
        self._policy.remove(request_id)

    def _add(self, request: Any, iteration: int, workflow_type: str, remaining_tokens: float | None) -> None:
        self._policy.add(request.request_id, iteration, request.arrival_time, workflow_type, remaining_tokens)
        self.fold(request)

    def _fold(self, request: Any) -> None:
        key = self._policy.key(request.request_id)
        request.priority = self._given[request.request_id] * _CLASS + vllm_priority(key.level, key.remaining_tokens)

    def _changed(self, ask: Any, *args: Any) -> list[str]:
        if self.switch.on:
            try:
                return list(ask(*args))
            except Exception as error:
                self.switch.off(error)
        return []
