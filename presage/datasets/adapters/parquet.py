"""Parquet files with the columns of a trace, read in chunks of bounded memory.

Those that were written as a trace carry its schema version. Any other, as pandas, polars or a database write it, is
read like JSONL: columns a trace does not know are ignored, an index that pandas stored among them.

A row group may hold gigabytes: it is decoded in portions, sized by what its first rows take in memory, since the size
on disk says little where a long prompt is stored once and repeated by reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from presage.datasets.adapters.source import Source
from presage.datasets.adapters.tabular import Batch, sources
from presage.datasets.columns import first_failure
from presage.datasets.origin import Origin
from presage.datasets.schema import KNOWN_COLUMNS, check_columns, check_version
from presage.errors import TraceError

_PROBE_ROWS: Final = 64
_CHUNK_BYTES: Final = 16 * 2**20
_CHUNK_ROWS: Final = 2**15
_BUFFER_BYTES: Final = 2**20


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
    return sources(_batches(path), str(path), skip_bad, progress)


def open_parquet(path: Path) -> pq.ParquetFile:
    """A file that is read as it is decoded; by default Arrow fetches the columns of a row group as a whole."""
    return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)


def row_batches(
    file: pq.ParquetFile, columns: list[str], groups: Iterable[int] | None = None
) -> Iterator[tuple[pa.Table, int]]:
    """(rows, bytes on disk read for them and those before) of an open file or some of its row groups, in portions."""
    done = 0
    for group in range(file.num_row_groups) if groups is None else groups:
        found = file.metadata.row_group(group)
        on_disk = sum(found.column(column).total_compressed_size for column in range(found.num_columns))
        rows = _CHUNK_ROWS
        if found.num_rows > _PROBE_ROWS:
            probe = next(file.iter_batches(_PROBE_ROWS, row_groups=[group], columns=columns))
            rows = min(_CHUNK_ROWS, max(1, _CHUNK_BYTES * probe.num_rows // max(1, probe.nbytes)))
        read = 0
        for batch in file.iter_batches(rows, row_groups=[group], columns=columns):
            read += batch.num_rows
            yield pa.Table.from_batches([batch]), done + on_disk * read // max(1, found.num_rows)
        done += on_disk


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


def _batches(path: Path) -> Iterator[Batch]:
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
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        what_to_do = "copy or write the file again"
        if detail.startswith("Expected all lists to be of size"):
            what_to_do = "Arrow does not read back lists of a fixed size where some are null: write plain lists"
        raise TraceError(f"{path}: cannot be read as Parquet ({detail[:200]}): {what_to_do}") from error
