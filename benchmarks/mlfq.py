"""A multilevel feedback queue as a plug-in of `presage replay`, for comparison with shortest total job first.

Source: FastServe (Wu et al., 2023) and the baseline MLFQ of Chimera, §4.1 (vLLM with several priority queues, promotion
and demotion by service time). A request begins at the top level. Once it has been served for its level's quantum, it
falls a level; each level has twice the quantum of the one above. Equal levels run by arrival. A request that has waited
for `starved_after` iterations without being served returns to the top.

Where we depart: no request skips levels by the length of its prompt, and the cache of a preempted request is not
swapped to the host: its blocks are free, and found again unless others have taken them. vLLM takes no running request
off for a waiting one. Here it does, as the queue wants: it preempts the last running request if it gets no blocks for
one, so the running requests are sorted by level, and those that must leave get none.

    PYTHONPATH=benchmarks presage replay traces --policy stock,mlfq:MLFQ
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from presage.serving_hooks.policies.priority import Key
from presage.serving_hooks.replay.policies import Policy

if TYPE_CHECKING:
    from presage.serving_hooks.modes import Switch

QUANTUM: Final = 128
"""Iterations at the top level. Of 16, 32, 64 and 128 the one with which requests complete soonest
(`fleet_models.py`, gsm8k); a shorter one brings first tokens sooner."""
LEVELS: Final = 4
STARVED_AFTER: Final = 1000
_FIRST: Final = -(2**30)


@dataclass(slots=True)
class _Job:
    arrival: float
    waits_since: int
    level: int = 0
    served: int = 0


class FeedbackQueue:
    """Levels of all requests, with the methods of `ShortestTotalJobFirst`, in whose place it stands.

    Args:
        quantum: iterations of service at the top level; one decodes a token, or computes a part of a prompt.
    """

    def __init__(self, quantum: int = QUANTUM, levels: int = LEVELS, starved_after: int = STARVED_AFTER) -> None:
        self._quantum, self._lowest, self._starved_after = quantum, levels - 1, starved_after
        self._jobs: dict[str, _Job] = {}
        self.promoted = self.demoted = 0

    def add(
        self, request: str, iteration: int, arrival: float, workflow_type: str, remaining_tokens: float | None
    ) -> Key:
        """A request arrives, at the top level."""
        self._jobs[request] = _Job(arrival, iteration)
        return self.key(request)

    def key(self, request: str) -> Key:
        """The lowest runs first."""
        job = self._jobs[request]
        return Key(job.level, 0.0, job.arrival, request)

    def overdue(self, request: str) -> Key:
        """Puts a request before all others."""
        self._jobs[request].level = _FIRST
        return self.key(request)

    def age(self, iteration: int) -> list[str]:
        """Returns starved requests to the top."""
        starved = []
        for request, job in self._jobs.items():
            if job.level > 0 and iteration - job.waits_since > self._starved_after:
                job.level, job.served, job.waits_since = 0, 0, iteration
                starved.append(request)
        self.promoted += len(starved)
        return starved

    def selected(self, requests: Collection[str], iteration: int) -> list[str]:
        """Counts an iteration of service; returns the requests that fall a level."""
        fallen = []
        for request in requests:
            job = self._jobs.get(request)
            if job is None:
                continue
            job.waits_since = iteration
            job.served += 1
            if 0 <= job.level < self._lowest and job.served >= self._quantum << job.level:
                job.level, job.served = job.level + 1, 0
                fallen.append(request)
        self.demoted += len(fallen)
        return fallen

    def remove(self, request: str) -> None:
        """A request has left."""
        self._jobs.pop(request, None)

    def debug_state(self) -> dict[str, int]:
        """Entries."""
        return {"priority keys": len(self._jobs)}


def by_level(hooked: type[Any]) -> type[Any]:
    """A scheduler whose running and waiting requests are ordered by level, and which preempts for a higher level."""
    from presage.serving_hooks.vllm.queues import Priorities

    class LevelScheduler(hooked):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._preempted: set[str] = set()
            allocate = self.kv_cache_manager.allocate_slots

            def allocated(request: Any, *more: Any, **named: Any) -> Any:
                return None if request.request_id in self._preempted else allocate(request, *more, **named)

            self.kv_cache_manager.allocate_slots = allocated

        def make_priorities(self, config: Any, medians: Mapping[str, float], switch: Switch) -> Any:
            return Priorities(FeedbackQueue(), medians, self.engine_port.by_priority, switch)  # type: ignore[arg-type]

        def schedule(self, throttle_prefills: bool = False) -> Any:
            self._preempted = self._to_preempt()
            output = super().schedule(throttle_prefills)
            self._preempted = set()
            return output

        def update_from_output(self, output: Any, computed: Any) -> Any:
            # The fast path runs until a request ends: not while one may come for which another is preempted.
            free = not self.waiting and len(self.running) < self.max_num_running_reqs
            self.fast_path = type(self).fast_path and free
            return super().update_from_output(output, computed)

        def _to_preempt(self) -> set[str]:
            """Running requests whose places waiting ones of a higher level take."""
            places, priorities = self.max_num_running_reqs, self.queue_policies.priorities
            if priorities is None or not self.waiting:
                return set()
            self.running.sort(key=priorities.key)
            wait, off = list(self.waiting)[places - len(self.running) :], set()
            for first, last in zip(wait, reversed(self.running), strict=False):
                if priorities.key(first)[:2] >= priorities.key(last)[:2]:
                    break
                off.add(last.request_id)
            return off

    return LevelScheduler


MLFQ: Final = Policy("mlfq", frozenset({"priority"}), scheduler=by_level, more={"objectives": {"factor": 1e9}})
