"""The contents of traces, from `datasets.describe`: a table, call graphs, and a page of its own.

A call graph is drawn as SVG: one line per agent, from where workflows begin down to END. A call to the agent right
below is a straight line, to one further down an arc on the right; a call back up is an arc on the left, to oneself a
loop there. An arc is the wider the more lines it spans, and its probability stands at its widest point. Arcs around the
same middle span numbers of lines that differ by at least two, so no two probabilities overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final
from xml.etree.ElementTree import Element, SubElement

from presage.datasets.describe import generated_names_warning, missing_counts_warning
from presage.datasets.schema.names import NameMapping
from presage.report.blocks import (
    Block,
    Card,
    Document,
    Facts,
    Folded,
    Panel,
    Picture,
    Section,
    Table,
    count,
    number,
)
from presage.report.plot import clean, text_at
from presage.wording import counted

END: Final = "END"
AGENTS: Final = 12

EDGES: Final = 32
LEAST: Final = 0.02
"""Rarer calls of an agent are left out."""

_STARTS: Final = 0.05
_ROW, _HEIGHT, _REACH, _FIRST, _MARGIN = 56.0, 28.0, 20.0, 24.0, 30.0
_CHARACTER, _LONGEST = 7.2, 26

Graph = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""{agent: {next: {"count", "probability"}}}, as `datasets.describe` gives it."""


def draw_call_graph(name: str, graph: Graph, steps: Mapping[str, int]) -> Panel:
    """Draw the call graph of the agents with most steps; `steps` counts them by agent.

    The title has the name, and how many of the agents, transitions and calls are drawn.
    """
    agents = sorted(steps, key=lambda agent: (-steps[agent], agent))[:AGENTS]
    counts = {(a, b): int(edge["count"]) for a, after in graph.items() for b, edge in after.items()}
    called = dict.fromkeys(steps, 0)
    for (_, to), times in counts.items():
        if to != END:
            called[to] += times
    begun = {agent: steps[agent] - called[agent] for agent in agents}  # a step without a caller begins a workflow
    inside = {pair: times for pair, times in counts.items() if pair[0] in agents and pair[1] in {*agents, END}}
    shown = sorted(
        (pair for pair in inside if graph[pair[0]][pair[1]]["probability"] >= LEAST),
        key=lambda pair: (-counts[pair], pair),
    )[:EDGES]
    order = flow_order(agents, inside, begun)
    if any(to == END for _, to in shown):
        order.append(END)
    workflows = sum(steps.values()) - sum(called.values())
    starting = {agent for agent in agents if begun[agent] >= _STARTS * workflows > 0}
    svg = _draw(order, {pair: graph[pair[0]][pair[1]] for pair in shown}, steps, starting)
    left_out = f"the {len(agents)} most frequent of {len(steps)} agents, " if len(agents) < len(steps) else ""
    calls = sum(counts[pair] for pair in shown)
    title = (
        f"{name}: {left_out}{len(shown)} of {counted(len(counts), 'transition')}, "
        f"{count(calls)} of {counted(sum(counts.values()), 'call')}"
    )
    return Panel(title, svg)


def flow_order(agents: Sequence[str], counts: Mapping[tuple[str, str], int], begun: Mapping[str, int]) -> list[str]:
    """Agents in an order against few calls: greedy, after Eades, Lin and Smyth (1993), weighted by calls.

    Next is the agent with the largest surplus of calls to the remaining agents over calls from them; a workflow that
    begins with it counts as a call it makes.
    """
    left, order = list(agents), []
    while left:

        def surplus(agent: str, left: Sequence[str] = left) -> tuple[int, str]:
            out = sum(counts.get((agent, other), 0) for other in left if other != agent)
            into = sum(counts.get((other, agent), 0) for other in left if other != agent)
            return -(out - into + begun[agent]), agent

        order.append(min(left, key=surplus))
        left.remove(order[-1])
    return order


def _draw(
    order: Sequence[str],
    edges: Mapping[tuple[str, str], Mapping[str, Any]],
    steps: Mapping[str, int],
    starting: set[str],
) -> Element:
    line = {agent: index for index, agent in enumerate(order)}
    spans = {pair: line[pair[1]] - line[pair[0]] for pair in edges}
    right = max((span for span in spans.values() if span > 1), default=0)
    left = max((-span for span in spans.values() if span <= 0), default=0)
    names = {agent: _short(agent) for agent in order}
    wide = max(70.0, _CHARACTER * max(len(name) for name in names.values()) + 34)
    x0 = _MARGIN + _reach(left)
    x1 = x0 + wide
    width, height = x1 + _reach(right) + _MARGIN, _ROW * len(order)
    svg = Element("svg", {"viewBox": f"0 0 {width:.0f} {height:.0f}", "class": "graph", "role": "img"})
    labels = []
    most = max((edge["count"] for edge in edges.values()), default=1)
    for pair, edge in sorted(edges.items(), key=lambda item: item[1]["count"]):
        a, b = (_ROW * (line[agent] + 0.5) for agent in pair)
        span = spans[pair]
        stroke = f"{0.8 + 3.2 * math.sqrt(edge['count'] / most):.1f}"
        tooltip = f"{pair[0]} → {pair[1]}: {edge['count']:,} times, {edge['probability']:.3f}"
        if span == 1:
            x = (x0 + x1) / 2
            below, above = a + _HEIGHT / 2, b - _HEIGHT / 2
            path = f"M{x:.0f} {below:.0f}V{above - 6:.0f}"
            tip = f"{x - 4:.0f},{above - 7:.0f} {x + 4:.0f},{above - 7:.0f} {x:.0f},{above:.0f}"
            place, kind = (x + 20, (a + b) / 2 + 3), "on"
        else:
            sign, edge_x = (1, x1) if span > 1 else (-1, x0)
            kind = "on" if span > 1 else "back"
            out = edge_x + sign * _reach(abs(span)) / 0.75  # a cubic reaches three quarters of the way
            begin, end = (a - 7, b + 7) if span <= 0 else (a + 6, b - 6)
            beyond = 12 if span == 0 else 0  # a loop is too small to write on
            tip_x = edge_x + sign * 7
            path = f"M{edge_x:.0f} {begin:.0f}C{out:.0f} {begin:.0f} {out:.0f} {end:.0f} {tip_x:.0f} {end:.0f}"
            tip = f"{tip_x:.0f},{end - 4:.0f} {tip_x:.0f},{end + 4:.0f} {edge_x:.0f},{end:.0f}"
            place = (edge_x + sign * (_reach(abs(span)) + beyond), (begin + end) / 2 + 4)
        drawn = SubElement(svg, "path", {"d": path, "class": f"edge {kind}", "stroke-width": stroke})
        SubElement(drawn, "title").text = clean(tooltip)
        SubElement(svg, "polygon", {"points": tip, "class": f"tip {kind}"})
        labels.append((place, f"{edge['probability']:.2f}"))
    for agent in order:
        _node(svg, agent, names[agent], x0, _ROW * (line[agent] + 0.5), wide, steps, agent in starting)
    for (x, y), text in labels:
        behind = {"x": f"{x - 13:.0f}", "y": f"{y - 11:.0f}", "width": "26", "height": "14", "class": "paper"}
        SubElement(svg, "rect", behind)
        text_at(svg, (x, y), text, "chance middle")
    return svg


def _node(
    svg: Element, agent: str, name: str, x: float, y: float, wide: float, steps: Mapping[str, int], starts: bool
) -> None:
    kind = "node end-of-workflow" if agent == END else "node"
    size = {"width": f"{wide:.0f}", "height": f"{_HEIGHT:.0f}", "rx": "7"}
    made = SubElement(svg, "rect", {"x": f"{x:.0f}", "y": f"{y - _HEIGHT / 2:.0f}", **size, "class": kind})
    SubElement(made, "title").text = clean(agent if agent == END else f"{agent}: {counted(steps[agent], 'step')}")
    if starts:
        tip = f"{x + 6:.0f},{y - 5:.0f} {x + 6:.0f},{y + 5:.0f} {x + 14:.0f},{y:.0f}"
        SubElement(svg, "polygon", {"points": tip, "class": "starts"})
    text_at(svg, (x + wide / 2, y + 4), name, "middle")


def _reach(span: int) -> float:
    """How far an arc over so many lines reaches out from the agents."""
    return _FIRST + _REACH * span


def _short(name: str) -> str:
    """A long name without its middle: names differ more often at their ends."""
    if len(name) <= _LONGEST:
        return name
    kept = _LONGEST - 1
    return f"{name[: kept - kept // 2]}…{name[-(kept // 2) :]}"


GRAPHS: Final = 4

_FOLLOWERS: Final = 6
_AGENTS: Final = 60

Description = Mapping[str, Any]


def types_table(traces: Description) -> Table:
    """A row a workflow type."""
    head = ["workflow type", "workflows", "steps", "agents", "tasks", "steps a workflow: median", "90 % within", "cut"]
    rows = [
        [
            name,
            count(figures["workflows"]),
            count(figures["steps"]),
            count(len(figures["agents"])),
            count(figures["tasks"]) if figures["tasks"] else "–",
            f"{figures['length']['p50']:g}",
            f"{figures['length']['p90']:g}",
            number(figures["censored_share"]),
        ]
        for name, figures in traces["workflow_types"].items()
    ]
    return Table(head, rows)


def call_graphs(traces: Description) -> Section:
    """The call graph of each workflow type as a drawing, and in full as a table below."""
    types = sorted(traces["workflow_types"].items(), key=lambda item: (-item[1]["steps"], item[0]))
    panels = [draw_call_graph(name, figures["call_graph"], figures["agents"]) for name, figures in types[:GRAPHS]]
    left_out = len(types) - len(panels)
    caption = (
        "Which agent calls which: the number is how often, of all steps of an agent, the other came next; blue leads "
        "down, orange back up. Thick lines are taken often; ▸ marks where workflows begin. The step at which a trace "
        "was cut counts nowhere."
        + (f" Not drawn: {counted(left_out, 'workflow type')} with fewer steps." if left_out else "")
    )
    blocks: list[Block] = [Picture("call-graph", caption, panels, wide=True)]
    blocks += [Folded(f"What follows each agent: {name}", [_followers(figures)]) for name, figures in types[:GRAPHS]]
    return Section("Call graph", blocks)


def _followers(described: Description) -> Table:
    agents = sorted(described["call_graph"], key=lambda agent: (-described["agents"][agent], agent))[:_AGENTS]
    rows = [
        [
            agent,
            count(described["agents"][agent]),
            ", ".join(
                f"{to} {number(edge['probability'])}"
                for to, edge in list(described["call_graph"][agent].items())[:_FOLLOWERS]
            ),
        ]
        for agent in agents
    ]
    return Table(["agent", "steps", f"what follows, the {_FOLLOWERS} most frequent"], rows, frozenset({0, 2}))


def document(description: Description) -> Document:
    """The description of a trace; `notices` may be in it: what of its spans was not read or was mended, how often."""
    types, notices = description["workflow_types"], description.get("notices", {})
    warning = " ".join(filter(None, (missing_counts_warning(description), generated_names_warning(description))))
    each = [Section(name, [Facts(_facts(figures))]) for name, figures in types.items()]
    if notices:
        rows = [[what, count(times)] for what, times in notices.items()]
        each.append(Section("What was not read, or was mended", [Table(["what", "times"], rows)]))
    return Document(
        "What is in these traces",
        "Counts, lengths, tokens and who calls whom, of every workflow type. Nothing here is a text of the traces."
        + (f" Names were folded by {names}." if (names := NameMapping.from_dict(description["names"])) else "")
        + (f" {warning}" if warning else ""),
        [Section("Workflow types", [types_table(description)]), call_graphs(description), *each],
        [
            _card(description["workflows"], "workflow", f"of {counted(len(types), 'workflow type')}"),
            _card(description["steps"], "step", "one agent invocation each"),
        ],
    )


def _card(number: int, noun: str, beside: str) -> Card:
    value, _, label = counted(number, noun).partition(" ")
    return Card(value, label, beside)


def _facts(described: Description) -> dict[str, str]:
    """What is known of one workflow type."""
    facts = {
        "workflows": count(described["workflows"]),
        "tasks": count(described["tasks"]) if described["tasks"] else "none given",
        "steps a workflow": _spread(described["length"]),
    }
    for column in ("input_tokens", "output_tokens", "cached_input_tokens"):
        facts[column.replace("_", " ")] = _spread(described[column]) if described[column] else "not recorded"
    if described["finish_reasons"]:
        facts["finish reasons, share of the steps that have one"] = ", ".join(
            f"{reason} {number(share)}" for reason, share in list(described["finish_reasons"].items())[:6]
        )
    facts["share cut before their end"] = number(described["censored_share"])
    facts["share successful"] = (
        "not recorded" if described["success_share"] is None else number(described["success_share"])
    )
    facts["share of steps with text"] = number(described["text_share"])
    facts["share of steps in a fan-out"] = number(described["fan_out_share"])
    for column, states in described["states"].items():
        facts[column.replace("_", " ")] = (
            f"{states['size']} numbers, on a share of {number(states['share'])} of the steps"
        )
    facts["first and last start"] = " to ".join(described["started_at"]) if described["started_at"] else "not recorded"
    return facts


def _spread(quantiles: Mapping[str, float]) -> str:
    return (
        f"median {quantiles['p50']:,.0f}, 90 % within {quantiles['p90']:,.0f}, "
        f"99 % within {quantiles['p99']:,.0f}, most {quantiles['max']:,.0f}"
    )
