"""OTLP JSON lines by the real SDK: steps in are steps out, whatever the shape of the application."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from span_samples import BEGIN, SECOND, Recorder, agent, chat, collected, envelope, raw_spans, steps, tool, write_lines

from presage.datasets.adapters import detect
from presage.datasets.adapters.spans.reader import read_spans
from presage.datasets.read import read_traces


def support(recorder: Recorder, at: float = 0.0, **attributes: Any) -> None:
    """planner, then two workers at once of which one uses a tool twice, then a writer who joins them."""
    workflow = {"gen_ai.operation.name": "invoke_workflow", "gen_ai.workflow.name": "support", **attributes}
    with recorder.span("invoke_workflow support", at, at + 20, attributes=workflow) as root:
        with recorder.span("invoke_agent planner", at + 0.1, at + 2, root, agent("planner")) as span:
            recorder.add("chat m", at + 0.2, at + 1.9, span, chat())
        with recorder.span("invoke_agent one", at + 2.1, at + 6, root, agent("one")) as span:
            recorder.add("chat m", at + 2.2, at + 3, span, chat())
            recorder.add("execute_tool search", at + 3.1, at + 3.5, span, tool("search"))
            recorder.add("execute_tool read", at + 3.2, at + 3.6, span, tool("read"))
            recorder.add("chat m", at + 3.7, at + 5.9, span, chat())
        with recorder.span("invoke_agent two", at + 2.15, at + 5, root, agent("two")) as span:
            recorder.add("chat m", at + 2.3, at + 4.9, span, chat())
        with recorder.span("invoke_agent writer", at + 6.1, at + 9, root, agent("writer")) as span:
            recorder.add("chat m", at + 6.2, at + 8, span, chat())


SUPPORT = [
    (0, "planner", "llm", []),
    (1, "one", "llm", [0]),
    (2, "two", "llm", [0]),
    (3, "search", "tool", [1]),
    (4, "read", "tool", [1]),
    (5, "one", "llm", [3, 4]),
    (6, "writer", "llm", [2, 5]),
]
SHAPE = ("step", "agent", "kind", "parent_steps")


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_fan_out_tools_and_join(recorder: Recorder, tmp_path: Path) -> None:
    support(recorder)
    table, skipped, spoiled = collected(read_spans(write_lines(tmp_path / "t.json", envelope(recorder.spans))))
    assert steps(table, *SHAPE) == SUPPORT
    assert set(table["workflow_type"].to_pylist()) == {"support"}
    assert set(table["workflow_id"].to_pylist()) == {f"{1:032x}"}
    assert table["complete"].to_pylist() == [True] * 7
    start_us = (BEGIN + SECOND // 5) // 1000
    assert table["started_at"].cast("int64")[0].as_py() == start_us
    assert table["ended_at"].cast("int64")[0].as_py() == start_us + 1_700_000
    assert not skipped
    assert not spoiled


def test_the_commands_reader_finds_the_format(recorder: Recorder, tmp_path: Path) -> None:
    support(recorder)
    path = write_lines(tmp_path / "t.json", envelope(recorder.spans))
    assert detect(path) == "otel"
    assert read_traces([path]).table.num_rows == 7
    named_jsonl = write_lines(tmp_path / "t.jsonl", envelope(recorder.spans))
    assert detect(named_jsonl) == "otel"
    plain = write_lines(tmp_path / "plain.jsonl", {"workflow_type": "t", "workflow_id": "w", "step": 0, "agent": "a"})
    assert detect(plain) == "jsonl"
    assert read_traces([plain]).table.num_rows == 1


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_that_straddles_rotated_files(recorder: Recorder, tmp_path: Path, packed: bool) -> None:
    support(recorder)
    support(recorder, 100)
    for number in range(4):
        text = json.dumps(envelope(recorder.spans[number::4])) + "\n"
        name = f"traces-2026-01-01T00-00-0{number}.000.json"
        (tmp_path / f"{name}.gz" if packed else tmp_path / name).write_bytes(
            gzip.compress(text.encode()) if packed else text.encode()
        )
    (tmp_path / "notes.txt").write_text("not ours")
    table = read_traces([tmp_path]).table
    assert steps(table, *SHAPE) == SUPPORT * 2
    assert table["complete"].to_pylist() == [True] * 14


def test_usage_model_and_texts(recorder: Recorder, tmp_path: Path) -> None:
    asked = [
        {"role": "system", "parts": [{"type": "text", "content": "be brief"}]},
        {"role": "user", "parts": [{"type": "text", "content": "hello"}]},
    ]
    answered = [{"role": "assistant", "parts": [{"type": "tool_call", "name": "go", "arguments": {"x": 1}}]}]
    recorder.add(
        "chat m",
        0,
        1,
        attributes=chat(
            **{
                "gen_ai.usage.input_tokens": 400,
                "gen_ai.usage.output_tokens": 20,
                "gen_ai.usage.cache_read.input_tokens": 256,
                "gen_ai.response.finish_reasons": ["tool_calls"],
                "gen_ai.input.messages": json.dumps(asked),
                "gen_ai.output.messages": json.dumps(answered),
            }
        ),
    )
    [row] = collected(read_spans(write_lines(tmp_path / "t.json", envelope(recorder.spans))))[0].to_pylist()
    assert (row["input_tokens"], row["output_tokens"], row["cached_input_tokens"], row["model"]) == (400, 20, 256, "m")
    assert (row["system_prompt"], row["input_text"], row["output_text"]) == ("be brief", "hello", 'go({"x":1})')
    assert row["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "attributes",
    [
        {
            "gen_ai.system": "openai",
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "m",
            "gen_ai.usage.prompt_tokens": 400,
            "gen_ai.usage.completion_tokens": 20,
            "gen_ai.usage.cache_read_input_tokens": 256,
            "gen_ai.prompt.0.role": "system",
            "gen_ai.prompt.0.content": "be brief",
            "gen_ai.prompt.1.role": "user",
            "gen_ai.prompt.1.content": "hello",
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.content": "yes",
        },
        {
            "gen_ai.system": "openai",  # before there were operation names
            "llm.request.type": "chat",
            "gen_ai.request.model": "m",
            "gen_ai.usage.input_tokens": 400,
            "gen_ai.usage.output_tokens": 20.0,
            "gen_ai.usage.cache_read.input_tokens": 256,
            "gen_ai.system_instructions": '[{"type": "text", "content": "be brief"}]',
            "gen_ai.prompt": '[{"role": "user", "content": "hello"}]',
            "gen_ai.completion": '[{"role": "assistant", "content": "yes"}]',
        },
    ],
)
def test_older_spellings(recorder: Recorder, tmp_path: Path, attributes: dict[str, Any]) -> None:
    recorder.add("openai.chat", 0, 1, attributes=attributes)
    [row] = collected(read_spans(write_lines(tmp_path / "t.json", envelope(recorder.spans))))[0].to_pylist()
    assert (row["input_tokens"], row["output_tokens"], row["cached_input_tokens"], row["model"]) == (400, 20, 256, "m")
    assert (row["system_prompt"], row["input_text"], row["output_text"]) == ("be brief", "hello", "yes")


def test_messages_in_events(recorder: Recorder, tmp_path: Path) -> None:
    with recorder.span("chat m", 0, 1, attributes=chat()) as span:
        span.add_event("gen_ai.system.message", {"content": "be brief"})
        span.add_event("gen_ai.user.message", {"content": "hello"})
        span.add_event("gen_ai.choice", {"index": 0, "message": '{"role": "assistant", "content": "yes"}'})
    with recorder.span("chat m", 2, 3, attributes=chat()) as span:
        details = {"gen_ai.input.messages": '[{"role": "user", "parts": [{"type": "text", "content": "again"}]}]'}
        span.add_event("gen_ai.client.inference.operation.details", details)
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", envelope(recorder.spans))))
    assert steps(table, "system_prompt", "input_text", "output_text") == [
        ("be brief", "hello", "yes"),
        (None, "again", None),
    ]


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"gen_ai.response.finish_reasons": ["length", "stop"]}, "length"),
        ({"gen_ai.response.finish_reasons": ["", "stop"]}, "stop"),
        ({"gen_ai.response.finish_reasons": '["tool_calls"]'}, "tool_calls"),
        ({"gen_ai.response.finish_reasons": [], "gen_ai.response.finish_reason": "stop"}, "stop"),
        ({"gen_ai.response.finish_reason": "old", "gen_ai.response.finish_reasons": ["new"]}, "new"),
        ({"llm.response.stop_reason": "end_turn"}, "end_turn"),
        ({"gen_ai.output.messages": '[{"role": "assistant", "parts": [], "finish_reason": "stop"}]'}, "stop"),
        ({"gen_ai.completion.0.content": "yes", "gen_ai.completion.0.finish_reason": "stop"}, "stop"),
        ({"gen_ai.completion": '{"stop_reason": "what the model wrote, as JSON"}'}, None),
        ({"gen_ai.completion": "the finish_reason of all things"}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("dumped", [False, True])
def test_finish_reasons(
    recorder: Recorder, tmp_path: Path, attributes: dict[str, Any], reason: str | None, dumped: bool
) -> None:
    recorder.add("chat m", 0, 1, attributes=chat(**attributes))
    lines = [json.loads(span.to_json()) for span in recorder.spans] if dumped else [envelope(recorder.spans)]
    assert steps(read_traces([write_lines(tmp_path / "t.json", *lines)]).table, "finish_reason") == [(reason,)]


def test_finish_reasons_in_events_and_of_a_wrapped_request(recorder: Recorder, tmp_path: Path) -> None:
    with recorder.span("chat m", 0, 1, attributes=chat()) as span:
        for index, reason in enumerate(("tool_calls", "stop")):
            said = {"index": index, "finish_reason": reason, "message": '{"role": "assistant", "content": "yes"}'}
            span.add_event("gen_ai.choice", said)
    with recorder.span("chat m", 2, 3, attributes=chat()) as span:
        said = {"gen_ai.output.messages": '[{"role": "assistant", "parts": [], "finish_reason": "length"}]'}
        span.add_event("gen_ai.client.inference.operation.details", said)
    with recorder.span("chat framework", 4, 6, attributes=chat(**{"gen_ai.response.finish_reasons": ["stop"]})) as span:
        recorder.add("chat client", 4.1, 5.9, span, chat())
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", envelope(recorder.spans))))
    assert sorted(steps(table, "started_at", "finish_reason")) == list(
        zip(sorted(table["started_at"].to_pylist()), ["tool_calls", "length", "stop"], strict=True)
    )


def objects(**values: Any) -> dict[str, Any]:
    return {"kvlistValue": {"values": [{"key": key, "value": value} for key, value in values.items()]}}


def test_structured_messages(recorder: Recorder, tmp_path: Path) -> None:
    recorder.add("chat m", 0, 1, attributes=chat())
    document = envelope(recorder.spans)
    text = objects(type={"stringValue": "text"}, content={"stringValue": "hello"})
    message = objects(role={"stringValue": "user"}, parts={"arrayValue": {"values": [text]}})
    pair = {"key": "gen_ai.input.messages", "value": {"arrayValue": {"values": [message]}}}
    raw_spans(document)[0]["attributes"].append(pair)
    [row] = collected(read_spans(write_lines(tmp_path / "t.json", document)))[0].to_pylist()
    assert row["input_text"] == "hello"


def test_nested_agents_lie_flat(recorder: Recorder, tmp_path: Path) -> None:
    """An agent calls another as a tool, and goes on: the tool span is no step, the steps inside it are."""
    with recorder.span("invoke_agent boss", 0, 10, attributes=agent("boss")) as boss:
        recorder.add("chat m", 0.1, 1, boss, chat())
        with (
            recorder.span("execute_tool ask_helper", 1.1, 5, boss, tool("ask_helper")) as call,
            recorder.span("invoke_agent helper", 1.2, 4.9, call, agent("helper")) as helper,
        ):
            recorder.add("chat m", 1.3, 2, helper, chat())
            recorder.add("execute_tool look", 2.1, 3, helper, tool("look"))
            recorder.add("chat m", 3.1, 4, helper, chat())
        recorder.add("chat m", 5.1, 6, boss, chat())
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", envelope(recorder.spans))))
    assert steps(table, *SHAPE) == [
        (0, "boss", "llm", []),
        (1, "helper", "llm", [0]),
        (2, "look", "tool", [1]),
        (3, "helper", "llm", [2]),
        (4, "boss", "llm", [3]),
    ]
    assert set(table["workflow_type"].to_pylist()) == {"boss"}


def test_a_wrapper_around_requests_is_no_step(recorder: Recorder, tmp_path: Path) -> None:
    """A framework's span around a client's; with one request inside it lends what that does not know."""
    known = {"gen_ai.usage.input_tokens": 7, "gen_ai.input.messages": '[{"role": "user", "content": "hello"}]'}
    with recorder.span("chat framework", 0, 1, attributes=chat(**known)) as outer:
        recorder.add("chat client", 0.1, 0.9, outer, chat(**{"gen_ai.usage.output_tokens": 3}))
    with recorder.span("chat framework", 2, 6, attributes=chat(**known)) as outer:  # retried: two requests
        recorder.add("chat client", 2.1, 3, outer, chat())
        recorder.add("chat client", 3.1, 4, outer, chat())
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", envelope(recorder.spans))))
    assert steps(table, "step", "input_tokens", "output_tokens", "input_text") == [
        (0, 7, 3, "hello"),
        (0, None, None, None),
        (1, None, None, None),
    ]


def test_an_agent_that_runs_elsewhere_is_a_step(recorder: Recorder, tmp_path: Path) -> None:
    with recorder.span("invoke_workflow w", 0, 10, attributes={"gen_ai.operation.name": "invoke_workflow"}) as root:
        recorder.add("invoke_agent remote", 1, 2, root, agent("remote", **{"gen_ai.usage.input_tokens": 5}))
        recorder.add("embeddings e", 3, 4, root, {"gen_ai.operation.name": "embeddings", "gen_ai.request.model": "e"})
        recorder.add("GET /", 4, 5, root, {"http.request.method": "GET"})
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", envelope(recorder.spans))))
    assert steps(table, "agent", "kind", "input_tokens", "workflow_type") == [("remote", "llm", 5, "w")]


def test_whom_a_request_belongs_to(recorder: Recorder, tmp_path: Path) -> None:
    chain = {"gen_ai.operation.name": "invoke_workflow"}
    with recorder.span("invoke_workflow crew", 0, 10, attributes=chain) as root:
        recorder.add("chat m", 1, 2, root, chat(**{"gen_ai.agent.name": "own"}))
        recorder.add("chat m", 3, 4, root, chat())
        with recorder.span(
            "invoke_agent named by its span", 5, 6, root, {"gen_ai.operation.name": "invoke_agent"}
        ) as a:
            recorder.add("chat m", 5.1, 5.9, a, chat())
    recorder.add("chat m", 20, 21, attributes=chat())
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", envelope(recorder.spans))))
    assert table["agent"].to_pylist() == ["chat m", "own", "crew", "named by its span"]
    assert set(table["workflow_type"].to_pylist()) == {"app", "crew"}


def test_a_missing_root_is_a_censored_workflow_of_the_same_type(recorder: Recorder, tmp_path: Path) -> None:
    """Roots end last, so a cut trace lacks its root: the type is learnt from the complete ones."""
    support(recorder)
    support(recorder, 100)
    kept = [span for span in recorder.spans if span.parent is not None or span.start_time < BEGIN + 50 * SECOND]
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", envelope(kept))))
    assert set(table["workflow_type"].to_pylist()) == {"support"}
    assert table["complete"].to_pylist() == [True] * 7 + [False] * 7
    assert steps(table, *SHAPE) == SUPPORT * 2


def test_an_unended_root_is_censored(recorder: Recorder, tmp_path: Path) -> None:
    support(recorder)
    document = envelope(recorder.spans)
    next(span for span in raw_spans(document) if "parentSpanId" not in span)["endTimeUnixNano"] = "0"
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", document)))
    assert steps(table, *SHAPE) == SUPPORT
    assert table["complete"].to_pylist() == [False] * 7


def test_a_caller_elsewhere_is_no_missing_root(recorder: Recorder, tmp_path: Path) -> None:
    """The parent ran in another process and its spans went elsewhere: the workflow is whole."""
    support(recorder)
    document = envelope(recorder.spans)
    root = next(span for span in raw_spans(document) if "parentSpanId" not in span)
    root["parentSpanId"], root["flags"] = "ab" * 8, 0x300
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", document)))
    assert table["complete"].to_pylist() == [True] * 7


def test_a_lost_span_in_between_keeps_the_workflow(recorder: Recorder, tmp_path: Path) -> None:
    support(recorder)
    kept = [span for span in recorder.spans if span.name != "invoke_agent writer"]
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", envelope(kept))))
    assert [shape[3] for shape in steps(table, *SHAPE)] == [shape[3] for shape in SUPPORT]
    assert table["agent"].to_pylist()[-1] == "support"  # whose it was went with the span
    assert table["complete"].to_pylist() == [True] * 7


def test_a_conversation_of_several_traces_is_one_workflow(recorder: Recorder, tmp_path: Path) -> None:
    turns = {"gen_ai.conversation.id": "c1"}
    support(recorder, 100, **turns)
    support(recorder, 0, **turns)
    support(recorder, 50, **{"gen_ai.conversation.id": "c2"})
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", envelope(recorder.spans))))
    one = table.filter([name == "c1" for name in table["workflow_id"].to_pylist()])
    second = [(step + 7, name, kind, [p + 7 for p in waits] or [6]) for step, name, kind, waits in SUPPORT]
    assert steps(one, *SHAPE) == SUPPORT + second
    assert set(table["workflow_id"].to_pylist()) == {"c1", "c2"}
    assert table["complete"].to_pylist() == [True] * 21


def test_traces_of_a_conversation_at_once_are_a_fan_out(recorder: Recorder, tmp_path: Path) -> None:
    turn = {"gen_ai.conversation.id": "c"}
    for name, start, end in (("a", 0, 1), ("b", 2, 6), ("c", 3, 5), ("d", 7, 8)):
        recorder.add("chat m", start, end, attributes=chat(**turn, **{"gen_ai.agent.name": name}))
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", envelope(recorder.spans))))
    assert steps(table, "agent", "parent_steps") == [("a", []), ("b", [0]), ("c", [0]), ("d", [1, 2])]


def test_ids_of_nested_agents_conversations_do_not_tear_a_trace(recorder: Recorder, tmp_path: Path) -> None:
    """Each agent with a thread id of its own, none on the root: the trace is the workflow."""
    with recorder.span("invoke_workflow w", 0, 10, attributes={"gen_ai.operation.name": "invoke_workflow"}) as root:
        recorder.add("chat m", 1, 2, root, chat(**{"gen_ai.conversation.id": "thread-1"}))
        recorder.add("chat m", 3, 4, root, chat(**{"gen_ai.conversation.id": "thread-2"}))
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", envelope(recorder.spans))))
    assert set(table["workflow_id"].to_pylist()) == {f"{1:032x}"}


def test_applications_in_one_file_are_told_apart(tmp_path: Path) -> None:
    """By service, and inside a service by workflow name; also where they share a conversation id."""
    one, other = Recorder("one"), Recorder("other")
    turn = {"gen_ai.conversation.id": "c"}
    one.add("chat m", 0, 1, attributes=chat(**turn))
    one.add("chat m", 2, 3, attributes=chat(**turn, **{"gen_ai.workflow.name": "nightly"}))
    for _ in range(5):  # other trace ids than the first application's
        other.provider.id_generator.generate_trace_id()
    other.add("chat m", 0, 1, attributes=chat(**turn))
    path = write_lines(tmp_path / "t.json", envelope(one.spans), envelope(other.spans))
    table, _, _ = collected(read_spans(path))
    assert sorted(steps(table, "workflow_type", "workflow_id", "step")) == [
        ("nightly", "c", 0),
        ("one", "c", 0),
        ("other", "c", 0),
    ]


@pytest.mark.parametrize("dumped", [False, True])
def test_a_workflow_named_by_its_process_is_named_where_the_root_is_missing(tmp_path: Path, dumped: bool) -> None:
    recorder = Recorder(**{"gen_ai.workflow.name": "nightly"})
    with recorder.span("invoke_agent bot", 0, 9, attributes=agent("bot")) as root:
        recorder.add("chat m", 1, 2, root, chat())
    kept = recorder.spans[:1]
    lines = [json.loads(span.to_json()) for span in kept] if dumped else [envelope(kept)]
    table, _, _ = collected(read_spans(write_lines(tmp_path / "t.json", *lines)))
    assert steps(table, "workflow_type", "complete") == [("nightly", False)]


def test_lines_of_logs_and_metrics_are_passed_over(recorder: Recorder, tmp_path: Path) -> None:
    support(recorder)
    path = write_lines(tmp_path / "t.json", {"resourceLogs": []}, envelope(recorder.spans), {"resourceMetrics": []})
    assert steps(collected(read_spans(path))[0], *SHAPE) == SUPPORT


def test_single_spans_as_the_sdk_prints_them(recorder: Recorder, tmp_path: Path) -> None:
    support(recorder)
    path = tmp_path / "t.jsonl"
    path.write_text("".join(f"{span.to_json(indent=None)}\n" for span in recorder.spans), encoding="utf-8")
    assert detect(path) == "otel"
    table, _, _ = collected(read_spans(path))
    assert steps(table, *SHAPE) == SUPPORT
    assert set(table["workflow_type"].to_pylist()) == {"support"}


def test_a_pretty_printed_document(recorder: Recorder, tmp_path: Path) -> None:
    support(recorder)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(envelope(recorder.spans), indent=2), encoding="utf-8")
    assert steps(collected(read_spans(path))[0], *SHAPE) == SUPPORT


def test_chunks_are_bounded_and_memory_is_not_spent_on_texts(tmp_path: Path) -> None:
    recorder = Recorder()
    text = "x" * 2**20
    for number in range(80):
        said = json.dumps([{"role": "user", "content": text}])
        recorder.add("chat m", number, number + 0.5, attributes=chat(**{"gen_ai.input.messages": said}))
    path = write_lines(tmp_path / "t.json", *(envelope([span]) for span in recorder.spans))
    chunks = list(read_spans(path))
    assert sum(chunk.table.num_rows for chunk in chunks) == 80
    assert max(chunk.table.num_rows for chunk in chunks) <= 32
    assert sum(chunk.read_bytes for chunk in chunks) == path.stat().st_size
