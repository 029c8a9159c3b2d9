"""Files of a recording: an engine's folder, and in it the files of each table, one after the other."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from presage.datasets.recording import INSTANCE_FOLDER, LOCK, OPEN, WHOLE
from presage.serving_hooks.recorder.config import RecorderConfig

_LOOK_AGAIN_S: Final = 10.0

OpenFile = Callable[[str], Any]
"""Opens a new file for writing: `write`, `tell`, `close`."""


class EngineFolder:
    """The folder of one engine in a recording that engines may share: locked, bounded, created again if removed."""

    def __init__(self, config: RecorderConfig, instance: str) -> None:
        self.root = Path(config.folder)
        self.path = self.root / f"{INSTANCE_FOLDER}{instance}"
        self._most = config.max_mb * 2**20
        self._lock: int | None = None
        self._bytes = 0
        self._looked_s = -_LOOK_AGAIN_S
        os.register_at_fork(after_in_child=self.release)  # a copy of the lock there would outlive the engine

    def claim(self) -> bool:
        """Makes the folder, readable by its owner only, and locks it; returns whether it was missing.

        Raises:
            OSError: it cannot be made or locked.
        """
        if self._lock is not None and (self.path / LOCK).exists():
            return False
        self.release()
        self.root.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system releases it when this process ends
        except OSError:
            os.close(lock)
            raise
        self._lock = lock
        return True

    def release(self) -> None:
        """Unlocks the folder; called after the last write."""
        if self._lock is not None:
            with suppress(OSError):
                os.close(self._lock)
            self._lock = None

    def grew(self, size: int) -> None:
        """Notes bytes that were written."""
        self._bytes += size

    def full(self, now_s: float) -> bool:
        """Whether the recording has reached its limit. Measures the disk now and then: other processes use it too."""
        if now_s - self._looked_s >= _LOOK_AGAIN_S:
            self._looked_s, self._bytes = now_s, 0
            for folder, _, names in os.walk(self.root):
                for name in names:
                    with suppress(OSError):
                        self._bytes += (Path(folder) / name).stat().st_size
        return self._bytes >= self._most


def error_reason(error: Exception) -> str:
    """The system's reason for a failed write; Arrow's own message may contain a path."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return type(error).__name__


class RotatingWriter:
    """Writes one table, a new file whenever the current one is full.

    A file has an open name until it is full, then it is renamed. A file that could not be written keeps the open name;
    its whole batches are read, and the next rows go into another file. Files are not synced to disk: a power cut
    truncates some files, and readers count that.
    """

    def __init__(
        self, folder: Path, table: str, schema: pa.Schema, config: RecorderConfig, open_file: OpenFile
    ) -> None:
        self._folder, self._table, self._schema, self._config = folder, table, schema, config
        self._open_file = open_file
        self._sink: Any = None
        self._writer: Any = None
        self._path = folder
        self._opened_s = 0.0
        self._rows = self._size = self._lost = 0

    def write(self, batch: pa.RecordBatch, number: int, now_s: float) -> int:
        """Adds a batch, to file `number` if a new one has to be opened; returns the bytes it took on disk.

        Raises:
            OSError: it could not be written; readers will not see it.
        """
        before = self._size
        try:
            if self._writer is None:
                self._path = self._folder / f"{self._table}-{number:06}{OPEN}"
                self._sink = self._open_file(str(self._path))
                self._writer = pa.ipc.new_stream(self._sink, self._schema)
                self._opened_s = now_s
            self._writer.write_batch(batch)
            self._size = int(self._sink.tell())
        except Exception:
            self._abandon()
            raise
        self._rows += batch.num_rows
        return self._size - before

    def full(self, now_s: float) -> bool:
        """Whether there is an open file, and it is full."""
        config = self._config
        return self._writer is not None and (
            self._rows >= config.rows_per_file
            or self._size >= config.file_mb * 2**20
            or now_s - self._opened_s >= config.file_age_s
        )

    def rotate(self) -> None:
        """Closes the open file, if there is one, and gives it its final name.

        Raises:
            OSError: it could not be closed; its batches stay readable.
        """
        if self._writer is None:
            return
        try:
            self._writer.close()
            self._sink.close()
            self._path.rename(self._path.with_name(self._path.name.removesuffix(OPEN) + WHOLE))
        except FileNotFoundError:
            self._lost += self._rows
        except Exception:
            self._abandon()
            raise
        self._reset()

    def take_lost(self) -> int:
        """Rows lost with open files that were removed, since the last call. Writes to such a file succeed."""
        if self._writer is not None and not self._path.exists():
            self._abandon()
        lost, self._lost = self._lost, 0
        return lost

    def _abandon(self) -> None:
        """Leaves a file that cannot be written as it is, or removes it if it holds no whole batch."""
        with suppress(Exception):
            self._sink.close()
        if not self._rows:
            with suppress(OSError):
                self._path.unlink()
        elif not self._path.exists():
            self._lost += self._rows
        self._reset()

    def _reset(self) -> None:
        self._sink = self._writer = None
        self._rows = self._size = 0
