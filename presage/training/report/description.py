"""What is in a trace, as a page: from what `datasets.describe` says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from presage.training.report.blocks import Card, Document, Facts, Section
from presage.training.report.numbers import count, number
from presage.training.report.traces import call_graphs, types_table

Description = Mapping[str, Any]


def document(description: Description) -> Document:
    """The description of a trace."""
    types = description["workflow_types"]
    each = [Section(name, [Facts(_facts(of))]) for name, of in types.items()]
    return Document(
        "What is in these traces",
        "Counts, lengths, tokens and who calls whom, of every workflow type. Nothing here is a text of the traces.",
        [Section("Workflow types", [types_table(description)]), call_graphs(description), *each],
        [
            Card(count(description["workflows"]), "workflows", f"of {count(len(types))} workflow types"),
            Card(count(description["steps"]), "steps", "one agent invocation each"),
        ],
    )


def _facts(of: Description) -> dict[str, str]:
    """What is known of one workflow type."""
    facts = {
        "workflows": count(of["workflows"]),
        "tasks": count(of["tasks"]) if of["tasks"] else "none given",
        "steps a workflow": _spread(of["length"]),
    }
    for column in ("input_tokens", "output_tokens", "cached_input_tokens"):
        facts[column.replace("_", " ")] = _spread(of[column]) if of[column] else "not recorded"
    if of["finish_reasons"]:
        facts["finish reasons, share of the steps that have one"] = ", ".join(
            f"{reason} {number(share)}" for reason, share in list(of["finish_reasons"].items())[:6]
        )
    facts["share cut before their end"] = number(of["censored_share"])
    facts["share successful"] = "not recorded" if of["success_share"] is None else number(of["success_share"])
    facts["share of steps with text"] = number(of["text_share"])
    facts["share of steps in a fan-out"] = number(of["fan_out_share"])
    for column, states in of["states"].items():
        facts[column.replace("_", " ")] = (
            f"{states['size']} numbers, on a share of {number(states['share'])} of the steps"
        )
    facts["first and last start"] = " to ".join(of["started_at"]) if of["started_at"] else "not recorded"
    return facts


def _spread(quantiles: Mapping[str, float]) -> str:
    return (
        f"median {quantiles['p50']:,.0f}, 90 % within {quantiles['p90']:,.0f}, "
        f"99 % within {quantiles['p99']:,.0f}, most {quantiles['max']:,.0f}"
    )
