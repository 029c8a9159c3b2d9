"""OTLP as JSON: the envelope of resources, scopes and spans that OpenTelemetry's collector writes a line at a time.

Ids are hex (or base64, as protobuf's own JSON has it: they are only compared), 64-bit numbers may be strings, an
attribute's value is wrapped in its type. The envelope is decoded into structures of just the fields that are read,
which is cheaper than dictionaries. Lines of logs and metrics, which an exporter may write into the same file, hold no
spans and are passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from presage.datasets.adapters.attributes import FLATTENED, PLAN, Found, keep, keep_event
from presage.datasets.adapters.intake import Intake
from presage.datasets.adapters.text_files import Place

_SIGNALS: Final = frozenset({"resourceSpans", "resourceLogs", "resourceMetrics", "resourceProfiles"})
_PARENT_IS_REMOTE: Final = 0x300  # flags: whether the parent is remote is known, and it is


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
    """A line as an `Envelope` if it is one with spans, else as any JSON.

    Raises:
        msgspec.DecodeError: it is no JSON.
    """
    try:
        envelope = _decode(line)
        if envelope.resource_spans is not None:
            return envelope
    except msgspec.ValidationError:
        pass  # JSON, but no envelope, or a broken one: `take_otlp` says which
    return msgspec.json.decode(line)


def is_otlp(document: Any) -> bool:
    """Whether a document is OTLP, of any signal."""
    return isinstance(document, Envelope) or (isinstance(document, dict) and not _SIGNALS.isdisjoint(document))


def take_otlp(document: Any, place: Place, intake: Intake) -> None:
    """Hand over every span of a document that `is_otlp`.

    Raises:
        TraceError: the envelope or a span in it is not as OTLP has it, and bad spans are not skipped.
    """
    if not isinstance(document, Envelope):
        try:
            document = msgspec.convert(document, Envelope)
        except msgspec.ValidationError as error:
            intake.refuse(place, f"not as OTLP has it: {error}: export the spans again", "line that is no OTLP")
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
                _take(span, place, service, shared, intake)


def _take(span: _Span, place: Place, service: str | None, shared: Found, intake: Intake) -> None:
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
        message = f"span {span.span_id}: a number or a list in it is not as OTLP has it: export the spans again"
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
    """An attribute's value without its type."""
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
    """A value inside a list or an object, which was not decoded further."""
    return None if wrapped is None else _value(msgspec.convert(wrapped, _Value))
