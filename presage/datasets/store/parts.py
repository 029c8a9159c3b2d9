"""Part files and manifest of a trace store, and Parquet reading in bounded memory.

Writers hold `.lock`, write part files to a staging folder and commit them by replacing the manifest. States are plain
Parquet lists, because Parquet has no fixed-size list and Arrow cannot read one with nulls. The workflow type is in the
folder name and the manifest, not in the parts, as other Parquet readers expect of a partition.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from presage.datasets.schema import SCHEMA_VERSION, STATE_COLUMNS, conform, state_sizes, trace_schema, with_schema
from presage.datasets.schema.names import NO_NAMES, NameMapping
from presage.errors import TraceError

_PROBE_ROWS: Final = 64
_CHUNK_BYTES: Final = 16 * 2**20
CHUNK_ROWS: Final = 2**15
_BUFFER_BYTES: Final = 2**20


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a file that is read while it is decoded; by default Arrow fetches whole row groups."""
    return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)


def first_line(error: Exception) -> str:
    """The message of an Arrow or system error, shortened to one line."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def row_batches(
    file: pq.ParquetFile, columns: list[str], groups: Iterable[int] | None = None
) -> Iterator[tuple[pa.Table, int]]:
    """(rows, bytes on disk read so far) of an open file or some of its row groups, in portions."""
    done = 0
    for group in range(file.num_row_groups) if groups is None else groups:
        row_group = file.metadata.row_group(group)
        on_disk = sum(row_group.column(column).total_compressed_size for column in range(row_group.num_columns))
        rows = CHUNK_ROWS
        if row_group.num_rows > _PROBE_ROWS:
            probe = next(file.iter_batches(_PROBE_ROWS, row_groups=[group], columns=columns))
            rows = min(CHUNK_ROWS, max(1, _CHUNK_BYTES * probe.num_rows // max(1, probe.nbytes)))
        read = 0
        for batch in file.iter_batches(rows, row_groups=[group], columns=columns):
            read += batch.num_rows
            yield pa.Table.from_batches([batch]), done + on_disk * read // max(1, row_group.num_rows)
        done += on_disk


MANIFEST: Final = "_manifest.json"  # the underscore hides it from other Parquet readers
WORK: Final = ".ingest"  # what writers have not committed yet
_LOCK: Final = ".lock"
_FORMAT: Final = "presage-traces"


@dataclass(frozen=True)
class Part:
    """A committed part file; `path` is relative to the store."""

    path: str
    workflow_type: str
    rows: int


@dataclass(frozen=True)
class Manifest:
    """The parts of a store, the widths of its prefill and completion states, and what its spans were read with.

    Of each notice it has the most that one ingestion had, so that files ingested again do not count twice. `names` has
    folded the names of all its steps, and folds those of later ingestions.
    """

    parts: tuple[Part, ...] = ()
    sizes: tuple[int | None, int | None] = (None, None)
    notices: Mapping[str, int] = field(default_factory=dict)
    names: NameMapping = NO_NAMES

    @property
    def schema(self) -> pa.Schema:
        """The schema of the trace."""
        return trace_schema(*self.sizes)


def is_store(path: str | Path) -> bool:
    """Whether a path is a trace store."""
    return (Path(path) / MANIFEST).is_file()


def load(root: Path) -> Manifest:
    """The manifest of a store.

    Raises TraceError if it is missing, damaged or of an unknown version, or a part is not on disk.
    """
    path = root / MANIFEST
    try:
        raw: dict[str, Any] = json.loads(path.read_bytes())
        if raw["format"] != _FORMAT:
            raise ValueError
        version = raw["schema_version"]
        parts = tuple(Part(**part) for part in raw["parts"])
        sizes = (raw["prefill_state_size"], raw["completion_state_size"])
        notices = {str(what): int(count) for what, count in raw.get("notices", {}).items()}
        names = NameMapping.from_dict(raw["names"]) if "names" in raw else NO_NAMES
    except OSError as error:
        raise TraceError(f"{root}: no trace store ({path.name}: {error.strerror}): check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}: not the manifest of a trace store, or damaged: ingest the traces again") from error
    if version != SCHEMA_VERSION:
        raise TraceError(
            f"{path}: trace schema version {version!r}, this release reads version {SCHEMA_VERSION}: read it with the "
            "release that wrote it, or ingest the original traces again"
        )
    missing = [part.path for part in parts if not (root / part.path).is_file()]
    if missing:
        raise TraceError(f"{root}: part {missing[0]} is in the manifest but not on disk: restore it or ingest again")
    return Manifest(parts, sizes, notices, names)


def save(manifest: Manifest, root: Path) -> None:
    """Commit: replace the manifest in one rename."""
    content = {
        "format": _FORMAT,
        "schema_version": SCHEMA_VERSION,
        "prefill_state_size": manifest.sizes[0],
        "completion_state_size": manifest.sizes[1],
        "notices": dict(manifest.notices),
        "names": manifest.names.to_dict(),
        "parts": [asdict(part) for part in manifest.parts],
    }
    temporary = root / f"{MANIFEST}.tmp"
    try:
        with temporary.open("w", encoding="utf-8") as sink:
            json.dump(content, sink, indent=1)
            sink.flush()
            os.fsync(sink.fileno())
        temporary.replace(root / MANIFEST)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def writing(root: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[Manifest]:
    """Context manager that locks a store for writing, creating it if needed; yields its manifest.

    After a failure, a store that was created here and is still empty is removed. `waiting` is called once if another
    writer holds the lock. Raises TraceError if the folder is not a store, or its manifest cannot be read.
    """
    made = not root.exists()
    with _lock(root, waiting):
        try:
            manifest = load(root) if is_store(root) else Manifest()
            sweep(root, manifest)
            yield manifest
        except BaseException:
            if made and not is_store(root):
                with suppress(OSError):
                    (root / WORK).rmdir()  # goes only when nothing in it waits to be resumed
                if not (root / WORK).exists():
                    (root / _LOCK).unlink(missing_ok=True)
                    with suppress(OSError):
                        root.rmdir()
            raise


@contextmanager
def _lock(root: Path, waiting: Callable[[], None]) -> Iterator[None]:
    while True:
        _claim(root)
        with (root / _LOCK).open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by closing, so also by a kill
            except BlockingIOError:
                waiting()
                fcntl.flock(lock, fcntl.LOCK_EX)
            # The writer before may have removed a store that it failed to create, and this lock with it.
            with suppress(FileNotFoundError):
                if os.fstat(lock.fileno()).st_ino == (root / _LOCK).stat().st_ino:
                    yield
                    return


def _claim(root: Path) -> None:
    """Create the folder; raise if it holds other files."""
    if root.exists() and not root.is_dir():
        raise TraceError(f"{root}: a file; expected the folder of a store: give another path")
    if root.is_dir() and not is_store(root):
        ours = (_LOCK, WORK, f"{MANIFEST}.tmp")  # what a writer that never committed may leave
        foreign = [p.name for p in root.iterdir() if p.name not in ours and not p.name.startswith("workflow_type=")]
        if foreign:
            raise TraceError(f"{root}: a folder with other files in it and no store: give an empty or a new folder")
    root.mkdir(parents=True, exist_ok=True)


def sweep(root: Path, manifest: Manifest) -> None:
    """Remove parts that were never committed."""
    committed = {root / part.path for part in manifest.parts}
    for folder in root.glob("workflow_type=*"):
        for path in folder.iterdir():
            if path not in committed:
                path.unlink()
        with suppress(OSError):
            folder.rmdir()  # only goes when empty


def sync(folder: Path) -> None:
    """Flush renames in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def part_folder(workflow_type: str) -> str:
    """The folder of a workflow type; long names are truncated with a hash, because file names end at 255 bytes."""
    quoted = quote(workflow_type, safe="")
    if len(quoted) > 200:
        quoted = f"{quoted[:180]}-{hashlib.sha256(workflow_type.encode()).hexdigest()[:16]}"
    return f"workflow_type={quoted}"


_ROW_GROUP_BYTES: Final = 32 * 2**20
_ROW_GROUP_ROWS: Final = 2**17
_SMALL_BYTES: Final = 4 * 2**20
_MANY: Final = 16
_DICTIONARY: Final = ["workflow_id", "agent", "task", "kind", "model", "finish_reason"]


def write_parts(table: pa.Table, staging: Path) -> list[Part]:
    """Write a valid trace in canonical order as one part for each workflow type, in a folder laid out as the store."""
    types = table["workflow_type"].combine_chunks()
    edges = np.flatnonzero(pc.not_equal(types[1:], types[:-1]).to_numpy(zero_copy_only=False)) + 1
    return [
        _write(types[start].as_py(), [table.slice(start, stop - start)], table.schema, staging)
        for start, stop in pairwise([0, *edges.tolist(), table.num_rows])
    ]


def commit(
    parts: Sequence[Part],
    staging: Path,
    root: Path,
    manifest: Manifest,
    schema: pa.Schema,
    replaced: Mapping[str, Sequence[str]],
    notices: Mapping[str, int],
) -> None:
    """Move parts from `staging` into the store, locked by `writing`, and commit; until then the store is unchanged.

    Many small parts of a workflow type are joined into one. `schema` is that of the store including the new parts;
    workflows of these ids, by workflow type, are `replaced` by new ones: the parts that hold them are written anew.
    `notices` are those of what is new. The store keeps the names of `manifest`.
    """
    most = {
        what: max(notices.get(what, 0), manifest.notices.get(what, 0)) for what in sorted({*manifest.notices, *notices})
    }
    try:
        kept = [*_without(manifest, replaced, staging, root, schema), *parts]
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
        save(Manifest(tuple(kept), state_sizes(schema), most, manifest.names), root)
    except BaseException:
        with suppress(OSError, TraceError):
            sweep(root, load(root) if is_store(root) else Manifest())  # by the manifest on disk: it may have got there
        raise
    with suppress(OSError):
        sync(root)
        sweep(root, Manifest(tuple(kept)))  # parts that were joined


def _without(
    manifest: Manifest, replaced: Mapping[str, Sequence[str]], staging: Path, root: Path, schema: pa.Schema
) -> Iterator[Part]:
    """The parts of a store, without workflows that are replaced."""
    for part in manifest.parts:
        ids = pa.array(replaced.get(part.workflow_type, ()), pa.string())
        if not len(ids) or not any(True for _ in rows_of(ids, root, part, manifest.sizes)):
            yield part
            continue
        rows = (
            rows.filter(pc.invert(pc.is_in(rows["workflow_id"], ids)))
            for rows, _ in part_rows(root, part, state_sizes(schema))
        )
        rest = _write(part.workflow_type, rows, schema, staging)
        if rest.rows:
            yield rest


def part_rows(folder: Path, part: Part, sizes: tuple[int | None, int | None]) -> Iterator[tuple[pa.Table, int]]:
    """(conforming rows, bytes on disk read so far) of a part, in portions; `sizes` are the widths of its states.

    Raises TraceError if the part is damaged.
    """
    with _opened(folder, part) as file:
        for rows, position in row_batches(file, file.schema_arrow.names):
            yield _conforming(rows, part, folder, sizes), position


def rows_of(ids: pa.Array, root: Path, part: Part, sizes: tuple[int | None, int | None]) -> Iterator[pa.Table]:
    """The conforming rows of a part with a workflow id in `ids`."""
    with _opened(root, part) as file:
        for group in range(file.num_row_groups):
            wanted = pc.is_in(file.read_row_group(group, ["workflow_id"])["workflow_id"], ids)
            if not pc.any(wanted).as_py():
                continue
            start = 0
            for rows, _ in row_batches(file, file.schema_arrow.names, groups=[group]):
                matching = rows.filter(wanted.slice(start, rows.num_rows))
                start += rows.num_rows
                if matching.num_rows:
                    yield _conforming(matching, part, root, sizes)


@contextmanager
def _opened(folder: Path, part: Part) -> Iterator[pq.ParquetFile]:
    try:
        with open_parquet(folder / part.path) as file:
            yield file
    except FileNotFoundError as error:
        message = f"{folder}: part {part.path} is gone; joined with others, if the store was written to: read it again"
        raise TraceError(message) from error
    except (pa.ArrowException, OSError) as error:
        raise unreadable(folder, error) from error


def unreadable(root: Path, error: Exception) -> TraceError:
    """The error for a part that cannot be read."""
    return TraceError(f"{root}: a part cannot be read ({first_line(error)}): restore it or ingest again")


def _conforming(rows: pa.Table, part: Part, folder: Path, sizes: tuple[int | None, int | None]) -> pa.Table:
    name = pa.DictionaryArray.from_arrays(np.zeros(rows.num_rows, np.int32), pa.array([part.workflow_type]))
    return conform(rows.append_column("workflow_type", name), str(folder), sizes)


def _write(workflow_type: str, tables: Iterable[pa.Table], schema: pa.Schema, staging: Path) -> Part:
    """Write conforming rows of one workflow type as a part, named by the digest of its content."""
    stored = schema.remove(schema.get_field_index("workflow_type"))
    for state in set(STATE_COLUMNS) & set(stored.names):
        stored = stored.set(stored.get_field_index(state), pa.field(state, pa.list_(pa.float16())))
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
            if sum(part_table.num_rows for part_table in waiting) >= rows:
                yield pa.concat_tables(waiting)
                waiting = []
    if waiting:
        yield pa.concat_tables(waiting)
