"""Spans written by OpenTelemetry's own SDK, encoded by its own exporter, as lines of a collector's file exporter."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, set_span_in_context

from presage.datasets.schema import concat
from presage.datasets.schema.source import Origin, Source
from presage.datasets.schema.validate import validate

SECOND = 1_000_000_000
BEGIN = 1_767_225_600 * SECOND


class _Counting(IdGenerator):
    """Ids that are the same in every run."""

    def __init__(self) -> None:
        self.spans = self.traces = 0

    def generate_span_id(self) -> int:
        self.spans += 1
        return self.spans

    def generate_trace_id(self) -> int:
        self.traces += 1
        return self.traces


class Recorder:
    """An instrumented application; times are seconds after `BEGIN`."""

    def __init__(self, service: str | None = "app", **resource: str) -> None:
        self.exporter = InMemorySpanExporter()
        attributes = {**resource} | ({"service.name": service} if service is not None else {})
        self.provider = TracerProvider(resource=Resource(attributes), id_generator=_Counting())
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    @contextmanager
    def span(
        self,
        name: str,
        start: float,
        end: float,
        parent: Span | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> Iterator[Span]:
        context = set_span_in_context(parent) if parent is not None else None
        made = self.tracer.start_span(name, context, attributes=attributes, start_time=BEGIN + int(start * SECOND))
        yield made
        made.end(BEGIN + int(end * SECOND))

    def add(
        self,
        name: str,
        start: float,
        end: float,
        parent: Span | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        with self.span(name, start, end, parent, attributes):
            pass

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()


def chat(**more: Any) -> dict[str, Any]:
    return {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", **more}


def agent(name: str, **more: Any) -> dict[str, Any]:
    return {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name, **more}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name, **more}


def envelope(spans: Iterable[ReadableSpan]) -> dict[str, Any]:
    """The spans as the OTLP JSON that a collector writes: ids in hex, where protobuf's JSON has base64."""
    document = MessageToDict(encode_spans(list(spans)), use_integers_for_enums=True)
    for resource in document["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for one in (span, *span.get("links", ())):
                    for key in {"traceId", "spanId", "parentSpanId"} & one.keys():
                        one[key] = base64.b64decode(one[key]).hex()
    return document


def raw_spans(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        span for resource in document["resourceSpans"] for scope in resource["scopeSpans"] for span in scope["spans"]
    ]


def write_lines(path: Path, *documents: Any) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return path


def collected(sources: Iterable[Source]) -> tuple[pa.Table, dict[str, int], set[tuple[str, str]]]:
    """All chunks as one valid table, what was skipped, and the spoiled workflows."""
    chunks = list(sources)
    skipped: dict[str, int] = {}
    for chunk in chunks:
        for reason, count in chunk.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    table = concat([chunk.table for chunk in chunks], ["test"] * len(chunks))
    valid = validate(table, Origin.of("test", table.num_rows)) if table.num_rows else table
    return valid, skipped, set().union(*(chunk.spoiled for chunk in chunks))


def steps(table: pa.Table, *columns: str) -> list[tuple[Any, ...]]:
    return list(zip(*(table.column(name).to_pylist() for name in columns), strict=True))
