"""The questions of PBKV's appendix C, asked of one's own traces: how much data, which states, how far ahead?

Each study trains as `train-predictor` does and judges on the same workflows. What it returns is JSON values with "kind"
"study", the name of the study under "study", and under "data" and "traces" what it was made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from presage.datasets.describe import describe
from presage.datasets.digest import digest
from presage.datasets.split import Split
from presage.features.moment import COMPLETION, MOMENTS, PREFILL
from presage.features.states import STATE_COLUMN, TEXT_COLUMN, States
from presage.training import learning_curve
from presage.training.differences import differences
from presage.training.evaluate import Evaluation
from presage.training.learning_curve import OURS
from presage.training.recipe import Recipe, Share
from presage.training.sets import set_apart


def study_learning_curve(
    table: pa.Table,
    test: pa.Table | None,
    recipe: Recipe,
    *,
    sizes: Sequence[int] | None,
    largest: int,
    draws: int,
    baselines: Sequence[str],
    share: Share,
) -> dict[str, Any]:
    """Accuracy against the number of training workflows: would more traces help? See `learning_curve.py`."""
    parts = set_apart(table, test, recipe.seed)
    found = learning_curve.learning_curve(
        parts.train,
        parts.test,
        recipe,
        sizes=sizes,
        largest=largest,
        draws=draws,
        baselines=baselines,
        share=share,
    )
    return {**_head("learning-curve", parts, recipe), "learning_curve": found}


def study_states(table: pa.Table, test: pa.Table | None, recipe: Recipe, *, share: Share) -> dict[str, Any]:
    """What states are worth: the same predictor with hidden states, with texts, with neither; prefill or completion.

    Returns:
        Beside the head, "sources" {"captured" | "text" | "none": {"moments": figures, "against_none": {moment:
        {"difference", "ci95"}}, "completion_against_prefill": {"difference", "ci95"}}} for each source the traces have;
        "none" is not set against itself. "absent" names the sources they lack.
    """
    parts = set_apart(table, test, recipe.seed)
    there = _sources(parts.train)
    judged: dict[States, Evaluation] = {}
    for index, states in enumerate(there):
        tell = partial(_say, share, f"states {states}", index / len(there))
        fitted = dataclasses.replace(recipe, states=states).train(parts.train, parts.test, (), tell)
        judged[states] = fitted.evaluation
    sources: dict[str, Any] = {}
    for states, found in judged.items():
        own = {COMPLETION: (found.moments[COMPLETION], found.moments[PREFILL])}
        sources[states] = {
            "moments": found.to_dict()["moments"],
            "completion_against_prefill": differences(own, recipe.seed)[COMPLETION].to_dict(),
        }
        if states != "none":
            pairs = {str(m): (found.moments[m], judged["none"].moments[m]) for m in MOMENTS}
            against = differences(pairs, recipe.seed)
            sources[states]["against_none"] = {moment: of.to_dict() for moment, of in against.items()}
    absent = [states for states in ("captured", "text") if states not in there]
    return {**_head("states", parts, recipe), "sources": sources, "absent": absent}


def study_horizon(
    table: pa.Table, test: pa.Table | None, recipe: Recipe, *, baselines: Sequence[str], share: Share
) -> dict[str, Any]:
    """Accuracy at each of K steps ahead: how far is a forecast worth acting on?

    Returns:
        Beside the head, the contract's "moments", "baselines" and "differences" of one predictor trained for K steps.
    """
    parts = set_apart(table, test, recipe.seed)
    fitted = recipe.train(parts.train, parts.test, baselines, lambda doing: share(doing, 0.0))
    found = fitted.evaluation.to_dict()
    kept = {key: found[key] for key in ("moments", "baselines", "differences")}
    return {**_head("horizon", parts, recipe), **kept}


def _head(study: str, parts: Split, recipe: Recipe) -> dict[str, Any]:
    traces, held = describe(parts.train), parts.test
    return {
        "kind": "study",
        "study": study,
        "model": OURS,
        "version": None,
        "workflows": int((held["step"].to_numpy() == 0).sum()),
        "steps": held.num_rows,
        "data": {
            "training": f"{traces['workflows']} workflows, {traces['steps']} steps",
            "split": parts.rule,
            "states": recipe.states,
            "seed": recipe.seed,
            "digest of the training traces": f"sha256:{digest(parts.train)}",
            "digest of the test traces": f"sha256:{digest(parts.test)}",
        },
        "traces": traces,
        "config": dataclasses.asdict(recipe.config),
    }


def _say(share: Share, what: str, done: float, doing: str) -> None:
    share(f"{what}: {doing}", done)


def _sources(table: pa.Table) -> list[States]:
    """Sources of states that a trace has, the one with least to know last."""

    def has(column: str) -> bool:
        return column in table.column_names and table[column].null_count < table.num_rows

    found: list[States] = []
    if any(map(has, STATE_COLUMN.values())):
        found.append("captured")
    if any(map(has, TEXT_COLUMN.values())):
        found.append("text")
    return [*found, "none"]
