"""Tool calls are no steps: what training reads of a trace with tool rows is what a server sees of the same workflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_samples import QUICK, llm, tool, tool_led, trace

from presage.datasets.schema import conform, digest
from presage.datasets.schema.validate import validate
from presage.datasets.synthetic.workflows import generate
from presage.errors import InputError, TraceError
from presage.features.served_steps import TOOLS_CALLED, running_steps, served_steps
from presage.training.next_agent.train import train


def seen(table: pa.Table) -> list[tuple[Any, ...]]:
    return [
        (row["step"], row["agent"], row["parent_steps"], row[TOOLS_CALLED]) for row in served_steps(table).to_pylist()
    ]


def test_tools_belong_to_the_step_before_and_steps_are_numbered_anew() -> None:
    table = trace(
        [tool("fetch"), llm("plan"), tool("search"), tool("search"), llm("write"), llm("check"), tool("send")],
        [llm("plan")],
    )
    assert seen(table) == [
        (0, "plan", None, ["search", "search"]),
        (1, "write", None, []),
        (2, "check", None, ["send"]),
        (0, "plan", None, []),
    ]


def test_a_step_that_waits_for_tools_waits_for_those_who_called_them() -> None:
    table = trace(
        [
            llm("plan", parent_steps=[]),
            llm("left", parent_steps=[0]),
            llm("right", parent_steps=[0]),
            tool("search", parent_steps=[1]),
            tool("read", parent_steps=[3]),
            tool("run", parent_steps=[2]),
            llm("join", parent_steps=[4, 5]),
        ]
    )
    assert seen(table) == [
        (0, "plan", [], []),
        (1, "left", [0], ["search", "read"]),
        (2, "right", [0], ["run"]),
        (3, "join", [1, 2], []),
    ]


def test_recorded_tools_are_kept_and_a_type_without_tool_rows_has_none_known() -> None:
    table = trace([llm("plan", tools_called=["a", "b"]), tool("c"), llm("write")])
    assert [row[3] for row in seen(table)] == [["a", "b"], []]
    bare = trace([llm("plan", tools_called=["a"]), llm("write")])
    assert served_steps(bare) is bare
    assert [row[3] for row in seen(bare)] == [["a"], None]
    assert digest(bare) != digest(trace([llm("plan", tools_called=["b"]), llm("write")]))


def test_without_an_llm_step_there_is_nothing_to_forecast() -> None:
    with pytest.raises(TraceError, match="no LLM step"):
        served_steps(trace([tool("a"), tool("b")]))
    with pytest.raises(InputError, match="no LLM step"):
        running_steps([tool("a")])


@st.composite
def workflows(draw: st.DrawFn) -> list[dict[str, Any]]:
    kinds = draw(st.lists(st.sampled_from(["llm", "llm", "tool"]), min_size=1, max_size=12))
    recorded = draw(st.booleans())
    rows = []
    for place, kind in enumerate(kinds):
        row: dict[str, Any] = {"agent": draw(st.sampled_from("abc")), "kind": kind}
        if recorded and place:
            row["parent_steps"] = draw(
                st.none() | st.lists(st.integers(0, place - 1), unique=True, max_size=3).map(sorted)
            )
        rows.append(row)
    return rows if any(kind == "llm" for kind in kinds) else [*rows, llm("z")]


@given(st.lists(workflows(), min_size=1, max_size=4))
def test_a_running_workflow_is_read_as_a_whole_trace(drawn: list[list[dict[str, Any]]]) -> None:
    table = trace(*drawn)
    served = served_steps(table)
    assert set(served["kind"].to_pylist()) == {"llm"}
    validate(served, "served")  # numbered without gaps, parents before their children
    by_workflow: dict[str, list[dict[str, Any]]] = {}
    for row in served.to_pylist():
        by_workflow.setdefault(row["workflow_id"], []).append(row)
    for number, workflow in enumerate(drawn):
        rows = by_workflow[f"w{number}"]
        running = running_steps(workflow)
        assert [row["agent"] for row in rows] == [step["agent"] for step in running]
        if any(step["kind"] == "tool" for step in workflow):
            assert [row[TOOLS_CALLED] for row in rows] == [step[TOOLS_CALLED] for step in running]


def with_tools(table: pa.Table, seed: int) -> pa.Table:
    """The trace with tool calls in some workflows: one after the other, several at once, also at the end."""
    rng, rows, number = np.random.default_rng(seed), [], 0
    for row in table.to_pylist():
        number = 0 if row["step"] == 0 else number
        uses = len(row["workflow_id"]) % 2 or rng.random() < 0.5
        rows.append({**row, "step": number})
        number += 1
        for name in rng.choice(["search", "read", "run"], rng.integers(0, 3 if uses else 1)):
            blank = {column: None for column in row if column not in ("workflow_type", "workflow_id", "task")}
            rows.append({**row, **blank, "step": number, "agent": str(name), "kind": "tool"})
            rows[-1] |= {"complete": row["complete"], "success": row["success"]}
            number += 1
    return validate(conform(pa.Table.from_pylist(rows, schema=table.schema), "with tools"), "with tools")


def test_traces_with_tool_rows_teach_what_a_server_sees() -> None:
    """Learnt as steps, tool calls would make a model that is worthless where none are seen."""
    plain = generate("retry", 120, 3, state_size=16).table
    bare = train(plain, None, QUICK, baselines=("markov-1",))
    given = train(with_tools(plain, 1), None, QUICK, baselines=("markov-1",))
    assert given.predictor.vocabulary.agents == bare.predictor.vocabulary.agents
    assert given.predictor.vocabulary.tools == ("read", "run", "search")
    for name in ("baselines", "workflows", "steps"):
        assert given.metrics[name] == bare.metrics[name], name
    for moment, figures in bare.metrics["moments"].items():  # the tools are drawn at random; 312 steps are judged
        np.testing.assert_allclose(given.metrics["moments"][moment]["accuracy"], figures["accuracy"], atol=0.05)


def test_the_tool_that_an_answer_calls_is_known_after_the_output() -> None:
    """Who is next depends on the tool alone, so nothing else can tell."""
    trained = train(tool_led(160, 5), None, QUICK, baselines=("markov-1",))
    predictor = trained.predictor
    begun = {"workflow_type": "app", "agent": "plan"}
    for called, following in ((["search"], "write"), (["ask", "ask"], "clarify")):
        after = predictor.forecast([{**begun, "output_tokens": 5, TOOLS_CALLED: called}])
        assert after.agents[0][following] > 0.9
        rows = [{**begun, "output_tokens": 5}, *({**begun, **tool(name)} for name in called)]
        assert predictor.forecast(rows) == after
    unknown = predictor.forecast([{**begun, "output_tokens": 5}])
    assert 0.2 < unknown.agents[0]["write"] < 0.8
    profiles = trained.metrics["profiles"]
    assert profiles["engine"]["moments"]["completion"]["accuracy"][0] > 0.95
    assert profiles["ids+tokens"]["moments"]["completion"]["accuracy"][0] < 0.85
    assert predictor.reads == {"tokens", "answers"}
