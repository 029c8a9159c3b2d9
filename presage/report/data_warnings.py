"""Warnings about data and figures that prove little: nothing to forecast, targets that never vary, perfect figures.

They refuse nothing. Some applications do end with the same agent each time; more often a workflow's requests were
recorded as workflows of their own, or an input was written after the outcome. Training prints the warnings, the report
shows them, and a promotion keeps them in its verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from presage.datasets.describe import describe, generated_names_warning
from presage.wording import counted

ONE_STEP_SHARE: Final = 0.1
"""From this share of a type's workflows with one step, there is a warning."""

FEWEST: Final = 10
"""Workflows of a type, or labels of a model: among fewer, equal ones are no surprise."""

FEWEST_PERFECT: Final = 30
"""Positions, ends or prompts: on fewer, a perfect figure is no surprise."""

_CAUSE: Final = (
    "A name or a text that was written after the outcome may give it away, or it never varies: check this before you "
    "rely on the figure"
)


def training_warnings(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Warnings by name, from the `metrics.json` of a training or an evaluation."""
    return {**description_warnings(metrics.get("traces", {})), **figure_warnings(metrics)}


def trace_warnings(table: Any) -> dict[str, str]:
    """Warnings about a valid trace in canonical order (a `pyarrow.Table`), by name."""
    return description_warnings(describe(table))


def description_warnings(description: Mapping[str, Any]) -> dict[str, str]:
    """`one-step-workflows`, `constant-targets` and `generated-names`, as far as they apply, from `describe`; nothing
    from an empty one."""
    types = {
        name: of_type
        for name, of_type in description.get("workflow_types", {}).items()
        if of_type["workflows"] >= FEWEST
    }
    warnings = {}
    short = [
        f"{name} {of_type['one_step_share']:.0%} of {counted(of_type['workflows'], 'workflow')}"
        for name, of_type in types.items()
        if of_type.get("one_step_share", 0.0) >= ONE_STEP_SHARE  # the metrics of earlier versions have none
    ]
    if short:
        warnings["one-step-workflows"] = (
            f"workflows with one step: {', '.join(short)}. Nothing follows that could be forecast. If they are "
            "requests of longer workflows, record the same workflow_id for all requests of one"
        )
    constant = [f"{name}: {' and '.join(why)}" for name, of_type in types.items() if (why := _constant(of_type))]
    if constant:
        warnings["constant-targets"] = (
            f"targets that never vary: {'; '.join(constant)}. Any forecast is right about these, so figures on them "
            "prove nothing"
        )
    if names := generated_names_warning(description):
        warnings["generated-names"] = names
    return warnings


def _constant(described: Mapping[str, Any]) -> list[str]:
    """What never varies in the workflows of one type."""
    constants = []
    if len(described["agents"]) == 1:
        constants.append(f"{next(iter(described['agents']))} is the only agent")
    elif all(len(following) == 1 for following in described["call_graph"].values()):
        constants.append("the same agent always follows each agent")
    if described["length"]["min"] == described["length"]["max"]:
        constants.append(f"every workflow has {counted(described['length']['min'], 'step')}")
    if described["output_tokens"] and described["output_tokens"]["min"] == described["output_tokens"]["max"]:
        constants.append(f"every output has {counted(described['output_tokens']['min'], 'token')}")
    return constants


def figure_warnings(figures: Mapping[str, Any]) -> dict[str, str]:
    """`perfect-MOMENT` of a next-agent predictor, `perfect-order` and `constant-labels` of a router, as far as they
    apply; from the JSON of an evaluation.
    """
    warnings = {}
    for moment, scores in figures.get("moments", {}).items():
        positions, accuracy = scores["positions"][0], scores["accuracy"][0]
        if positions >= FEWEST_PERFECT and accuracy == 1.0:
            what = f"all {counted(positions, 'next step')} at {moment} are forecast right (1.000)"
            warnings[f"perfect-{moment}"] = f"{what}. {_CAUSE}"
        elif scores.get("ends", [0])[0] >= FEWEST_PERFECT and not scores["end_errors"][0]:  # earlier versions have none
            what = f"END is forecast at all {counted(scores['ends'][0], 'end')} at {moment} and nowhere else (1.000)"
            warnings[f"perfect-{moment}"] = f"{what}. {_CAUSE}"
    if figures.get("macro_map") == 1.0 and figures["prompts"] >= FEWEST_PERFECT:
        what = f"every model's prompts are in the perfect order (1.000 on {counted(figures['prompts'], 'prompt')})"
        warnings["perfect-order"] = f"{what}. {_CAUSE}"
    constant = [
        f"{name} {'all' if of_model['base_rate'] else 'none'} of {counted(of_model['labels'], 'prompt')}"
        for name, of_model in figures.get("by_model", {}).items()
        if of_model["labels"] >= FEWEST and of_model["base_rate"] in (0.0, 1.0)
    ]
    if constant:
        warnings["constant-labels"] = (
            f"models that solve all or none: {', '.join(constant)}. There is nothing to learn about these"
        )
    return warnings
