"""Rows of files as conforming chunks, of which bad ones raise or are skipped; Parquet, CSV and pandas data frames.

docs/traces.md ("Tables") says what each may hold. A Parquet file that was written as a trace carries its schema
version; all others are read like JSONL. A data frame is read as the Parquet file that pandas would write.
"""

from __future__ import annotations

import datetime as dt
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeGuard

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.datasets.adapters.files.text import CsvRow, CsvRows
from presage.datasets.schema import (
    COLUMN_TYPES,
    KNOWN_COLUMNS,
    CommonSizes,
    check_columns,
    check_version,
    concat,
    conform,
    state_sizes,
)
from presage.datasets.schema.columns import KINDS, REFUSALS, first_failure, first_refused, is_text
from presage.datasets.schema.source import Origin, RowError, Source, Workflow, salvage
from presage.datasets.store.parts import first_line, open_parquet, row_batches
from presage.errors import TraceError

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]


class RawRows(Protocol):
    """Rows in the form of their source."""

    def table(self, start: int, stop: int, origin: Origin) -> pa.Table:
        """Raw columns of the rows from start to stop (excluded) with their origin; raises a RowError for a bad row."""
        ...

    def workflow(self, row: int) -> tuple[object, object]:
        """The workflow type and id of a row; values that are not strings if the row lacks them."""
        ...


class Batch(NamedTuple):
    """A bounded number of rows, and the bytes read from disk for them and all earlier ones."""

    rows: RawRows
    origin: Origin
    read_bytes: int = 0


def sources(batches: Iterable[Batch], name: str, skip_bad: bool) -> Iterator[Source]:
    """Convert the batches of the source called `name` to conforming chunks.

    With `skip_bad`, bad rows are counted and their workflows marked as spoiled; a row without a workflow is attributed
    to that of the nearest row before it. Otherwise raises TraceError, which names the row and the column.
    """
    common = CommonSizes()
    last: Workflow | None = None
    read_before = 0

    def conforming(batch: Batch, start: int, stop: int) -> pa.Table:
        part = batch.origin.part(slice(start, stop))
        table = conform(batch.rows.table(start, stop, part), part, common.sizes)
        common.add(state_sizes(table.schema), name)
        return table

    for batch in batches:
        count, origin = len(batch.origin.places), batch.origin
        skipped, spoiled = Counter[str](), set[Workflow]()

        def on_bad(row: int, error: RowError) -> None:
            skipped[f"{'line' if origin.lined[0] else 'row'} with {error.reason}"] += 1  # noqa: B023
            if (workflow := _last_workflow(batch.rows, row, last)) is not None:  # noqa: B023
                spoiled.add(workflow)  # noqa: B023

        if skip_bad:
            good = salvage(count, lambda start, stop: conforming(batch, start, stop), on_bad)  # noqa: B023
            table = concat([table for _, _, table in good], [name] * len(good))
            kept = [slice(start, stop) for start, stop, _ in good] or [slice(0)]
            origin = Origin.chunks([origin.part(rows) for rows in kept])
        else:
            table = conforming(batch, 0, count)
        last = _last_workflow(batch.rows, count - 1, last)
        table, notices = _known_counts(table)
        yield Source(table, origin, dict(skipped), frozenset(spoiled), batch.read_bytes - read_before, notices)
        read_before = batch.read_bytes


def _known_counts(table: pa.Table) -> tuple[pa.Table, dict[str, int]]:
    """The rows with unknown counts of tokens where a request that was not aborted has 0, as one without usage does."""
    notices = {}
    answered = pc.and_(
        pc.equal(table["kind"], "llm"), pc.fill_null(pc.not_equal(table["finish_reason"], "abort"), True)
    )
    for name in ("input_tokens", "output_tokens"):
        zero = pc.and_(answered, pc.fill_null(pc.equal(table[name], 0), False))
        if count := pc.sum(zero).as_py() or 0:
            place = table.schema.get_field_index(name)
            counts = pc.if_else(zero, pa.scalar(None, table[name].type), table[name])
            table = table.set_column(place, table.schema.field(place), counts)
            notices[f"{name} of 0, which is no count: unknown"] = count
    return table, notices


def _last_workflow(rows: RawRows, row: int, before: Workflow | None) -> Workflow | None:
    """The workflow of a row, else of the nearest earlier row with one, else `before`."""
    for place in range(row, -1, -1):
        workflow_type, workflow_id = rows.workflow(place)
        if isinstance(workflow_type, str) and isinstance(workflow_id, str):
            return workflow_type, workflow_id
    return before


def array_of(values: Sequence[Any], name: str, origin: Origin, *, from_pandas: bool) -> pa.Array:
    """Python values of a column as the first Arrow type that accepts them all; the caller casts to the schema.

    None is a missing value; `from_pandas`, so are NaN and NaT. Otherwise the values come from JSON, with checked types.
    Raises RowError for a value of a wrong type, or that does not fit.
    """
    kind = KINDS[COLUMN_TYPES[name]]
    if from_pandas and pa.types.is_timestamp(COLUMN_TYPES[name]):
        values = [v.isoformat() if isinstance(v, dt.datetime) and v == v else v for v in values]  # NaT != NaT
    bad = 0
    for arrow_type in kind.arrow:
        try:
            return pa.array(values, arrow_type, from_pandas=from_pandas)
        except REFUSALS:
            bad = max(bad, first_refused(values, arrow_type, from_pandas=from_pandas))
    if not from_pandas:
        message = f"the value does not fit; expected {kind.words} (in valid Unicode): correct it"
        raise origin.bad(bad, name, message, f"{name} does not fit")
    raise wrong_type(values[bad], bad, name, origin)


def wrong_type(value: Any, row: int, name: str, origin: Origin) -> RowError:
    """The error for a value of a wrong Python type."""
    message = f"type {type(value).__name__}; expected {KINDS[COLUMN_TYPES[name]].words}: convert it"
    return origin.bad(row, name, message, f"{name} of a wrong type")


def read_parquet(path: Path, skip_bad: bool = False) -> Iterator[Source]:
    """Read a Parquet file, a chunk at a time; see `Reader`."""
    return sources(_parquet_batches(path), str(path), skip_bad)


class _ParquetRows(NamedTuple):
    """Rows of a table. In foreign tables text is checked too, because Arrow accepts any bytes in a file as UTF-8."""

    rows: pa.Table
    foreign: bool

    def table(self, start: int, stop: int, origin: Origin) -> pa.Table:
        part = self.rows.slice(start, stop - start)
        for name in part.column_names if self.foreign else ():
            try:
                part[name].validate(full=True)
            except pa.ArrowInvalid:
                row = first_failure(part[name], lambda some: some.validate(full=True))
                message = "text that is no UTF-8: correct it, or write the file again from text"
                raise origin.bad(row, name, message, f"{name} that is no UTF-8") from None
        return part

    def workflow(self, row: int) -> tuple[object, object]:
        with suppress(UnicodeDecodeError):
            return self.rows["workflow_type"][row].as_py(), self.rows["workflow_id"][row].as_py()
        return None, None


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
_FRAME_BATCH_ROWS: Final = 2**15
_CSV_BATCH_CHARACTERS: Final = 32 * 2**20
_NO_VALUE: Final = ("", "nan", "null", "none", "na", "n/a", "<na>", "nat", "\\n")
"""Spellings of a missing value by pandas and databases, in lower case; names and texts may legitimately equal them."""
_GAP: Final = re.compile(r"(?<=\d)\s+(?=\d)")
_LIST: Final = msgspec.json.Decoder(list[int | float | list[int | float]])


def read_csv(path: Path, skip_bad: bool = False) -> Iterator[Source]:
    """Read a CSV file, plain or gzip, a batch of rows at a time; see `Reader`."""
    return sources(_csv_batches(path), str(path), skip_bad)


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
    def __init__(self, names: Sequence[str], rows: Sequence[CsvRow]) -> None:
        self._places = {name: place for place, name in enumerate(names) if name in COLUMN_TYPES}
        self._rows = rows

    def table(self, start: int, stop: int, origin: Origin) -> pa.Table:
        part = self._rows[start:stop]
        for row, csv_row in enumerate(part):
            if csv_row.problem:
                raise RowError(f"{origin.at(row)}: {csv_row.problem}", row=row, reason=csv_row.reason)
        columns = list(zip(*(row.fields for row in part), strict=True)) or [()] * (1 + max(self._places.values()))
        return pa.table({name: _csv_column(columns[place], name, origin) for name, place in self._places.items()})

    def workflow(self, row: int) -> tuple[object, object]:
        csv_row = self._rows[row]
        return self._field(csv_row, "workflow_type"), self._field(csv_row, "workflow_id")

    def _field(self, row: CsvRow, name: str) -> str | None:
        place = self._places[name]
        text = row.fields[place] if place < len(row.fields) else ""
        return text if text and "\ufffd" not in text else None


def _csv_column(fields: Sequence[str], name: str, origin: Origin) -> pa.ChunkedArray:
    """A column of text, parsed for its type; the caller casts to the schema."""
    target = COLUMN_TYPES[name]
    if is_text(target):
        return pa.chunked_array([pa.array([field or None for field in fields], pa.large_string())])
    text = pc.utf8_trim_whitespace(pa.chunked_array([fields], pa.large_string()))
    text = pc.if_else(pc.is_in(pc.utf8_lower(text), pa.array(_NO_VALUE)), None, text)
    types = KINDS[target].arrow
    means = partial(_list, of=types[0]) if pa.types.is_list(target) else partial(_cast_first, types=types)
    try:
        return means(text)
    except pa.ArrowInvalid:
        row = first_failure(text, means)
        as_json = " in JSON, such as [0, 1]," if pa.types.is_list(target) else ""
        message = f"the value does not fit; expected {KINDS[target].words}{as_json}: correct it"
        raise origin.bad(row, name, message, f"{name} does not fit") from None


def _cast_first(text: pa.ChunkedArray, types: Sequence[pa.DataType]) -> pa.ChunkedArray:
    """The text as the first type that accepts all of it; the last raises."""
    for data_type in types[:-1]:
        with suppress(pa.ArrowInvalid):
            return text.cast(data_type)
    return text.cast(types[-1])


def _list(text: pa.ChunkedArray, of: pa.DataType) -> pa.ChunkedArray:
    try:
        lists = [None if field is None else _numbers(field) for field in text.to_pylist()]
    except msgspec.MsgspecError as error:
        raise pa.ArrowInvalid("no list") from error
    return pa.chunked_array([pa.array(lists, of)])


def _numbers(field: str) -> list[int | float | list[int | float]]:
    try:
        return _LIST.decode(field)
    except msgspec.MsgspecError:
        return _LIST.decode(_GAP.sub(",", field))  # NumPy's [0 1], which pandas writes for lists read from Parquet


def is_frame(source: object) -> TypeGuard[pd.DataFrame]:
    """Whether this is a pandas data frame; does not import pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(source, pandas.DataFrame)


def read_frame(frame: pd.DataFrame, name: str, skip_bad: bool = False) -> Iterator[Source]:
    """Read a data frame, a batch of rows at a time; as a `Reader`. Errors count rows from 0, as `frame.iloc` does."""
    return sources(_frame_batches(frame, name), name, skip_bad)


def _frame_batches(frame: pd.DataFrame, name: str) -> Iterator[Batch]:
    indexed = [level for level in frame.index.names if level in KNOWN_COLUMNS]
    check_columns([*indexed, *map(str, frame.columns)], name)
    if indexed:
        frame = frame.reset_index(indexed)
    frame = frame[[column for column in frame.columns if column in KNOWN_COLUMNS]]
    for start in range(0, len(frame), _FRAME_BATCH_ROWS):
        rows = frame.iloc[start : start + _FRAME_BATCH_ROWS]
        yield Batch(_FrameRows(rows), Origin.of(name, len(rows), first=start))


class _FrameRows(NamedTuple):
    rows: pd.DataFrame

    def table(self, start: int, stop: int, origin: Origin) -> pa.Table:
        part = self.rows.iloc[start:stop]
        return pa.table({name: _frame_column(part[name], name, origin) for name in part.columns})

    def workflow(self, row: int) -> tuple[object, object]:
        return self.rows["workflow_type"].iloc[row], self.rows["workflow_id"].iloc[row]


def _frame_column(series: pd.Series, name: str, origin: Origin) -> pa.Array | pa.ChunkedArray:
    if series.dtype == object:
        return array_of(series.tolist(), name, origin, from_pandas=True)
    if getattr(series.dtype, "tz", None) is not None:
        series = series.dt.tz_convert(None)  # UTC; converting with the zone makes pandas warn
    try:
        return pa.array(series, from_pandas=True)
    except REFUSALS as error:
        message = f"dtype {series.dtype}, expected {KINDS[COLUMN_TYPES[name]].words}: convert the column"
        raise TraceError(f'{origin.names[0]}, column "{name}": {message}') from error


def table_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a CSV or Parquet file, without missing values, with their lines or rows, from 1.

    Raises TraceError if it cannot be read.
    """
    if not path.name.endswith(".parquet"):
        reading = CsvRows(path)
        for row in reading:
            if row.problem:
                raise TraceError(f"{path}, line {row.line}: {row.problem}")
            yield row.line, {name: field for name, field in zip(reading.names, row.fields, strict=True) if field}
        return
    try:
        with open_parquet(path) as file:
            rows = (row for rows, _ in row_batches(file, file.schema_arrow.names) for row in rows.to_pylist())
            yield from enumerate(map(_without_missing, rows), start=1)
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{path}: cannot be read as Parquet ({first_line(error)}): write the file again") from error


def frame_rows(frame: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a pandas data frame, without missing values, numbered from 0; a named index is a column."""
    named = frame.reset_index([name for name in frame.index.names if name is not None])
    yield from enumerate(map(_without_missing, named.to_dict("records")))


def _without_missing(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        str(name): value.isoformat() if isinstance(value, dt.datetime) else value
        for name, value in row.items()
        if value is not None and (isinstance(value, list | dict) or hasattr(value, "__len__") or value == value)
    }
