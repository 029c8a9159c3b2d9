"""Published routing policies of a fleet of engines, for comparison with those of the package.

    ModelByRule          an engine by its model's confidence and the time of its answer, by a rule of
                         `presage.serving_hooks.policies.routing.chimera`, as the gateway applies it
    PublishedChimera     Chimera, §3.6 and algorithm 1, as published
    StatisticalCapacity  Pythia, algorithm 2

`presage replay --fleet` takes routing policies by name; these are the `routing` of a `Policy` in Python.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from presage.serving_hooks.policies.routing.chimera import last_token_s, within_slack
from presage.serving_hooks.policies.routing.fleet import Fleet, Placement, Program, RoutingRequest
from presage.serving_hooks.policies.routing.placement import HOME, Immediate

HEADROOM: Final = "engine with the most headroom"
NO_CAPACITY: Final = "queued: upper bounds of lengths fill the caches"

Scores = Callable[[RoutingRequest], Mapping[str, float]]
"""Confidence of each model that it answers a request right, 0 to 1."""

Lengths = Callable[[RoutingRequest], float]
"""Output tokens predicted of a request."""

Rule = Callable[[Mapping[int, float], Mapping[int, float]], tuple[int, str]]
"""(seconds to the last token, confidence) of each engine -> the engine, and why."""

Bound = Callable[[RoutingRequest, float], float]
"""(request, α) -> output tokens that it passes with probability α at most."""


class ModelByRule(Immediate):
    """The engine whose model a rule chooses.

    A workflow stays on its model as long as that is worth its cached prefix, which the seconds contain.

    Args:
        models: the model of each engine.
    """

    def __init__(self, models: Sequence[str], scores: Scores, lengths: Lengths, rule: Rule) -> None:
        super().__init__()
        self._models, self._scores, self._lengths, self._rule = models, scores, lengths, rule

    def seconds(self, request: RoutingRequest, fleet: Fleet, engine: int) -> float:
        """Seconds until an engine has produced the last token of a request."""
        uncached = request.prompt_tokens - request.cached_tokens(engine)
        return last_token_s(fleet.engines[engine], uncached, self._lengths(request))

    def choose(self, request: RoutingRequest, fleet: Fleet, engines: list[int]) -> Placement:
        """The engine that the rule names."""
        confidence = self._scores(request)
        seconds = {number: self.seconds(request, fleet, number) for number in engines}
        return Placement(*self._rule(seconds, {number: confidence[self._models[number]] for number in engines}))


class PublishedChimera(ModelByRule):
    """Chimera's rule as published: seconds are those of the queue alone, and a workflow stays on its first model.

    Args:
        slack: τ, share by which the answer may be later than the fastest; infinity for accuracy alone.
        margin: Δs, confidence that a slower model must have more than the fastest.
    """

    def __init__(
        self, models: Sequence[str], scores: Scores, lengths: Lengths, slack: float, margin: float = 0.05
    ) -> None:
        super().__init__(models, scores, lengths, partial(within_slack, slack=slack, margin=margin))

    def seconds(self, request: RoutingRequest, fleet: Fleet, engine: int) -> float:
        """L[m] of §3.6: predicted tokens in flight · seconds of a token / batch."""
        return fleet.engines[engine].queue_s

    def choose(self, request: RoutingRequest, fleet: Fleet, engines: list[int]) -> Placement:
        """The engine of the workflow, else by the rule."""
        home = fleet.programs[request.program].engine
        return Placement(home, HOME) if home in engines else super().choose(request, fleet, engines)


class StatisticalCapacity:
    """Placement by upper bounds: the lengths of an engine's requests pass its cache with probability ε at most.

    With u_i an upper bound of the final length of request i that it passes with probability α_i at most, a request may
    go to an engine of capacity C if

        Σ u_i ≤ C   and   Σ α_i ≤ ε   over its active requests and the new one (union bound, any distribution).

    Among such engines it goes to the one with the most headroom C − Σ u_i; of equals, to one that has its prefix
    cached. The paper fixes α_i = 0.01, which caps an engine at ε / α requests; here α_i = ε / n with n the requests of
    an iteration, so the second condition is that they are n at most. Requests that fit nowhere are held in the order of
    arrival. An engine without requests takes any: one request never shares the cache.

    Args:
        bound: of output tokens.
        risk: ε, the probability that the lengths of an engine's requests pass its cache.
    """

    tick_s: float | None = None

    def __init__(self, bound: Bound, risk: float) -> None:
        self._bound, self._risk = bound, risk
        self._held: defaultdict[str, deque[RoutingRequest]] = defaultdict(deque)  # by model
        self._reserved: dict[tuple[int, int], tuple[int, float]] = {}
        self._tokens: defaultdict[int, float] = defaultdict(float)
        self._requests: defaultdict[int, int] = defaultdict(int)

    def decide(self, request: RoutingRequest, fleet: Fleet, now: float) -> Placement:
        """An engine that has room, unless others wait."""
        held = self._held[request.model]
        placement = None if held else self._place(request, fleet)
        if placement is None:
            held.append(request)
            return Placement(None, NO_CAPACITY)
        return placement

    def answered(self, request: tuple[int, int], program: Program, fleet: Fleet, now: float) -> None:
        """Its reservation ends."""
        engine, tokens = self._reserved.pop(request)
        self._tokens[engine] -= tokens
        self._requests[engine] -= 1

    def tick(self, fleet: Fleet, now: float) -> None:
        """Nothing to do."""

    def release(self, fleet: Fleet, now: float) -> list[tuple[RoutingRequest, Placement]]:
        """Held requests in the order of arrival, as long as the first fits."""
        found = []
        for held in self._held.values():
            while held:
                placement = self._place(held[0], fleet)
                if placement is None:
                    break
                found.append((held.popleft(), placement))
        return found

    def _place(self, request: RoutingRequest, fleet: Fleet) -> Placement | None:
        best: tuple[float, int, int] | None = None
        bounds: dict[float, float] = {}
        for number in fleet.open(request.model):
            engine = fleet.engines[number]
            alpha = self._risk / engine.most_requests
            if alpha not in bounds:
                bounds[alpha] = request.prompt_tokens + self._bound(request, alpha)
            left = engine.cache_tokens - self._tokens[number] - bounds[alpha]
            if self._requests[number] and (left < 0 or self._requests[number] >= engine.most_requests):
                continue
            key = (left, request.cached_tokens(number), -number)
            if best is None or key > best:
                best = key
        if best is None:
            return None
        number = -best[2]
        needs = bounds[self._risk / fleet.engines[number].most_requests]
        self._reserved[request.id] = number, needs
        self._tokens[number] += needs
        self._requests[number] += 1
        return Placement(number, HEADROOM)
