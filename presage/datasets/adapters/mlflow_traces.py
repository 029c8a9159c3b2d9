"""MLflow traces: `--format mlflow` for exported JSON, and an experiment of a live tracking store.

Exports are JSON, one trace a line, one a file, or a list of them: `trace.to_json()`, `mlflow traces get` and `mlflow
traces search --output json`, and the data frame of `mlflow.search_traces()` written by `to_json(orient="records",
lines=True)`; of MLflow 3, and of MLflow 2, which called some keys otherwise. Values of attributes are JSON inside JSON.

A live store is read page by page through MLflow's own client. Reading must leave the store as it is. MLflow's client
makes the tables of a database that has none and the file of one that is not there, so both are looked for first,
without MLflow; a store of an older schema MLflow refuses by itself. MLflow is loaded when a store is read (about two
seconds), never when this module is imported.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from presage.datasets.adapters.attributes import Found, keep
from presage.datasets.adapters.intake import Intake, Partitions
from presage.datasets.adapters.messages import from_json
from presage.datasets.adapters.span_files import described, read_documents, time_ns
from presage.datasets.adapters.text_files import Place
from presage.datasets.adapters.workflows import SpanWorkflows
from presage.datasets.source import Source
from presage.errors import TraceError

if TYPE_CHECKING:
    from mlflow import MlflowClient

_SESSION: Final = "mlflow.trace.session"
_RUNNING: Final = "IN_PROGRESS"


def read_mlflow(
    path: Path | Sequence[Path], *, skip_bad: bool = False, progress: Callable[[int], None] | None = None
) -> Iterator[Source]:
    """Read exported MLflow traces from a file or a folder of files, plain or gzip.

    Args:
        path: the file or folder; or several, over which a session may be spread.
        skip_bad: count what is bad instead of raising; the workflow of a bad span is marked as spoiled.
        progress: called with the number of requests and tool calls seen since its last call.

    Raises:
        TraceError: as `span_files.read_spans`.
        OutputError: the disk of temporary files is full.
    """

    def take(document: Any, place: Place, intake: Intake) -> None:
        take_mlflow(document, place, intake)

    return read_documents(path, take, skip_bad, progress)


def is_mlflow(document: Any) -> bool:
    """Whether a JSON document is an exported trace, or holds some."""
    return isinstance(document, dict) and (isinstance(document.get("traces"), list) or _parts(document) is not None)


def take_mlflow(document: Any, place: Place, intake: Intake, service: str | None = None) -> None:
    """Hand over the spans of every trace in a document; `service` stands for the application, else the experiment.

    Raises:
        TraceError: it holds no trace, or a span of it is bad, and bad ones are not skipped.
    """
    if isinstance(document, dict) and isinstance(document.get("traces"), list):
        for trace in document["traces"]:
            take_mlflow(trace, place, intake, service)
        return
    parts = _parts(document) if isinstance(document, dict) else None
    if parts is None:
        message = (
            f'{described(document)}; an MLflow trace (with "info" and "data", as trace.to_json() writes it) is wanted'
        )
        intake.refuse(place, message, "line that is no MLflow trace")
        return
    info, spans = parts
    trace = info.get("trace_id", info.get("request_id"))
    metadata = info.get("trace_metadata", info.get("request_metadata"))
    session = metadata.get(_SESSION) if isinstance(metadata, dict) else None
    service = service or _experiment(info)
    running = info.get("state", info.get("status")) == _RUNNING
    for span in spans:
        _take_span(span, place, trace, session, service, running, intake)


def _parts(document: dict[str, Any]) -> tuple[dict[str, Any], list[Any]] | None:
    """The info and the spans of an exported trace, None if it is none."""
    whole = from_json(document.get("trace"))
    if isinstance(whole, dict):
        return _parts(whole)  # a row of a data frame, which holds the trace itself too
    info = next((document[key] for key in ("info", "trace_info") if isinstance(document.get(key), dict)), None)
    data = from_json(document.get("data", document))
    spans = data.get("spans") if isinstance(data, dict) else None
    return (info, spans) if info is not None and isinstance(spans, list) else None


def _decoded(value: Any) -> Any:
    """An attribute's value, which MLflow keeps as JSON, numbers and truths too."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value


def _experiment(info: dict[str, Any]) -> str | None:
    """The experiment, which stands for the application where nothing else names it."""
    where = info.get("trace_location")
    where = where.get("mlflow_experiment") if isinstance(where, dict) else info
    number = where.get("experiment_id") if isinstance(where, dict) else None
    return f"experiment-{number}" if number is not None else None


def _take_span(
    span: Any, place: Place, trace: Any, session: Any, service: str | None, running: bool, intake: Intake
) -> None:
    if not isinstance(span, dict):
        intake.refuse(place, "a span that is no object: export the trace again", "span that is no object", trace)
        return
    context = span.get("context")  # MLflow 2
    ids = context if isinstance(context, dict) else span
    found: Found = {}
    attributes = span.get("attributes")
    for key, value in attributes.items() if isinstance(attributes, dict) else ():
        keep(found, key, _decoded(value))
    if session is not None:
        found.setdefault(_SESSION, session)
    try:
        start = time_ns(span.get("start_time_unix_nano", span.get("start_time")))
        end = time_ns(span.get("end_time_unix_nano", span.get("end_time")))
    except (TypeError, ValueError, OverflowError):
        intake.refuse(
            place, "a span whose times cannot be read: export the trace again", "span with unreadable times", trace
        )
        return
    parent = span.get("parent_span_id", span.get("parent_id"))
    intake.take(
        place,
        found,
        trace=trace,
        span=ids.get("span_id"),
        parent=parent,
        name=span.get("name"),
        start=start,
        end=None if running and parent is None else end,
        service=service,
    )


_PARTITIONS: Final = 64
_PAGE_TRACES: Final = 100
_DATABASES: Final = ("sqlite", "postgresql", "mysql", "mssql")
_DEFAULTS: Final = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # the default of seven growing ones hangs for minutes on a dead server
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def read_mlflow_experiment(
    name: str,
    *,
    tracking_uri: str | None = None,
    since: dt.datetime | None = None,
    skip_bad: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Source]:
    """Read the traces of an experiment.

    Args:
        name: the experiment's name.
        tracking_uri: the store; None means MLFLOW_TRACKING_URI, else `sqlite:///mlflow.db` in the working directory.
        since: only traces that began at or after this time.
        skip_bad: count what is bad instead of raising; the workflow of a bad span is marked as spoiled.
        progress: called with the number of requests and tool calls seen since its last call.

    Raises:
        TraceError: the store does not answer, is not there, or is of an older schema; there is no such experiment, or
            no trace with a step in it; a span is bad.
        OutputError: the disk of temporary files is full.
    """
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"
    source = f"experiment {name!r} of {_without_password(uri)}"
    with Partitions(_PARTITIONS) as spill:
        intake = Intake([source], spill, skip_bad, progress, lined=False)
        with _speaking(uri):
            for trace in _traces(_client(uri), name, uri, since):
                take_mlflow(trace, Place(0, 0), intake, service=name)
        intake.flush()
        if not intake.spans and not intake.lost:
            when = f" since {since.isoformat()}" if since is not None else ""
            raise TraceError(
                f"{source}: no traces{when}: check the name, or record some first (docs/traces.md says how)"
            )
        yield from SpanWorkflows(source, intake, spill, skip_bad).sources()


def _traces(client: MlflowClient, name: str, uri: str, since: dt.datetime | None) -> Iterator[dict[str, Any]]:
    """Every trace of the experiment as a dictionary, oldest first."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        there = ", ".join(repr(found.name) for found in client.search_experiments(max_results=10)) or "none"
        raise TraceError(
            f"no experiment {name!r} in {_without_password(uri)}; there are: {there}. Check the name and the tracking "
            "URI"
        )
    wanted = None if since is None else f"trace.timestamp_ms >= {int(since.timestamp() * 1000)}"
    token: str | None = None
    while True:
        page = client.search_traces(
            locations=[experiment.experiment_id],
            filter_string=wanted,
            max_results=_PAGE_TRACES,
            order_by=["timestamp_ms ASC"],
            page_token=token,
        )
        for trace in page:
            yield trace.to_dict()
        token = page.token
        if not token:
            return


def _client(uri: str) -> MlflowClient:
    """MLflow's client of a store that is there.

    Raises:
        TraceError: it is not, or it is no store of MLflow.
    """
    for key, value in _DEFAULTS.items():
        os.environ.setdefault(key, value)
    scheme = uri.split(":", 1)[0].split("+", 1)[0]
    if scheme in _DATABASES:
        _check_database(uri)
    elif scheme not in ("http", "https", "databricks", "uc"):
        folder = Path(uri.removeprefix("file://"))
        if not any(folder.glob("*/meta.yaml")):
            raise TraceError(f"{uri}: no tracking store there, and none is made for reading: correct the tracking URI")
    from mlflow import MlflowClient

    for logger in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    return MlflowClient(tracking_uri=uri)


def _check_database(uri: str) -> None:
    """Look without MLflow whether a database is MLflow's, read-only where it is a file."""
    import sqlalchemy

    shown = _without_password(uri)
    url = sqlalchemy.engine.make_url(uri)
    if url.get_backend_name() == "sqlite":
        file = Path(url.database or "")
        if not file.is_file():
            raise TraceError(f"{shown}: no such file, and none is made for reading: correct the tracking URI")
        uri = f"sqlite:///file:{file.absolute()}?mode=ro&uri=true"
    try:
        engine = sqlalchemy.create_engine(uri)
    except ImportError as error:
        raise TraceError(
            f"{shown}: {error.name or 'the driver'} is needed to read it and is not installed: pip install it, or read "
            "through an MLflow server"
        ) from error
    try:
        is_mlflow = sqlalchemy.inspect(engine).has_table("alembic_version")
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise TraceError(
            f"{shown}: no database that can be read ({type(error).__name__}): correct the tracking URI"
        ) from error
    finally:
        engine.dispose()
    if not is_mlflow:
        raise TraceError(f"{shown}: a database, but not MLflow's: correct the tracking URI")


@contextmanager
def _speaking(uri: str) -> Iterator[None]:
    """What MLflow, its database or the network raise as one `TraceError` of one line."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        from mlflow.exceptions import MlflowException
        from requests.exceptions import RequestException
        from sqlalchemy.exc import SQLAlchemyError

        if not isinstance(error, MlflowException | RequestException | SQLAlchemyError):
            raise
        raise TraceError(_one_line(_without_password(uri), str(error))) from error


def _one_line(uri: str, text: str) -> str:
    if "out-of-date database schema" in text or "db upgrade" in text:
        return (
            f"{uri}: a store with the schema of another MLflow release, which is not upgraded for reading: back it up "
            "and run `mlflow db upgrade` on it, or export its traces with the release that wrote it and ingest those"
        )
    if any(sign in text for sign in ("Max retries exceeded", "Connection refused", "timed out")):
        return f"{uri}: the MLflow server does not answer: start it, or correct the tracking URI"
    first = next((line.strip() for line in text.splitlines() if line.strip()), "an error without a message")
    return f"{uri}: reading traces: {first[:300]}"


def _without_password(uri: str) -> str:
    head, at, rest = uri.rpartition("@")
    return f"{head.split('//', 1)[0]}//…@{rest}" if at and "//" in head else uri
