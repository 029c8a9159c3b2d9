"""What the traces are that a report speaks of, and their call graphs: from what `datasets.describe` says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from presage.training.report.blocks import Block, Folded, Panel, Picture, Row, Section, Table
from presage.training.report.call_graph import draw_call_graph
from presage.training.report.numbers import count, number

GRAPHS: Final = 4
"""Call graphs of so many workflow types are drawn, those with most steps."""

_FOLLOWERS: Final = 6
_AGENTS: Final = 60

Description = Mapping[str, Any]


def types_table(traces: Description) -> Table:
    """A row a workflow type."""
    head = ["workflow type", "workflows", "steps", "agents", "tasks", "steps a workflow: median", "90 % within", "cut"]
    rows = [
        Row(
            [
                name,
                count(of["workflows"]),
                count(of["steps"]),
                count(len(of["agents"])),
                count(of["tasks"]) if of["tasks"] else "–",
                f"{of['length']['p50']:g}",
                f"{of['length']['p90']:g}",
                number(of["censored_share"]),
            ]
        )
        for name, of in traces["workflow_types"].items()
    ]
    return Table(head, rows)


def call_graphs(traces: Description) -> Section:
    """The call graph of each workflow type, drawn, and told in full below."""
    types = sorted(traces["workflow_types"].items(), key=lambda item: (-item[1]["steps"], item[0]))
    panels = []
    for name, of in types[:GRAPHS]:
        drawn = draw_call_graph(of["call_graph"], of["agents"])
        agents = (
            f"the {drawn.agents} most frequent of {drawn.all_agents} agents, "
            if drawn.agents < drawn.all_agents
            else ""
        )
        panels.append(
            Panel(
                f"{name}: {agents}{drawn.edges} of {drawn.all_edges} transitions, "
                f"{count(drawn.calls)} of {count(drawn.all_calls)} calls",
                drawn.svg,
            )
        )
    left_out = len(types) - len(panels)
    caption = (
        "Which agent calls which: the number is how often, of all steps of an agent, the other came next; blue leads "
        "down, orange back up. Thick lines are taken often; ▸ marks where workflows begin. The step at which a trace "
        "was cut counts nowhere." + (f" {left_out} workflow types with fewer steps are not drawn." if left_out else "")
    )
    blocks: list[Block] = [Picture("call-graph", caption, panels, wide=True)]
    blocks += [Folded(f"What follows each agent: {name}", [_followers(of)]) for name, of in types[:GRAPHS]]
    return Section("Call graph", blocks)


def _followers(of: Description) -> Table:
    agents = sorted(of["call_graph"], key=lambda agent: (-of["agents"][agent], agent))[:_AGENTS]
    rows = [
        Row(
            [
                agent,
                count(of["agents"][agent]),
                ", ".join(
                    f"{to} {number(edge['probability'])}"
                    for to, edge in list(of["call_graph"][agent].items())[:_FOLLOWERS]
                ),
            ]
        )
        for agent in agents
    ]
    return Table(["agent", "steps", f"what follows, the {_FOLLOWERS} most frequent"], rows, frozenset({0, 2}))
