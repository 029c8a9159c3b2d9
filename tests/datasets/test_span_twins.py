"""Requests that MLflow recorded twice: its LangChain autolog, and apart from that the one of the client it calls."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from span_samples import BEGIN, SECOND, steps, write_lines

from presage.datasets.adapters.spans.conventions import TWIN
from presage.datasets.read import Traces, read_traces

SYSTEM = {"role": "system", "content": "be brief"}


class Recorded:
    """Traces as MLflow exports them; times are seconds after `BEGIN`."""

    def __init__(self) -> None:
        self.traces: dict[str, list[dict[str, Any]]] = {}

    def span(
        self, trace: str, name: str, kind: str, start: float, end: float, parent: str | None = None, **attributes: Any
    ) -> str:
        """Add a span; the attributes are MLflow's without the prefix, `_` for a dot. Its id."""
        made = f"{sum(map(len, self.traces.values())):016x}"
        values = {"spanType": kind, **{key.replace("_", "."): value for key, value in attributes.items()}}
        self.traces.setdefault(trace, []).append(
            {
                "span_id": made,
                "parent_span_id": parent,
                "name": name,
                "start_time_unix_nano": BEGIN + int(start * SECOND),
                "end_time_unix_nano": BEGIN + int(end * SECOND),
                "attributes": {f"mlflow.{key}": json.dumps(value) for key, value in values.items()},
            }
        )
        return made

    def graph(self, trace: str, end: float) -> tuple[str, str]:
        """A graph with one node, and the ids of both."""
        root = self.span(trace, "LangGraph", "CHAIN", 0, end)
        return root, self.span(trace, "planner", "CHAIN", 0, end, root)

    def framework(self, trace: str, start: float, end: float, node: str | None, asked: str, *tokens: int) -> str:
        """A request as the autolog of LangChain records it."""
        usage = dict(zip(("input_tokens", "output_tokens"), tokens, strict=False))
        said = [[{"type": "system", "content": "be brief"}, {"type": "human", "content": asked}]]
        more = {"llm_model": "m", "message_format": "langchain", "spanInputs": said}
        return self.span(trace, "ChatOpenAI", "CHAT_MODEL", start, end, node, chat_tokenUsage=usage, **more)

    def client(self, trace: str, start: float, end: float, parent: str | None, asked: str, *tokens: int) -> None:
        """A request as the autolog of OpenAI's client records it."""
        usage = dict(zip(("input_tokens", "output_tokens"), tokens, strict=False))
        said = {"model": "m", "messages": [SYSTEM, {"role": "user", "content": asked}]}
        answer = {"choices": [{"message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}]}
        more = {"llm_model": "m", "message_format": "openai", "spanInputs": said, "spanOutputs": answer}
        self.span(trace, "AsyncCompletions", "CHAT_MODEL", start, end, parent, chat_tokenUsage=usage, **more)

    def read(self, folder: Path) -> Traces:
        documents = [{"info": {"trace_id": name}, "data": {"spans": spans}} for name, spans in self.traces.items()]
        return read_traces([write_lines(folder / "traces.jsonl", *documents)])


def agents(found: Traces) -> Counter[tuple[Any, ...]]:
    return Counter(steps(found.table, "workflow_id", "agent"))


def test_a_client_in_a_trace_of_its_own_is_the_request_of_the_graph(tmp_path: Path) -> None:
    recorded = Recorded()
    _, node = recorded.graph("t1", 10)
    recorded.framework("t1", 1, 3, node, "plan", 40, 7)
    recorded.client("t2", 1.1, 2.9, None, "plan", 40, 7)
    found = recorded.read(tmp_path)
    [row] = found.table.to_pylist()
    assert (row["workflow_type"], row["workflow_id"], row["agent"]) == ("LangGraph", "t1", "planner")
    assert (row["input_tokens"], row["output_tokens"], row["finish_reason"]) == (40, 7, "stop")
    assert (row["output_text"], row["complete"]) == ("yes", True)
    assert found.notices == {TWIN: 1}


def test_a_client_beside_the_graph_in_its_trace_is_the_request_of_the_graph(tmp_path: Path) -> None:
    recorded = Recorded()
    root, node = recorded.graph("t1", 10)
    for at in (1, 4):
        recorded.framework("t1", at, at + 2, node, f"plan {at}", 40, 7)
        recorded.client("t1", at + 0.1, at + 1.9, root, f"plan {at}", 40, 7)
    found = recorded.read(tmp_path)
    assert steps(found.table, "agent", "parent_steps") == [("planner", []), ("planner", [0])]
    assert found.notices == {TWIN: 2}


def test_calls_without_a_graph_count_once(tmp_path: Path) -> None:
    recorded = Recorded()
    recorded.client("t1", 1.1, 2.9, None, "plan", 40, 7)
    recorded.framework("t2", 1, 3, None, "plan", 40, 7)
    assert agents(recorded.read(tmp_path)) == {("t2", "AsyncCompletions"): 1}


def test_a_failed_call_that_was_tried_again_is_no_step(tmp_path: Path) -> None:
    recorded = Recorded()
    _, node = recorded.graph("t1", 10)
    recorded.framework("t1", 1, 3, node, "plan")
    recorded.client("t2", 1.1, 2.9, None, "plan")
    recorded.traces["t1"][-1]["status"] = recorded.traces["t2"][0]["status"] = {"code": "STATUS_CODE_ERROR"}
    del recorded.traces["t2"][0]["attributes"]["mlflow.spanOutputs"]
    recorded.framework("t1", 4, 6, node, "plan", 40, 7)
    recorded.client("t3", 4.1, 5.9, None, "plan", 40, 7)
    assert agents(recorded.read(tmp_path)) == {("t1", "planner"): 1}


def test_calls_of_tools_are_the_same_in_both_records(tmp_path: Path) -> None:
    call = {"type": "function_call", "name": "search", "call_id": "c", "arguments": '{"query": "x"}'}
    found = {"type": "function_call_output", "call_id": "c", "output": "found x"}
    recorded = Recorded()
    recorded.framework("t1", 1, 3, None, "plan", 40, 7)
    again = [{"name": "search", "args": {"query": "x"}, "id": "c", "type": "tool_call"}]
    said = [{"type": "human", "content": "plan"}, {"type": "ai", "content": [call], "tool_calls": again}]
    said.append({"type": "tool", "content": "found x"})
    recorded.traces["t1"][0]["attributes"]["mlflow.spanInputs"] = json.dumps([said])
    recorded.client("t2", 1.1, 2.9, None, "plan", 40, 7)
    given = {"model": "m", "input": [{"role": "user", "content": "plan"}, call, found]}
    recorded.traces["t2"][0]["attributes"]["mlflow.spanInputs"] = json.dumps(given)
    assert recorded.read(tmp_path).table["input_text"].to_pylist() == ['plan\n\nsearch({"query": "x"})\n\nfound x']


def test_one_autolog_alone_is_read_as_before(tmp_path: Path) -> None:
    recorded = Recorded()
    for number in range(3):  # the same at the same time, as in parallel branches
        recorded.client(f"t{number}", 1 + number / 10, 3 - number / 10, None, "plan", 40, 7)
    _, node = recorded.graph("g", 10)
    for number in range(3):
        recorded.framework("g", 1 + number / 10, 3 - number / 10, node, "write", 40, 7)
    found = recorded.read(tmp_path)
    assert agents(found) == {("g", "planner"): 3} | {(f"t{number}", "AsyncCompletions"): 1 for number in range(3)}
    assert not found.notices


def test_what_differs_or_is_not_inside_is_another_request(tmp_path: Path) -> None:
    recorded = Recorded()
    _, node = recorded.graph("g", 10)
    recorded.framework("g", 1, 3, node, "plan", 40, 7)
    recorded.client("prompt", 1.1, 2.9, None, "write", 40, 7)
    recorded.client("tokens", 1.1, 2.9, None, "plan", 40, 8)
    recorded.client("later", 1.1, 3.1, None, "plan", 40, 7)
    recorded.client("earlier", 0.9, 2.9, None, "plan", 40, 7)
    recorded.client("model", 1.1, 2.9, None, "plan", 40, 7)
    recorded.traces["model"][0]["attributes"]["mlflow.llm.model"] = '"other"'
    assert len(recorded.read(tmp_path).table) == 6


class Call(NamedTuple):
    """A request to a model: seconds; where the client's span of it is."""

    workflow: int
    asked: str
    start: int
    lasted: int
    client: str


CALLS = st.builds(
    Call,
    st.integers(0, 2),
    st.sampled_from("ab"),
    st.integers(0, 12),
    st.integers(4, 12),
    st.sampled_from(("inside", "beside", "apart", "none")),
)


@given(st.lists(CALLS, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_every_request_stands_in_its_workflow_once(calls: list[Call], random: Any) -> None:
    recorded = Recorded()
    graphs = {call.workflow: recorded.graph(f"g{call.workflow}", 30) for call in calls}
    for number, call in enumerate(calls):
        root, node = graphs[call.workflow]
        start = call.start + number / 100  # what is equal in all is a span exported twice
        trace, end = f"g{call.workflow}", start + call.lasted
        tokens = (40, 7) if call.asked == "a" else ()
        own = recorded.framework(trace, start, end, node, call.asked, *tokens)
        parent = {"inside": own, "beside": root}.get(call.client)
        if call.client != "none":
            place = trace if parent else f"c{number}"
            recorded.client(place, start + 1, end - 1, parent, call.asked, *tokens)
    order = list(recorded.traces.items())
    random.shuffle(order)
    recorded.traces = dict(order)
    with TemporaryDirectory() as folder:
        found = recorded.read(Path(folder))
    assert agents(found) == Counter((f"g{call.workflow}", "planner") for call in calls)
    assert found.notices.get(TWIN, 0) == sum(call.client in ("beside", "apart") for call in calls)
