"""Trace formats, and detection of the format of a path.

A reader takes a path and yields `Source` chunks: rows that conform to the schema, with their origin. Workflows are
validated later, across all sources (`presage.datasets.read` in memory, `presage.datasets.ingest` in bounded memory).

To add a format, write one module and add one line to `READERS` or `JOINING`. Also add its file suffixes to `SUFFIXES`,
or a check of the content to `detect`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa

from presage.datasets.adapters.files.jsonl import read_jsonl
from presage.datasets.adapters.files.tables import read_csv, read_parquet
from presage.datasets.adapters.files.text import JSON_SUFFIXES, TABLE_SUFFIXES, CsvRows, first_document
from presage.datasets.adapters.recording import is_recording, read_recording
from presage.datasets.adapters.requests.inferred import READ_SUFFIXES, read_request_logs
from presage.datasets.adapters.requests.logs import is_log
from presage.datasets.adapters.requests.vllm_log import is_vllm_log
from presage.datasets.adapters.spans.documents import is_mlflow, is_otlp, is_span
from presage.datasets.adapters.spans.exports import are_spans, names_of_unread, unwrapped
from presage.datasets.adapters.spans.reader import read_mlflow, read_spans
from presage.datasets.schema.messages import fields
from presage.datasets.schema.source import JoiningReader, Reader, Source
from presage.datasets.store import scan_store
from presage.datasets.store.parts import is_store, open_parquet
from presage.errors import TraceError

Chunks = Callable[[], Iterator[Source]]
"""Starts reading a source."""

JOINING: Final[Mapping[str, JoiningReader]] = {"otel": read_spans, "openinference": read_spans, "mlflow": read_mlflow}
"""Formats whose workflows may be spread over files: rotated files, or one file a service."""

READERS: Final[Mapping[str, Reader]] = {
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "csv": read_csv,
    "recording": read_recording,
    **JOINING,
}
SUFFIXES: Final = {".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".parquet": "parquet", ".csv": "csv", ".csv.gz": "csv"}


def detect(path: Path) -> str | None:
    """The format of a file or folder, by name and first document; None if unknown."""
    if path.is_dir() and is_recording(path):
        return "recording"
    if path.is_dir() or path.name.endswith(JSON_SUFFIXES):
        document = first_document(path)
        if is_mlflow(document):
            return "mlflow"
        if is_otlp(document) or is_span(document) or unwrapped(document) is not None:
            return "otel"
    if path.name.endswith(TABLE_SUFFIXES) and are_spans(_first_columns(path)):
        return "otel"
    if path.is_dir():
        return None
    return next((name for suffix, name in SUFFIXES.items() if path.name.endswith(suffix)), None)


def open_sources(
    paths: Sequence[str | Path], source_format: str = "auto", skip_bad: bool = False, parents_elsewhere: bool = False
) -> list[tuple[tuple[Path, ...], Chunks]]:
    """Group paths into sources: all files of spans are one source, any other path is one; and what reads each.

    `parents_elsewhere` is for spans: a trace that lacks nothing but one parent of its first spans counts as complete.

    Raises TraceError if a path is missing, of an unknown kind, or holds outcomes.
    """
    sources: list[tuple[Callable[..., Iterator[Source]], list[Path]]] = []
    joined: dict[Reader, list[Path]] = {}
    for path in map(Path, paths):
        reader = _reader(path, source_format)
        together = joined.setdefault(reader, []) if reader in JOINING.values() and not path.is_dir() else []
        if not together:
            sources.append((reader, together))
        together.append(path)
    more = {reader: {"parents_elsewhere": parents_elsewhere} for reader in JOINING.values()}
    return [
        (
            tuple(group),
            partial(reader, group if len(group) > 1 else group[0], skip_bad, **more.get(reader, {})),
        )
        for reader, group in sources
    ]


def open_request_logs(paths: Sequence[Path], workflow_type: str | None = None, skip_bad: bool = False) -> Chunks:
    """What reads logs of requests, all together as one source; see `read_request_logs`.

    Raises TraceError if a path is missing, no JSON, or a source whose requests have workflows.
    """
    if not paths:
        raise TraceError("no request logs given: name at least one file, or folder of files")
    for path in paths:
        if not path.exists():
            raise TraceError(f"{path}: no such file or folder; expected a log of requests: check the path")
        if is_store(path) or detect(path) in ("recording", *JOINING):
            raise TraceError(
                f"{path}: its requests have workflows; expected a log of requests without: ingest it by itself, and "
                "infer nothing"
            )
        if not path.is_dir() and not path.name.endswith(READ_SUFFIXES) and not is_vllm_log(path):
            kinds = ", ".join(READ_SUFFIXES)
            raise TraceError(
                f"{path}: neither {kinds} nor vLLM's own log; expected a log of one JSON object a request: write it as "
                "JSONL"
            )
    return partial(read_request_logs, paths, workflow_type, skip_bad)


def _reader(path: Path, source_format: str) -> Reader:
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder; expected a trace: check the path")
    if source_format != "auto":
        if source_format not in READERS:
            raise TraceError(f"unknown trace format {source_format!r}; known: auto, {', '.join(READERS)}")
        return READERS[source_format]
    if is_store(path):
        return lambda store, _: scan_store(store)
    name = detect(path)
    if name is None and path.is_dir():
        raise TraceError(
            f"{path}: a folder, but neither a trace store (no _manifest.json) nor files of spans: name its files one "
            f"by one ({path}/*), or the format"
        )
    if (unread := _export_not_read(path)) is not None:
        raise TraceError(f"{path}: {unread}")
    if name is None and path.name.endswith((".json", ".json.gz")):
        raise TraceError(
            f"{path}: its first line is not OTLP JSON, a span or an MLflow trace; expected one a line, as a "
            "collector's file exporter and span.to_json(indent=None) write them: export it so, or name its format "
            "(one step a line is --format jsonl, or a file name with .jsonl)"
        )
    if name is None:
        suffixes = ", ".join((*SUFFIXES, ".json", ".json.gz"))
        raise TraceError(f"{path}: unknown kind of file; known: {suffixes}, or a store: rename it or name its format")
    columns = _first_columns(path)
    if columns >= {"prompt", "correct"} and "workflow_id" not in columns:
        raise TraceError(
            f"{path}: these are outcomes, which a router learns from; expected a trace: rows of steps, with "
            "workflow_type, workflow_id, step and agent (docs/traces.md)"
        )
    if name == "jsonl" and is_log(columns):
        raise TraceError(
            f"{path}: a log of requests (a prompt and a time a line) without workflow_id; expected rows of steps. "
            "Which requests are one workflow can be inferred from prompts: presage traces ingest LOG --infer-workflows "
            "--to STORE"
        )
    return READERS[name]


def _export_not_read(path: Path) -> str | None:
    """What a file is that is recognised and not read, and what to do; None for any other."""
    if path.is_dir() or not path.name.endswith(JSON_SUFFIXES):
        return None
    with path.open("rb") as raw:
        if re.match(rb"\s*\{\s*(?:resource|traceId|instrumentationScope|name): ", raw.read(400)) is not None:
            return (
                "what JavaScript's ConsoleSpanExporter prints, which is no JSON: export with OTLPTraceExporter to a "
                "collector's file exporter"
            )
    return names_of_unread(first_document(path))


def _first_columns(path: Path) -> frozenset[str]:
    """The columns of a CSV or Parquet file, or the keys of the first JSON document; empty if there are none to read."""
    with suppress(TraceError, pa.ArrowException, OSError):  # the reader says why
        if path.name.endswith((".csv", ".csv.gz")):
            return frozenset(CsvRows(path).names)
        if path.name.endswith(".parquet"):
            with open_parquet(path) as opened:
                return frozenset(opened.schema_arrow.names)
        if path.name.endswith(JSON_SUFFIXES):
            return frozenset(fields(first_document(path)))
    return frozenset()


def is_trace(path: Path) -> bool:
    """Whether a file or folder holds a trace in any format, for readers that expect something else."""
    if is_store(path) or detect(path) in ("recording", *JOINING):
        return True
    return _first_columns(path) >= {"workflow_id", "agent"}
