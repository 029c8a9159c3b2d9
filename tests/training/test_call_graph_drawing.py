"""The call graph drawn: every probability there and readable, whatever the graph; names are data."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any
from xml.etree.ElementTree import Element, tostring

from hypothesis import given, settings
from hypothesis import strategies as st

from presage.datasets.describe import describe
from presage.datasets.synthetic.workflows import generate
from presage.report.traces import AGENTS, EDGES, LEAST, draw_call_graph, flow_order

Counts = dict[str, dict[str, int]]


def graph_of(counts: Counts) -> dict[str, dict[str, dict[str, Any]]]:
    return {
        agent: {to: {"count": n, "probability": n / sum(after.values())} for to, n in after.items()}
        for agent, after in counts.items()
    }


def steps_of(counts: Counts) -> dict[str, int]:
    return {agent: sum(after.values()) for agent, after in counts.items()}


def chances(svg: Element) -> list[tuple[float, float, str]]:
    texts = [text for text in svg.iter("text") if "chance" in text.attrib["class"]]
    return [(float(text.attrib["x"]), float(text.attrib["y"]), text.text or "") for text in texts]


CHAIN = {"plan": {"code": 10}, "code": {"test": 12}, "test": {"code": 2, "END": 10}}


def test_workflows_run_down_the_page() -> None:
    drawn = draw_call_graph("coding", graph_of(CHAIN), steps_of(CHAIN))
    names = [text.text for text in drawn.svg.iter("text") if "chance" not in text.attrib["class"]]
    assert names == ["plan", "code", "test", "END"]
    assert sorted(text for *_, text in chances(drawn.svg)) == ["0.17", "0.83", "1.00", "1.00"]
    assert drawn.title == "coding: 4 of 4 transitions, 34 of 34 calls"
    starts = [mark for mark in drawn.svg.iter("polygon") if mark.attrib["class"] == "starts"]
    assert len(starts) == 1


def test_the_order_goes_with_the_calls() -> None:
    counts = {("a", "b"): 9, ("b", "a"): 3, ("b", "c"): 6, ("c", "a"): 1}
    assert flow_order(["c", "b", "a"], counts, {"a": 5, "b": 0, "c": 0}) == ["a", "b", "c"]


def test_every_transition_of_a_law_is_there_with_its_probability() -> None:
    of = describe(generate("research", 200, 0).table)["workflow_types"]["research"]
    drawn = draw_call_graph("research", of["call_graph"], of["agents"])
    shown = {edge["probability"] for after in of["call_graph"].values() for edge in after.values()}
    assert sorted(text for *_, text in chances(drawn.svg)) == sorted(f"{p:.2f}" for p in shown if p >= LEAST)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, AGENTS))
def test_no_two_probabilities_lie_on_one_another(seed: int, agents: int) -> None:
    import numpy as np

    draw = np.random.default_rng(seed)
    names = [f"agent {n}" for n in range(agents)]
    counts = {a: {b: int(draw.integers(1, 40)) for b in [*names, "END"] if draw.random() < 0.5} for a in names}
    counts = {a: after or {"END": 1} for a, after in counts.items()}
    steps = {name: max(n, sum(after.get(name, 0) for after in counts.values())) for name, n in steps_of(counts).items()}
    drawn = draw_call_graph("any", graph_of(counts), steps)
    for (x, y, _), (x2, y2, _) in combinations(chances(drawn.svg), 2):
        assert abs(x - x2) >= 26 or abs(y - y2) >= 13


def test_of_many_agents_the_most_frequent_are_drawn_and_counted() -> None:
    counts = {f"a{n:03}": {f"a{(n + 1) % 190:03}": 200 - n, "END": 1} for n in range(190)}
    drawn = draw_call_graph("ring", graph_of(counts), steps_of(counts))
    agents, all_agents, edges, all_edges, calls, all_calls = map(int, re.findall(r"\d+", drawn.title.replace(",", "")))
    assert (agents, all_agents) == (AGENTS, 190)
    assert edges <= EDGES
    assert all_edges == 380
    assert calls < all_calls == sum(steps_of(counts).values())


def test_names_are_data() -> None:
    name = "<script>alert('x')</script>\x00" + "y" * 200
    drawn = draw_call_graph("any", graph_of({name: {"END": 3}}), {name: 3})
    text = tostring(drawn.svg, encoding="unicode")
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "\x00" not in text
    assert float(drawn.svg.attrib["viewBox"].split()[2]) < 500
