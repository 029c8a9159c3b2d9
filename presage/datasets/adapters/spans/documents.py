"""Span documents: OTLP JSON lines of OpenTelemetry's collector, spans as one JSON object each, exported MLflow traces.

OTLP ids are hex or base64 (they are only compared); 64-bit numbers may be strings. An exporter may write lines of logs
and metrics into the same file; they are skipped. Single spans are what OpenTelemetry's `span.to_json()`, Phoenix and
its data frames write; keys may be flat ("context.trace_id", "attributes.llm.model_name"), attributes nested.
Exported MLflow traces are those of `trace.to_json()`, its command line and its data frames; MLflow 2 called some keys
otherwise. Values of attributes are JSON inside JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

import msgspec

from presage.datasets.adapters.files.text import Place
from presage.datasets.adapters.spans.attributes import PLAN, Found, is_pause, keep, keep_event, other
from presage.datasets.adapters.spans.conventions import Flag
from presage.datasets.adapters.spans.dialects import MESSAGE_EVENTS
from presage.datasets.adapters.spans.exports import names_of_unread, unwrapped
from presage.datasets.adapters.spans.intake import SIGNALS, Intake, described, time_ns
from presage.datasets.schema.messages import fields, from_json

_PARENT_IS_REMOTE: Final = 0x300  # flags: "is remote" is known and true
_CALLED: Final = (2, 5, "SPAN_KIND_SERVER", "SPAN_KIND_CONSUMER", "SpanKind.SERVER", "SpanKind.CONSUMER")
"""Kinds of spans whose parent is in another process."""
_ERRORS: Final = frozenset({2, "2", "STATUS_CODE_ERROR", "ERROR"})
_FLAT: Final = "attributes."
_SESSION: Final = "mlflow.trace.session"
_MALFORMED: Final = (KeyError, TypeError, ValueError, AttributeError)
_NOT_OTLP: Final = "a number or a list in it or in its resource is not valid OTLP: export the spans again"
_OTHER_UNITS: Final = (1, 10**3, 10**6)
_OF_TODAY: Final = range(15 * 10**8, 22 * 10**8)  # seconds of 2017 to 2039
_ATTRIBUTE_LIMIT: Final = 128  # the default of every SDK; what has exactly as many has probably lost some


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


class _Link(msgspec.Struct, gc=False, rename="camel"):
    trace_id: str = ""


class _Status(msgspec.Struct, gc=False):
    code: int | str | None = None
    message: str | None = None


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
    links: list[_Link] | None = None
    kind: int | str | None = None
    status: _Status | None = None
    dropped_attributes_count: int | None = None


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
    with suppress(msgspec.ValidationError):  # JSON, but not a valid envelope: `_take_otlp` reports the problem
        envelope = _decode(line)
        if envelope.resource_spans is not None:
            return envelope
    return msgspec.json.decode(line)


def is_otlp(document: Any) -> bool:
    """Whether a document is OTLP, of any signal."""
    return isinstance(document, Envelope) or (isinstance(document, dict) and not SIGNALS.isdisjoint(document))


def take_spans(document: Any, place: Place, intake: Intake) -> None:
    """Pass on every span of a document: OTLP, a single span, or another export that is recognised.

    Unless bad spans are skipped, raises TraceError for one, and for a document that is none of these.
    """
    if is_otlp(document):
        _take_otlp(document, place, intake)
    elif is_span(document):
        _take_span(document, place, intake)
    elif (inner := unwrapped(document)) is not None:
        for inner_document in inner:
            take_spans(inner_document, place, intake)
    elif (name := names_of_unread(document)) is not None:
        intake.refuse(place, name, "line of an export that is not read")
    else:
        message = (
            f'{described(document)}, neither OTLP JSON (an object with "resourceSpans") nor a span (with '
            '"context"): check the format; plain JSONL is --format jsonl'
        )
        intake.refuse(place, message, "line that holds no spans")


def _take_otlp(document: Any, place: Place, intake: Intake) -> None:
    if not isinstance(document, Envelope):
        messages = sum(map(str(document.get("resourceLogs", "")).count, MESSAGE_EVENTS))
        intake.notices["log record with a message, which is not read"] += messages
        intake.other_signals |= "resourceSpans" not in document
        try:
            document = msgspec.convert(document, Envelope)
        except msgspec.ValidationError as error:
            intake.refuse(place, f"not valid OTLP: {error}: export the spans again", "line that is no OTLP")
            return
    for resource in document.resource_spans or ():
        given = (resource.resource.attributes if resource.resource else None) or ()
        service = (
            next((attribute.value.string_value for attribute in given if attribute.key == "service.name"), None) or None
        )
        shared = None
        with suppress(*_MALFORMED):
            shared = {attribute.key: _value(attribute.value) for attribute in given if attribute.key in PLAN}
        for scope in resource.scope_spans or resource.instrumentation_library_spans or ():
            for span in scope.spans or ():
                _take_otlp_span(span, place, service, shared, intake)


def _take_otlp_span(span: _Span, place: Place, service: str | None, shared: Found | None, intake: Intake) -> None:
    """Pass on a span; `shared` are the attributes of its resource, None if they are malformed."""
    missed = []
    attributes = span.attributes or ()
    status = span.status
    flags = _flags(status.code, status.message) if status is not None and status.code else 0
    if span.dropped_attributes_count or len(attributes) == _ATTRIBUTE_LIMIT:
        flags |= Flag.LOST
    try:
        if shared is None:
            raise ValueError("a resource that is no OTLP")
        kept = shared.copy()
        for attribute in attributes:
            key = attribute.key
            if key in PLAN:
                text = attribute.value.string_value
                kept[key] = text if text is not None else _value(attribute.value)
            else:
                prefix, name = other(key)
                if prefix is not None:
                    keep(kept, key, _value(attribute.value))
                elif name is not None:
                    missed.append(name)
        for event in span.events or ():
            flags |= _event(
                kept, event.name, {attribute.key: _value(attribute.value) for attribute in event.attributes or ()}
            )
        start, end = int(span.start_time_unix_nano or 0), int(span.end_time_unix_nano or 0)
        if any(start // unit in _OF_TODAY for unit in _OTHER_UNITS):
            start, end = time_ns(start) or 0, time_ns(end) or 0
    except _MALFORMED:
        intake.refuse(place, f"span {span.span_id}: {_NOT_OTLP}", "span that is no OTLP", span.trace_id)
        return
    intake.take(
        place,
        kept,
        ids=(span.trace_id, span.span_id, span.parent_span_id),
        name=span.name,
        times=(start or None, end or None),
        service=service,
        remote=(span.flags or 0) & _PARENT_IS_REMOTE == _PARENT_IS_REMOTE or span.kind in _CALLED,
        flags=flags,
        unread=missed,
        links=[link.trace_id for link in span.links or ()],
    )


def _event(kept: Found, name: str, attributes: dict[str, Any]) -> int:
    """Keep the attributes of an event; what it says of its span."""
    if name.startswith("gen_ai."):
        keep_event(kept, name, attributes)
    if name != "exception":
        return 0
    return Flag.PAUSED if any(map(is_pause, attributes.values())) else Flag.UNANSWERED


def _flags(code: Any, message: Any) -> int:
    """What a status says."""
    if code not in _ERRORS:
        return 0
    return Flag.PAUSED if is_pause(message) else Flag.ERROR


def _value(value: _Value) -> Any:
    if value.int_value is not None:
        return int(value.int_value)
    if value.array_value is not None:
        return [_inner(element) for element in value.array_value.get("values") or ()]
    if value.kvlist_value is not None:
        return {pair["key"]: _inner(pair.get("value")) for pair in value.kvlist_value.get("values") or ()}
    plain = (value.string_value, value.double_value, value.bool_value)
    return next((scalar for scalar in plain if scalar is not None), None)


def _inner(wrapped: Any) -> Any:
    """A value inside a list or an object, which is still encoded."""
    return None if wrapped is None else _value(msgspec.convert(wrapped, _Value))


def is_span(document: Any) -> bool:
    """Whether a JSON object is one span."""
    return isinstance(document, dict) and (isinstance(document.get("context"), dict) or "context.span_id" in document)


def _take_span(document: dict[str, Any], place: Place, intake: Intake) -> None:
    shared = fields(fields(document.get("resource")).get("attributes"))
    flat = {key.removeprefix(_FLAT): value for key, value in document.items() if key.startswith(_FLAT)}
    attributes = [*_flat("", fields(document.get("attributes"))), *_flat("", flat)]
    service = shared.get("service.name")
    _take_object(
        document,
        (*shared.items(), *attributes),
        place,
        intake,
        trace=_id(document, "trace_id"),
        service=service if isinstance(service, str) and service else None,
        flags=Flag.LOST if document.get("dropped_attributes_count") or len(attributes) == _ATTRIBUTE_LIMIT else 0,
    )


def _take_object(
    span: dict[str, Any],
    attributes: Iterable[tuple[str, Any]],
    place: Place,
    intake: Intake,
    *,
    trace: Any,
    service: str | None,
    running: bool = False,
    flags: int = 0,
) -> None:
    """Pass on a span that is one JSON object, and its attributes; of a `running` trace the root has no end.

    Raises TraceError if the span is malformed, and bad spans are not skipped.
    """
    kept: Found = {}
    unread = [name for key, value in attributes if (name := keep(kept, key, value)) is not None and value is not None]
    try:
        for event in span.get("events") or ():
            flags |= _event(kept, event["name"], event.get("attributes") or {})
        status = span.get("status") or {}
        code = span.get("status_code", status.get("status_code", status.get("code")))
        flags |= _flags(code, span.get("status_message", status.get("description", status.get("message"))))
        start = time_ns(span.get("start_time_unix_nano", span.get("start_time")))
        end = time_ns(span.get("end_time_unix_nano", span.get("end_time")))
        links = [_id(link, "trace_id") for link in span.get("links") or ()]
    except (*_MALFORMED, OverflowError):
        message = "a span whose events or times cannot be read; expected ISO 8601 or a number since 1970: export again"
        intake.refuse(place, message, "span with unreadable times", trace)
        return
    parent = span.get("parent_span_id", span.get("parent_id"))
    intake.take(
        place,
        kept,
        ids=(trace, _id(span, "span_id"), _plain_id(parent)),
        name=span.get("name"),
        times=(start, None if running and parent is None else end),
        service=service,
        remote=span.get("kind") in _CALLED,
        flags=flags,
        unread=unread,
        links=filter(None, links),
    )


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
    own = span.get(f"context.{name}", span.get(name))
    return _plain_id(fields(span.get("context")).get(name, own))


def _plain_id(value: Any) -> Any:
    return value.removeprefix("0x") if isinstance(value, str) else value


def is_mlflow(document: Any) -> bool:
    """Whether a JSON document is an exported trace, or holds some."""
    return isinstance(document, dict) and (isinstance(document.get("traces"), list) or _parts(document) is not None)


def take_mlflow(document: Any, place: Place, intake: Intake, service: str | None = None) -> None:
    """Pass on the spans of every trace in a document; `service` names the application, by default the experiment.

    Unless bad spans are skipped, raises TraceError for one, and for a document without a trace.
    """
    if isinstance(document, dict) and isinstance(document.get("traces"), list):
        for trace in document["traces"]:
            take_mlflow(trace, place, intake, service)
        return
    parts = _parts(document) if isinstance(document, dict) else None
    if parts is None:
        wanted = 'expected an MLflow trace (with "info" and "data", as trace.to_json() writes it)'
        intake.refuse(place, f"{described(document)}; {wanted}", "line that is no MLflow trace")
        return
    info, spans = parts
    trace = info.get("trace_id", info.get("request_id"))
    session = fields(info.get("trace_metadata", info.get("request_metadata"))).get(_SESSION)
    running = info.get("state", info.get("status")) == "IN_PROGRESS"
    where = info.get("trace_location")
    experiment = fields(where.get("mlflow_experiment") if isinstance(where, dict) else info).get("experiment_id")
    service = service or (f"experiment-{experiment}" if experiment is not None else None)
    if not spans and not running:
        begun = info.get("timestamp_ms", info.get("request_time"))
        intake.missing_trace(place, trace, time_ns(begun), {_SESSION: session}, service)
    for span in spans:
        if not isinstance(span, dict):
            message = "a span that is not an object: export the trace again"
            intake.refuse(place, message, "span that is no object", trace)
            continue
        given = {_SESSION: session} | fields(span.get("attributes"))
        attributes = ((key, _decoded(value)) for key, value in given.items())
        _take_object(span, attributes, place, intake, trace=trace, service=service, running=running)


def _parts(document: dict[str, Any]) -> tuple[dict[str, Any], list[Any]] | None:
    """The info and the spans of an exported trace, None if it is not one."""
    whole = from_json(document.get("trace"))
    if isinstance(whole, dict):
        return _parts(whole)  # a row of a data frame, which also contains the trace
    info = next((document[key] for key in ("info", "trace_info") if isinstance(document.get(key), dict)), None)
    spans = fields(from_json(document.get("data", document))).get("spans")
    return (info, spans) if info is not None and isinstance(spans, list) else None


def _decoded(value: Any) -> Any:
    """The value of an attribute, which MLflow stores as JSON, including numbers and booleans."""
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except msgspec.DecodeError:
        return value
