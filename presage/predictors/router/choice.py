"""Which model to pick: the likeliest, unless the difference is no more than noise.

The highest of many estimates is too high, most of all where models are alike: picking it may be worse than always
picking the model that is best on the whole. So for picking, log-odds are drawn towards those of the base rates, by a
trust between 0 (always the best single model) and 1 (the probabilities as they are). It is the one whose gain over the
best single model on calibration prompts is surest; where no gain is sure, it is 0. Chimera (§3.6) guards against the
same with a margin of confidence that a user has to find.

The probabilities themselves are left alone.

Where cost counts too (`choose`): with a budget the likeliest of the models that cost at most so much; with a wish for
quality the cheapest of those likely enough. Where no model keeps the limit, the answer is the nearest to it and says
so: a request has to go somewhere. Without a limit it is the router's own pick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError
from presage.predictors.router.factors import logit

TRUSTS: Final = tuple(round(0.1 * tenth, 1) for tenth in range(11))
SURE: Final = 1.645
"""Standard errors that a gain has to lie above 0: 95 %, one-sided."""

_EDGE: Final = 1e-7


def pick(probabilities: NDArray[np.float32], base: NDArray[np.float64], trust: float) -> NDArray[np.int64]:
    """The model to take for each of n prompts, int64 [n]; of equals the first.

    Args:
        probabilities: [n, M].
        base: float64 [M], base rates, strictly between 0 and 1.
        trust: 0..1.
    """
    centre = logit(base)
    odds = logit(np.clip(probabilities.astype(np.float64), _EDGE, 1.0 - _EDGE))
    return np.asarray((centre + trust * (odds - centre)).argmax(axis=1), np.int64)


def learn_trust(probabilities: NDArray[np.float32], correct: NDArray[np.float32], base: NDArray[np.float64]) -> float:
    """The trust whose gain over the best single model is surest, on n prompts; those without every label are left out.

    Args:
        probabilities: [n, M].
        correct: [n, M], 0..1, NaN without a label.
        base: float64 [M], base rates; their highest is the best single model.
    """
    whole = ~np.isnan(correct).any(axis=1)
    if whole.sum() < 2:
        return 0.0
    judged, truth = probabilities[whole], correct[whole].astype(np.float64)
    alone = truth[:, int(base.argmax())]
    surest, found = 0.0, 0.0
    for trust in TRUSTS[1:]:
        gain = np.take_along_axis(truth, pick(judged, base, trust)[:, None], axis=1)[:, 0] - alone
        least = float(gain.mean() - SURE * gain.std(ddof=1) / np.sqrt(len(gain)))
        if least > surest:
            surest, found = least, trust
    return found


@dataclass(frozen=True)
class ModelChoice:
    """A model for a prompt.

    Attributes:
        model: its name.
        reason: for people.
        kept: whether the limit is kept; True without one.
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
) -> ModelChoice:
    """Pick a model for a prompt.

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
        return ModelChoice(pick, "the router's pick")
    if max_cost is not None and min_quality is not None:
        raise ConfigurationError("a greatest cost and a least quality together; give one of the two")
    if without := sorted(probabilities.keys() - costs.keys()):
        raise ConfigurationError(f"no cost for {', '.join(without[:5])}; with a limit every model needs one")
    by_quality = sorted(probabilities, key=lambda model: (-probabilities[model], costs[model], model))
    by_cost = sorted(probabilities, key=lambda model: (costs[model], -probabilities[model], model))
    if max_cost is not None:
        if within := [model for model in by_quality if costs[model] <= max_cost]:
            return ModelChoice(within[0], f"the likeliest of {len(within)} that cost at most {max_cost:g}")
        return ModelChoice(by_cost[0], f"no model costs at most {max_cost:g}: the cheapest", kept=False)
    if good := [model for model in by_cost if probabilities[model] >= (min_quality or 0.0)]:
        return ModelChoice(good[0], f"the cheapest of {len(good)} that are at least {min_quality:g} likely to solve it")
    return ModelChoice(by_quality[0], f"no model is at least {min_quality:g} likely: the likeliest", kept=False)
