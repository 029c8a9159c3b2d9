"""The columns of a file, which tell a trace from outcomes: each is easily given in the other's place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from presage.datasets.adapters.files.text import JSON_SUFFIXES, CsvRows, first_document
from presage.datasets.store.parts import open_parquet
from presage.errors import TraceError


def first_columns(path: Path) -> frozenset[str]:
    """The columns of a CSV or Parquet file, or the keys of the first JSON document; empty if there are none to read."""
    try:
        if path.name.endswith((".csv", ".csv.gz")):
            return frozenset(CsvRows(path).names)
        if path.name.endswith(".parquet"):
            with open_parquet(path) as opened:
                return frozenset(opened.schema_arrow.names)
        document = first_document(path) if path.name.endswith(JSON_SUFFIXES) else None
    except (TraceError, pa.ArrowException, OSError):  # the reader says why
        return frozenset()
    return frozenset(document) if isinstance(document, Mapping) else frozenset()
