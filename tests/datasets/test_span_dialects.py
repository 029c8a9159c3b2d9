"""Every row of the table of dialects, with spans as its source writes them: what is a step, and what is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.trace import Status, StatusCode
from span_samples import Recorder, agent, chat, envelope, raw_spans, steps, tool, write_lines

from presage.datasets.adapters.spans.attributes import PLAN
from presage.datasets.adapters.spans.dialects import DIALECTS
from presage.datasets.ingest import ingest
from presage.datasets.read import Traces, read_traces
from presage.errors import TraceError


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def read(recorder: Recorder, folder: Path) -> Traces:
    return read_traces([write_lines(folder / "spans.json", envelope(recorder.spans))])


NAMES = ("workflow_id", "agent", "kind", "model", "input_tokens", "output_tokens", "cached_input_tokens")
Row = tuple[Any, ...]

# For each dialect: the name and attributes of a request and of a tool call, and the steps that they are.
SAMPLES: dict[str, tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]], list[Row]]] = {
    "LangSmith's OpenTelemetry exporter": (
        (
            "ChatOpenAI",
            {
                "langsmith.span.kind": "llm",
                "gen_ai.operation.name": "chat",
                "gen_ai.system": "openai",
                "gen_ai.request.model": "m",
                "gen_ai.usage.input_tokens": 100,
                "gen_ai.usage.output_tokens": 10,
                "langsmith.metadata.thread_id": "s",
                "langsmith.metadata.langgraph_checkpoint_ns": "planner:1f|1|agent:2f",
                "langsmith.trace.session_name": "default",
            },
        ),
        (
            "search",
            {
                "langsmith.span.kind": "tool",
                "gen_ai.operation.name": "execute_tool",
                "langsmith.metadata.thread_id": "s",
            },
        ),
        [("s", "planner", "llm", "m", 100, 10, None), ("s", "search", "tool", None, None, None, None)],
    ),
    "Pydantic Logfire": (
        ("chat m", {**chat(), "gen_ai.usage.input_tokens": 100, "session.id": "s", "logfire.span_type": "span"}),
        ("chat m (pending)", {**chat(), "session.id": "s", "logfire.span_type": "pending_span"}),
        [("s", "chat m", "llm", "m", 100, None, None)],
    ),
    "OpenTelemetry GenAI": (
        (
            "responses m",
            {
                "gen_ai.operation.name": "responses",
                "gen_ai.provider.name": "openai",
                "gen_ai.response.model": "m",
                "gen_ai.conversation.id": "s",
                "gen_ai.agent.name": "planner",
                "gen_ai.response.prompt_tokens": "100",
                "gen_ai.response.completion_tokens": "10",
                "gen_ai.usage.cache_read_input_tokens": 64,
            },
        ),
        ("execute_tool search", {"gen_ai.tool.name": "search", "gen_ai.conversation.id": "s"}),
        [("s", "planner", "llm", "m", 100, 10, 64), ("s", "search", "tool", None, None, None, None)],
    ),
    "OpenLLMetry (Traceloop), LiteLLM": (
        (
            "litellm_request",
            {
                "llm.request.type": "acompletion",
                "gen_ai.request.model": "m",
                "llm.usage.prompt_tokens": 100,
                "llm.usage.completion_tokens": 10,
                "traceloop.association.properties.thread_id": "s",
                "traceloop.association.properties.langgraph_node": "planner",
            },
        ),
        (
            "search.tool",
            {
                "traceloop.span.kind": "tool",
                "traceloop.entity.name": "search",
                "traceloop.association.properties.thread_id": "s",
            },
        ),
        [("s", "planner", "llm", "m", 100, 10, None), ("s", "search", "tool", None, None, None, None)],
    ),
    "Vercel AI SDK": (
        (
            "ai.generateText.doGenerate",
            {
                "ai.operationId": "ai.generateText.doGenerate",
                "ai.model.id": "m",
                "ai.usage.promptTokens": 100,
                "ai.usage.completionTokens": 10,
                "ai.usage.cachedInputTokens": 64,
                "ai.telemetry.functionId": "planner",
                "ai.telemetry.metadata.sessionId": "s",
            },
        ),
        (
            "ai.toolCall",
            {
                "ai.operationId": "ai.toolCall",
                "ai.toolCall.name": "search",
                "ai.telemetry.metadata.sessionId": "s",
            },
        ),
        [("s", "planner", "llm", "m", 100, 10, 64), ("s", "search", "tool", None, None, None, None)],
    ),
    "Claude Code": (
        (
            "claude_code.llm_request",
            {
                "span.type": "llm_request",
                "model": "m",
                "input_tokens": 2,
                "output_tokens": 10,
                "cache_read_tokens": 90,
                "cache_creation_tokens": 8,
                "session.id": "s",
            },
        ),
        ("claude_code.tool", {"span.type": "tool", "tool_name": "Bash", "session.id": "s"}),
        [
            ("s", "claude_code.llm_request", "llm", "m", 100, 10, 90),
            ("s", "Bash", "tool", None, None, None, None),
        ],
    ),
    "OpenInference, Phoenix, Arize": (
        (
            "ChatCompletion",
            {
                "openinference.span.kind": "LLM",
                "llm.model_name": "m",
                "llm.token_count.prompt": 100,
                "llm.token_count.completion": 10,
                "session.id": "s",
                "agent.name": "planner",
            },
        ),
        ("search", {"openinference.span.kind": "TOOL", "session.id": "s"}),
        [("s", "planner", "llm", "m", 100, 10, None), ("s", "search", "tool", None, None, None, None)],
    ),
    "MLflow": (
        (
            "Completions",
            {
                "mlflow.spanType": '"CHAT_MODEL"',
                "mlflow.llm.model": '"m"',
                "mlflow.chat.tokenUsage": '{"input_tokens": 100, "output_tokens": 10, "cache_read_input_tokens": 64}',
                "mlflow.trace.session": '"s"',
            },
        ),
        ("search", {"mlflow.spanType": '"TOOL"', "mlflow.trace.session": '"s"'}),
        [("s", "Completions", "llm", "m", 100, 10, 64), ("s", "search", "tool", None, None, None, None)],
    ),
    "Langfuse": (
        (
            "answer",
            {
                "langfuse.observation.type": "generation",
                "langfuse.observation.model.name": "m",
                "langfuse.observation.usage_details": '{"input": 36, "output": 10, "input_cached_tokens": 64}',
                "langfuse.session.id": "s",
                "langfuse.observation.metadata.langgraph_node": "planner",
            },
        ),
        ("search", {"langfuse.observation.type": "tool", "langfuse.session.id": "s"}),
        [("s", "planner", "llm", "m", 100, 10, 64), ("s", "search", "tool", None, None, None, None)],
    ),
    "Spring AI (Micrometer)": (
        (
            "chat m",
            {
                **chat(),
                "gen_ai.system": "openai",
                "gen_ai.usage.input_tokens": "100",
                "gen_ai.usage.output_tokens": "10",
            },
        ),
        (
            "tool_call search",
            {
                "gen_ai.operation.name": "framework",
                "gen_ai.system": "spring_ai",
                "spring.ai.kind": "tool_call",
                "spring.ai.tool.definition.name": "search",
            },
        ),
        [("1", "chat m", "llm", "m", 100, 10, None), ("2", "search", "tool", None, None, None, None)],
    ),
    "Google ADK": (
        (
            "call_llm",
            {
                "gen_ai.system": "gcp.vertex.agent",
                "gen_ai.request.model": "m",
                "gen_ai.usage.input_tokens": 100,
                "gen_ai.response.finish_reasons": "['stop']",
                "gcp.vertex.agent.session_id": "s",
            },
        ),
        (
            "execute_tool (merged)",
            {
                "gen_ai.system": "gcp.vertex.agent",
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": "(merged tools)",
                "gcp.vertex.agent.session_id": "s",
            },
        ),
        [("s", "call_llm", "llm", "m", 100, None, None)],
    ),
    "Microsoft Agent Framework": (
        ("chat m", {**chat(), "gen_ai.conversation.id": "s", "executor.id": "planner", "workflow.name": "support"}),
        ("execute_tool search", {"gen_ai.conversation.id": "s", "workflow.name": "support"}),
        [("s", "planner", "llm", "m", None, None, None), ("s", "search", "tool", None, None, None, None)],
    ),
    "pydantic-ai, Strands, older versions": (
        (
            "agent run",
            {"agent_name": "planner", "model_name": "m", "gen_ai.usage.input_tokens": 100, "session.id": "s"},
        ),
        ("running tool", {"gen_ai.tool.name": "search", "session.id": "s"}),
        [("s", "planner", "llm", "m", 100, None, None), ("s", "search", "tool", None, None, None, None)],
    ),
}


def test_every_dialect_has_a_sample() -> None:
    assert set(SAMPLES) == {dialect.name for dialect in DIALECTS}


def test_no_attribute_stands_in_two_rows() -> None:
    names = [name for dialect in DIALECTS for of in dialect.names.values() for name in of.split()]
    names += [name for dialect in DIALECTS for name in dialect.kinds]
    assert sorted(names) == sorted(PLAN)


@pytest.mark.parametrize("dumped", [False, True])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_dialect(recorder: Recorder, tmp_path: Path, name: str, dumped: bool) -> None:
    (request, request_attributes), (call, call_attributes), right = SAMPLES[name]
    recorder.add(request, 0, 1, attributes=request_attributes)
    recorder.add(call, 2, 3, attributes=call_attributes)
    lines = [json.loads(span.to_json()) for span in recorder.spans] if dumped else [envelope(recorder.spans)]
    found = read_traces([write_lines(tmp_path / "spans.json", *lines)])
    expected = [(row[0] if row[0] == "s" else f"{int(row[0]):032x}", *row[1:]) for row in right]
    assert steps(found.table, *NAMES) == expected
    assert not any("value dropped" in what or "attribute not read" in what for what in found.notices)


@pytest.mark.parametrize(
    ("operation", "attributes", "kind"),
    [
        ("chat.completions", {}, "llm"),
        ("some_new_word", {"gen_ai.provider.name": "p", "gen_ai.usage.input_tokens": 1}, "llm"),
        ("some_new_word", {"gen_ai.tool.name": "search"}, "tool"),
        ("embeddings", {"gen_ai.provider.name": "p"}, None),
        ("create_agent", {"gen_ai.provider.name": "p", "gen_ai.agent.name": "a"}, None),
        ("some_new_word", {}, None),
        ("search_memory", {"gen_ai.provider.name": "p"}, None),
        ("moderations", {"gen_ai.provider.name": "p"}, None),
        ("count_tokens", {"gen_ai.provider.name": "p", "gen_ai.usage.input_tokens": 1}, None),
        ("audio_transcription", {"gen_ai.provider.name": "p"}, None),
        ("images.generate", {"gen_ai.provider.name": "p"}, None),
    ],
)
def test_an_operation_that_is_not_known_is_judged_by_what_it_carries(
    recorder: Recorder, tmp_path: Path, operation: str, attributes: dict[str, Any], kind: str | None
) -> None:
    recorder.add("known", 0, 1, attributes=chat(**{"session.id": "s"}))
    named = {"gen_ai.operation.name": operation, "gen_ai.request.model": "m", "session.id": "s", **attributes}
    recorder.add("span", 2, 3, attributes=named)
    found = read(recorder, tmp_path)
    assert found.table["kind"].to_pylist()[1:] == ([kind] if kind else [])
    said = "span of a kind that is no step" if operation != "some_new_word" else "span not read"
    assert any(what.startswith(said) for what in found.notices) == (kind is None)


def test_a_wrapper_under_an_unknown_operation_is_no_step(recorder: Recorder, tmp_path: Path) -> None:
    outer = {"gen_ai.operation.name": "run_crew", "gen_ai.request.model": "m", "gen_ai.usage.output_tokens": 30}
    with recorder.span("crew", 0, 9, attributes={**outer, "gen_ai.provider.name": "p"}) as root:
        with recorder.span("invoke_agent a", 1, 4, root, agent("a")) as one:
            recorder.add("chat m", 2, 3, one, chat(**{"gen_ai.usage.output_tokens": 10}))
        with recorder.span("invoke_agent b", 5, 8, root, agent("b")) as two:
            recorder.add("chat m", 6, 7, two, chat(**{"gen_ai.usage.output_tokens": 20}))
    assert steps(read(recorder, tmp_path).table, "agent", "output_tokens") == [("a", 10), ("b", 20)]


def test_vercels_outer_span_and_langsmiths_prompt_are_no_steps(recorder: Recorder, tmp_path: Path) -> None:
    outer = {"ai.operationId": "ai.generateText", "ai.model.id": "m", "ai.usage.promptTokens": 300}
    with recorder.span("ai.generateText", 0, 9, attributes=outer) as root:
        for start in (1, 5):
            inner = {"ai.operationId": "ai.generateText.doGenerate", "ai.model.id": "m", "ai.usage.promptTokens": 150}
            recorder.add("ai.generateText.doGenerate", start, start + 1, root, inner)
        recorder.add("ai.toolCall", 3, 4, root, {"ai.operationId": "ai.toolCall", "ai.toolCall.name": "search"})
        prompt = {"langsmith.span.kind": "prompt", "gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
        recorder.add("ChatPromptTemplate", 7, 8, root, prompt)
    assert steps(read(recorder, tmp_path).table, "kind", "input_tokens") == [
        ("llm", 150), ("tool", None), ("llm", 150),
    ]  # fmt: skip


def test_what_shows_that_cached_tokens_stand_outside_of_the_input(recorder: Recorder, tmp_path: Path) -> None:
    """More cached than given proves it for the provider and model in the trace; a total that has room for all, too."""
    read_of, written = "gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_creation.input_tokens"
    spans: list[dict[str, Any]] = [
        {"gen_ai.provider.name": "anthropic", "gen_ai.usage.input_tokens": 7, written: 9000},
        {"gen_ai.provider.name": "anthropic", "gen_ai.usage.input_tokens": 9500, read_of: 9000, written: 10},
        {"gen_ai.provider.name": "openai", "gen_ai.usage.input_tokens": 9500, read_of: 9000},
        {"gen_ai.provider.name": "bedrock", "gen_ai.usage.input_tokens": 50, read_of: 40,
         "gen_ai.usage.output_tokens": 5, "gen_ai.usage.total_tokens": 95},
    ]  # fmt: skip
    with recorder.span("invoke_agent a", 0, 20, attributes=agent("a")) as root:
        for number, attributes in enumerate(spans):
            recorder.add("chat m", 2 * number + 1, 2 * number + 2, root, chat(**attributes))
    assert read(recorder, tmp_path).table["input_tokens"].to_pylist() == [9007, 18510, 9500, 90]


def test_only_the_answered_attempt_is_a_step(recorder: Recorder, tmp_path: Path) -> None:
    with recorder.span("invoke_agent a", 0, 20, attributes=agent("a")) as root:
        for start in (1, 3):
            with recorder.span("chat m", start, start + 1, root, chat(**{"error.type": "RateLimitError"})) as span:
                span.set_status(Status(StatusCode.ERROR, "429"))
        recorder.add("chat fallback", 5, 6, root, chat(**{"gen_ai.usage.output_tokens": 3}))
        with recorder.span("execute_tool t", 7, 8, root, tool("t")) as span:  # a tool that fails was called
            span.set_status(Status(StatusCode.ERROR))
        with recorder.span("chat m", 9, 10, root, chat(**{"gen_ai.usage.output_tokens": 4})) as span:
            span.set_status(Status(StatusCode.ERROR, "the answer does not parse"))
    found = read(recorder, tmp_path)
    assert steps(found.table, "kind", "output_tokens") == [("llm", 3), ("tool", None), ("llm", 4)]
    assert found.notices == {"span with an error": 4, "failed attempt, which is no step": 2}
    assert set(found.table["complete"].to_pylist()) == {True}


@pytest.mark.parametrize("how", ["exception", "status", "output"])
def test_a_run_that_waits_for_somebody_is_not_complete(recorder: Recorder, tmp_path: Path, how: str) -> None:
    chain: dict[str, Any] = {"openinference.span.kind": "CHAIN"}
    outer = chain | ({"output.value": '{"__interrupt__": [1]}'} if how == "output" else {})
    with recorder.span("flow", 0, 9, attributes=outer) as root:
        recorder.add("chat m", 1, 2, root, chat())
        with recorder.span("approve", 3, 4, root, chain) as span:
            if how == "exception":
                span.add_event("exception", {"exception.type": "langgraph.errors.GraphInterrupt"})
            elif how == "status":
                span.set_status(Status(StatusCode.ERROR, "GraphInterrupt((Interrupt(value='ok?'),))"))
    found = read(recorder, tmp_path)
    assert found.table["complete"].to_pylist() == [False]
    assert found.notices == {"trace that paused: not complete": 1}


def test_a_span_that_lost_attributes_leaves_its_workflow_and_its_session_open(
    recorder: Recorder, tmp_path: Path
) -> None:
    for start, name in ((0, "first"), (10, "second")):
        with recorder.span(f"invoke_agent {name}", start, start + 5, attributes=agent(name)) as root:
            root.set_attribute("session.id", "s")
            recorder.add("chat m", start + 1, start + 2, root, chat())
    document = envelope(recorder.spans)
    raw_spans(document)[0]["droppedAttributesCount"] = 3
    found = read_traces([write_lines(tmp_path / "spans.json", document)])
    assert steps(found.table, "agent", "complete") == [("first", False), ("second", False)]
    assert found.notices == {"span that lost attributes: its workflow is not complete": 1}


def test_attributes_that_look_like_something_are_named(recorder: Recorder, tmp_path: Path) -> None:
    unknown = {"acme.usage.prompt_tokens": 5, "acme.session_id": "x", "acme.agent.name": "a", "acme.colour": "red"}
    sums = {"gen_ai.aggregated_usage.input_tokens": 9, "crewai.crew.token_usage": "9", "gen_ai.client.token.usage": 9}
    unknown |= sums | {"pydantic_ai.cache.established_tokens": 9, "baggage_conflict.gen_ai.agent.name": "a"}
    recorder.add("chat m", 0, 1, attributes=chat(**unknown, **{"gen_ai.request.max_tokens": 9}))
    assert read(recorder, tmp_path).notices == {
        "attribute not read: acme.usage.prompt_tokens": 1,
        "attribute not read: acme.session_id": 1,
        "attribute not read: acme.agent.name": 1,
    }


def observation(number: int, kind: str, name: str, parent: str | None, **more: Any) -> dict[str, Any]:
    times = {"startTime": f"2026-01-01T00:00:0{number}.000Z", "endTime": f"2026-01-01T00:00:0{number}.900Z"}
    return (
        {"id": f"o{number}", "traceId": "t", "type": kind, "name": name, "parentObservationId": parent} | times | more
    )


def exports() -> dict[str, list[Any]]:
    """One request of an agent and one tool call, in the exports that are read besides OTLP."""
    rows = [
        observation(0, "AGENT", "planner", None, endTime="2026-01-01T00:00:09.000Z"),
        observation(1, "GENERATION", "ask", "o0", model="m", usageDetails={"input": 100, "output": 10, "total": 110}),
        observation(2, "TOOL", "search", "o0"),
    ]
    recorder = Recorder()
    with recorder.span("invoke_agent planner", 0, 9, attributes=agent("planner")) as root:
        usage = {"gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 10}
        recorder.add("chat m", 1, 2, root, chat(**usage))
        recorder.add("execute_tool search", 3, 4, root, tool("search"))
    otlp = envelope(recorder.spans)
    snake = json.loads(
        json.dumps(otlp)
        .replace('"resourceSpans"', '"resource_spans"').replace('"scopeSpans"', '"scope_spans"')
        .replace('"traceId"', '"trace_id"').replace('"spanId"', '"span_id"')
        .replace('"parentSpanId"', '"parent_span_id"').replace('"startTimeUnixNano"', '"start_time_unix_nano"')
        .replace('"endTimeUnixNano"', '"end_time_unix_nano"').replace('"stringValue"', '"string_value"')
        .replace('"intValue"', '"int_value"')
    )  # fmt: skip
    agents_sdk = [
        {"object": "trace", "id": "t", "workflow_name": "w"},
        {"object": "trace.span", "id": "a", "trace_id": "t", "parent_id": None, "started_at": "2026-01-01T00:00:00Z",
         "ended_at": "2026-01-01T00:00:09Z", "span_data": {"type": "agent", "name": "planner"}},
        {"object": "trace.span", "id": "b", "trace_id": "t", "parent_id": "a", "started_at": "2026-01-01T00:00:01Z",
         "ended_at": "2026-01-01T00:00:02Z", "span_data": {"type": "generation", "model": "m",
         "usage": {"input_tokens": 100, "output_tokens": 10}}},
        {"object": "trace.span", "id": "c", "trace_id": "t", "parent_id": "a", "started_at": "2026-01-01T00:00:03Z",
         "ended_at": "2026-01-01T00:00:04Z", "span_data": {"type": "function", "name": "search"}},
    ]  # fmt: skip
    return {
        "observations of Langfuse": rows,
        "a trace of Langfuse": [{"id": "t", "name": "run", "observations": rows}],
        "a page of Langfuse": [{"data": rows, "meta": {"page": 1}}],
        "snake_case": [snake],
        "batches of Tempo": [{"batches": otlp["resourceSpans"]}],
        "a trace of Tempo": [{"trace": otlp}],
        "one span a line": raw_spans(otlp),
        "spans of the OpenAI Agents SDK": agents_sdk,
    }


@pytest.mark.parametrize("name", exports())
def test_other_exports(tmp_path: Path, name: str) -> None:
    table = read_traces([write_lines(tmp_path / "export.jsonl", *exports()[name])]).table
    assert steps(table, "agent", "kind", "input_tokens", "output_tokens", "complete") == [
        ("planner", "llm", 100, 10, True),
        ("search", "tool", None, None, True),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{\n  resource: {\n    attributes: {}\n  },\n  traceId: 'a'\n}\n", "JavaScript's ConsoleSpanExporter"),
        ('{"data": [{"traceID": "a", "spans": []}]}\n', "Jaeger"),
        ('[{"traceId": "a", "id": "b", "timestamp": 1, "duration": 1, "localEndpoint": {}}]\n', "Zipkin"),
    ],
)
def test_an_export_that_is_not_read_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "export.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=words):
        read_traces([path])


def test_an_export_of_langfuse_that_only_names_its_observations(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "traces.jsonl", {"id": "t", "name": "run", "observations": ["o1", "o2"]})
    with pytest.raises(TraceError, match="0 spans, but not one request"):
        read_traces([path])


def test_log_records_with_messages_are_counted(recorder: Recorder, tmp_path: Path) -> None:
    recorder.add("chat m", 0, 1, attributes=chat())
    log = {"eventName": "gen_ai.user.message", "body": {"stringValue": "hello"}}
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [log, log, {"eventName": "other"}]}]}]}
    found = read_traces([write_lines(tmp_path / "t.json", envelope(recorder.spans), logs)])
    assert found.notices == {"log record with a message, which is not read": 2}


def test_an_http_error_on_a_request_is_a_failed_attempt(recorder: Recorder, tmp_path: Path) -> None:
    recorder.add("chat m", 0, 1, attributes=chat(**{"session.id": "s", "http.response.status_code": 429}))
    recorder.add("chat m", 2, 3, attributes=chat(**{"session.id": "s", "http.response.status_code": 200}))
    found = read(recorder, tmp_path)
    assert found.notices["span with an error"] == 1


@pytest.mark.parametrize("templates", [False, True])
def test_logfire_names_agents_and_tools_of_the_openai_agents_sdk_in_their_spans(
    recorder: Recorder, tmp_path: Path, templates: bool
) -> None:
    workflow, run_of, function = "OpenAI Agents trace: support", "Agent run: 'triage'", "Function: lookup"
    if templates:
        workflow, run_of, function = "OpenAI Agents trace: {name}", "Agent run: {name!r}", "Function: {name}"
    system = {"gen_ai.system": "openai"}
    with (
        recorder.span(workflow, 0, 9, None, {"name": "support"}) as trace,
        recorder.span(run_of, 0, 9, trace, {"name": "triage", "tools": ["lookup"], **system}) as run,
    ):
        recorder.add("Responses API with 'm'", 0, 2, run, chat())
        recorder.add(function, 2, 4, run, {"name": "lookup", "input": "{}", "output": "found", **system})
        recorder.add("Responses API with 'm'", 4, 6, run, chat())
    found = read(recorder, tmp_path)
    assert steps(found.table, "agent", "kind") == [("triage", "llm"), ("lookup", "tool"), ("triage", "llm")]
    assert set(found.table["workflow_type"].to_pylist()) == {"support"}
    assert not found.notices


def test_spans_beside_a_request_that_are_none(recorder: Recorder, tmp_path: Path) -> None:
    """OpenLLMetry has two spans for a graph, of which one stays empty; LlamaIndex calls its preparation an LLM."""
    with recorder.span("execute_task researcher", 0, 9, None, {"gen_ai.operation.name": "execute_task"}) as node:
        recorder.add("invoke_agent LangGraph", 1, 8, node, agent("LangGraph", **{"gen_ai.provider.name": "langgraph"}))
        with recorder.span("run_agent_step", 2, 7, node, {"openinference.span.kind": "CHAIN"}) as step:
            llm = {"openinference.span.kind": "LLM", "llm.model_name": "m", "agent.name": "researcher"}
            recorder.add("OpenAILike._prepare_chat_with_tools", 2, 3, step, llm)
            recorder.add("OpenAILike.achat", 4, 6, step, {**llm, "llm.token_count.prompt": 100})
    found = read(recorder, tmp_path)
    assert steps(found.table, "agent", "input_tokens") == [("researcher", 100)]
    assert not found.notices


def test_a_span_called_by_its_operation_alone_names_no_agent(recorder: Recorder, tmp_path: Path) -> None:
    with recorder.span("invoke_agent planner", 0, 9, attributes=agent("planner")) as run:
        for start in (1, 5):  # OpenLIT's spans of the turns of an agent
            turn = {"gen_ai.operation.name": "invoke_agent", "gen_ai.provider.name": "openai"}
            with recorder.span("invoke_agent", start, start + 3, run, turn) as inside:
                recorder.add("chat m", start + 1, start + 2, inside, chat())
    assert steps(read(recorder, tmp_path).table, "agent") == [("planner",), ("planner",)]


@pytest.mark.parametrize(
    "attributes",
    [
        {"langsmith.metadata.usage_metadata": '{"input_tokens": 100, "input_token_details": {"cache_read": 64}}'},
        {"langfuse.observation.usage_details": '{"input_tokens": 100, "input_tokens_details": {"cached_tokens": 64}}'},
        {"gen_ai.usage.input_tokens": 100, "gen_ai.usage.details.cached_tokens": 64},
    ],
)
def test_cached_tokens_among_the_details_of_a_usage(
    recorder: Recorder, tmp_path: Path, attributes: dict[str, Any]
) -> None:
    recorder.add("chat m", 0, 1, attributes=chat(**attributes))
    assert steps(read(recorder, tmp_path).table, "input_tokens", "cached_input_tokens") == [(100, 64)]


def test_langfuses_metadata_is_json(recorder: Recorder, tmp_path: Path) -> None:
    metadata = {"langgraph_checkpoint_ns": '"planner:1f|1|model:2f"', "session_id": '"s"'}
    attributes = {f"langfuse.observation.metadata.{key}": value for key, value in metadata.items()}
    recorder.add("ChatOpenAI", 0, 1, attributes={"langfuse.observation.type": "generation", **attributes})
    assert steps(read(recorder, tmp_path).table, "workflow_id", "agent") == [("s", "planner")]


def test_messages_in_the_formats_of_pydantic_ai_and_strands(recorder: Recorder, tmp_path: Path) -> None:
    asked = {"event.name": "gen_ai.user.message", "role": "user", "content": "hello"}
    answered = {"event.name": "gen_ai.choice", "index": 0, "message": {"role": "assistant", "content": "yes"}}
    other = [{"event.name": "acme", "content": "no"}, "none"]
    recorder.add("chat m", 0, 1, attributes=chat(events=json.dumps([asked, answered, *other]), **{"session.id": "s"}))
    with recorder.span("chat", 2, 3, attributes=chat(**{"session.id": "s"})) as span:
        span.add_event("gen_ai.user.message", {"content": '[{"text": "hello"}]'})
        span.add_event("gen_ai.choice", {"finish_reason": "end_turn", "message": '[{"text": "yes"}]'})
    recorder.add("chat m", 4, 5, attributes=chat(events="[no JSON", **{"session.id": "s"}))
    found = steps(read(recorder, tmp_path).table, "input_text", "output_text")
    assert found == [("hello", "yes"), ("hello", "yes"), (None, None)]


@pytest.mark.parametrize(("recovered", "complete"), [(False, False), (True, True)])
def test_a_failed_agent_whose_outer_spans_say_nothing(
    recorder: Recorder, tmp_path: Path, recovered: bool, complete: bool
) -> None:
    """The OpenAI Agents SDK marks the agent that raised, and not the spans of the run and of the trace."""
    with recorder.span("support", 0, 20, attributes={"openinference.span.kind": "AGENT"}) as root:
        with recorder.span("run", 1, 19, root, {"openinference.span.kind": "CHAIN"}) as run:
            with recorder.span("planner", 2, 9, run, {"openinference.span.kind": "AGENT"}) as one:
                recorder.add("chat m", 3, 4, one, chat())
                one.set_status(Status(StatusCode.ERROR))
            if recovered:
                recorder.add("chat m", 10, 11, run, chat())
        recorder.add("POST", 19, 20, root)
    table = read(recorder, tmp_path).table
    assert set(steps(table, "complete", "success")) == {(complete, None if complete else False)}


def test_a_wrapper_that_its_own_dialect_knows_is_no_unknown_span(recorder: Recorder, tmp_path: Path) -> None:
    client = {"spring.ai.kind": "chat_client", "gen_ai.operation.name": "framework", "gen_ai.system": "spring_ai"}
    with recorder.span("spring_ai chat_client", 0, 9, None, client) as wrapper:
        recorder.add("chat m", 0, 2, wrapper, chat())
    assert dict(read(recorder, tmp_path).notices) == {"span of a kind that is no step: chat_client": 1}


def test_strict_refuses_what_was_not_read_and_no_kind_that_is_rightly_no_step(
    recorder: Recorder, tmp_path: Path
) -> None:
    with recorder.span("invoke_agent a", 0, 9, attributes=agent("a", **{"gen_ai.conversation.id": "s"})) as root:
        for name, attributes in (
            ("embeddings m", {"gen_ai.operation.name": "embeddings", "gen_ai.request.model": "m"}),
            ("embed documents", {"gen_ai.request.model": "m"}),
            ("retriever", {"openinference.span.kind": "RETRIEVER"}),
            ("spring_ai chat_client", {"spring.ai.kind": "chat_client", "gen_ai.operation.name": "framework"}),
            ("POST /chat", {"gen_ai.conversation.id": "s", "gen_ai.system": "openai"}),
            ("node", {"openinference.span.kind": "CHAIN"}),
        ):
            recorder.add(name, 1, 2, root, attributes)
        recorder.add("chat m", 3, 4, root, chat())
    path = write_lines(tmp_path / "spans.json", envelope(recorder.spans))
    assert ingest([path], tmp_path / "store", strict=True).steps == 1
    recorder.add("rewrite m", 10, 11, None, {"gen_ai.operation.name": "rewrite", "gen_ai.request.model": "m"})
    write_lines(path, envelope(recorder.spans))
    with pytest.raises(TraceError, match="1 × span not read: rewrite"):
        ingest([path], tmp_path / "other", strict=True)


def test_vercels_requests_for_images_and_speech_are_no_steps(recorder: Recorder, tmp_path: Path) -> None:
    recorder.add("chat m", 0, 1, attributes=chat(**{"session.id": "s"}))
    for start, operation in enumerate(("ai.generateImage", "ai.generateSpeech", "ai.transcribe"), start=2):
        carried = {"ai.operationId": operation, "ai.model.id": "m", "ai.model.provider": "p", "session.id": "s"}
        recorder.add(operation, start, start + 1, attributes=carried)
    assert len(read(recorder, tmp_path)) == 1


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"gen_ai.span.kind": "LLM"},
        {"gen_ai.span.kind": "TOOL"},
        {"openinference.span.kind": "OpenInferenceSpanKindValues.LLM"},
    ],
)
def test_a_kind_says_what_a_span_is(recorder: Recorder, tmp_path: Path, kind: dict[str, str]) -> None:
    recorder.add("chat m", 0, 1, attributes=chat(**{"session.id": "s"}))
    recorder.add("work", 2, 3, attributes={"gen_ai.request.model": "m", "session.id": "s", **kind})
    found = read(recorder, tmp_path).table["kind"].to_pylist()[1:]
    assert found == [one.lower().rpartition(".")[2] for one in kind.values()]


@pytest.mark.parametrize(
    "kind",
    [
        {"openinference.span.kind": "GUARDRAIL"},
        {"openinference.span.kind": "EVALUATOR"},
        {"gen_ai.operation.name": "evaluate"},
        {"langfuse.observation.type": "guardrail"},
        {"mlflow.spanType": "EVALUATOR"},
    ],
)
def test_the_requests_of_a_judge_are_its_own(recorder: Recorder, tmp_path: Path, kind: dict[str, str]) -> None:
    with recorder.span("invoke_agent a", 0, 9, attributes=agent("a")) as root:
        recorder.add("chat m", 1, 2, root, chat())
        with recorder.span("is it safe", 3, 6, root, kind) as judge:
            recorder.add("chat m", 4, 5, judge, chat())
        recorder.add("too short to ask", 7, 8, root, kind)
    found = read(recorder, tmp_path)
    assert found.table["agent"].to_pylist() == ["a", "is it safe"]
    assert [count for what, count in found.notices.items() if what.startswith("span of a kind that is no step")] == [2]


def test_a_workflow_that_is_named_as_an_agent_is_none(recorder: Recorder, tmp_path: Path) -> None:
    """Conventions of 2026 write the name of a workflow as that of an agent."""
    named = {"gen_ai.operation.name": "invoke_workflow", "gen_ai.agent.name": "crew"}
    with recorder.span("invoke_workflow crew", 0, 9, attributes=named) as root:
        with recorder.span("planner", 1, 4, root, {"openinference.span.kind": "CHAIN"}) as node:
            recorder.add("chat m", 2, 3, node, chat())
        recorder.add("chat m", 5, 6, root, chat())
    found = steps(read(recorder, tmp_path).table, "workflow_type", "agent")
    assert found == [("crew", "planner"), ("crew", "crew")]


def test_an_exception_without_a_status_is_a_failed_attempt_of_a_request_alone(
    recorder: Recorder, tmp_path: Path
) -> None:
    with recorder.span("invoke_agent a", 0, 9, attributes=agent("a")) as root:
        root.record_exception(ValueError("caught"))
        for start, answer in ((1, {}), (3, {"gen_ai.usage.output_tokens": 7}), (5, {"gen_ai.usage.output_tokens": 8})):
            with recorder.span("chat m", start, start + 1, root, chat(**answer)) as request:
                if start < 5:
                    request.record_exception(TimeoutError())
    assert steps(read(recorder, tmp_path).table, "output_tokens", "complete") == [(7, True), (8, True)]


def test_a_tool_that_repeats_the_tokens_of_its_requests_has_none(recorder: Recorder, tmp_path: Path) -> None:
    counts = {"llm.token_count.prompt": 100, "llm.token_count.completion": 10}
    with recorder.span("CodeAgent.run", 0, 9, attributes={"openinference.span.kind": "AGENT", **counts}) as root:
        request = {"openinference.span.kind": "LLM", "llm.model_name": "m", **counts}
        recorder.add("Model.generate", 1, 2, root, request)
        recorder.add("search", 3, 4, root, {"openinference.span.kind": "TOOL", **counts})
    assert steps(read(recorder, tmp_path).table, "kind", "input_tokens") == [("llm", 100), ("tool", None)]


@pytest.mark.parametrize(
    ("read_of", "written"),
    [
        ("gen_ai.usage.cache_read_tokens", "gen_ai.usage.cache_creation_tokens"),
        ("gen_ai.usage.cache_read_tokens", "gen_ai.usage.cache_write_tokens"),
    ],
)
def test_cached_tokens_by_their_short_names(recorder: Recorder, tmp_path: Path, read_of: str, written: str) -> None:
    recorder.add("chat m", 0, 1, attributes=chat(**{"gen_ai.usage.input_tokens": 10, read_of: 900, written: 50}))
    assert steps(read(recorder, tmp_path).table, "input_tokens", "cached_input_tokens") == [(960, 900)]


def test_what_a_span_that_is_no_step_carries_is_named_too(recorder: Recorder, tmp_path: Path) -> None:
    recorder.add("chat m", 0, 1, attributes=chat(**{"k8s.node.name": "node-1"}))
    recorder.add("work", 2, 3, attributes={"some.tool.name": "search", "k8s.node.name": "node-1"})
    assert read(recorder, tmp_path).notices == {"attribute not read: some.tool.name": 1}


def test_exports_of_langfuse_to_blob_storage_and_as_csv(tmp_path: Path) -> None:
    begin, end = (f"2026-01-01 00:00:0{second}.000000" for second in (1, 3))
    row = {"id": "b", "trace_id": "t", "type": "GENERATION", "name": "call", "parent_observation_id": None}
    row |= {"start_time": begin, "end_time": end, "provided_model_name": "m", "session_id": "s"}
    blob = write_lines(tmp_path / "blob.json", {**row, "usage_details": {"input": 10, "input_cached_tokens": 90}})
    names = ["id", "traceId", "type", "name", "parentObservationId", "startTime", "endTime", "model", "sessionId"]
    fields = [*map(str, [value or "" for value in row.values()]), '"{""input"": 10, ""input_cached_tokens"": 90}"']
    table = tmp_path / "rows.csv"
    table.write_text(",".join([*names, "usageDetails"]) + "\n" + ",".join(fields) + "\n", encoding="utf-8")
    for path in (blob, table):
        assert steps(read_traces(path).table, *NAMES) == [("s", "call", "llm", "m", 100, None, 90)]


@pytest.mark.parametrize(
    ("counts", "right"),
    [
        ({"input": 50, "output": 10, "thought": 100, "total": 160}, (50, 110)),  # Gemini: beside the output
        ({"input": 50, "output": 110, "thought": 100, "total": 160}, (50, 110)),  # OpenAI: inside
        ({"input": 50, "output": 10, "thought": 100}, (50, 110)),  # more than the output proves it
        ({"input": 50, "output": 110, "thought": 100}, (50, 110)),
        ({"input": 50, "output": 10, "thought": 100, "total": 160, "cached": 40}, (50, 110)),  # no room for the cache
        ({"input": 50, "output": 110, "thought": 100, "total": 200, "cached": 40}, (90, 110)),
        ({"input": 50, "output": 10, "thought": 100, "total": 200, "cached": 40}, (90, 110)),
    ],
)
def test_what_a_model_thought_is_output(
    recorder: Recorder, tmp_path: Path, counts: dict[str, int], right: tuple[int, int]
) -> None:
    names = {
        "input": "gen_ai.usage.input_tokens", "output": "gen_ai.usage.output_tokens",
        "thought": "gen_ai.usage.reasoning.output_tokens", "total": "gen_ai.usage.total_tokens",
        "cached": "gen_ai.usage.cache_read.input_tokens",
    }  # fmt: skip
    recorder.add("chat m", 0, 1, attributes=chat(**{names[of]: count for of, count in counts.items()}))
    assert steps(read(recorder, tmp_path).table, "input_tokens", "output_tokens") == [right]


def test_a_span_with_tokens_alone_is_a_request(recorder: Recorder, tmp_path: Path) -> None:
    """That of vLLM's engine, where no client has any around it."""
    recorder.add("llm_request", 0, 1, attributes={"gen_ai.usage.prompt_tokens": 9, "gen_ai.usage.completion_tokens": 2})
    assert steps(read(recorder, tmp_path).table, "kind", "input_tokens", "output_tokens") == [("llm", 9, 2)]


def test_tools_that_a_model_called_at_once_under_one_id_are_two(recorder: Recorder, tmp_path: Path) -> None:
    with recorder.span("invoke_agent a", 0, 9, attributes=agent("a")) as root:
        recorder.add("chat m", 1, 2, root, chat())
        recorder.add("execute_tool x", 3, 5, root, tool("x", **{"gen_ai.tool.call.id": "call_0"}))
        recorder.add("execute_tool y", 4, 6, root, tool("y", **{"gen_ai.tool.call.id": "call_0"}))
    assert read(recorder, tmp_path).table["agent"].to_pylist() == ["a", "x", "y"]
