"""The trace store: a Parquet dataset partitioned by workflow type, appended to safely and read lazily.

    store/
      _manifest.json                                 what is in the store; the only file a reader believes
      workflow_type=autocoderover/part-<digest>.parquet
      .lock                                          held while appending

An append writes its part files under temporary names, renames them, and then replaces `_manifest.json` in one rename:
that rename is the commit. Whatever happens before it (a full disk, a kill) leaves a store that reads as it did; parts
nobody committed are swept away by the next append. The workflow type stands in the folder name and in the manifest,
not in the parts, as other Parquet readers expect of a partition.

States are plain Parquet lists: Parquet knows no fixed-size list, and Arrow cannot read one with nulls back. Reading
through the schema of the trace restores the type. Many small appends make many small files; nothing compacts them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq

from presage.datasets.adapters.parquet import row_batches
from presage.datasets.adapters.source import Source
from presage.datasets.origin import Origin
from presage.datasets.schema import (
    SCHEMA_VERSION,
    concat,
    conform,
    digest,
    state_sizes,
    trace_schema,
    validate,
    with_schema,
)
from presage.datasets.validate import canonical_order
from presage.errors import OutputError, TraceError

_MANIFEST: Final = "_manifest.json"  # the underscore hides it from other Parquet readers
_FORMAT: Final = "presage-traces"
_ROW_GROUP_BYTES: Final = 64 * 2**20
_KEYS: Final = ("workflow_type", "workflow_id", "step")
_DICTIONARY: Final = ["workflow_id", "agent", "task", "kind", "model"]


@dataclass(frozen=True)
class AppendReport:
    """What an append did: workflows and steps added, and workflows that were there already."""

    workflows: int
    steps: int
    already_present: int


@dataclass(frozen=True)
class _Part:
    """A committed part file; `path` is relative to the store."""

    path: str
    workflow_type: str
    rows: int


@dataclass(frozen=True)
class _Manifest:
    parts: tuple[_Part, ...] = ()
    prefill_state_size: int | None = None
    completion_state_size: int | None = None

    @property
    def schema(self) -> pa.Schema:
        return trace_schema(self.prefill_state_size, self.completion_state_size)


def is_store(path: str | Path) -> bool:
    """Does a trace store stand at this path?"""
    return (Path(path) / _MANIFEST).is_file()


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
    try:
        _claim(root)
        with _locked(root):
            manifest = _load(root) if is_store(root) else _Manifest()
            _sweep(root, manifest)
            fresh, present = _not_yet_in(table, root, manifest)
            if fresh.num_rows:
                _commit(fresh, root, manifest)
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(
            f"{root}: the store could not be written ({error.strerror or error}); it reads as before: make room or "
            "check permissions, then append again"
        ) from error
    return AppendReport(_workflow_count(fresh), fresh.num_rows, present)


def open_store(store: str | Path) -> ds.Dataset:
    """The store as a lazy Arrow dataset with the schema of the trace; rows stand part by part, not in canonical order.

    A filter on `workflow_type` opens only the parts of that type.

    Raises:
        TraceError: there is no store, its manifest or a part is missing or damaged, or its version is unknown.
    """
    root = Path(store)
    return _dataset(root, _load_whole(root))


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
    known = {part.workflow_type for part in _load(Path(store)).parts}
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
    manifest = _load_whole(root)
    sizes = (manifest.prefill_state_size, manifest.completion_state_size)
    for part in manifest.parts:
        told = 0
        for raw, position in _part_batches(root, part):
            origin = Origin.of(str(root), raw.num_rows, first=first)
            if progress is not None:
                progress(raw.num_rows)
            yield Source(conform(raw, origin, sizes), origin, read_bytes=position - told)
            told, first = position, first + raw.num_rows


def _load_whole(root: Path) -> _Manifest:
    manifest = _load(root)
    missing = [part.path for part in manifest.parts if not (root / part.path).is_file()]
    if missing:
        raise TraceError(f"{root}: part {missing[0]} is in the manifest but not on disk: restore it or ingest again")
    return manifest


def _part_batches(root: Path, part: _Part) -> Iterator[tuple[pa.Table, int]]:
    """(rows with their workflow type, bytes on disk up to there) of a part; its states are lists of no fixed size."""
    try:
        with pq.ParquetFile(root / part.path) as file:
            for rows, position in row_batches(file, file.schema_arrow.names):
                name = pa.DictionaryArray.from_arrays(np.zeros(rows.num_rows, np.int32), pa.array([part.workflow_type]))
                yield rows.append_column("workflow_type", name), position
    except (pa.ArrowException, OSError) as error:
        detail = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise TraceError(f"{root}: a part cannot be read ({detail}): restore it or ingest again") from error


def _dataset(root: Path, manifest: _Manifest) -> ds.Dataset:
    return ds.FileSystemDataset.from_paths(
        [str(root / part.path) for part in manifest.parts],
        schema=manifest.schema,
        format=ds.ParquetFileFormat(),
        filesystem=pyarrow.fs.LocalFileSystem(),
        partitions=[ds.field("workflow_type") == part.workflow_type for part in manifest.parts],
    )


def _load(root: Path) -> _Manifest:
    path = root / _MANIFEST
    try:
        raw: dict[str, Any] = json.loads(path.read_bytes())
        if raw["format"] != _FORMAT:
            raise ValueError
        version = raw["schema_version"]
        parts = tuple(_Part(**part) for part in raw["parts"])
        sizes = (raw["prefill_state_size"], raw["completion_state_size"])
    except OSError as error:
        raise TraceError(f"{root}: no trace store ({path.name}: {error.strerror}): check the path") from error
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: not the manifest of a trace store, or damaged: ingest the traces again") from error
    if version != SCHEMA_VERSION:
        raise TraceError(
            f"{path}: trace schema version {version!r}, this release reads version {SCHEMA_VERSION}: read it with the "
            "release that wrote it, or ingest the original traces again"
        )
    return _Manifest(parts, *sizes)


def _claim(root: Path) -> None:
    """Make the folder, unless something that is no store lives there."""
    if root.exists() and not root.is_dir():
        raise TraceError(f"{root}: a file; the folder of a store is wanted: give another path")
    if root.is_dir() and not is_store(root):
        ours = (".lock", f"{_MANIFEST}.tmp")  # what an append that never committed may leave
        foreign = [p.name for p in root.iterdir() if p.name not in ours and not p.name.startswith("workflow_type=")]
        if foreign:
            raise TraceError(f"{root}: a folder with other files in it and no store: give an empty or a new folder")
    root.mkdir(parents=True, exist_ok=True)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    with (root / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by closing, so also by a kill
        yield


def _sweep(root: Path, manifest: _Manifest) -> None:
    """Remove what earlier appends left that never committed."""
    committed = {root / part.path for part in manifest.parts}
    for folder in root.glob("workflow_type=*"):
        for path in folder.iterdir():
            if path not in committed:
                path.unlink()
        with suppress(OSError):
            folder.rmdir()  # only goes when empty


def _not_yet_in(table: pa.Table, root: Path, manifest: _Manifest) -> tuple[pa.Table, int]:
    """The workflows that the store lacks, and how many it has already."""
    types = set(pc.unique(table["workflow_type"]).to_pylist())
    parts = tuple(part for part in manifest.parts if part.workflow_type in types)
    if not parts:
        return table, 0
    stored = _dataset(root, _Manifest(parts, manifest.prefill_state_size, manifest.completion_state_size))
    known = stored.to_table(columns=["workflow_type", "workflow_id"]).group_by(["workflow_type", "workflow_id"])
    keys = known.aggregate([])
    in_store = np.zeros(table.num_rows, bool)
    for name in types:
        ids = keys.filter(pc.equal(keys["workflow_type"], name))["workflow_id"].combine_chunks()
        mask = pc.and_(pc.equal(table["workflow_type"], name), pc.is_in(table["workflow_id"], ids))
        in_store |= mask.to_numpy()
    again = table.filter(pa.array(in_store))
    if again.num_rows:
        _check_same(again, stored, str(root))
    return table.filter(pa.array(~in_store)), _workflow_count(again)


def _check_same(given: pa.Table, stored: ds.Dataset, store: str) -> None:
    ids = pc.unique(given["workflow_id"])
    found = stored.to_table(filter=ds.field("workflow_id").isin(ids))
    pairs = set(zip(given["workflow_type"].to_pylist(), given["workflow_id"].to_pylist(), strict=True))
    mine = [
        pair in pairs for pair in zip(found["workflow_type"].to_pylist(), found["workflow_id"].to_pylist(), strict=True)
    ]
    found = found.filter(pa.array(mine))
    found = found.take(pa.array(canonical_order(found)))
    # One schema for both: a column only one of them has is null in the other, which is a difference if it has states.
    schema = concat([found.slice(0, 0), given.slice(0, 0)], [store, "the trace to append"]).schema
    found, given = with_schema(found, schema), with_schema(given, schema)
    if found.equals(given):
        return
    for name, workflow_id in sorted(pairs):
        key = (ds.field("workflow_type") == name) & (ds.field("workflow_id") == workflow_id)
        old, new = found.filter(key), given.filter(key)
        if not old.equals(new):
            same = old.num_rows == new.num_rows
            column = next(c for c in schema.names if not same or not old[c].equals(new[c]))
            what = (
                f"column {column!r} differs" if same else f"it has {old.num_rows} steps there and {new.num_rows} here"
            )
            raise TraceError(
                f"workflow {workflow_id!r} ({name}) is already in {store} with other content: {what}. A workflow is "
                "written once, when it has ended: use another store, or give the new run another workflow_id"
            )


def _commit(table: pa.Table, root: Path, manifest: _Manifest) -> None:
    schema = concat(
        [manifest.schema.empty_table(), table.slice(0, 0)], [f"the store {root}", "the trace to append"]
    ).schema
    parts: list[_Part] = []
    try:
        for name in pc.unique(table["workflow_type"]).to_pylist():
            part = table.filter(pc.equal(table["workflow_type"], name))
            folder = root / f"workflow_type={_folder(name)}"
            folder.mkdir(exist_ok=True)
            path = folder / f"part-{digest(part)[:16]}.parquet"
            temporary = folder / f".{path.name}.tmp"
            _write_part(part, temporary)
            temporary.replace(path)
            _sync(folder)
            parts.append(_Part(str(path.relative_to(root)), name, part.num_rows))
        every = sorted((*manifest.parts, *parts), key=lambda part: (part.workflow_type, part.path))
        _write_manifest(_Manifest(tuple(every), *state_sizes(schema)), root)
    except BaseException:
        with suppress(OSError, TraceError):
            _sweep(
                root, _load(root) if is_store(root) else _Manifest()
            )  # by the manifest on disk: it may have got there
        raise
    with suppress(OSError):
        _sync(root)


def _write_part(part: pa.Table, path: Path) -> None:
    columns, fields = [], []
    for field in part.schema:
        if field.name == "workflow_type":
            continue
        column = part.column(field.name)
        if pa.types.is_fixed_size_list(field.type):
            column = column.cast(pa.list_(pa.float16()))
        columns.append(column)
        fields.append(pa.field(field.name, column.type, field.nullable))
    row_bytes = max(1, part.nbytes // part.num_rows)
    with path.open("wb") as sink:
        pq.write_table(
            pa.table(columns, schema=pa.schema(fields, metadata=part.schema.metadata)),
            sink,
            compression="zstd",
            use_dictionary=_DICTIONARY,
            row_group_size=int(np.clip(_ROW_GROUP_BYTES // row_bytes, 1024, 2**17)),
        )
        sink.flush()
        os.fsync(sink.fileno())


def _write_manifest(manifest: _Manifest, root: Path) -> None:
    content = {
        "format": _FORMAT,
        "schema_version": SCHEMA_VERSION,
        "prefill_state_size": manifest.prefill_state_size,
        "completion_state_size": manifest.completion_state_size,
        "parts": [asdict(part) for part in manifest.parts],
    }
    temporary = root / f"{_MANIFEST}.tmp"
    try:
        with temporary.open("w", encoding="utf-8") as sink:
            json.dump(content, sink, indent=1)
            sink.flush()
            os.fsync(sink.fileno())
        temporary.replace(root / _MANIFEST)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _sync(folder: Path) -> None:
    """Make renames in a folder outlive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _folder(name: str) -> str:
    """A workflow type as a folder name; long ones are cut and told apart by a hash, since names end at 255 bytes."""
    quoted = quote(name, safe="")
    return quoted if len(quoted) <= 200 else f"{quoted[:180]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _workflow_count(table: pa.Table) -> int:
    return int(table.group_by(["workflow_type", "workflow_id"]).aggregate([]).num_rows)
