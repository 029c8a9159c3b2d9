"""OpenInference's names on the real SDK's spans, with the constants of its own package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import pytest
from openinference.semconv.trace import MessageAttributes, MessageContentAttributes, SpanAttributes, ToolCallAttributes
from span_samples import Recorder, agent, chat, collected, envelope, steps, write_lines

from presage.datasets.adapters.spans.reader import read_spans
from presage.datasets.read import read_traces

ASKED, ANSWERED = SpanAttributes.LLM_INPUT_MESSAGES, SpanAttributes.LLM_OUTPUT_MESSAGES
PART = f"{ASKED}.1.{MessageAttributes.MESSAGE_CONTENTS}.0"
CALL = f"{ANSWERED}.0.{MessageAttributes.MESSAGE_TOOL_CALLS}.0"


def of_kind(kind: str, **more: Any) -> dict[str, Any]:
    return {SpanAttributes.OPENINFERENCE_SPAN_KIND: kind, **more}


def read(recorder: Recorder, path: Path) -> Any:
    return collected(read_spans(write_lines(path / "t.json", envelope(recorder.spans))))[0]


def test_a_crew_with_everything_it_records(tmp_path: Path) -> None:
    recorder = Recorder()
    request = of_kind(
        "LLM",
        **{
            SpanAttributes.LLM_MODEL_NAME: "m",
            SpanAttributes.LLM_TOKEN_COUNT_PROMPT: 400,
            SpanAttributes.LLM_TOKEN_COUNT_COMPLETION: 20,
            SpanAttributes.LLM_TOKEN_COUNT_PROMPT_DETAILS_CACHE_READ: 256,
            SpanAttributes.INPUT_VALUE: '{"messages": "the raw request, which the messages are better than"}',
            f"{ASKED}.0.{MessageAttributes.MESSAGE_ROLE}": "system",
            f"{ASKED}.0.{MessageAttributes.MESSAGE_CONTENT}": "be brief",
            f"{ASKED}.1.{MessageAttributes.MESSAGE_ROLE}": "user",
            f"{PART}.{MessageContentAttributes.MESSAGE_CONTENT_TYPE}": "text",
            f"{PART}.{MessageContentAttributes.MESSAGE_CONTENT_TEXT}": "hello",
            f"{ANSWERED}.0.{MessageAttributes.MESSAGE_ROLE}": "assistant",
            f"{CALL}.{ToolCallAttributes.TOOL_CALL_FUNCTION_NAME}": "search",
            f"{CALL}.{ToolCallAttributes.TOOL_CALL_FUNCTION_ARGUMENTS_JSON}": '{"q":1}',
        },
    )
    root_names = of_kind("CHAIN", **{SpanAttributes.SESSION_ID: "session-1"})
    with recorder.span("Crew.kickoff", 0, 20, attributes=root_names) as root:
        named = of_kind("AGENT", **{SpanAttributes.AGENT_NAME: "researcher", SpanAttributes.GRAPH_NODE_ID: "node-1"})
        with recorder.span("Agent.execute", 1, 9, root, named) as span:
            recorder.add("ChatCompletion", 1.1, 3, span, request)
            recorder.add("ToolUsage", 3.1, 4, span, of_kind("TOOL", **{SpanAttributes.TOOL_NAME: "search"}))
        recorder.add("Retriever", 9.1, 9.2, root, of_kind("RETRIEVER"))
        with recorder.span(
            "Agent.execute", 10, 15, root, of_kind("AGENT", **{SpanAttributes.GRAPH_NODE_ID: "writer"})
        ) as a:
            recorder.add("ChatCompletion", 11, 12, a, of_kind("LLM"))
    table = read(recorder, tmp_path)
    assert steps(table, "agent", "kind", "parent_steps") == [
        ("researcher", "llm", []),
        ("search", "tool", [0]),
        ("writer", "llm", [1]),
    ]
    first = table.to_pylist()[0]
    assert (first["workflow_type"], first["workflow_id"], first["complete"]) == ("Crew.kickoff", "session-1", True)
    assert tuple(first[name] for name in ("model", "input_tokens", "output_tokens", "cached_input_tokens")) == (
        "m",
        400,
        20,
        256,
    )
    assert (first["system_prompt"], first["input_text"], first["output_text"]) == (
        "be brief",
        "hello",
        'search({"q":1})',
    )


def test_finish_reasons(tmp_path: Path) -> None:
    """The attribute, else the raw response of OpenAI's instrumentor or of LangChain's."""
    recorder = Recorder()
    message = {f"{ANSWERED}.0.{MessageAttributes.MESSAGE_CONTENT}": "yes"}
    raw = json.dumps({"choices": [{"finish_reason": "length", "message": {"role": "assistant", "content": "yes"}}]})
    generation = {"text": "yes", "message": {"kwargs": {"response_metadata": {"finish_reason": "tool_calls"}}}}
    langchain = json.dumps({"generations": [[generation]]})
    for start, found in enumerate(
        (
            {SpanAttributes.LLM_FINISH_REASON: "stop", SpanAttributes.OUTPUT_VALUE: raw},
            {SpanAttributes.OUTPUT_VALUE: raw, **message},
            {SpanAttributes.OUTPUT_VALUE: langchain, **message},
            message,
        )
    ):
        names = of_kind("LLM", **{SpanAttributes.SESSION_ID: "s"}, **found)
        recorder.add("ChatCompletion", start, start + 0.5, attributes=names)
    table = read(recorder, tmp_path)
    assert table["finish_reason"].to_pylist() == ["stop", "length", "tool_calls", None]
    assert table["output_text"].to_pylist()[1:] == ["yes"] * 3


def test_the_graph_tells_a_fan_out_that_time_does_not(tmp_path: Path) -> None:
    """Branches that happened to run one after the other: their parent node says whom they waited for."""
    recorder = Recorder()
    with recorder.span("graph", 0, 20, attributes=of_kind("CHAIN")) as root:
        for name, parent, start in (("a", "", 1), ("b", "a", 3), ("c", "a", 5), ("d", "c", 7), ("e", "gone", 9)):
            node = {SpanAttributes.GRAPH_NODE_ID: name, SpanAttributes.GRAPH_NODE_PARENT_ID: parent}
            with recorder.span(name, start, start + 1, root, of_kind("AGENT", **node)) as span:
                recorder.add("ChatCompletion", start + 0.1, start + 0.5, span, of_kind("LLM"))
    assert steps(read(recorder, tmp_path), "agent", "parent_steps") == [
        ("a", []),
        ("b", [0]),
        ("c", [0]),
        ("d", [2]),
        ("e", [3]),  # its parent never ran: what ended before it
    ]


def test_a_parent_node_around_the_span_is_no_earlier_run(tmp_path: Path) -> None:
    """Some frameworks name the team an agent is in: that is parentage, not order."""
    recorder = Recorder()
    team = of_kind("AGENT", **{SpanAttributes.GRAPH_NODE_ID: "team"})
    with recorder.span("team", 0, 20, attributes=team) as root:
        for name, start in (("a", 1), ("b", 3)):
            node = {SpanAttributes.GRAPH_NODE_ID: name, SpanAttributes.GRAPH_NODE_PARENT_ID: "team"}
            with recorder.span(name, start, start + 1, root, of_kind("AGENT", **node)) as span:
                recorder.add("ChatCompletion", start + 0.1, start + 0.5, span, of_kind("LLM"))
    assert steps(read(recorder, tmp_path), "agent", "parent_steps") == [("a", []), ("b", [0])]


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ({"langgraph_node": "planner", "langgraph_checkpoint_ns": "planner:1f0c"}, "planner"),
        ({"langgraph_node": "agent", "langgraph_checkpoint_ns": "researcher:1f0c|agent:77ab"}, "researcher"),
        ({"langgraph_node": "model", "langgraph_checkpoint_ns": "team:1|coder:2|model:3"}, "coder"),
        ({"langgraph_node": "agent", "langgraph_checkpoint_ns": "agent:77ab"}, "agent"),
        ({"langgraph_node": "planner"}, "planner"),
        ({"thread_id": "7"}, "RunnableSequence"),
    ],
)
def test_a_langgraph_node_names_the_agent(tmp_path: Path, metadata: dict[str, str], name: str) -> None:
    """As LangGraph writes it, also for its ready-made agents, whose request runs in a node called agent or model."""
    recorder = Recorder()
    with recorder.span("LangGraph", 0, 20, attributes=of_kind("CHAIN")) as root:
        node = {SpanAttributes.METADATA: json.dumps(metadata)}
        with recorder.span("RunnableSequence", 1, 5, root, of_kind("CHAIN", **node)) as span:
            recorder.add("ChatOpenAI", 2, 3, span, of_kind("LLM", **node))
    assert steps(read(recorder, tmp_path), "workflow_type", "agent") == [("LangGraph", name)]


def test_a_langgraph_node_as_openllmetry_writes_it(tmp_path: Path) -> None:
    recorder = Recorder()
    with recorder.span("invoke_agent support", 0, 20, attributes=agent("support")) as root:
        names = {"traceloop.span.kind": "task", "gen_ai.operation.name": "execute_task"}
        with recorder.span("execute_task planner", 1, 5, root, names) as span:
            where = {"traceloop.association.properties.langgraph_checkpoint_ns": "planner:701a|model:1"}
            recorder.add("ChatOpenAI.chat", 2, 3, span, chat(**where))
    assert steps(read(recorder, tmp_path), "workflow_type", "agent") == [("support", "planner")]


def test_both_conventions_in_one_tree(tmp_path: Path) -> None:
    recorder = Recorder()
    with recorder.span("Crew.kickoff", 0, 20, attributes=of_kind("CHAIN")) as root:
        with recorder.span("invoke_agent planner", 1, 5, root, agent("planner")) as span:
            recorder.add("ChatCompletion", 2, 3, span, of_kind("LLM", **{SpanAttributes.LLM_TOKEN_COUNT_PROMPT: 5}))
        with recorder.span("coder", 6, 9, root, of_kind("AGENT", **{SpanAttributes.AGENT_NAME: "coder"})) as span:
            both = of_kind("LLM", **{SpanAttributes.LLM_TOKEN_COUNT_PROMPT: 7})
            recorder.add("chat m", 7, 8, span, chat(**both, **{"gen_ai.usage.input_tokens": 7}))
    assert steps(read(recorder, tmp_path), "agent", "input_tokens") == [("planner", 5), ("coder", 7)]


def test_a_span_dump_with_flat_columns(tmp_path: Path) -> None:
    """As Phoenix's data frame of spans is written with to_json(orient="records", lines=True)."""
    shared = {"context.trace_id": "t1", "status_code": "OK"}
    rows = [
        shared | {
            "name": "ChatCompletion", "context.span_id": "b", "parent_id": "a", "span_kind": "LLM",
            "start_time": 1767225601000, "end_time": 1767225602500,
            "attributes.openinference.span.kind": "LLM", "attributes.llm.model_name": "m",
            "attributes.llm.token_count.prompt": 12.0, "attributes.llm.token_count.completion": None,
            "attributes.llm.input_messages": [{"message.role": "user", "message.content": "hello"}],
        },
        shared | {
            "name": "planner", "context.span_id": "a", "parent_id": None, "span_kind": "AGENT",
            "start_time": "2026-01-01T00:00:00+00:00", "end_time": "2026-01-01T00:00:09+00:00",
            "attributes.openinference.span.kind": "AGENT", "attributes.agent.name": "planner",
        },
    ]  # fmt: skip
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.jsonl", *rows)))
    [row] = table.to_pylist()
    assert (row["agent"], row["model"], row["input_tokens"], row["output_tokens"]) == ("planner", "m", 12, None)
    assert (row["complete"], row["input_text"]) == (True, "hello")
    assert (row["ended_at"] - row["started_at"]).total_seconds() == 1.5


def phoenix() -> pd.DataFrame:
    """As Phoenix gives it: one row a span, flat columns, floats where counts are missing, ids as the index."""
    kinds = ["CHAIN", "LLM", "TOOL"]
    return pd.DataFrame(
        {
            "name": ["run", "ChatOpenAI", "search"],
            "parent_id": [None, "a", "a"],
            "start_time": pd.to_datetime([f"2026-01-01T00:00:0{n}Z" for n in (0, 1, 3)]),
            "end_time": pd.to_datetime([f"2026-01-01T00:00:0{n}Z" for n in (9, 2, 4)]),
            "context.trace_id": "t",
            "attributes.openinference.span.kind": kinds,
            "attributes.agent.name": [None, "planner", None],
            "attributes.llm.token_count.prompt": [None, 100.0, None],
            "attributes.session.id": [float("nan")] * 3,
            "attributes.llm.input_messages": [None, [{"message.role": "user", "message.content": "hello"}], None],
        },
        index=pd.Index(["a", "b", "c"], name="context.span_id"),
    )


@pytest.mark.parametrize("how", ["frame", "csv", "csv.gz", "parquet", "page"])
def test_what_phoenix_exports(tmp_path: Path, how: str) -> None:
    frame, path = phoenix(), tmp_path / f"spans.{how}"
    if how.startswith("csv"):
        frame.to_csv(path)
    elif how == "parquet":
        frame.to_parquet(path)
    elif how == "page":
        path = tmp_path / "page.json"
        spans = json.loads(frame.reset_index().to_json(orient="records", date_format="iso"))
        path.write_text(json.dumps({"data": spans, "next_cursor": None}, indent=1), encoding="utf-8")
    found = read_traces(frame if how == "frame" else path)
    assert steps(found.table, "workflow_id", "agent", "kind", "input_tokens", "complete") == [
        ("t", "planner", "llm", 100, True),
        ("t", "search", "tool", None, True),
    ]
    assert found.table["ended_at"].to_pylist()[0].isoformat() == "2026-01-01T00:00:02+00:00"
    if not how.startswith("csv"):
        assert found.table["input_text"].to_pylist() == ["hello", None]


def test_a_span_dump_with_nested_attributes(tmp_path: Path) -> None:
    """As Phoenix's API gives spans."""
    llm = {
        "model_name": "m",
        "token_count": {"prompt": 12, "completion": 3},
        "output_messages": [{"message": {"role": "assistant", "content": "yes"}}],
        "finish_reason": "stop",
    }
    row = {
        "name": "ChatCompletion", "context": {"trace_id": "t1", "span_id": "b"}, "parent_id": None,
        "start_time": "2026-01-01T00:00:00Z", "end_time": "2026-01-01T00:00:09Z",
        "attributes": {"openinference": {"span": {"kind": "LLM"}}, "llm": llm, "session": {"id": "s"}},
    }  # fmt: skip
    [found] = collected(read_spans(write_lines(tmp_path / "t.jsonl", row)))[0].to_pylist()
    assert (found["workflow_id"], found["input_tokens"], found["output_tokens"]) == ("s", 12, 3)
    assert (found["model"], found["output_text"], found["finish_reason"]) == ("m", "yes", "stop")
