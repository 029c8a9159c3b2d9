"""Exported MLflow traces: the documents of `--format mlflow`.

Exports are JSON, one trace a line, one a file, or a list: `trace.to_json()`, `mlflow traces get`, `mlflow traces search
--output json`, and `mlflow.search_traces()` written by `to_json(orient="records", lines=True)`. MLflow 2 called some
keys otherwise. Values of attributes are JSON inside JSON.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from presage.datasets.adapters.files.text import Place
from presage.datasets.adapters.spans.attributes import Found, keep
from presage.datasets.adapters.spans.intake import Intake, described, time_ns
from presage.datasets.adapters.spans.otlp import take_object
from presage.datasets.schema.messages import fields, from_json

_SESSION: Final = "mlflow.trace.session"
_RUNNING: Final = "IN_PROGRESS"


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
        message = (
            f'{described(document)}; expected an MLflow trace (with "info" and "data", as trace.to_json() writes it)'
        )
        intake.refuse(place, message, "line that is no MLflow trace")
        return
    info, spans = parts
    trace = info.get("trace_id", info.get("request_id"))
    session = fields(info.get("trace_metadata", info.get("request_metadata"))).get(_SESSION)
    running = info.get("state", info.get("status")) == _RUNNING
    service = service or _experiment(info)
    if not spans and not running:
        begun = info.get("timestamp_ms", info.get("request_time"))
        intake.missing_trace(place, trace, time_ns(begun), {_SESSION: session}, service)
    for span in spans:
        if not isinstance(span, dict):
            message = "a span that is not an object: export the trace again"
            intake.refuse(place, message, "span that is no object", trace)
            continue
        found: Found = {}
        for key, value in fields(span.get("attributes")).items():
            keep(found, key, _decoded(value))
        if session is not None:
            found.setdefault(_SESSION, session)
        take_object(span, found, place, intake, trace=trace, service=service, running=running)


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
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value


def _experiment(info: dict[str, Any]) -> str | None:
    """The experiment, which stands for the application if nothing else names it."""
    where = info.get("trace_location")
    where = where.get("mlflow_experiment") if isinstance(where, dict) else info
    number = fields(where).get("experiment_id")
    return f"experiment-{number}" if number is not None else None
