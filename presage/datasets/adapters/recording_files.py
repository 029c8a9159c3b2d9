"""The files of a recording: engines, tables, whole batches. Knows nothing of workflows.

A file may be growing, torn at its end, renamed or removed while it is read. What is read of it is its whole batches;
what is not is counted in bytes.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from presage.datasets.recording import (
    FILE_NAME,
    INSTANCE_FOLDER,
    INSTANCE_KEY,
    LAYER_KEY,
    LOCK,
    MODEL_KEY,
    OPEN,
    TABLES,
    VERSION,
    VERSION_KEY,
    WHOLE,
)
from presage.errors import TraceError

TORN: Final = "file that ends inside a batch"
TORN_BYTES: Final = "byte after the last whole batch of a file"


@dataclass(frozen=True)
class Engine:
    """One engine of a recording.

    Attributes:
        folder: its folder.
        name: of the instance.
        records: whether it still records; then what it has not finished may yet go on.
    """

    folder: Path
    name: str
    records: bool


@dataclass(frozen=True)
class Served:
    """What an engine served while it wrote a file.

    Attributes:
        model: by its name; None where it was not known.
        state_layer: the layer of recorded states, counted from 1; None for those after the final norm.
    """

    model: str | None
    state_layer: int | None


def is_recording(path: Path) -> bool:
    """Is this the folder of a recording, or that of one engine in it?"""
    return bool(_folders(path))


def engines(path: Path) -> list[Engine]:
    """The engines of a recording, by name; or the one whose folder this is.

    Raises:
        TraceError: there is none.
    """
    found = _folders(path)
    if not found:
        raise TraceError(
            f"{path}: no recording ({INSTANCE_FOLDER}*/{LOCK} is not there); the folder of the recorder's settings is "
            "wanted: check the path"
        )
    return [Engine(one, one.name.removeprefix(INSTANCE_FOLDER), _records(one / LOCK)) for one in found]


def batches(
    engine: Engine, table: str, columns: Sequence[str] | None, lost: Counter[str]
) -> Iterator[tuple[pa.RecordBatch, Served]]:
    """All whole batches of a table in the order they were written, each with what was served.

    Args:
        engine: whose.
        table: steps, forecasts or ends.
        columns: those that are wanted, the others are not read; None for all.
        lost: counts what cannot be read.

    Raises:
        TraceError: a file is of another version, or is no file of a recording.
    """
    for path in _files(engine.folder, table):
        try:
            yield from _batches(path, table, columns, lost)
        except FileNotFoundError:
            # It was full in the meantime. One that was removed is gone, and its steps are missing.
            with suppress(FileNotFoundError):
                yield from _batches(path.with_name(path.name.replace(OPEN, WHOLE)), table, columns, lost)


def _folders(path: Path) -> list[Path]:
    if path.name.startswith(INSTANCE_FOLDER) and (path / LOCK).is_file():
        return [path]
    return sorted(lock.parent for lock in path.glob(f"{INSTANCE_FOLDER}*/{LOCK}"))


def _records(lock: Path) -> bool:
    """Whether somebody holds the lock. A copy of a folder has a lock that nobody holds."""
    try:
        handle = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _files(folder: Path, table: str) -> list[Path]:
    names = [path for path in folder.iterdir() if FILE_NAME.fullmatch(path.name)]
    return sorted(path for path in names if path.name.startswith(f"{table}-"))


def _batches(
    path: Path, table: str, columns: Sequence[str] | None, lost: Counter[str]
) -> Iterator[tuple[pa.RecordBatch, Served]]:
    size = path.stat().st_size
    if not size:
        return
    wanted = None if columns is None else [TABLES[table].get_field_index(name) for name in columns]
    options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
    with pa.memory_map(str(path)) as source:
        position = 0
        try:
            reader = pa.ipc.open_stream(source, options=options)
        except (pa.ArrowException, OSError):
            lost[TORN] += 1
            lost[TORN_BYTES] += size
            return
        served = _served(reader, path, table, columns)
        while True:
            position = source.tell()
            try:
                batch = reader.read_next_batch()
                batch.validate(full=True)
            except StopIteration:
                return
            except (pa.ArrowException, OSError):
                lost[TORN] += 1
                lost[TORN_BYTES] += size - position
                return
            yield batch, served


def _served(reader: pa.RecordBatchStreamReader, path: Path, table: str, columns: Sequence[str] | None) -> Served:
    facts = reader.schema.metadata or {}
    version = facts.get(VERSION_KEY, b"none").decode(errors="replace")
    if version != VERSION or INSTANCE_KEY not in facts:
        raise TraceError(
            f"{path}: recording version {version}, this release reads version {VERSION}: ingest it with the release "
            "that recorded it"
        )
    wanted = TABLES[table] if columns is None else pa.schema([TABLES[table].field(name) for name in columns])
    if not reader.schema.equals(wanted):
        raise TraceError(f"{path}: not the columns of {table} in a recording: remove the file, or record anew")
    return Served(
        facts[MODEL_KEY].decode() if MODEL_KEY in facts else None,
        int(facts[LAYER_KEY]) if LAYER_KEY in facts else None,
    )
