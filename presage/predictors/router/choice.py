"""Model choice: the likeliest model, unless its lead is no more than noise.

The highest of many estimates is biased upwards, most of all when models are similar: picking it may be worse than
always using the model that is best overall. So for picking, log-odds are shrunk towards those of the base rates by a
trust between 0 (always the best single model) and 1 (the probabilities as they are). The fitted trust has the largest
lower confidence bound on the gain over the best single model on calibration prompts; it is 0 if no gain is significant.
(Chimera, §3.6, uses a confidence margin that a user has to find.)
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
"""Standard errors above 0 at which a gain is significant: 95 %, one-sided."""

_EDGE: Final = 1e-7


def pick(probabilities: NDArray[np.float32], base: NDArray[np.float64], trust: float) -> NDArray[np.int64]:
    """Index of the model for each of n prompts, int64 [n], from probabilities [n, M]; ties go to the first.

    `base` is the base rates, float64 [M], strictly between 0 and 1, and `trust` is 0..1.
    """
    centre = logit(base)
    odds = logit(np.clip(probabilities.astype(np.float64), _EDGE, 1.0 - _EDGE))
    return np.asarray((centre + trust * (odds - centre)).argmax(axis=1), np.int64)


def learn_trust(probabilities: NDArray[np.float32], correct: NDArray[np.float32], base: NDArray[np.float64]) -> float:
    """The trust with the surest gain over the best single model (of the highest base rate), on prompts with M labels.

    Probabilities and labels are [n, M], labels 0..1, NaN if unknown.
    """
    whole = ~np.isnan(correct).any(axis=1)
    if whole.sum() < 2:
        return 0.0
    judged, labels = probabilities[whole], correct[whole].astype(np.float64)
    alone = labels[:, int(base.argmax())]
    largest_bound, best = 0.0, 0.0
    for trust in TRUSTS[1:]:
        gain = np.take_along_axis(labels, pick(judged, base, trust)[:, None], axis=1)[:, 0] - alone
        bound = float(gain.mean() - SURE * gain.std(ddof=1) / np.sqrt(len(gain)))
        if bound > largest_bound:
            largest_bound, best = bound, trust
    return best


@dataclass(frozen=True)
class ModelChoice:
    """A model for a prompt, with an explanation for people; `kept`: whether it meets the limit, True without one."""

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
    """Choose a model for a prompt: the likeliest within a budget, or the cheapest that is likely enough.

    If no model meets the limit, the nearest one is returned with `kept=False`.

    Args:
        probabilities: that each model solves the prompt, 0..1.
        costs: of a request to each model, in one unit, 0 or more; a limit requires the costs of all models.
        pick: the router's own pick.
        max_cost: the highest acceptable cost of a request.
        min_quality: the lowest acceptable probability.

    Raises:
        ConfigurationError: both limits are set, or a limit is set and costs are missing.
    """
    if max_cost is None and min_quality is None:
        return ModelChoice(pick, "the router's pick")
    if max_cost is not None and min_quality is not None:
        raise ConfigurationError("both a maximum cost and a minimum quality are set; set only one of them")
    if without := sorted(probabilities.keys() - costs.keys()):
        raise ConfigurationError(f"no cost for {', '.join(without[:5])}; a limit requires the cost of every model")
    by_quality = sorted(probabilities, key=lambda model: (-probabilities[model], costs[model], model))
    by_cost = sorted(probabilities, key=lambda model: (costs[model], -probabilities[model], model))
    if max_cost is not None:
        if within := [model for model in by_quality if costs[model] <= max_cost]:
            return ModelChoice(within[0], f"the likeliest of {len(within)} models that cost at most {max_cost:g}")
        return ModelChoice(by_cost[0], f"no model costs at most {max_cost:g}: using the cheapest", kept=False)
    wanted = f"a probability of at least {min_quality:g}"
    if good := [model for model in by_cost if probabilities[model] >= (min_quality or 0.0)]:
        return ModelChoice(good[0], f"the cheapest of {len(good)} models with {wanted}")
    return ModelChoice(by_quality[0], f"no model has {wanted}: using the likeliest", kept=False)
