"""What a report wants to know beyond the figures of one training, at the price of more of them.

The learning curve, and the same predictor with one part left out: each is a training of its own, so they are made only
for a report that was asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import pyarrow as pa

from presage.predictors.parts import COMPONENTS, NextAgentConfig
from presage.training import learning_curve
from presage.training.differences import differences
from presage.training.next_agent import NextAgentTraining
from presage.training.recipe import Recipe, Share
from presage.training.sets import set_apart

STATES: Final = "states"
"""The part of an ablation that is an input, not a component."""


def further_evidence(
    training: NextAgentTraining, table: pa.Table, test: pa.Table | None, recipe: Recipe, share: Share
) -> dict[str, Any]:
    """Figures to add to the metrics of `training`, which was made of these traces by this recipe.

    Returns:
        JSON values: "learning_curve" (see `learning_curve.py`), which ends with `training` itself, and "ablation",
        {part: figures} of the predictor trained and judged without GraphSAGE, trees, n-gram, and states if it reads
        any; of each "moments" and "differences" {moment: {"difference", "ci95"}}, with the part minus without.
    """
    parts = set_apart(table, test, recipe.seed)
    known = [name for name in learning_curve.BASELINES if name in training.evaluation.baselines]
    ablation = {}
    for part, without in _without(training, recipe).items():
        fitted = without.train(parts.train, parts.test, (), _telling(share, part))
        pairs = {str(m): (of, fitted.evaluation.moments[m]) for m, of in training.evaluation.moments.items()}
        ablation[part] = {
            "moments": fitted.evaluation.to_dict()["moments"],
            "differences": {moment: of.to_dict() for moment, of in differences(pairs, recipe.seed).items()},
        }
    curve = learning_curve.learning_curve(
        parts.train, parts.test, recipe, baselines=known, whole=training.evaluation, share=share
    )
    return {"ablation": ablation, "learning_curve": curve}


def _without(training: NextAgentTraining, recipe: Recipe) -> Mapping[str, Recipe]:
    """The recipe without each part. The states are those that were chosen, so that one thing differs."""
    kind = training.predictor.source.kind
    kept = dataclasses.replace(recipe, states=kind if kind in ("captured", "none") else "text")

    def changed(config: NextAgentConfig) -> Recipe:
        return dataclasses.replace(kept, config=config)

    config = recipe.config
    found = {
        "GraphSAGE": changed(dataclasses.replace(config, network=dataclasses.replace(config.network, graph=False)))
    }
    for part in COMPONENTS[1:]:
        mixture = tuple(name for name in config.mixture if name != part)
        found[part] = changed(dataclasses.replace(config, mixture=mixture))
    if kind != "none":
        found[STATES] = dataclasses.replace(recipe, states="none")
    return found


def _telling(share: Share, part: str) -> Callable[[str], None]:
    return lambda doing: share(f"without {part}: {doing}", 0.0)
