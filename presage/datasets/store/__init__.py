"""The trace store: a Parquet dataset partitioned by workflow type, appended to safely and read lazily.

    store/
      _manifest.json                                 the parts of the store; replacing it, in one rename, commits
      workflow_type=autocoderover/part-<digest>.parquet
      .lock                                          held while writing
      .ingest/                                       what is not committed yet

A writer that fails before the commit leaves the store unchanged; the next writer removes its files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.schema import canonical_order, concat, take_rows, with_schema, workflow_codes, workflow_count
from presage.datasets.schema.source import Origin, Source
from presage.datasets.store.parts import Manifest, load, part_rows, rows_of, unreadable
from presage.errors import TraceError

if TYPE_CHECKING:
    import pyarrow.dataset as ds


_KEYS: Final = ("workflow_type", "workflow_id", "step")


def open_store(store: str | Path) -> ds.Dataset:
    """The store as a lazy Arrow dataset with the schema of the trace; rows come part by part, not in canonical order.

    A filter on `workflow_type` opens only the parts of that type. Raises TraceError if there is no store, its manifest
    or a part is missing or damaged, or its version is unknown.
    """
    import pyarrow.dataset as ds  # brings in pandas
    import pyarrow.fs

    root = Path(store)
    manifest = load(root)
    return ds.FileSystemDataset.from_paths(
        [str(root / part.path) for part in manifest.parts],
        schema=manifest.schema,
        format=ds.ParquetFileFormat(),
        filesystem=pyarrow.fs.LocalFileSystem(),
        partitions=[ds.field("workflow_type") == part.workflow_type for part in manifest.parts],
    )


def read_store(
    store: str | Path, workflow_types: Sequence[str] | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """Read a store in canonical order; if given, only some workflow types, and some columns in the order given.

    Raises TraceError as `open_store`, or if a part is damaged, or a workflow type or a column is not in the store.
    """
    dataset = open_store(store)
    unknown = [column for column in columns or () if column not in dataset.schema.names]
    if unknown:
        raise TraceError(f"{store}: no column {unknown[0]!r}; the store has: {', '.join(dataset.schema.names)}")
    known = {part.workflow_type for part in load(Path(store)).parts}
    absent = sorted(set(workflow_types or ()) - known)
    if absent:
        raise TraceError(f"{store}: no workflow type {absent[0]!r}; the store has: {', '.join(sorted(known))}")
    only = None if workflow_types is None else pc.field("workflow_type").isin(list(workflow_types))
    wanted = list(dataset.schema.names if columns is None else columns)
    try:
        table = dataset.to_table(columns=list(dict.fromkeys([*wanted, *_KEYS])), filter=only)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(Path(store), error) from error
    return take_rows(table, canonical_order(table)).select(wanted)


def scan_store(store: str | Path) -> Iterator[Source]:
    """A store as chunks of bounded memory, part by part; raises TraceError as `open_store`, or if a part is damaged."""
    root, first = Path(store), 1
    manifest = load(root)
    for part in manifest.parts:
        reported = 0
        for table, position in part_rows(root, part, manifest.sizes):
            yield Source(table, Origin.of(str(root), table.num_rows, first=first), read_bytes=position - reported)
            reported, first = position, first + table.num_rows


def not_yet_in(table: pa.Table, root: Path, manifest: Manifest) -> tuple[pa.Table, int]:
    """The workflows of a valid trace in canonical order that a store lacks, and the number of those it has.

    Raises TraceError if the store has a workflow with other content, or a part is damaged.
    """
    found = []
    for name in pc.unique(table["workflow_type"]).to_pylist():
        parts = [part for part in manifest.parts if part.workflow_type == name]
        if parts:
            ids = pc.unique(table["workflow_id"].filter(pc.equal(table["workflow_type"], name)))
            found += [rows for part in parts for rows in rows_of(ids, root, part, manifest.sizes)]
    if not found:
        return table, 0
    stored = concat(found, [str(root)] * len(found))
    keys = ["workflow_type", "workflow_id"]
    codes = workflow_codes(pa.concat_tables([table.select(keys), stored.select(keys)]))
    here, there = codes[: table.num_rows], codes[table.num_rows :]
    again = np.isin(here, there)
    given = table.filter(pa.array(again))
    _check_same(given, here[again], stored.take(pa.array(canonical_order(stored))), np.sort(there), str(root))
    return table.filter(pa.array(~again)), workflow_count(given)


def _check_same(
    given: pa.Table, here: NDArray[np.int64], stored: pa.Table, there: NDArray[np.int64], store: str
) -> None:
    """Raise if workflows differ; both tables are in canonical order, `here` and `there` are the workflow codes."""
    # One schema for both: a column only one of them has is null in the other, which is a difference if it has states.
    schema = concat([stored.slice(0, 0), given.slice(0, 0)], [store, "the trace to append"]).schema
    lengths = [np.bincount(codes, minlength=int(there.max()) + 1) for codes in (there, here)]
    other_length = np.flatnonzero(lengths[0] != lengths[1])
    if len(other_length):
        code = other_length[0]
        row = int(np.flatnonzero(here == code)[0])
        what = f"it has {lengths[0][code]} steps there and {lengths[1][code]} here"
    else:
        rows, columns = differing(with_schema(stored, schema), with_schema(given, schema))
        if not rows.any():
            return
        row = int(np.argmax(rows))
        column = next(name for name, first in columns.items() if first == row)
        what = f"column {column!r} differs"
    raise TraceError(
        f"workflow {given['workflow_id'][row].as_py()!r} ({given['workflow_type'][row].as_py()}) is already in {store} "
        f"with other content: {what}. A workflow is written once, when it has ended: use another store, or give the "
        "new run another workflow_id"
    )


def differing(one: pa.Table, other: pa.Table) -> tuple[NDArray[np.bool_], dict[str, int]]:
    """Which rows of two tables of equal length and schema differ, bool [rows], and the first of each such column."""
    rows = np.zeros(one.num_rows, bool)
    columns: dict[str, int] = {}
    for name in one.column_names:
        left, right = one[name], other[name]
        if left.equals(right):
            continue
        if pa.types.is_nested(left.type):  # Arrow compares no lists; few are looked at, since this ends in an error
            found = np.array([left[row] != right[row] for row in range(len(left))])
        else:
            same = pc.or_(pc.fill_null(pc.equal(left, right), False), pc.and_(pc.is_null(left), pc.is_null(right)))
            found = ~same.to_numpy()
        columns[name] = int(np.argmax(found))
        rows |= found
    return rows, columns
