"""Exports of tracing products, as OTLP or as spans of one JSON object each.

Read are a collector's OTLP in other spellings (snake_case, Tempo's batches, one span or one scope a line), pages of
Phoenix' REST API, what JavaScript's span objects are as JSON, observations of Langfuse (rows, or traces that hold
them), and spans of the OpenAI Agents SDK. Each becomes what `otlp` reads; nothing is interpreted here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from presage.datasets.schema.messages import from_json

_UNDERSCORE: Final = re.compile(r"_([a-z])")
_OTLP_KEYS: Final = frozenset({"resource_spans", "resource_logs"})
_SPAN_KEYS: Final = frozenset({"context", "context.span_id"})
_US: Final = 1000

Spans = list[dict[str, Any]]


def unwrapped(document: Any) -> list[Any] | None:
    """The documents that a recognised export stands for, OTLP or single spans; None for any other document."""
    if not isinstance(document, dict):
        return None
    for is_one, convert in _EXPORTS:
        if is_one(document):
            return list(convert(document))
    return None


def names_of_unread(document: Any) -> str | None:
    """What an export that is recognised and not read is called, and how to get one that is."""
    if not isinstance(document, dict):
        return None
    data = document.get("data")
    first = data[0] if isinstance(data, list) and data else document
    if isinstance(first, dict) and "traceID" in first:
        return "an export of Jaeger's API: export OTLP JSON, as a collector's file exporter writes it"
    if "localEndpoint" in first if isinstance(first, dict) else False:
        return "Zipkin spans: export OTLP JSON, as a collector's file exporter writes it"
    return None


def is_console_print(text: bytes) -> bool:
    """Whether text is what JavaScript's console exporter prints, which is no JSON."""
    return re.match(rb"\s*\{\s*(?:resource|traceId|instrumentationScope|name): ", text) is not None


def _camel(value: Any) -> Any:
    """OTLP with the keys of its JSON; names of attributes are values of `key`, and stay."""
    if isinstance(value, dict):
        return {_UNDERSCORE.sub(lambda found: found[1].upper(), key): _camel(inner) for key, inner in value.items()}
    return [_camel(inner) for inner in value] if isinstance(value, list) else value


def _batches(document: dict[str, Any]) -> Iterator[Any]:
    yield {"resourceSpans": document.get("batches") or (document.get("scopeSpans") and [document])}


def _tempo(document: dict[str, Any]) -> Iterator[Any]:
    yield document["trace"]


def _one_span(document: dict[str, Any]) -> Iterator[Any]:
    yield {"resourceSpans": [{"resource": document.get("resource"), "scopeSpans": [{"spans": [document]}]}]}


def _page(document: dict[str, Any]) -> Iterator[Any]:
    yield from document["data"]


def _span(trace: Any, span: Any, parent: Any, **more: Any) -> dict[str, Any]:
    return {"context": {"trace_id": trace, "span_id": span}, "parent_id": parent, **more}


def _javascript(document: dict[str, Any]) -> Iterator[Any]:
    start, parent = document["timestamp"] * _US, document.get("parentSpanContext")
    yield _span(
        document["traceId"],
        document["id"],
        parent.get("spanId") if isinstance(parent, dict) else document.get("parentId"),
        name=document.get("name"),
        start_time_unix_nano=start,
        end_time_unix_nano=start + (document.get("duration") or 0) * _US,
        status=document.get("status"),
        attributes=document.get("attributes"),
        resource=document.get("resource"),
    )


def _langfuse(document: dict[str, Any]) -> Iterator[Any]:
    for row in document.get("observations") or ([document] if "traceId" in document else []):
        usage = next(filter(None, map(row.get, ("usageDetails", "usage_details", "usage"))), None) or {
            "input": row.get("promptTokens") or row.get("inputUsage"),
            "output": row.get("completionTokens") or row.get("outputUsage"),
        }
        metadata = from_json(row.get("metadata"))
        attributes = {
            "langfuse.observation.type": row.get("type"),
            "langfuse.observation.model.name": row.get("model") or row.get("providedModelName"),
            "langfuse.observation.usage_details": usage,
            "langfuse.observation.input": row.get("input"),
            "langfuse.observation.output": row.get("output"),
            "langfuse.session.id": row.get("sessionId") or document.get("sessionId"),
            "langfuse.trace.name": row.get("traceName")
            or (document.get("name") if "observations" in document else None),
            "metadata": metadata.get("attributes", metadata) if isinstance(metadata, dict) else None,
        }
        yield _span(
            row.get("traceId") or document.get("id"),
            row["id"],
            row.get("parentObservationId"),
            name=row.get("name"),
            start_time=row.get("startTime"),
            end_time=row.get("endTime"),
            status={"code": row.get("level"), "message": row.get("statusMessage")},
            attributes={key: value for key, value in attributes.items() if value not in (None, "", {})},
        )


_AGENTS_KINDS: Final = {"generation": "LLM", "response": "LLM", "function": "TOOL", "handoff": "TOOL", "agent": "AGENT"}


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
    return unwrapped(first) is not None or (isinstance(first, dict) and not _SPAN_KEYS.isdisjoint(first))


_EXPORTS: Final[tuple[tuple[Callable[[dict[str, Any]], bool], Callable[[dict[str, Any]], Iterator[Any]]], ...]] = (
    (lambda one: not _OTLP_KEYS.isdisjoint(one), lambda one: iter([_camel(one)])),
    (lambda one: isinstance(one.get("batches"), list) or isinstance(one.get("scopeSpans"), list), _batches),
    (lambda one: isinstance(one.get("trace"), dict) and "resourceSpans" in one["trace"], _tempo),
    (lambda one: "traceId" in one and "spanId" in one and "startTimeUnixNano" in one, _one_span),
    (lambda one: {"traceId", "id", "timestamp", "duration"} <= one.keys() and "localEndpoint" not in one, _javascript),
    (lambda one: {"traceId", "id", "type", "startTime"} <= one.keys(), _langfuse),
    (lambda one: "id" in one and isinstance(one.get("observations"), list), _langfuse),
    (lambda one: one.get("object") in ("trace.span", "trace"), _agents_sdk),
    (_is_page, _page),
)
"""How each export is recognised, and what it stands for."""
