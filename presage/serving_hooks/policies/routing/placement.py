"""Routing policies that place every request at once: the baselines of fleets."""

from __future__ import annotations

from collections import Counter
from typing import Final, Protocol

from presage.serving_hooks.policies.routing.fleet import Fleet, Placement, Program, RoutingRequest

NO_ENGINE: Final = "no engine takes requests"
NEXT: Final = "next engine in turn"
FEWEST: Final = "fewest requests in flight"
HOME: Final = "engine of the workflow"
NEW_SESSION: Final = "new workflow: engine with the fewest workflows"
CACHED: Final = "longest cached prefix"


class RoutingPolicy(Protocol):
    """Places requests; see `Fleet` for what it knows. Times in seconds of the caller's clock.

    `decide` is called once a request arrives. Held requests are placed by `release`, which the caller calls after every
    arrival, answer, end and tick.
    """

    tick_s: float | None
    """Seconds between two ticks; None for none."""

    def decide(self, request: RoutingRequest, fleet: Fleet, now: float) -> Placement:
        """Where a request goes that has just arrived."""

    def answered(self, request: tuple[int, int], program: Program, fleet: Fleet, now: float) -> None:
        """A request of a program has its last token."""

    def tick(self, fleet: Fleet, now: float) -> None:
        """Looks at all programs again."""

    def release(self, fleet: Fleet, now: float) -> list[tuple[RoutingRequest, Placement]]:
        """Held requests that may go now."""


class Immediate:
    """A policy that holds no request while an engine of its model is open."""

    tick_s: float | None = None

    def __init__(self) -> None:
        self._held: list[RoutingRequest] = []

    def choose(self, request: RoutingRequest, fleet: Fleet, engines: list[int]) -> Placement:
        """One of `engines`, those open to the request, of which there is at least one."""
        raise NotImplementedError

    def decide(self, request: RoutingRequest, fleet: Fleet, now: float) -> Placement:
        """An engine, if one is open."""
        engines = fleet.open(request.model)
        if engines:
            return self.choose(request, fleet, engines)
        self._held.append(request)
        return Placement(None, NO_ENGINE)

    def answered(self, request: tuple[int, int], program: Program, fleet: Fleet, now: float) -> None:
        """Nothing to do."""

    def tick(self, fleet: Fleet, now: float) -> None:
        """Nothing to do."""

    def release(self, fleet: Fleet, now: float) -> list[tuple[RoutingRequest, Placement]]:
        """Those that came while no engine was open."""
        if not self._held:
            return []
        held, self._held = self._held, []
        decided = [(request, self.decide(request, fleet, now)) for request in held]
        return [(request, placement) for request, placement in decided if placement.engine is not None]


def least_loaded(fleet: Fleet, engines: list[int]) -> int:
    """The engine with the fewest requests in flight; of equals, the first."""
    return min(engines, key=lambda number: (fleet.engines[number].requests, number))


class RoundRobin(Immediate):
    """Every engine of a model in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._turns: Counter[str] = Counter()

    def choose(self, request: RoutingRequest, fleet: Fleet, engines: list[int]) -> Placement:
        """The next one."""
        turn = self._turns[request.model]
        self._turns[request.model] += 1
        return Placement(engines[turn % len(engines)], NEXT)


class LeastLoaded(Immediate):
    """The engine with the fewest requests in flight."""

    def choose(self, request: RoutingRequest, fleet: Fleet, engines: list[int]) -> Placement:
        """The least loaded one."""
        return Placement(least_loaded(fleet, engines), FEWEST)


class SessionAffinity(Immediate):
    """All requests of a workflow on one engine: the one that had the fewest workflows when it began.

    Routers that hash session ids balance less well; this is the stronger baseline.
    """

    def choose(self, request: RoutingRequest, fleet: Fleet, engines: list[int]) -> Placement:
        """Its engine, while that is open."""
        home = fleet.programs[request.program].engine
        if home is not None and fleet.engines[home].open:
            return Placement(home, HOME)
        fewest = min(engines, key=lambda number: (len(fleet.engines[number].programs), number))
        return Placement(fewest, NEW_SESSION)


class LongestPrefix(Immediate):
    """The engine whose cache has most of the prompt, unless the load is out of balance.

    As cache-aware routers do: the least loaded engine if the loads differ by more than `most_apart` requests and by
    half, or if less than `least_share` of the prompt is cached anywhere.
    """

    most_apart = 32
    least_share = 0.5

    def choose(self, request: RoutingRequest, fleet: Fleet, engines: list[int]) -> Placement:
        """The engine with the longest cached prefix, or the least loaded one."""
        loads = [fleet.engines[number].requests for number in engines]
        if max(loads) - min(loads) <= self.most_apart or max(loads) <= 1.5 * min(loads):
            cached = {number: request.cached_tokens(number) for number in engines}
            best = max(engines, key=lambda number: (cached[number], -fleet.engines[number].requests, -number))
            if cached[best] >= self.least_share * request.prompt_tokens:
                return Placement(best, CACHED)
        return Placement(least_loaded(fleet, engines), FEWEST)
