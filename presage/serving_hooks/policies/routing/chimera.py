"""Choice of a model: the most confident one whose answer is not much later than the fastest.

Source: Chimera, §3.5, §3.6 and algorithm 1. With q[m] the router's confidence in model m and L[e] the estimated seconds
to the last token on engine e, start from the engine with the least L; by falling q, take the first engine with

    L[e] ≤ (1 + τ) · L_fast   and   q[m(e)] ≥ q[m(fast)] + Δs.

`Chimera` departs from the paper in L and in what follows from it:

- L[e] = queue + uncached prompt tokens · prefill seconds + predicted tokens · step seconds; the paper counts the queue
  only, so at light load a model that takes four times as long for an answer looks as fast as any.
- A workflow stays on its model as long as that is worth its cached prefix, which L contains; the paper always stays.

`PublishedChimera` is the paper's rule. `PricedModels` is ours: the engine with the largest q[m(e)] − λ · L[e]. With a
slack the fast model's queue decides how many requests the accurate one gets, whoever they are; a price gives it those
that gain most by it, and fewer of them as its queue grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from presage.serving_hooks.policies.routing.fleet import Fleet, FleetEngine, Placement, RoutingRequest
from presage.serving_hooks.policies.routing.placement import HOME, Immediate

FASTEST: Final = "fastest model: none within the slack is more confident by the margin"
CONFIDENT: Final = "most confident model within the slack"
WORTH: Final = "most confident model, net of the price of waiting"

Scores = Callable[[RoutingRequest], Mapping[str, float]]
"""Confidence of each model that it answers a request right, 0 to 1."""

Lengths = Callable[[RoutingRequest], float]
"""Output tokens predicted of a request."""

Key = TypeVar("Key")
"""What is chosen: an engine."""


def last_token_s(engine: FleetEngine, uncached_tokens: float, predicted_tokens: float) -> float:
    """Seconds until an engine has produced the last token of a request."""
    prefill_s = uncached_tokens * engine.prefill_token_s
    return engine.queue_s + prefill_s + predicted_tokens * engine.token_s


def within_slack(
    seconds: Mapping[Key, float], scores: Mapping[Key, float], slack: float, margin: float
) -> tuple[Key, str]:
    """Algorithm 1, lines 12 to 22: the choice, and why. Of equals, the one that answers first.

    Args:
        seconds: L of each engine; scores: q of its model.
        slack: τ; margin: Δs. See `Chimera`.
    """
    fastest = min(seconds, key=lambda key: seconds[key])
    least = scores[fastest] + margin
    most_s = (1 + slack) * seconds[fastest] if math.isfinite(slack) else math.inf
    for key in sorted(seconds, key=lambda key: (-scores[key], seconds[key])):
        if seconds[key] <= most_s and scores[key] >= least:
            return key, CONFIDENT
    return fastest, FASTEST


def net_of_waiting(seconds: Mapping[Key, float], scores: Mapping[Key, float], price: float) -> tuple[Key, str]:
    """The choice with the largest q − λ · L, and why. Of equals, the one that answers first."""
    return max(seconds, key=lambda key: (scores[key] - price * seconds[key], -seconds[key])), WORTH


class Chimera(Immediate):
    """The most confident model within the latency slack.

    Args:
        models: the model of each engine.
        slack: τ, share by which the answer may be later than the fastest; infinity for accuracy alone.
        margin: Δs, confidence that a slower model must have more than the fastest.
    """

    def __init__(
        self, models: Sequence[str], scores: Scores, lengths: Lengths, slack: float = 1.0, margin: float = 0.05
    ) -> None:
        super().__init__()
        self._models, self._scores, self._lengths = models, scores, lengths
        self._slack, self._margin = slack, margin

    def estimate_s(self, request: RoutingRequest, fleet: Fleet, engine: int) -> float:
        """L of an engine, seconds."""
        uncached = request.prompt_tokens - request.cached_tokens(engine)
        return last_token_s(fleet.engines[engine], uncached, self._lengths(request))

    def choose(self, request: RoutingRequest, fleet: Fleet, engines: list[int]) -> Placement:
        """The engine of the most confident model within the slack."""
        return Placement(*within_slack(*self._judged(request, fleet, engines), self._slack, self._margin))

    def _judged(
        self, request: RoutingRequest, fleet: Fleet, engines: list[int]
    ) -> tuple[dict[int, float], dict[int, float]]:
        """L and q of each engine."""
        scores = self._scores(request)
        seconds = {number: self.estimate_s(request, fleet, number) for number in engines}
        return seconds, {number: scores[self._models[number]] for number in engines}


class PricedModels(Chimera):
    """The model with the most confidence net of the price of waiting.

    Args:
        price: λ, confidence that a second is worth; 0 for accuracy alone.
    """

    def __init__(self, models: Sequence[str], scores: Scores, lengths: Lengths, price: float) -> None:
        super().__init__(models, scores, lengths)
        self._price = price

    def choose(self, request: RoutingRequest, fleet: Fleet, engines: list[int]) -> Placement:
        """The engine with the largest net confidence; of equals, the one that answers first."""
        return Placement(*net_of_waiting(*self._judged(request, fleet, engines), self._price))


class PublishedChimera(Chimera):
    """The paper's rule: L is the queue alone, and a workflow stays on its first model."""

    def estimate_s(self, request: RoutingRequest, fleet: Fleet, engine: int) -> float:
        """L[m] of §3.6: predicted tokens in flight · seconds of a token / batch."""
        return fleet.engines[engine].queue_s

    def choose(self, request: RoutingRequest, fleet: Fleet, engines: list[int]) -> Placement:
        """The engine of the workflow, else as `Chimera`."""
        home = fleet.programs[request.program].engine
        return Placement(home, HOME) if home in engines else super().choose(request, fleet, engines)
