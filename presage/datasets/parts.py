"""The part files of a trace store: written aside, brought in by one commit, joined where they are many and small.

States are plain Parquet lists: Parquet knows no fixed-size list, and Arrow cannot read one with nulls back. The
workflow type stands in the folder name and in the manifest, not in the parts, as other Parquet readers expect of a
partition.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from presage.datasets.adapters.tabular import open_parquet, row_batches
from presage.datasets.manifest import Manifest, Part, is_store, load, part_folder, save, sweep, sync
from presage.datasets.schema import conform, state_sizes, with_schema
from presage.errors import TraceError

_ROW_GROUP_BYTES: Final = 32 * 2**20
_ROW_GROUP_ROWS: Final = 2**17
_SMALL_BYTES: Final = 4 * 2**20
_MANY: Final = 16
_DICTIONARY: Final = ["workflow_id", "agent", "task", "kind", "model", "finish_reason"]


def write_parts(table: pa.Table, staging: Path) -> list[Part]:
    """Write rows as one part a workflow type, under `staging` as they will lie in the store.

    Args:
        table: a valid trace in canonical order.
        staging: a folder on the file system of the store.
    """
    types = table["workflow_type"].combine_chunks()
    edges = np.flatnonzero(pc.not_equal(types[1:], types[:-1]).to_numpy(zero_copy_only=False)) + 1
    return [
        _write(types[start].as_py(), [table.slice(start, stop - start)], table.schema, staging)
        for start, stop in pairwise([0, *edges.tolist(), table.num_rows])
    ]


def commit(parts: Sequence[Part], staging: Path, root: Path, manifest: Manifest, schema: pa.Schema) -> None:
    """Bring parts from `staging` into the store, which stays as it was until the very end.

    A workflow type that has many small parts by then has them joined into one.

    Args:
        parts: as `write_parts` gave them.
        staging: the folder they lie in.
        root: folder of the store, held by `manifest.writing`.
        manifest: what is in the store.
        schema: of the store with the parts in it.
    """
    try:
        kept = [*manifest.parts, *parts]
        for name in {part.workflow_type for part in parts}:
            small = [
                (part, folder)
                for part in kept
                if part.workflow_type == name
                for folder in ((staging if (staging / part.path).is_file() else root),)
                if (folder / part.path).stat().st_size < _SMALL_BYTES
            ]
            if len(small) >= _MANY:
                rows = (rows for part, folder in small for rows, _ in part_rows(folder, part, state_sizes(schema)))
                joined = _write(name, rows, schema, staging)
                gone = {part.path for part, _ in small}
                kept = [part for part in kept if part.path not in gone] + [joined]
        for part in kept:
            if (staging / part.path).is_file():
                (root / part.path).parent.mkdir(exist_ok=True)
                (staging / part.path).replace(root / part.path)
                sync((root / part.path).parent)
        kept.sort(key=lambda part: (part.workflow_type, part.path))
        save(Manifest(tuple(kept), *state_sizes(schema)), root)
    except BaseException:
        with suppress(OSError, TraceError):
            sweep(root, load(root) if is_store(root) else Manifest())  # by the manifest on disk: it may have got there
        raise
    with suppress(OSError):
        sync(root)
        sweep(root, Manifest(tuple(kept)))  # parts that were joined


def part_rows(folder: Path, part: Part, sizes: tuple[int | None, int | None]) -> Iterator[tuple[pa.Table, int]]:
    """(conforming rows, bytes on disk up to there) of a part, in portions.

    Args:
        folder: of the store.
        part: the part.
        sizes: widths of the states of the store.

    Raises:
        TraceError: the part is damaged.
    """
    with _opened(folder, part) as file:
        for rows, position in row_batches(file, file.schema_arrow.names):
            yield _conforming(rows, part, folder, sizes), position


def rows_of(ids: pa.Array, root: Path, part: Part, sizes: tuple[int | None, int | None]) -> Iterator[pa.Table]:
    """The conforming rows of a part whose workflow id is one of `ids`; as `part_rows`."""
    with _opened(root, part) as file:
        for group in range(file.num_row_groups):
            wanted = pc.is_in(file.read_row_group(group, ["workflow_id"])["workflow_id"], ids)
            if not pc.any(wanted).as_py():
                continue
            start = 0
            for rows, _ in row_batches(file, file.schema_arrow.names, groups=[group]):
                found = rows.filter(wanted.slice(start, rows.num_rows))
                start += rows.num_rows
                if found.num_rows:
                    yield _conforming(found, part, root, sizes)


@contextmanager
def _opened(folder: Path, part: Part) -> Iterator[pq.ParquetFile]:
    try:
        with open_parquet(folder / part.path) as file:
            yield file
    except FileNotFoundError as error:
        message = f"{folder}: part {part.path} is gone; joined with others, if the store was written to: read it again"
        raise TraceError(message) from error
    except (pa.ArrowException, OSError) as error:
        detail = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise TraceError(f"{folder}: a part cannot be read ({detail}): restore it or ingest again") from error


def _conforming(rows: pa.Table, part: Part, folder: Path, sizes: tuple[int | None, int | None]) -> pa.Table:
    name = pa.DictionaryArray.from_arrays(np.zeros(rows.num_rows, np.int32), pa.array([part.workflow_type]))
    return conform(rows.append_column("workflow_type", name), str(folder), sizes)


def _write(workflow_type: str, tables: Iterable[pa.Table], schema: pa.Schema, staging: Path) -> Part:
    """Write conforming rows of one workflow type as a part named by its content."""
    fields = [
        pa.field(field.name, pa.list_(pa.float16()), field.nullable)
        if pa.types.is_fixed_size_list(field.type)
        else field
        for field in schema
        if field.name != "workflow_type"
    ]
    stored = pa.schema(fields, metadata=schema.metadata)
    folder = staging / part_folder(workflow_type)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".part.tmp"
    count = 0
    with temporary.open("wb") as sink:
        with pq.ParquetWriter(sink, stored, compression="zstd", use_dictionary=_DICTIONARY) as writer:
            for rows in _row_groups(tables, schema):
                writer.write_table(rows.select(stored.names).cast(stored), row_group_size=rows.num_rows)
                count += rows.num_rows
        sink.flush()
        os.fsync(sink.fileno())
    with temporary.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    final = folder / f"part-{digest[:16]}.parquet"
    temporary.replace(final)
    return Part(str(final.relative_to(staging)), workflow_type, count)


def _row_groups(tables: Iterable[pa.Table], schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows under one schema, in tables of about the size of a row group."""
    waiting: list[pa.Table] = []
    for table in tables:
        rows = int(np.clip(_ROW_GROUP_BYTES * table.num_rows // max(1, table.nbytes), 1, _ROW_GROUP_ROWS))
        for start in range(0, table.num_rows, rows):
            waiting.append(with_schema(table.slice(start, rows), schema))
            if sum(one.num_rows for one in waiting) >= rows:
                yield pa.concat_tables(waiting)
                waiting = []
    if waiting:
        yield pa.concat_tables(waiting)
