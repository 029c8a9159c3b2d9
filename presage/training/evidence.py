"""What a report wants to know beyond the figures of one training, at the price of more of them.

The learning curve, and the same predictor with states withheld: each is a training of its own, so they are made only
for a report that was asked for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa

from presage.training import learning_curve
from presage.training.differences import differences
from presage.training.next_agent import NextAgentTraining
from presage.training.recipe import Recipe, Share
from presage.training.sets import set_apart


def further_evidence(
    training: NextAgentTraining, table: pa.Table, test: pa.Table | None, recipe: Recipe, share: Share
) -> dict[str, Any]:
    """Figures to add to the metrics of `training`, which was made of these traces by this recipe.

    Returns:
        JSON values: "learning_curve" (see `learning_curve.py`), which ends with `training` itself, and
        "without_states": null for a predictor that has none, else "moments", the figures with states withheld in
        training and forecasting, and "differences" {moment: {"difference", "ci95"}}, with states minus without.
    """
    parts = set_apart(table, test, recipe.seed)
    known = [name for name in learning_curve.BASELINES if name in training.evaluation.baselines]
    found: dict[str, Any] = {"without_states": None}
    if training.predictor.source.kind != "none":
        found["without_states"] = _without_states(training, parts.train, parts.test, recipe, share)
    found["learning_curve"] = learning_curve.learning_curve(
        parts.train, parts.test, recipe, baselines=known, whole=training.evaluation, share=share
    )
    return found


def _without_states(
    training: NextAgentTraining, train: pa.Table, test: pa.Table, recipe: Recipe, share: Share
) -> dict[str, Any]:
    ids = dataclasses.replace(recipe, states="none")
    withheld = ids.train(train, test, (), lambda doing: share(f"states withheld: {doing}", 0.0)).evaluation
    pairs = {str(m): (figures, withheld.moments[m]) for m, figures in training.evaluation.moments.items()}
    return {
        "moments": withheld.to_dict()["moments"],
        "differences": {moment: of.to_dict() for moment, of in differences(pairs, recipe.seed).items()},
    }
