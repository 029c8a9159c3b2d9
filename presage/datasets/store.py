"""The trace store: a Parquet dataset partitioned by workflow type, appended to safely and read lazily.

    store/
      _manifest.json                                 what is in the store; the only file a reader believes
      workflow_type=autocoderover/part-<digest>.parquet
      .lock                                          held while writing
      .ingest/                                       what is being written and not committed

An append writes its part files aside, renames them into place, and then replaces `_manifest.json` in one rename: that
rename is the commit. Whatever happens before it (a full disk, a kill) leaves a store that reads as it did; what nobody
committed is swept away by the next append. Small parts of a workflow type are joined once there are many
(`presage.datasets.parts`). A trace that need not fit in memory is brought in by `presage.datasets.ingest`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs

from presage.datasets.manifest import WORK, is_store, load, writing
from presage.datasets.parts import commit, part_rows, write_parts
from presage.datasets.present import not_yet_in
from presage.datasets.schema import concat, conform, validate
from presage.datasets.source import Origin, Source
from presage.datasets.validate import canonical_order, workflow_count
from presage.errors import OutputError, TraceError

__all__ = ["AppendReport", "append", "is_store", "open_store", "read_store", "scan_store"]

_KEYS: Final = ("workflow_type", "workflow_id", "step")


@dataclass(frozen=True)
class AppendReport:
    """What an append did: workflows and steps added, and workflows that were there already."""

    workflows: int
    steps: int
    already_present: int


def append(table: pa.Table, store: str | Path) -> AppendReport:
    """Add workflows to a store, which is created if it is not there.

    A workflow that is in the store with the same content is passed over. Two appends at a time wait for each other.

    Args:
        table: a trace; it is conformed and validated first.
        store: folder of the store.

    Raises:
        TraceError: the trace is not valid, a workflow is in the store with other content, its states have another
            size than the store's, or the folder holds something else than a store.
        OutputError: the store could not be written; it reads as it did before.
    """
    root = Path(store)
    table = validate(conform(table, "trace to append"), "trace to append")
    staging = root / WORK / "append"
    try:
        with writing(root) as manifest:
            schema = concat(
                [manifest.schema.empty_table(), table.slice(0, 0)], [f"the store {root}", "the trace to append"]
            ).schema
            fresh, present = not_yet_in(table, root, manifest)
            try:
                if fresh.num_rows:
                    commit(write_parts(fresh, staging), staging, root, manifest, schema)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
                with suppress(OSError):
                    staging.parent.rmdir()  # only goes when empty
    except OSError as error:
        raise unwritten(root, error) from error
    return AppendReport(workflow_count(fresh), fresh.num_rows, present)


def unwritten(root: Path, error: OSError) -> OutputError:
    """The error of a store that could not be written."""
    return OutputError(
        f"{root}: the store could not be written ({error.strerror or error}); it reads as before: make room or "
        "check permissions, then append again"
    )


def open_store(store: str | Path) -> ds.Dataset:
    """The store as a lazy Arrow dataset with the schema of the trace; rows stand part by part, not in canonical order.

    A filter on `workflow_type` opens only the parts of that type.

    Raises:
        TraceError: there is no store, its manifest or a part is missing or damaged, or its version is unknown.
    """
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
    """Read a store in canonical order.

    Args:
        store: folder of the store.
        workflow_types: read only these; None reads all.
        columns: read only these, in this order; None reads all.

    Raises:
        TraceError: as `open_store`; a part is damaged; a workflow type or a column is not in the store.
    """
    dataset = open_store(store)
    unknown = [column for column in columns or () if column not in dataset.schema.names]
    if unknown:
        raise TraceError(f"{store}: no column {unknown[0]!r}; the store has: {', '.join(dataset.schema.names)}")
    known = {part.workflow_type for part in load(Path(store)).parts}
    absent = sorted(set(workflow_types or ()) - known)
    if absent:
        raise TraceError(f"{store}: no workflow type {absent[0]!r}; the store has: {', '.join(sorted(known))}")
    only = None if workflow_types is None else ds.field("workflow_type").isin(list(workflow_types))
    wanted = list(dataset.schema.names if columns is None else columns)
    try:
        table = dataset.to_table(columns=list(dict.fromkeys([*wanted, *_KEYS])), filter=only)
    except (pa.ArrowException, OSError) as error:
        detail = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise TraceError(f"{store}: a part cannot be read ({detail}): restore it or ingest again") from error
    order = canonical_order(table)
    if not np.array_equal(order, np.arange(len(order))):
        table = table.take(pa.array(order))
    return table.select(wanted)


def scan_store(store: str | Path, *, progress: Callable[[int], None] | None = None) -> Iterator[Source]:
    """A store as chunks of bounded memory, part by part.

    Args:
        store: folder of the store.
        progress: called with the number of steps read since its last call.

    Raises:
        TraceError: as `open_store`; a part is damaged.
    """
    root, first = Path(store), 1
    manifest = load(root)
    for part in manifest.parts:
        told = 0
        for table, position in part_rows(root, part, manifest.sizes):
            if progress is not None:
                progress(table.num_rows)
            yield Source(table, Origin.of(str(root), table.num_rows, first=first), read_bytes=position - told)
            told, first = position, first + table.num_rows
