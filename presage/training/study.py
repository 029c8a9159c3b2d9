"""The studies of PBKV's appendix C on the user's own traces: amount of data, source of states, horizon.

Each study trains as `train-predictor` does and evaluates on the same workflows. It returns JSON values with "kind"
"study", its name under "study", and a description of its inputs under "data" and "traces".

`further_evidence` adds a learning curve and an ablation to the report of one training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa

from presage.datasets.describe import describe
from presage.datasets.schema import digest
from presage.datasets.split import Split
from presage.features.moment import COMPLETION, MOMENTS, PREFILL
from presage.features.states import STATE_COLUMN, TEXT_COLUMN, States
from presage.predictors.next_agent.parts import COMPONENTS, NextAgentConfig
from presage.training import learning_curve
from presage.training.evaluate import Evaluation
from presage.training.learning_curve import OURS, Recipe, Share
from presage.training.metrics import differences
from presage.training.next_agent import NextAgentTraining
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
    """Accuracy against the number of training workflows."""
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
    """Compare predictors with hidden states, with texts and with neither, and completion with prefill.

    Returns:
        Adds "sources" {"captured" | "text" | "none": {"moments": figures, "against_none": {moment:
        {"difference", "ci95"}}, "completion_against_prefill": {"difference", "ci95"}}} for each source the traces have;
        "none" is not compared with itself. "absent" lists the sources missing from the traces.
    """
    parts = set_apart(table, test, recipe.seed)
    there = _sources(parts.train)
    judged: dict[States, Evaluation] = {}
    for index, states in enumerate(there):
        report = partial(_report, share, f"states {states}", index / len(there))
        fitted = dataclasses.replace(recipe, states=states).train(parts.train, parts.test, (), report)
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
    """Accuracy at each of K steps ahead.

    Returns:
        Adds the contract's "moments", "baselines" and "differences" of one predictor trained for K steps.
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


def _report(share: Share, what: str, done: float, doing: str) -> None:
    share(f"{what}: {doing}", done)


def _sources(table: pa.Table) -> list[States]:
    """Sources of states in a trace, with "none" last."""

    def has(column: str) -> bool:
        return column in table.column_names and table[column].null_count < table.num_rows

    found: list[States] = []
    if any(map(has, STATE_COLUMN.values())):
        found.append("captured")
    if any(map(has, TEXT_COLUMN.values())):
        found.append("text")
    return [*found, "none"]


STATES: Final = "states"
"""The ablated part that is an input rather than a component."""


def further_evidence(
    training: NextAgentTraining, table: pa.Table, test: pa.Table | None, recipe: Recipe, share: Share
) -> dict[str, Any]:
    """Figures to add to the metrics of `training`, a training on these traces with this recipe.

    Returns:
        JSON values: "learning_curve" (see `learning_curve`), which ends with `training` itself, and "ablation",
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
    """The recipe without each part; the states are those already chosen, so that only one part differs."""
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
