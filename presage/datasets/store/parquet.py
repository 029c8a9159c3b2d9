"""Parquet files in portions of bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

_PROBE_ROWS: Final = 64
_CHUNK_BYTES: Final = 16 * 2**20
CHUNK_ROWS: Final = 2**15
_BUFFER_BYTES: Final = 2**20


def open_parquet(path: Path) -> pq.ParquetFile:
    """A file that is read as it is decoded; by default Arrow fetches the columns of a row group as a whole."""
    return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)


def first_line(error: Exception) -> str:
    """What Arrow or the system says of a file, on one short line."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def row_batches(
    file: pq.ParquetFile, columns: list[str], groups: Iterable[int] | None = None
) -> Iterator[tuple[pa.Table, int]]:
    """(rows, bytes on disk read for them and those before) of an open file or some of its row groups, in portions."""
    done = 0
    for group in range(file.num_row_groups) if groups is None else groups:
        found = file.metadata.row_group(group)
        on_disk = sum(found.column(column).total_compressed_size for column in range(found.num_columns))
        rows = CHUNK_ROWS
        if found.num_rows > _PROBE_ROWS:
            probe = next(file.iter_batches(_PROBE_ROWS, row_groups=[group], columns=columns))
            rows = min(CHUNK_ROWS, max(1, _CHUNK_BYTES * probe.num_rows // max(1, probe.nbytes)))
        read = 0
        for batch in file.iter_batches(rows, row_groups=[group], columns=columns):
            read += batch.num_rows
            yield pa.Table.from_batches([batch]), done + on_disk * read // max(1, found.num_rows)
        done += on_disk
