"""Shortest total job first, with ageing: which request runs next.

Source: Chimera, §3.7. Key (starvation level, predicted remaining tokens of the workflow, arrival), the lower first. A
request not selected in S consecutive iterations goes up one level (level − 1); once it has been selected in Q
iterations since, it comes down one.

Where we depart. The paper promotes once; here every further S iterations without selection promote again. With a single
step, promoted requests compete by length, and a stream of short ones starves a long one for ever. With the ladder this
holds, and a test holds it: while a request waits, nothing that arrived S or more iterations after its wait began comes
before it. For a level counts full waits of S iterations: the waiting request has had all that fit into its wait, a
later one at least one fewer. So if every iteration selects the lowest keys for B places, a request waits at most

    floor(iterations of work of those present when its wait began, or arriving within the next S, divided by B).

The bound is one on the order. An engine that cannot take the first in line, for want of cache say, waits longer.

Waiting requests are found by a heap of (iteration to wake, request), not by a scan, and those that have had their
quantum by another: who is selected again and again changes nothing until then. So an iteration costs what comes into
the batch, what leaves it, and who is due, whatever the lengths of queue and batch.

A request without a forecast stands where the median of its workflow type stands; for a type nobody knows, at the middle
of the known types' medians: neither rewarded nor punished for saying nothing. Where no median is known either it stands
behind those with a forecast, so that silence gains nothing, and ageing bounds what it loses.

The lower key runs first. `vllm_priority` folds a key into the one integer that vLLM takes; arrival is left out, since
vLLM breaks ties by it itself.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from presage.errors import ConfigurationError

MOST_TOKENS: Final = 2**32 - 1
"""Where `vllm_priority` cuts remaining tokens: more work than that is all the same, and so is unknown work."""


@dataclass(frozen=True)
class PriorityConfig:
    """Settings of the ageing.

    Attributes:
        starved_after: S, consecutive iterations without selection until a request goes up a level.
        quantum: Q, iterations selected until a promoted request comes down a level.
    """

    starved_after: int = 200
    quantum: int = 100

    def __post_init__(self) -> None:
        for name, value in (("starved_after", self.starved_after), ("quantum", self.quantum)):
            if value < 1:
                raise ConfigurationError(f"{name} is {value}; it counts iterations, give 1 or more")


class Key(NamedTuple):
    """The lower runs first. `arrival` in any clock that rises; `request` makes the order total."""

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
    since: int | None = None  # the turn from which on it was selected in all; these are not yet in `served`


@dataclass
class ShortestTotalJobFirst:
    """The keys of all requests, running and waiting.

    Args:
        config: S and Q.
        medians: remaining output tokens at the start, the median of each workflow type.

    Attributes:
        promoted: promotions so far.
        demoted: demotions so far.
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
        """A request begins to wait in `iteration`; its key, which a forecast of None leaves to the type's median."""
        of = _Waiting(arrival, self._place(workflow_type, remaining_tokens), iteration)
        self._requests[request] = of
        self._chosen.discard(request)
        self._sleep(iteration + self.config.starved_after, request, of)
        return self.key(request)

    def forecast(self, request: str, workflow_type: str, remaining_tokens: float | None) -> Key:
        """A new forecast of a known request; its new key."""
        self._requests[request].remaining_tokens = self._place(workflow_type, remaining_tokens)
        return self.key(request)

    def key(self, request: str) -> Key:
        """Where a known request stands now."""
        of = self._requests[request]
        return Key(of.level, of.remaining_tokens, of.arrival, request)

    def age(self, iteration: int) -> list[str]:
        """Before `iteration` selects: those that have now waited S iterations more, whose keys have fallen."""
        risen = []
        while self._wake and self._wake[0][0] <= iteration:
            due, _, request, of = self._wake[0]
            if self._requests.get(request) is not of:
                heapq.heappop(self._wake)
                continue
            wanted = (of.last if of.since is None else self._at + 1) + self.config.starved_after
            if wanted <= due:  # not selected since
                of.level, of.last, of.served = of.level - 1, due, 0
                risen.append(request)
                wanted = due + self.config.starved_after
                if of.since is not None:
                    self._serve(request, of)
            heapq.heapreplace(self._wake, (wanted, next(self._order), request, of))
        self.promoted += len(risen)
        return risen

    def selected(self, requests: Collection[str], iteration: int) -> list[str]:
        """After `iteration` has selected: those that have had their quantum, whose keys have risen."""
        known = self._requests
        left = self._chosen.difference(requests)
        for request in left:
            of = known[request]
            of.served += self._turn + 1 - (of.since or 0)
            of.since, of.last = None, self._at + 1  # the next wait began with the next iteration
        self._chosen -= left
        came = [request for request in requests if request not in self._chosen and request in known]
        for request in came:
            self._serve(request, known[request])
        self._chosen.update(came)
        self._turn, self._at = self._turn + 1, iteration
        fallen = self._fallen()
        self.demoted += len(fallen)
        return fallen

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {"priority keys": len(self), "ageing heap": len(self._wake)}

    def remove(self, request: str) -> None:
        """The request has finished or was aborted. Removing one that is not there is no error."""
        self._requests.pop(request, None)
        self._chosen.discard(request)
        if len(self._wake) > 64 + 2 * len(self._requests):  # who has left would stay there until it was due
            self._wake = [entry for entry in self._wake if self._requests.get(entry[2]) is entry[3]]
            heapq.heapify(self._wake)

    def _serve(self, request: str, of: _Waiting) -> None:
        """From the next turn on it is selected in all; when it has had its quantum, if nothing comes between."""
        of.since = self._turn + 1
        if of.level < 0:
            had = self._turn + self.config.quantum - of.served
            heapq.heappush(self._fall, (had, next(self._order), request, of))

    def _fallen(self) -> list[str]:
        """Those that have had their quantum with this turn."""
        fallen = []
        while self._fall and self._fall[0][0] <= self._turn:
            _, _, request, of = heapq.heappop(self._fall)
            if of.since is None or of.level == 0 or self._requests.get(request) is not of:
                continue
            if of.served + self._turn + 1 - of.since < self.config.quantum:
                continue  # it has been left out, or promoted, since: that has an entry of its own
            of.level, of.served = of.level + 1, 0
            fallen.append(request)
            self._serve(request, of)
        return fallen

    def _sleep(self, until: int, request: str, of: _Waiting) -> None:
        heapq.heappush(self._wake, (until, next(self._order), request, of))

    def _place(self, workflow_type: str, remaining_tokens: float | None) -> float:
        if remaining_tokens is not None and remaining_tokens >= 0:  # NaN is no forecast either
            return float(remaining_tokens)
        known = self.medians.get(workflow_type)
        if known is None and self.medians:
            known = statistics.median(self.medians.values())
        return math.inf if known is None else float(known)


def vllm_priority(level: int, remaining_tokens: float) -> int:
    """One integer, lower runs first: the level decides, whole predicted tokens break its ties.

    Args:
        level: starvation level, 0 or below; lower runs first.
        remaining_tokens: predicted, 0 or more; infinity is allowed.
    """
    tokens = MOST_TOKENS if remaining_tokens >= MOST_TOKENS else int(remaining_tokens)
    return level * (MOST_TOKENS + 1) + tokens
