"""Spans as one JSON object each: what OpenTelemetry's `span.to_json()`, Phoenix and its data frames write.

    {"name": …, "context": {"trace_id": …, "span_id": …}, "parent_id": …,
     "start_time": …, "end_time": …, "attributes": {…}}

Keys may be flat ("context.trace_id", "attributes.llm.model_name"), attributes may be nested, times are ISO 8601 or
numbers: nanoseconds, microseconds, milliseconds or seconds since 1970, told apart by their size.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any, Final

from presage.datasets.adapters.attributes import PLAN, Found, keep, keep_event
from presage.datasets.adapters.intake import Intake
from presage.datasets.adapters.text_files import Place

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_FLAT: Final = "attributes."
_LATEST_S: Final = 10**11  # in seconds this is the year 5138, in milliseconds 1973


def is_span(document: Any) -> bool:
    """Whether a JSON object is one span."""
    return isinstance(document, dict) and (isinstance(document.get("context"), dict) or "context.span_id" in document)


def take_span(document: dict[str, Any], place: Place, intake: Intake) -> None:
    """Hand over one span.

    Raises:
        TraceError: it is not as such dumps have it, and bad spans are not skipped.
    """
    context = document.get("context")
    ids = context if isinstance(context, dict) else {}
    trace = _id(ids.get("trace_id", document.get("context.trace_id")))
    resource = document.get("resource")
    resource = resource.get("attributes") if isinstance(resource, dict) else None
    service = resource.get("service.name") if isinstance(resource, dict) else None
    found: Found = {}
    if isinstance(resource, dict):
        for key, value in resource.items():
            keep(found, key, value)
    for key, value in _attributes(document):
        keep(found, key, value)
    try:
        for event in document.get("events") or ():
            if event["name"].startswith("gen_ai."):
                keep_event(found, event["name"], event.get("attributes") or {})
        start, end = time_ns(document.get("start_time")), time_ns(document.get("end_time"))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        message = "a span whose events or times cannot be read; ISO 8601 or a number since 1970 is wanted: export again"
        intake.refuse(place, message, "span with unreadable times", trace)
        return
    intake.take(
        place,
        found,
        trace=trace,
        span=_id(ids.get("span_id", document.get("context.span_id"))),
        parent=_id(document.get("parent_id", document.get("parent_span_id"))),
        name=document.get("name"),
        start=start,
        end=end,
        service=service if isinstance(service, str) and service else None,
    )


def time_ns(value: Any) -> int | None:
    """A time in nanoseconds since 1970.

    Raises:
        ValueError: no time can be meant.
    """
    if value is None or value == "":
        return None
    if isinstance(value, str):
        moment = dt.datetime.fromisoformat(value)
        since = (moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)) - _EPOCH
        return ((since.days * 86400 + since.seconds) * 10**6 + since.microseconds) * 1000
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("no time")
    for scale in (10**9, 10**6, 10**3):
        if abs(value) < _LATEST_S * (10**9 // scale):
            return round(value * scale)
    return int(value)


def _attributes(document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    attributes = document.get("attributes")
    if isinstance(attributes, dict):
        yield from _flat("", attributes)
    yield from _flat("", {key[len(_FLAT) :]: value for key, value in document.items() if key.startswith(_FLAT)})


def _flat(prefix: str, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Nested attributes under their dotted names; an object that is an attribute itself stays one."""
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


def _id(value: Any) -> Any:
    return value.removeprefix("0x") if isinstance(value, str) else value
