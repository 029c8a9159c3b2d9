"""Shortest total job first, with ageing: the order in which requests run.

Source: Chimera, §3.7. The key is (starvation level, predicted remaining tokens of the workflow, arrival); the lowest
runs first. A request not selected in S consecutive iterations is promoted one level (level − 1); once selected in Q
iterations since, it is demoted one level.

The paper promotes once; here every further S iterations without selection promote again, since with a single level a
stream of short requests starves a long one for ever. So no request that arrived S or more iterations after a wait began
overtakes the waiting request, and if every iteration selects the lowest keys for B places, a request waits at most

    floor(iterations of work of those present when its wait began, or arriving within the next S, divided by B).

This bounds the order only: if an engine cannot run the first request, for lack of cache say, requests wait longer.

`overdue` puts a request before all others, when it has waited for as long as it may in seconds (`wait_bounds.py`).

One heap holds the requests by the iteration of their next promotion, another by that of their demotion: an iteration
costs O(requests that enter or leave the batch, or change level), whatever the lengths of queue and batch.

A request without a forecast is queued with the median of its workflow type; for an unknown type, with the median of the
known types' medians. If no median is known, it runs after those with a forecast.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

MOST_TOKENS: Final = 2**32 - 1
"""The limit to which `vllm_priority` clips remaining tokens, unknown ones included."""


@dataclass(frozen=True)
class PriorityConfig:
    """Settings of the ageing.

    Attributes:
        starved_after: S, consecutive iterations without selection that promote a request one level.
        quantum: Q, selected iterations that demote a promoted request one level.
    """

    starved_after: int = 200
    quantum: int = 100


_OVERDUE: Final = 2**30
"""Levels by which an overdue request is raised, more than ageing ever does."""


class Key(NamedTuple):
    """The lowest runs first. `arrival` may use any rising clock; `request` makes the order total."""

    level: int
    remaining_tokens: float
    arrival: float
    request: str


@dataclass(slots=True)
class _Waiting:
    arrival: float
    remaining_tokens: float
    last: int
    level: int = 0
    served: int = 0
    overdue: bool = False
    since: int | None = None  # first turn of its current run of selections, which `served` does not count yet


@dataclass
class ShortestTotalJobFirst:
    """The keys of all requests, running and waiting.

    Args:
        medians: remaining output tokens at the start, the median of each workflow type.
    """

    config: PriorityConfig = field(default_factory=PriorityConfig)
    medians: Mapping[str, float] = field(default_factory=dict)
    promoted: int = 0
    demoted: int = 0
    _requests: dict[str, _Waiting] = field(default_factory=dict, repr=False)
    _wake: list[tuple[int, int, str, _Waiting]] = field(default_factory=list, repr=False)
    _fall: list[tuple[int, int, str, _Waiting]] = field(default_factory=list, repr=False)
    _order: Iterator[int] = field(default_factory=itertools.count, repr=False)
    _chosen: set[str] = field(default_factory=set, repr=False)  # in the last turn
    _turn: int = 0  # iterations that have selected
    _at: int = 0  # the last of them

    def __len__(self) -> int:
        return len(self._requests)

    def add(
        self, request: str, iteration: int, arrival: float, workflow_type: str, remaining_tokens: float | None
    ) -> Key:
        """Adds a request that begins to wait in `iteration`; returns its key. None uses the type's median."""
        waiting = _Waiting(arrival, self._remaining(workflow_type, remaining_tokens), iteration)
        self._requests[request] = waiting
        self._chosen.discard(request)
        heapq.heappush(self._wake, (iteration + self.config.starved_after, next(self._order), request, waiting))
        return self.key(request)

    def forecast(self, request: str, workflow_type: str, remaining_tokens: float | None) -> Key:
        """Sets a new forecast of a known request; returns its new key."""
        self._requests[request].remaining_tokens = self._remaining(workflow_type, remaining_tokens)
        return self.key(request)

    def key(self, request: str) -> Key:
        """The current key of a known request."""
        waiting = self._requests[request]
        return Key(waiting.level - _OVERDUE * waiting.overdue, waiting.remaining_tokens, waiting.arrival, request)

    def overdue(self, request: str) -> Key:
        """Puts a known request before all that are not overdue; returns its new key."""
        self._requests[request].overdue = True
        return self.key(request)

    def age(self, iteration: int) -> list[str]:
        """Promotes and returns the requests that have waited S more iterations. Call it before `iteration` selects."""
        promoted = []
        while self._wake and self._wake[0][0] <= iteration:
            due, _, request, waiting = self._wake[0]
            if self._requests.get(request) is not waiting:
                heapq.heappop(self._wake)
                continue
            wanted = (waiting.last if waiting.since is None else self._at + 1) + self.config.starved_after
            if wanted <= due:  # not selected since
                waiting.level, waiting.last, waiting.served = waiting.level - 1, due, 0
                promoted.append(request)
                wanted = due + self.config.starved_after
                if waiting.since is not None:
                    self._serve(request, waiting)
            heapq.heapreplace(self._wake, (wanted, next(self._order), request, waiting))
        self.promoted += len(promoted)
        return promoted

    def selected(self, requests: Collection[str], iteration: int) -> list[str]:
        """Records the requests that `iteration` selected; demotes and returns those that have used their quantum."""
        by_request = self._requests
        left = self._chosen.difference(requests)
        for request in left:
            waiting = by_request[request]
            waiting.served += self._turn + 1 - (waiting.since or 0)
            waiting.since, waiting.last = None, self._at + 1  # the next wait began with the next iteration
        self._chosen -= left
        entered = [request for request in requests if request not in self._chosen and request in by_request]
        for request in entered:
            self._serve(request, by_request[request])
        self._chosen.update(entered)
        self._turn, self._at = self._turn + 1, iteration
        demoted = self._demote()
        self.demoted += len(demoted)
        return demoted

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {"priority keys": len(self), "ageing heap": len(self._wake)}

    def remove(self, request: str) -> None:
        """Removes a request that has finished or was aborted. An unknown request is ignored."""
        self._requests.pop(request, None)
        self._chosen.discard(request)
        if len(self._wake) > 64 + 2 * len(self._requests):  # entries of removed requests would stay until due
            self._wake = [entry for entry in self._wake if self._requests.get(entry[2]) is entry[3]]
            heapq.heapify(self._wake)

    def _serve(self, request: str, waiting: _Waiting) -> None:
        """Starts a run of selections with the next turn, and schedules the demotion if the run is not interrupted."""
        waiting.since = self._turn + 1
        if waiting.level < 0:
            due = self._turn + self.config.quantum - waiting.served
            heapq.heappush(self._fall, (due, next(self._order), request, waiting))

    def _demote(self) -> list[str]:
        """Demotes and returns the requests that have used their quantum with this turn."""
        demoted = []
        while self._fall and self._fall[0][0] <= self._turn:
            _, _, request, waiting = heapq.heappop(self._fall)
            if waiting.since is None or waiting.level == 0 or self._requests.get(request) is not waiting:
                continue
            if waiting.served + self._turn + 1 - waiting.since < self.config.quantum:
                continue  # its run was interrupted, or it was promoted: a later entry applies
            waiting.level, waiting.served = waiting.level + 1, 0
            demoted.append(request)
            self._serve(request, waiting)
        return demoted

    def _remaining(self, workflow_type: str, remaining_tokens: float | None) -> float:
        if remaining_tokens is not None and remaining_tokens >= 0:  # rejects NaN too
            return float(remaining_tokens)
        median = self.medians.get(workflow_type)
        if median is None and self.medians:
            median = statistics.median(self.medians.values())
        return math.inf if median is None else float(median)


def vllm_priority(level: int, remaining_tokens: float) -> int:
    """Encodes a level (0 or below) and whole predicted tokens (0 to infinity) as one integer; the lowest runs first.

    It omits the arrival, by which vLLM itself breaks ties.
    """
    tokens = MOST_TOKENS if remaining_tokens >= MOST_TOKENS else int(remaining_tokens)
    return level * (MOST_TOKENS + 1) + tokens
