"""Reads the traces of an experiment in a live MLflow tracking store.

The store is read page by page through MLflow's own client and is never modified. MLflow's client creates missing
database files and tables, so their existence is checked first without MLflow. MLflow itself rejects stores with an
older schema. MLflow is imported only when a store is read (about two seconds).
"""

from __future__ import annotations

import datetime as dt
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from presage.datasets.adapters.files.text import Place
from presage.datasets.adapters.spans.documents import take_mlflow
from presage.datasets.adapters.spans.intake import Intake, Partitions
from presage.datasets.adapters.spans.reader import SpanWorkflows
from presage.datasets.schema.source import Source
from presage.errors import TraceError

if TYPE_CHECKING:
    from mlflow import MlflowClient

_PARTITIONS: Final = 64
_PAGE_TRACES: Final = 100
_DATABASES: Final = ("sqlite", "postgresql", "mysql", "mssql")
_DEFAULTS: Final = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # the default of seven, with backoff, hangs for minutes on a dead server
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def read_mlflow_experiment(
    name: str, *, tracking_uri: str | None = None, since: dt.datetime | None = None, skip_bad: bool = False
) -> Iterator[Source]:
    """Read the traces of an experiment, only those that began at or after `since`.

    `tracking_uri` defaults to MLFLOW_TRACKING_URI, else to `sqlite:///mlflow.db` in the working directory; `skip_bad`
    is as for `read_spans`. Raises TraceError if the store is missing, does not respond or has an older schema, the
    experiment is missing or has no trace with a step, or a span is bad, and OutputError if the disk of temporary files
    is full.
    """
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"
    shown = _without_password(uri)
    source = f"experiment {name!r} of {shown}"
    with Partitions(_PARTITIONS) as spill, Partitions(_PARTITIONS) as requests:
        intake = Intake([source], spill, requests, skip_bad, lined=False)
        try:
            for trace in _traces(_client(uri), name, shown, since):
                take_mlflow(trace, Place(0, 0), intake, service=name)
        except TraceError:
            raise
        except Exception as error:
            if (line := _one_line(error)) is None:
                raise
            raise TraceError(f"{shown}: {line}") from error
        if not intake.spans and not intake.lost:
            when = f" since {since.isoformat()}" if since is not None else ""
            raise TraceError(f"{source}: no traces{when}: check the name, or record some first (see docs/traces.md)")
        yield from SpanWorkflows(source, intake).sources()


def _traces(client: MlflowClient, name: str, shown: str, since: dt.datetime | None) -> Iterator[dict[str, Any]]:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        there = ", ".join(repr(other.name) for other in client.search_experiments(max_results=10)) or "none"
        raise TraceError(f"no experiment {name!r} in {shown}; there are: {there}. Check the name and the tracking URI")
    search = partial(
        client.search_traces,
        locations=[experiment.experiment_id],
        filter_string=None if since is None else f"trace.timestamp_ms >= {int(since.timestamp() * 1000)}",
        max_results=_PAGE_TRACES,
        order_by=["timestamp_ms ASC"],
    )
    # With spans, MLflow leaves out without a word what it cannot load; without, it lists all that there are.
    listed = {trace.info.trace_id: trace for trace in _pages(search, include_spans=False)}
    for trace in _pages(search, include_spans=True):
        listed.pop(trace.info.trace_id, None)
        yield trace.to_dict()
    yield from (trace.to_dict() for trace in listed.values())


def _pages(search: Callable[..., Any], include_spans: bool) -> Iterator[Any]:
    page = search(page_token=None, include_spans=include_spans)
    yield from page
    while page.token:
        page = search(page_token=page.token, include_spans=include_spans)
        yield from page


def _client(uri: str) -> MlflowClient:
    for key, value in _DEFAULTS.items():
        os.environ.setdefault(key, value)
    scheme = uri.split(":", 1)[0].split("+", 1)[0]
    if scheme in _DATABASES:
        _check_database(uri)
    elif scheme not in ("http", "https", "databricks", "uc"):
        folder = Path(uri.removeprefix("file://"))
        if not any(folder.glob("*/meta.yaml")):
            raise TraceError(f"{uri}: no tracking store, and reading does not create one: correct the tracking URI")
    from mlflow import MlflowClient

    for logger in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    return MlflowClient(tracking_uri=uri)


def _check_database(uri: str) -> None:
    """Check without MLflow that a database belongs to MLflow; files are opened read-only."""
    import sqlalchemy

    shown = _without_password(uri)
    url = sqlalchemy.engine.make_url(uri)
    if url.get_backend_name() == "sqlite":
        file = Path(url.database or "")
        if not file.is_file():
            raise TraceError(f"{shown}: no such file, and reading does not create one: correct the tracking URI")
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
        message = f"{shown}: the database cannot be read ({type(error).__name__}): correct the tracking URI"
        raise TraceError(message) from error
    finally:
        engine.dispose()
    if not is_mlflow:
        raise TraceError(f"{shown}: a database, but not MLflow's: correct the tracking URI")


def _one_line(error: Exception) -> str | None:
    """What an error of MLflow, its database or the network says, in one line; None for any other."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    if not isinstance(error, MlflowException | RequestException | SQLAlchemyError):
        return None
    text = str(error)
    if "out-of-date database schema" in text or "db upgrade" in text:
        return (
            "a store with the schema of another MLflow release, and reading does not upgrade it: back it up and run "
            "`mlflow db upgrade` on it, or export its traces with the release that wrote it and ingest those"
        )
    if any(sign in text for sign in ("Max retries exceeded", "Connection refused", "timed out")):
        return "the MLflow server does not answer: start it, or correct the tracking URI"
    first = next((line.strip() for line in text.splitlines() if line.strip()), "an error without a message")
    return f"reading traces: {first[:300]}"


def _without_password(uri: str) -> str:
    head, separator, rest = uri.rpartition("@")
    return f"{head.split('//', 1)[0]}//…@{rest}" if separator and "//" in head else uri
