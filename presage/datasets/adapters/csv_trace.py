"""CSV files with the columns of a trace, as `DataFrame.to_csv` and databases write them.

A header names the columns; those a trace does not know are dropped, and so is an index without a name. What a field
means is told by its column alone: names and texts stay as they are written, so `007` is no number. An empty field is no
value. Lists (`parent_steps`, states) are JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.datasets.adapters.source import Source
from presage.datasets.adapters.tabular import Batch, sources
from presage.datasets.adapters.text_files import CsvRow, CsvRows
from presage.datasets.columns import first_failure, wanted
from presage.datasets.origin import Origin, RowError
from presage.datasets.schema import COLUMN_TYPES, check_columns

_BATCH_ROWS: Final = 8192
_BATCH_CHARACTERS: Final = 32 * 2**20
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
    return sources(_batches(path), str(path), skip_bad, progress)


def _batches(path: Path) -> Iterator[Batch]:
    reading = CsvRows(path)
    check_columns(reading.names, str(path))
    rows: list[CsvRow] = []
    size = 0

    def batch() -> Batch:
        lines = np.array([row.line for row in rows], np.int64)
        return Batch(_Rows(reading.names, rows), Origin.of(str(path), len(rows), lines), reading.read_bytes)

    for row in reading:
        rows.append(row)
        size += sum(map(len, row.fields))
        if len(rows) == _BATCH_ROWS or size >= _BATCH_CHARACTERS:
            yield batch()
            rows, size = [], 0
    yield batch()


class _Rows:
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
        return pa.table({name: _column(columns[place], name, origin) for name, place in self._places.items()})

    def workflow(self, row: int) -> tuple[object, object]:
        of = self._rows[row]
        return self._field(of, "workflow_type"), self._field(of, "workflow_id")

    def _field(self, row: CsvRow, name: str) -> str | None:
        place = self._places[name]
        text = row.fields[place] if place < len(row.fields) else ""
        return text if text and "\ufffd" not in text else None


def _column(fields: Sequence[str], name: str, origin: Origin) -> pa.ChunkedArray:
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
