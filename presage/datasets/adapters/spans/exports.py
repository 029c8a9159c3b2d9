"""Exports of tracing products, as OTLP or as spans of one JSON object each.

docs/traces.md ("Traces of OpenTelemetry, OpenInference and MLflow") lists them. Each becomes what `documents` reads;
nothing is interpreted here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

from presage.datasets.schema.messages import fields, from_json

_camel_key: Final = partial(re.compile(r"_([a-z])").sub, lambda match: match[1].upper())
_OTLP_KEYS: Final = frozenset({"resource_spans", "resource_logs"})
_UNREAD: Final = {"traceID": "an export of Jaeger's API", "localEndpoint": "Zipkin spans"}
_LANGFUSE_COUNTS: Final = ("promptTokens", "completionTokens", "totalTokens")  # of exports before usage details
_AGENTS_KINDS: Final = {
    **{"generation": "LLM", "response": "LLM", "function": "TOOL", "handoff": "TOOL"},
    **{"agent": "AGENT", "guardrail": "GUARDRAIL"},
}
_LANGFUSE: Final = ({"traceId", "id", "type", "startTime"}, {"trace_id", "id", "type", "start_time"})
"""Keys of its observations: of the API and the user interface, and of exports to blob storage."""


def unwrapped(document: Any) -> list[Any] | None:
    """The documents that a recognised export stands for, OTLP or single spans; None for any other document."""
    converters = (convert for is_one, convert in _EXPORTS if isinstance(document, dict) and is_one(document))
    convert = next(converters, None)
    return None if convert is None else list(convert(document))


def names_of_unread(document: Any) -> str | None:
    """What an export that is recognised and not read is called, and how to get one that is."""
    data = fields(document).get("data")
    first = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else fields(document)
    unread = next((name for key, name in _UNREAD.items() if key in first), None)
    return unread and f"{unread}: export OTLP JSON, as a collector's file exporter writes it"


def _camel(value: Any) -> Any:
    """OTLP with the keys of its JSON; names of attributes are values of `key`, and stay."""
    if isinstance(value, dict):
        return {_camel_key(key): _camel(inner) for key, inner in value.items()}
    return [_camel(inner) for inner in value] if isinstance(value, list) else value


def _span(trace: Any, span: Any, parent: Any, **more: Any) -> dict[str, Any]:
    return {"context": {"trace_id": trace, "span_id": span}, "parent_id": parent, **more}


def _langfuse(document: dict[str, Any]) -> Iterator[Any]:
    """An observation of Langfuse, or those of a trace; an export of traces that only names them holds none."""
    whole = document if "observations" in document else {}
    for row in whole.get("observations", [document]):
        if not isinstance(row, dict):
            continue
        usage = next(filter(None, map(row.get, ("usageDetails", "usage_details", "usage"))), None)
        metadata = from_json(row.get("metadata"))
        attributes = {
            "langfuse.observation.type": row.get("type"),
            "langfuse.observation.model.name": row.get("model") or row.get("providedModelName"),
            "langfuse.observation.usage_details": usage or {key: row.get(key) for key in _LANGFUSE_COUNTS},
            "langfuse.observation.input": row.get("input"),
            "langfuse.observation.output": row.get("output"),
            "langfuse.session.id": row.get("sessionId") or whole.get("sessionId"),
            "langfuse.trace.name": row.get("traceName") or whole.get("name"),
            "metadata": metadata.get("attributes", metadata) if isinstance(metadata, dict) else None,
        }
        yield _span(
            row.get("traceId") or whole.get("id"),
            row.get("id"),
            row.get("parentObservationId"),
            name=row.get("name"),
            start_time=row.get("startTime"),
            end_time=row.get("endTime"),
            status={"code": row.get("level"), "message": row.get("statusMessage")},
            attributes=attributes,
        )


def _agents_sdk(document: dict[str, Any]) -> Iterator[Any]:
    """A span of the OpenAI Agents SDK; its traces, which name the workflow, are no spans."""
    data = document.get("span_data")
    if not isinstance(data, dict):
        return
    usage = data.get("usage") or {}
    name = data.get("name") or data.get("type")
    kind = data.get("type")
    yield _span(
        document.get("trace_id"),
        document.get("id"),
        document.get("parent_id"),
        name=f"handoff to {data.get('to_agent')}" if kind == "handoff" else name,
        start_time=document.get("started_at"),
        end_time=document.get("ended_at"),
        status={"code": "ERROR"} if document.get("error") else {},
        attributes={
            "openinference.span.kind": _AGENTS_KINDS.get(str(kind), "CHAIN"),
            "agent.name": name if kind == "agent" else None,
            "llm.model_name": data.get("model"),
            "llm.token_count.prompt": usage.get("input_tokens", usage.get("prompt_tokens")),
            "llm.token_count.completion": usage.get("output_tokens", usage.get("completion_tokens")),
            "input.value": data.get("input"),
            "output.value": data.get("output"),
        },
    )


def _is_page(document: dict[str, Any]) -> bool:
    first = next(iter(document["data"]), None) if isinstance(document.get("data"), list) else None
    keys = first.keys() if isinstance(first, dict) else ()
    return unwrapped(first) is not None or "context" in keys or "context.span_id" in keys


_EXPORTS: Final[tuple[tuple[Callable[[dict[str, Any]], bool], Callable[[dict[str, Any]], Iterable[Any]]], ...]] = (
    (lambda document: not _OTLP_KEYS.isdisjoint(document), lambda document: [_camel(document)]),
    (
        lambda document: isinstance(document.get("batches"), list),
        lambda document: [{"resourceSpans": document["batches"]}],
    ),
    (lambda document: isinstance(document.get("scopeSpans"), list), lambda document: [{"resourceSpans": [document]}]),
    (
        lambda document: isinstance(document.get("trace"), dict) and "resourceSpans" in document["trace"],
        lambda document: [document["trace"]],
    ),
    (
        lambda span: {"traceId", "spanId", "startTimeUnixNano"} <= span.keys(),
        lambda span: [{"resourceSpans": [{"resource": span.get("resource"), "scopeSpans": [{"spans": [span]}]}]}],
    ),
    (lambda row: _LANGFUSE[0] <= row.keys(), _langfuse),
    (lambda row: _LANGFUSE[1] <= row.keys(), lambda row: _langfuse({_camel_key(key): row[key] for key in row})),
    (lambda trace: "id" in trace and isinstance(trace.get("observations"), list), _langfuse),
    (lambda document: document.get("object") in ("trace.span", "trace"), _agents_sdk),
    (_is_page, lambda document: document["data"]),
)
"""How each export is recognised, and what it stands for."""


def are_spans(columns: Iterable[str]) -> bool:
    """Whether a table with these columns holds spans."""
    given = set(columns)
    return any(some <= given for some in ({"context.trace_id", "context.span_id"}, *_LANGFUSE))
