"""Two routers on the same prompts, on the models that both know: what promotion is decided by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from presage.datasets.outcomes.schema import Outcomes
from presage.errors import ConfigurationError
from presage.predictors.router import RouterPredictor
from presage.predictors.routing.choice import pick
from presage.training.router.evaluate import RouterFigures, Told, differences, judge


@dataclass(frozen=True)
class ComparedRouters:
    """A router beside another.

    Attributes:
        mine, its: figures of each.
        differences: mine − its, by figure, with paired intervals.
    """

    mine: RouterFigures
    its: RouterFigures
    differences: Mapping[str, Told]


def compare_routers(mine: RouterPredictor, its: RouterPredictor, outcomes: Outcomes, seed: int) -> ComparedRouters:
    """Judges both on prompts that neither was trained on.

    Each picks among the models in common as it would if there were no others.

    Raises:
        ConfigurationError: they have no model in common.
    """
    shared = [name for name in mine.models if name in its.models]
    if not shared:
        raise ConfigurationError(
            f"two routers without a model in common ({', '.join(mine.models)}; {', '.join(its.models)}): they cannot "
            "be compared; register the new one under a name of its own"
        )
    judged = outcomes.of_models(shared)
    one, other = (_judge(router, shared, judged, seed) for router in (mine, its))
    return ComparedRouters(one, other, differences(one, other, seed))


def _judge(router: RouterPredictor, shared: list[str], outcomes: Outcomes, seed: int) -> RouterFigures:
    columns = np.array([router.models.index(name) for name in shared])
    said = router.probabilities(outcomes.prompts)[:, columns]
    return judge(said, pick(said, router.base[columns], router.trust), outcomes, seed)
