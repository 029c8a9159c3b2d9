"""Which model to send a prompt to where cost counts too, from the probabilities that each solves it and the prices.

With a budget the likeliest of those that cost at most so much; with a wish for quality the cheapest of those likely
enough. Where no model keeps the limit, the answer is the nearest to it and says so: a request has to go somewhere.
Without a limit it is the router's own pick (`choice.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from presage.errors import ConfigurationError


@dataclass(frozen=True)
class Choice:
    """A model for a prompt.

    Attributes:
        model: its name.
        reason: why this one, for people.
        kept: whether the limit that was asked for is kept; true without one.
    """

    model: str
    reason: str
    kept: bool = True


def choose(
    probabilities: Mapping[str, float],
    costs: Mapping[str, float],
    pick: str,
    *,
    max_cost: float | None = None,
    min_quality: float | None = None,
) -> Choice:
    """Picks a model.

    Args:
        probabilities: that each model solves the prompt, 0..1.
        costs: of a request to each model, in one unit, 0 or more; with a limit every model needs one.
        pick: the router's own.
        max_cost: the most that a request may cost.
        min_quality: the least probability wanted.

    Raises:
        ConfigurationError: both limits, or a limit without the costs that it needs.
    """
    if max_cost is None and min_quality is None:
        return Choice(pick, "the router's pick")
    if max_cost is not None and min_quality is not None:
        raise ConfigurationError("a greatest cost and a least quality together; give one of the two")
    if without := sorted(probabilities.keys() - costs.keys()):
        raise ConfigurationError(f"no cost for {', '.join(without[:5])}; with a limit every model needs one")
    by_quality = sorted(probabilities, key=lambda model: (-probabilities[model], costs[model], model))
    by_cost = sorted(probabilities, key=lambda model: (costs[model], -probabilities[model], model))
    if max_cost is not None:
        if within := [model for model in by_quality if costs[model] <= max_cost]:
            return Choice(within[0], f"the likeliest of {len(within)} that cost at most {max_cost:g}")
        return Choice(by_cost[0], f"no model costs at most {max_cost:g}: the cheapest", kept=False)
    if good := [model for model in by_cost if probabilities[model] >= (min_quality or 0.0)]:
        return Choice(good[0], f"the cheapest of {len(good)} that are at least {min_quality:g} likely to solve it")
    return Choice(by_quality[0], f"no model is at least {min_quality:g} likely: the likeliest", kept=False)
