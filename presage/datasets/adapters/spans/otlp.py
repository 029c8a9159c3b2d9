"""Span documents: OTLP JSON lines of OpenTelemetry's collector, and spans as one JSON object each.

OTLP ids are hex or base64 (they are only compared); 64-bit numbers may be strings. An exporter may write lines of logs
and metrics into the same file; they are skipped. Single spans are what OpenTelemetry's `span.to_json()`, Phoenix and
its data frames write; keys may be flat ("context.trace_id", "attributes.llm.model_name"), attributes nested:

    {"name": …, "context": {"trace_id": …, "span_id": …}, "parent_id": …, "start_time": …, "end_time": …,
     "attributes": {…}}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec

from presage.datasets.adapters.files.text import Place
from presage.datasets.adapters.spans.attributes import FLATTENED, PLAN, Found, keep, keep_event
from presage.datasets.adapters.spans.intake import SIGNALS, Intake, described, time_ns

_PARENT_IS_REMOTE: Final = 0x300  # flags: "is remote" is known and true


class _Value(msgspec.Struct, gc=False, frozen=True, rename="camel"):
    string_value: str | None = None
    int_value: int | str | None = None
    double_value: float | str | None = None  # NaN is a string
    bool_value: bool | None = None
    array_value: dict[str, Any] | None = None
    kvlist_value: dict[str, Any] | None = None


class _Attribute(msgspec.Struct, gc=False):
    key: str
    value: _Value = _Value()


class _Event(msgspec.Struct, gc=False):
    name: str = ""
    attributes: list[_Attribute] | None = None


class _Span(msgspec.Struct, gc=False, rename="camel"):
    trace_id: str = ""
    span_id: str = ""
    parent_span_id: str | None = None
    name: str = ""
    flags: int | None = None
    start_time_unix_nano: int | str | None = None
    end_time_unix_nano: int | str | None = None
    attributes: list[_Attribute] | None = None
    events: list[_Event] | None = None


class _Scope(msgspec.Struct, gc=False):
    spans: list[_Span] | None = None


class _Resource(msgspec.Struct, gc=False):
    attributes: list[_Attribute] | None = None


class _ResourceSpans(msgspec.Struct, gc=False, rename="camel"):
    resource: _Resource | None = None
    scope_spans: list[_Scope] | None = None
    instrumentation_library_spans: list[_Scope] | None = None  # what collectors before 0.60 wrote


class Envelope(msgspec.Struct, gc=False, rename="camel"):
    """A line of OTLP: the spans of some resources."""

    resource_spans: list[_ResourceSpans] | None = None


_decode: Final[Callable[[bytes], Envelope]] = msgspec.json.Decoder(Envelope).decode


def decode(line: bytes) -> Any:
    """Decode a line: an `Envelope` if it is OTLP with spans, else any JSON; raises msgspec.DecodeError."""
    try:
        envelope = _decode(line)
        if envelope.resource_spans is not None:
            return envelope
    except msgspec.ValidationError:
        pass  # JSON, but not a valid envelope: `_take_otlp` reports the problem
    return msgspec.json.decode(line)


def is_otlp(document: Any) -> bool:
    """Whether a document is OTLP, of any signal."""
    return isinstance(document, Envelope) or (isinstance(document, dict) and not SIGNALS.isdisjoint(document))


def take_spans(document: Any, place: Place, intake: Intake) -> None:
    """Pass on every span of a document, OTLP or a single span.

    Unless bad spans are skipped, raises TraceError for one, and for a document that is neither.
    """
    if is_otlp(document):
        _take_otlp(document, place, intake)
    elif is_span(document):
        _take_span(document, place, intake)
    else:
        message = (
            f'{described(document)}, neither OTLP JSON (an object with "resourceSpans") nor a span (with '
            '"context"): check the format; plain JSONL is --format jsonl'
        )
        intake.refuse(place, message, "line that holds no spans")


def _take_otlp(document: Any, place: Place, intake: Intake) -> None:
    if not isinstance(document, Envelope):
        try:
            document = msgspec.convert(document, Envelope)
        except msgspec.ValidationError as error:
            intake.refuse(place, f"not valid OTLP: {error}: export the spans again", "line that is no OTLP")
            return
    for resource in document.resource_spans or ():
        shared: Found = {}
        service = None
        for attribute in (resource.resource.attributes if resource.resource else None) or ():
            if attribute.key == "service.name":
                service = attribute.value.string_value or None
            elif attribute.key in PLAN:
                shared[attribute.key] = _value(attribute.value)
        for scope in resource.scope_spans or resource.instrumentation_library_spans or ():
            for span in scope.spans or ():
                _take_otlp_span(span, place, service, shared, intake)


def _take_otlp_span(span: _Span, place: Place, service: str | None, shared: Found, intake: Intake) -> None:
    found = shared.copy()
    try:
        for attribute in span.attributes or ():
            key = attribute.key
            if key in PLAN:
                text = attribute.value.string_value
                found[key] = text if text is not None else _value(attribute.value)
            elif key.startswith(FLATTENED):
                keep(found, key, _value(attribute.value))
        for event in span.events or ():
            if event.name.startswith("gen_ai."):
                keep_event(found, event.name, {one.key: _value(one.value) for one in event.attributes or ()})
        start, end = int(span.start_time_unix_nano or 0), int(span.end_time_unix_nano or 0)
    except (KeyError, TypeError, ValueError, AttributeError):
        message = f"span {span.span_id}: a number or a list in it is not valid OTLP: export the spans again"
        intake.refuse(place, message, "span that is no OTLP", span.trace_id)
        return
    intake.take(
        place,
        found,
        trace=span.trace_id,
        span=span.span_id,
        parent=span.parent_span_id,
        name=span.name,
        start=start or None,
        end=end or None,
        service=service,
        remote=(span.flags or 0) & _PARENT_IS_REMOTE == _PARENT_IS_REMOTE,
    )


def _value(value: _Value) -> Any:
    if value.string_value is not None:
        return value.string_value
    if value.int_value is not None:
        return int(value.int_value)
    if value.double_value is not None:
        return value.double_value
    if value.bool_value is not None:
        return value.bool_value
    if value.array_value is not None:
        return [_inner(one) for one in value.array_value.get("values") or ()]
    if value.kvlist_value is not None:
        return {one["key"]: _inner(one.get("value")) for one in value.kvlist_value.get("values") or ()}
    return None


def _inner(wrapped: Any) -> Any:
    """A value inside a list or an object, which is still encoded."""
    return None if wrapped is None else _value(msgspec.convert(wrapped, _Value))


_FLAT: Final = "attributes."


def is_span(document: Any) -> bool:
    """Whether a JSON object is one span."""
    return isinstance(document, dict) and (isinstance(document.get("context"), dict) or "context.span_id" in document)


def _take_span(document: dict[str, Any], place: Place, intake: Intake) -> None:
    resource = document.get("resource")
    resource = resource.get("attributes") if isinstance(resource, dict) else None
    shared = resource if isinstance(resource, dict) else {}
    found: Found = {}
    for key, value in (*shared.items(), *_attributes(document)):
        keep(found, key, value)
    service = shared.get("service.name")
    take_object(
        document,
        found,
        place,
        intake,
        trace=_id(document, "trace_id"),
        service=service if isinstance(service, str) and service else None,
        events=document.get("events") or (),
    )


def take_object(
    span: dict[str, Any],
    found: Found,
    place: Place,
    intake: Intake,
    *,
    trace: Any,
    service: str | None,
    events: Iterable[Any] = (),
    running: bool = False,
) -> None:
    """Pass on a span that is one JSON object, its attributes in `found`; of a `running` trace the root has no end.

    Raises TraceError if the span is malformed, and bad spans are not skipped.
    """
    try:
        for event in events:
            if event["name"].startswith("gen_ai."):
                keep_event(found, event["name"], event.get("attributes") or {})
        start = time_ns(span.get("start_time_unix_nano", span.get("start_time")))
        end = time_ns(span.get("end_time_unix_nano", span.get("end_time")))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        message = "a span whose events or times cannot be read; expected ISO 8601 or a number since 1970: export again"
        intake.refuse(place, message, "span with unreadable times", trace)
        return
    parent = span.get("parent_span_id", span.get("parent_id"))
    intake.take(
        place,
        found,
        trace=trace,
        span=_id(span, "span_id"),
        parent=_plain_id(parent),
        name=span.get("name"),
        start=start,
        end=None if running and parent is None else end,
        service=service,
    )


def _attributes(document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    attributes = document.get("attributes")
    if isinstance(attributes, dict):
        yield from _flat("", attributes)
    yield from _flat("", {key[len(_FLAT) :]: value for key, value in document.items() if key.startswith(_FLAT)})


def _flat(prefix: str, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Nested attributes under dotted names; an object that is a known attribute itself stays nested."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in PLAN:
            yield name, value
        elif isinstance(value, dict):
            yield from _flat(f"{name}.", value)
        elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
            yield from _flat(f"{name}.", {str(i): inner for i, inner in enumerate(value)})
        else:
            yield name, value


def _id(span: dict[str, Any], name: str) -> Any:
    """An id of a span: in its context, as a flat column, or its own key."""
    context = span.get("context")
    own = span.get(f"context.{name}", span.get(name))
    return _plain_id(context.get(name, own) if isinstance(context, dict) else own)


def _plain_id(value: Any) -> Any:
    return value.removeprefix("0x") if isinstance(value, str) else value
