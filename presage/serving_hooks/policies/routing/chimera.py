"""Choice of a model: by its confidence and by the time of its answer.

Source of the slack: Chimera, §3.6 and algorithm 1. With q[m] the router's confidence in model m and L[e] the estimated
seconds to the last token on engine e, start from the engine with the least L; by falling q, take the first engine with

    L[e] ≤ (1 + τ) · L_fast   and   q[m(e)] ≥ q[m(fast)] + Δs.

Here L[e] = queue + uncached prompt tokens · prefill seconds + predicted tokens · step seconds. The paper counts the
queue only, so at light load a model that takes four times as long for an answer looks as fast as any.

The price is ours: the engine with the largest q[m(e)] − λ · L[e]. With a slack the fast model's queue decides how many
requests the accurate one gets, whoever they are; a price gives it those that gain most by it, and fewer of them as its
queue grows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, TypeVar

from presage.serving_hooks.policies.routing.fleet import FleetEngine

FASTEST: Final = "fastest model: none within the slack is more confident by the margin"
CONFIDENT: Final = "most confident model within the slack"
WORTH: Final = "most confident model, net of the price of waiting"

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
        slack: τ, share by which the answer may be later than the fastest; infinity for accuracy alone.
        margin: Δs, confidence that a slower model must have more than the fastest.
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
