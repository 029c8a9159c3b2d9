"""Tables with the columns of a trace: Parquet and CSV files, and pandas data frames, as conforming chunks.

Each reader gives batches of raw rows; `sources` makes them conforming chunks and cuts bad rows out.

Parquet files that were written as a trace carry its schema version. Any other, as pandas, polars or a database write
it, is read like JSONL: columns a trace does not know are ignored, an index that pandas stored among them. A row group
may hold gigabytes: it is decoded in portions, sized by what its first rows take in memory, since the size on disk says
little where a long prompt is stored once and repeated by reference.

In a CSV file a header names the columns; those a trace does not know are dropped, and so is an index without a name.
What a field means is told by its column alone: names and texts stay as they are written, so `007` is no number. An
empty field is no value. Lists (`parent_steps`, states) are JSON.

A data frame is read as the Parquet file that pandas would make of it; an index that is named like a column of the trace
is one. Columns of Python objects, which may hold anything, are read value by value as JSONL is. pandas itself is only
imported by the caller that made the frame.
"""

from __future__ import annotations

import datetime as dt
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.datasets.adapters.files.text import CsvRow, CsvRows
from presage.datasets.schema import (
    COLUMN_TYPES,
    KNOWN_COLUMNS,
    check_columns,
    check_version,
    concat,
    conform,
    state_sizes,
    trace_schema,
)
from presage.datasets.schema.columns import REFUSALS, first_failure, first_refused, wanted
from presage.datasets.schema.source import Origin, RowError, Source, Workflow, salvage
from presage.datasets.store.parquet import first_line, open_parquet, row_batches
from presage.errors import TraceError

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]


class RawRows(Protocol):
    """Rows as their source has them."""

    def table(self, start: int, stop: int, origin: Origin) -> pa.Table:
        """Raw columns of the rows from `start` (included) to `stop` (excluded), which have this origin.

        Raises:
            RowError: a row cannot be read at all, or has a value that cannot be meant.
        """
        ...

    def workflow(self, row: int) -> tuple[object, object]:
        """The type and id of the workflow of a row, each no string where the row does not tell."""
        ...


@dataclass(frozen=True)
class Batch:
    """A bounded number of rows.

    Args:
        rows: what `origin` is of.
        origin: where they came from.
        read_bytes: bytes on disk read for them and for those before.
    """

    rows: RawRows
    origin: Origin
    read_bytes: int = 0


def sources(
    batches: Iterable[Batch], name: str, skip_bad: bool, progress: Callable[[int], None] | None
) -> Iterator[Source]:
    """Batches as conforming chunks.

    Args:
        batches: of one source, in their order.
        name: of the source.
        skip_bad: count rows that are bad instead of raising. Their workflow is marked as spoiled; where a row does not
            tell its workflow, that is the workflow of the row before it.
        progress: called with the number of steps read since its last call.

    Raises:
        TraceError: a value is missing or has a wrong type; names the row and the column.
    """
    sizes: tuple[int | None, int | None] = (None, None)
    last: Workflow | None = None
    read_before = 0
    for batch in batches:
        source = _source(batch, name, skip_bad, sizes, last, batch.read_bytes - read_before)
        found = state_sizes(source.table.schema)
        sizes = (sizes[0] or found[0], sizes[1] or found[1])
        last = _workflow(batch.rows, len(batch.origin.places) - 1)
        read_before = batch.read_bytes
        if progress is not None:
            progress(source.table.num_rows)
        yield source


def _source(
    batch: Batch,
    name: str,
    skip_bad: bool,
    sizes: tuple[int | None, int | None],
    last: Workflow | None,
    read_bytes: int,
) -> Source:
    """A batch as a chunk; `last` is the workflow of the row before it."""
    rows, origin = batch.rows, batch.origin
    skipped, spoiled = Counter[str](), set[Workflow]()

    def build(start: int, stop: int) -> pa.Table:
        nonlocal sizes
        part = origin.part(start, stop)
        table = conform(rows.table(start, stop, part), part, sizes)
        found = state_sizes(table.schema)
        sizes = (sizes[0] or found[0], sizes[1] or found[1])
        return table

    def on_bad(row: int, error: RowError) -> None:
        skipped[f"{'line' if origin.lined[0] else 'row'} with {error.reason}"] += 1
        workflow = _workflow(rows, row) or (_workflow(rows, row - 1) if row else last)
        if workflow is not None:
            spoiled.add(workflow)

    count = len(origin.places)
    if not skip_bad:
        return Source(build(0, count), origin, read_bytes=read_bytes)
    stretches = salvage(count, build, on_bad)
    tables = [table for _, _, table in stretches] or [trace_schema().empty_table()]
    parts = [origin.part(start, stop) for start, stop, _ in stretches] or [origin.part(0, 0)]
    table = concat(tables, [name] * len(tables))
    return Source(table, Origin.chunks(parts), dict(skipped), frozenset(spoiled), read_bytes)


def _workflow(rows: RawRows, row: int) -> Workflow | None:
    if row < 0:
        return None
    workflow_type, workflow_id = rows.workflow(row)
    return (workflow_type, workflow_id) if isinstance(workflow_type, str) and isinstance(workflow_id, str) else None


def read_parquet(
    path: Path, *, skip_bad: bool = False, progress: Callable[[int], None] | None = None
) -> Iterator[Source]:
    """Read a Parquet file, a chunk at a time.

    Args:
        path: the file, written as a trace or by anybody who calls its columns as a trace does.
        skip_bad: count rows that are bad instead of raising, and mark their workflows as spoiled.
        progress: called with the number of steps read since its last call.

    Raises:
        TraceError: the file is damaged or of another schema version, a column is missing or misspelt, or a value is
            missing or has a wrong type.
    """
    return sources(_parquet_batches(path), str(path), skip_bad, progress)


class _ParquetRows:
    """Rows of a table; of a foreign one the text is checked too: Arrow takes any bytes in a file for UTF-8."""

    def __init__(self, rows: pa.Table, foreign: bool) -> None:
        self._rows = rows
        self._foreign = foreign

    def table(self, start: int, stop: int, origin: Origin) -> pa.Table:
        part = self._rows.slice(start, stop - start)
        for name in part.column_names if self._foreign else ():
            try:
                _check_text(part[name])
            except pa.ArrowInvalid:
                row = first_failure(part[name], _check_text)
                message = "text that is no UTF-8: correct it, or write the file again from text"
                raise origin.bad(row, name, message, f"{name} that is no UTF-8") from None
        return part

    def workflow(self, row: int) -> tuple[object, object]:
        return _text(self._rows["workflow_type"][row]), _text(self._rows["workflow_id"][row])


def _check_text(column: pa.ChunkedArray) -> None:
    column.validate(full=True)


def _text(value: pa.Scalar) -> object:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return None


def _parquet_batches(path: Path) -> Iterator[Batch]:
    name, first = str(path), 1
    try:
        with open_parquet(path) as file:
            schema = file.schema_arrow
            foreign = not check_version(schema.metadata, name)
            check_columns(schema.names, name)
            columns = [column for column in schema.names if column in KNOWN_COLUMNS]
            for rows, position in row_batches(file, columns):
                yield Batch(_ParquetRows(rows, foreign), Origin.of(name, rows.num_rows, first=first), position)
                first += rows.num_rows
    except (pa.ArrowException, OSError) as error:
        detail = first_line(error)
        what_to_do = "copy or write the file again"
        if detail.startswith("Expected all lists to be of size"):
            what_to_do = "Arrow does not read back lists of a fixed size where some are null: write plain lists"
        raise TraceError(f"{path}: cannot be read as Parquet ({detail}): {what_to_do}") from error


CSV_BATCH_ROWS: Final = 8192
_CSV_BATCH_CHARACTERS: Final = 32 * 2**20
_NO_VALUE: Final = ("", "nan", "null", "none", "na", "n/a", "<na>", "nat", "\\n")
"""What pandas and databases write for no value, in lower case: a name or a text may be spelt so."""
_GAP: Final = re.compile(r"(?<=\d)\s+(?=\d)")
_LIST: Final = msgspec.json.Decoder(list[int | float])


def read_csv(path: Path, *, skip_bad: bool = False, progress: Callable[[int], None] | None = None) -> Iterator[Source]:
    """Read a CSV file, a batch of rows at a time.

    Args:
        path: the file, plain or gzip.
        skip_bad: count rows that are bad instead of raising. Their workflow is marked as spoiled; where a row does not
            tell its workflow (no CSV, a cut file), that is the workflow of the row before it.
        progress: called with the number of steps read since its last call.

    Raises:
        TraceError: the file cannot be read or is cut, a column is missing or misspelt, or a row is no CSV or has a
            value that is missing or of a wrong type; names the line and the column.
    """
    return sources(_csv_batches(path), str(path), skip_bad, progress)


def _csv_batches(path: Path) -> Iterator[Batch]:
    reading = CsvRows(path)
    check_columns(reading.names, str(path))
    rows: list[CsvRow] = []
    size = 0

    def batch() -> Batch:
        lines = np.array([row.line for row in rows], np.int64)
        return Batch(_CsvRows(reading.names, rows), Origin.of(str(path), len(rows), lines), reading.read_bytes)

    for row in reading:
        rows.append(row)
        size += sum(map(len, row.fields))
        if len(rows) == CSV_BATCH_ROWS or size >= _CSV_BATCH_CHARACTERS:
            yield batch()
            rows, size = [], 0
    yield batch()


class _CsvRows:
    """Some rows, and the names of their columns."""

    def __init__(self, names: Sequence[str], rows: Sequence[CsvRow]) -> None:
        self._places = {name: place for place, name in enumerate(names) if name in COLUMN_TYPES}
        self._rows = rows

    def table(self, start: int, stop: int, origin: Origin) -> pa.Table:
        part = self._rows[start:stop]
        for row, found in enumerate(part):
            if found.problem:
                raise RowError(f"{origin.at(row)}: {found.problem}", row=row, reason=found.reason)
        columns = list(zip(*(row.fields for row in part), strict=True)) or [()] * (1 + max(self._places.values()))
        return pa.table({name: _csv_column(columns[place], name, origin) for name, place in self._places.items()})

    def workflow(self, row: int) -> tuple[object, object]:
        of = self._rows[row]
        return self._field(of, "workflow_type"), self._field(of, "workflow_id")

    def _field(self, row: CsvRow, name: str) -> str | None:
        place = self._places[name]
        text = row.fields[place] if place < len(row.fields) else ""
        return text if text and "\ufffd" not in text else None


def _csv_column(fields: Sequence[str], name: str, origin: Origin) -> pa.ChunkedArray:
    """A column of text as what it means, nearly: the cast to the schema is still to come."""
    target = COLUMN_TYPES[name]
    if pa.types.is_string(target) or pa.types.is_large_string(target):
        return pa.chunked_array([pa.array([field or None for field in fields], pa.large_string())])
    text = pc.utf8_trim_whitespace(pa.chunked_array([fields], pa.large_string()))
    text = pc.if_else(pc.is_in(pc.utf8_lower(text), pa.array(_NO_VALUE)), None, text)
    means = _MEANINGS[target.id]
    try:
        return means(text)
    except pa.ArrowInvalid:
        row = first_failure(text, means)
        as_json = " in JSON, such as [0, 1]," if pa.types.is_list(target) else ""
        message = f"the value does not fit; {wanted(target)}{as_json} is wanted: correct it"
        raise origin.bad(row, name, message, f"{name} does not fit") from None


def _number(text: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        return text.cast(pa.int64())
    except pa.ArrowInvalid:
        return text.cast(pa.float64())  # what pandas makes of whole numbers where some are missing


def _time(text: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        return text.cast(pa.float64())
    except pa.ArrowInvalid:
        return text  # ISO 8601, or the cast to the schema says that it is not


def _truth(text: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        return text.cast(pa.bool_())  # true and false in any case, 1 and 0
    except pa.ArrowInvalid:
        return text.cast(pa.float64())


def _list(text: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        lists = [None if field is None else _numbers(field) for field in text.to_pylist()]
    except msgspec.MsgspecError as error:
        raise pa.ArrowInvalid("no list") from error
    return pa.chunked_array([lists], pa.list_(pa.float64()))


def _numbers(field: str) -> list[int | float]:
    try:
        return _LIST.decode(field)
    except msgspec.MsgspecError:
        return _LIST.decode(_GAP.sub(",", field))  # NumPy's [0 1], which pandas makes of lists it read from Parquet


_MEANINGS: Final[dict[Any, Callable[[pa.ChunkedArray], pa.ChunkedArray]]] = {
    pa.int32().id: _number,
    pa.timestamp("us").id: _time,
    pa.bool_().id: _truth,
    pa.list_(pa.int32()).id: _list,
}


_FRAME_BATCH_ROWS: Final = 2**15
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
    return sources(_frame_batches(frame, name), name, skip_bad, progress)


def _frame_batches(frame: pd.DataFrame, name: str) -> Iterator[Batch]:
    indexed = [level for level in frame.index.names if level in KNOWN_COLUMNS]
    check_columns([*indexed, *map(str, frame.columns)], name)
    if indexed:
        frame = frame.reset_index(indexed)
    frame = frame[[column for column in frame.columns if column in KNOWN_COLUMNS]]
    for start in range(0, len(frame), _FRAME_BATCH_ROWS):
        rows = frame.iloc[start : start + _FRAME_BATCH_ROWS]
        yield Batch(_FrameRows(rows), Origin.of(name, len(rows), first=start))


class _FrameRows:
    """Rows of a frame."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self._rows = rows

    def table(self, start: int, stop: int, origin: Origin) -> pa.Table:
        part = self._rows.iloc[start:stop]
        return pa.table({name: _frame_column(part[name], name, origin) for name in part.columns})

    def workflow(self, row: int) -> tuple[object, object]:
        return self._rows["workflow_type"].iloc[row], self._rows["workflow_id"].iloc[row]


def _frame_column(series: pd.Series, name: str, origin: Origin) -> pa.Array | pa.ChunkedArray:
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
