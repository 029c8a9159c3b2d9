"""Trace formats, one module each: what a source calls its fields stays in its module.

A reader takes a path and gives `Source` chunks: rows that conform to the schema, with their origin. Whole workflows are
checked later and across all sources (`presage.datasets.read`, which keeps all in memory, and `presage.datasets.ingest`,
which does not). A new format is one module, one line in `READERS` or `JOINING` and, where a file name
tells it, one in `SUFFIXES`; where only the content does, one in `detect`.

Spans, from `span_files.py` or `mlflow_traces.py`, are read by the attribute names in `spans.py`, spilled by
`intake.py`, and become workflows in `workflows.py`; `span_tree.py` says how a tree becomes steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from presage.datasets.adapters.jsonl import read_jsonl
from presage.datasets.adapters.mlflow_traces import is_mlflow, read_mlflow
from presage.datasets.adapters.recording import is_recording, read_recording
from presage.datasets.adapters.span_files import is_otlp, is_span, read_spans
from presage.datasets.adapters.tabular import read_csv, read_parquet
from presage.datasets.adapters.text_files import JSON_SUFFIXES, first_document
from presage.datasets.source import JoiningReader, Reader, Source

__all__ = ["JOINING", "READERS", "SUFFIXES", "Reader", "Source", "detect"]

JOINING: Final[Mapping[str, JoiningReader]] = {"otel": read_spans, "openinference": read_spans, "mlflow": read_mlflow}
"""Formats whose workflows may be spread over files: rotation cuts where it likes, and each service has its own file."""

READERS: Final[Mapping[str, Reader]] = {
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "csv": read_csv,
    "recording": read_recording,
    **JOINING,
}
SUFFIXES: Final[Mapping[str, str]] = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".parquet": "parquet",
    ".csv": "csv",
    ".csv.gz": "csv",
}


def detect(path: Path) -> str | None:
    """The format of a file, or of the files in a folder, by name and first document; None if they tell none."""
    if path.is_dir() and is_recording(path):
        return "recording"
    if path.is_dir() or path.name.endswith(JSON_SUFFIXES):
        document = first_document(path)
        if is_otlp(document) or is_span(document):
            return "otel"
        if is_mlflow(document):
            return "mlflow"
    if path.is_dir():
        return None
    return next((name for suffix, name in SUFFIXES.items() if path.name.endswith(suffix)), None)
