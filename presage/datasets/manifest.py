"""The manifest of a trace store, and what keeps two writers apart.

The manifest is the only file a reader believes; replacing it, in one rename, is what commits a change. Writers hold
`.lock`. What lies in the folders of the parts and not in the manifest was left by a writer that never committed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa

from presage.datasets.schema import SCHEMA_VERSION, trace_schema
from presage.errors import TraceError

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
    """What is in a store."""

    parts: tuple[Part, ...] = ()
    prefill_state_size: int | None = None
    completion_state_size: int | None = None

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Widths of the prefill and the completion state."""
        return self.prefill_state_size, self.completion_state_size

    @property
    def schema(self) -> pa.Schema:
        """The schema of the trace."""
        return trace_schema(*self.sizes)


def is_store(path: str | Path) -> bool:
    """Does a trace store stand at this path?"""
    return (Path(path) / MANIFEST).is_file()


def load(root: Path) -> Manifest:
    """The manifest of a store.

    Raises:
        TraceError: there is none, it is damaged, its version is unknown, or a part is not on disk.
    """
    path = root / MANIFEST
    try:
        raw: dict[str, Any] = json.loads(path.read_bytes())
        if raw["format"] != _FORMAT:
            raise ValueError
        version = raw["schema_version"]
        parts = tuple(Part(**part) for part in raw["parts"])
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
    missing = [part.path for part in parts if not (root / part.path).is_file()]
    if missing:
        raise TraceError(f"{root}: part {missing[0]} is in the manifest but not on disk: restore it or ingest again")
    return Manifest(parts, *sizes)


def save(manifest: Manifest, root: Path) -> None:
    """Replace the manifest in one rename: this commits."""
    content = {
        "format": _FORMAT,
        "schema_version": SCHEMA_VERSION,
        "prefill_state_size": manifest.prefill_state_size,
        "completion_state_size": manifest.completion_state_size,
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
    """Hold a store, which is made if it is not there, as its only writer; gives what is in it.

    What a failure leaves of a store that held nothing before is removed again.

    Args:
        root: folder of the store.
        waiting: called once if another writer has to be waited for.

    Raises:
        TraceError: something else than a store lives there, or its manifest cannot be read.
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
            # Whoever held it may have removed the store it could not make; then this is the lock of nothing.
            with suppress(FileNotFoundError):
                if os.fstat(lock.fileno()).st_ino == (root / _LOCK).stat().st_ino:
                    yield
                    return


def _claim(root: Path) -> None:
    """Make the folder, unless something that is no store lives there."""
    if root.exists() and not root.is_dir():
        raise TraceError(f"{root}: a file; the folder of a store is wanted: give another path")
    if root.is_dir() and not is_store(root):
        ours = (_LOCK, WORK, f"{MANIFEST}.tmp")  # what a writer that never committed may leave
        foreign = [p.name for p in root.iterdir() if p.name not in ours and not p.name.startswith("workflow_type=")]
        if foreign:
            raise TraceError(f"{root}: a folder with other files in it and no store: give an empty or a new folder")
    root.mkdir(parents=True, exist_ok=True)


def sweep(root: Path, manifest: Manifest) -> None:
    """Remove parts that earlier writers left and never committed."""
    committed = {root / part.path for part in manifest.parts}
    for folder in root.glob("workflow_type=*"):
        for path in folder.iterdir():
            if path not in committed:
                path.unlink()
        with suppress(OSError):
            folder.rmdir()  # only goes when empty


def sync(folder: Path) -> None:
    """Make renames in a folder outlive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def part_folder(workflow_type: str) -> str:
    """The folder of a workflow type; long names are cut and told apart by a hash, since names end at 255 bytes."""
    quoted = quote(workflow_type, safe="")
    if len(quoted) > 200:
        quoted = f"{quoted[:180]}-{hashlib.sha256(workflow_type.encode()).hexdigest()[:16]}"
    return f"workflow_type={quoted}"
