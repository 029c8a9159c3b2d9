"""Spans as rows of a table: Phoenix' data frame of spans, and what it becomes as CSV or Parquet.

A row is a span with flat keys ("context.trace_id", "attributes.llm.model_name"), as `otlp` reads it; a missing value is
no attribute.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from presage.datasets.adapters.files.text import CsvRows
from presage.datasets.store.parts import first_line, open_parquet, row_batches
from presage.errors import TraceError

_IDS: Final = frozenset({"context.trace_id", "context.span_id"})


def are_spans(columns: Iterable[str]) -> bool:
    """Whether a table with these columns holds spans."""
    return set(columns) >= _IDS


def span_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The spans of a CSV or Parquet file with their lines or rows, from 1; raises TraceError if it cannot be read."""
    if not path.name.endswith(".parquet"):
        reading = CsvRows(path)
        for row in reading:
            if row.problem:
                raise TraceError(f"{path}, line {row.line}: {row.problem}")
            yield row.line, {name: field for name, field in zip(reading.names, row.fields, strict=True) if field}
        return
    try:
        with open_parquet(path) as file:
            number = 0
            for rows, _ in row_batches(file, file.schema_arrow.names):
                for row in rows.to_pylist():
                    number += 1
                    yield number, _without_missing(row)
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{path}: cannot be read as Parquet ({first_line(error)}): write the file again") from error


def frame_rows(frame: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """The spans of a pandas data frame with their rows, from 0; an index that is named is a column."""
    named = frame.reset_index([name for name in frame.index.names if name is not None])
    for number, row in enumerate(named.to_dict("records")):
        yield number, _without_missing(row)


def _without_missing(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        str(name): value.isoformat() if isinstance(value, dt.datetime) else value
        for name, value in row.items()
        if value is not None and (isinstance(value, list | dict) or hasattr(value, "__len__") or value == value)
    }
