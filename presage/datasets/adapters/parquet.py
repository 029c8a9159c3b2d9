"""Parquet files with the columns of a trace and its schema version, read in chunks of bounded memory.

A row group may hold gigabytes: it is decoded in portions, sized by what its first rows take in memory, since the size
on disk says little where a long prompt is stored once and repeated by reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from presage.datasets.adapters.source import Source, Workflow, salvage
from presage.datasets.origin import Origin, RowError
from presage.datasets.schema import KNOWN_COLUMNS, check_version, concat, conform, state_sizes, trace_schema
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
        path: the file; its metadata carry the schema version.
        skip_bad: count rows that are bad instead of raising, and mark their workflows as spoiled.
        progress: called with the number of steps read since its last call.

    Raises:
        TraceError: the file is damaged or of another schema version, or a value is missing or has a wrong type.
    """
    name, first, told = str(path), 1, 0
    sizes: tuple[int | None, int | None] = (None, None)
    for raw, position in _batches(path):
        origin = Origin.of(name, raw.num_rows, first=first)
        first += raw.num_rows
        source = _salvaged(raw, origin, sizes) if skip_bad else Source(conform(raw, origin, sizes), origin)
        found = state_sizes(source.table.schema)
        sizes = (sizes[0] or found[0], sizes[1] or found[1])
        if progress is not None:
            progress(source.table.num_rows)
        yield Source(source.table, source.origin, source.skipped, source.spoiled, position - told)
        told = position


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


def _batches(path: Path) -> Iterator[tuple[pa.Table, int]]:
    try:
        with open_parquet(path) as file:
            check_version(file.schema_arrow.metadata, str(path))
            columns = [name for name in file.schema_arrow.names if name in KNOWN_COLUMNS]
            if not file.metadata.num_rows:  # the columns are to be checked all the same
                yield file.schema_arrow.empty_table().select(columns), 0
            yield from row_batches(file, columns)
    except (pa.ArrowException, OSError) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(f"{path}: cannot be read as Parquet ({detail[:200]}): copy or write the file again") from error


def _salvaged(raw: pa.Table, origin: Origin, sizes: tuple[int | None, int | None]) -> Source:
    skipped = Counter[str]()
    spoiled: set[Workflow] = set()

    def part(start: int, stop: int) -> Origin:
        return Origin.of(origin.names[0], stop - start, first=int(origin.places[0]) + start)

    def on_bad(row: int, error: RowError) -> None:
        skipped[f"row with {error.reason}"] += 1
        spoiled.add((str(raw["workflow_type"][row]), str(raw["workflow_id"][row])))

    found = salvage(raw.num_rows, lambda i, j: conform(raw.slice(i, j - i), part(i, j), sizes), on_bad)
    if not found:
        return Source(trace_schema().empty_table(), part(0, 0), dict(skipped), frozenset(spoiled))
    table = concat([rows for _, _, rows in found], [origin.names[0]] * len(found))
    return Source(
        table, Origin.chunks([part(start, stop) for start, stop, _ in found]), dict(skipped), frozenset(spoiled)
    )
