"""A pandas data frame with the columns of a trace, in memory.

It is read as the Parquet file that pandas would make of it; an index that is named like a column of the trace is one.
Columns of Python objects, which may hold anything, are read value by value as JSONL is. pandas itself is only imported
by who made the frame.
"""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import pyarrow as pa

from presage.datasets.adapters.source import Source
from presage.datasets.adapters.tabular import Batch, sources
from presage.datasets.columns import REFUSALS, first_refused, wanted
from presage.datasets.origin import Origin
from presage.datasets.schema import COLUMN_TYPES, KNOWN_COLUMNS, check_columns
from presage.errors import TraceError

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

_BATCH_ROWS: Final = 2**15
_FLOATS: Final = pa.list_(pa.float64())


def is_frame(source: object) -> TypeGuard[pd.DataFrame]:
    """Whether this is a pandas data frame."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(source, pandas.DataFrame)


def read_frame(
    frame: pd.DataFrame, name: str, *, skip_bad: bool = False, progress: Callable[[int], None] | None = None
) -> Iterator[Source]:
    """Read a data frame, a batch of rows at a time.

    Args:
        frame: one row a step, columns as in a trace; others are ignored.
        name: what errors call it. They count its rows from 0, as `frame.iloc` does.
        skip_bad: count rows that are bad instead of raising, and mark their workflows as spoiled.
        progress: called with the number of steps read since its last call.

    Raises:
        TraceError: a column is missing or misspelt, or a value is missing or has a wrong type.
    """
    return sources(_batches(frame, name), name, skip_bad, progress)


def _batches(frame: pd.DataFrame, name: str) -> Iterator[Batch]:
    indexed = [level for level in frame.index.names if level in KNOWN_COLUMNS]
    check_columns([*indexed, *map(str, frame.columns)], name)
    if indexed:
        frame = frame.reset_index(indexed)
    frame = frame[[column for column in frame.columns if column in KNOWN_COLUMNS]]
    for start in range(0, len(frame), _BATCH_ROWS):
        rows = frame.iloc[start : start + _BATCH_ROWS]
        yield Batch(_FrameRows(rows), Origin.of(name, len(rows), first=start))


class _FrameRows:
    """Rows of a frame."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self._rows = rows

    def table(self, start: int, stop: int, origin: Origin) -> pa.Table:
        part = self._rows.iloc[start:stop]
        return pa.table({name: _column(part[name], name, origin) for name in part.columns})

    def workflow(self, row: int) -> tuple[object, object]:
        return self._rows["workflow_type"].iloc[row], self._rows["workflow_id"].iloc[row]


def _column(series: pd.Series, name: str, origin: Origin) -> pa.Array | pa.ChunkedArray:
    if series.dtype == object:
        return _of_objects(series.tolist(), name, origin)
    if getattr(series.dtype, "tz", None) is not None:
        series = series.dt.tz_convert(None)  # UTC; with its zone, pyarrow takes it in a way that pandas warns of
    try:
        return pa.array(series, from_pandas=True)
    except REFUSALS as error:
        message = f"dtype {series.dtype}, {wanted(COLUMN_TYPES[name])} is wanted: convert the column"
        raise TraceError(f'{origin.names[0]}, column "{name}": {message}') from error


def _of_objects(values: list[Any], name: str, origin: Origin) -> pa.Array:
    """Python values as the first of the types they may have that takes them all."""
    target = COLUMN_TYPES[name]
    if pa.types.is_string(target) or pa.types.is_large_string(target):
        types = [pa.large_string()]
    elif pa.types.is_boolean(target):
        types = [pa.bool_(), pa.float64()]
    elif pa.types.is_timestamp(target):
        values = [v.isoformat() if isinstance(v, dt.datetime) and v == v else v for v in values]  # NaT equals nothing
        types = [pa.float64(), pa.large_string()]
    else:
        types = [_FLOATS if pa.types.is_list(target) else pa.float64()]
    bad = 0
    for arrow_type in types:
        try:
            return pa.array(values, arrow_type, from_pandas=True)
        except REFUSALS:
            bad = max(bad, first_refused(values, arrow_type, from_pandas=True))
    message = f"type {type(values[bad]).__name__}; {wanted(target)} is wanted: convert it"
    raise origin.bad(bad, name, message, f"{name} of a wrong type") from None
