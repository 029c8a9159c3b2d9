"""One table of a recording: its open file, and when that is full.

A file is written under an open name and gets its whole name when it is full, in one rename. A file whose writing failed
keeps its open name, and what is whole in it counts; the next rows go into another. Nothing is forced to the disk: that
would slow the engine's machine down, and what a power cut takes is the end of some files, which readers count.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from presage.datasets.recording import OPEN, WHOLE

Opening = Callable[[str], Any]
"""Opens a new file for writing: `write`, `tell`, `close`."""


@dataclass(frozen=True)
class FileLimits:
    """When a file is full: rows, bytes, seconds since it was opened."""

    rows: int
    size: int
    age_s: float


class Series:
    """The files of a table.

    Args:
        folder: of the engine.
        table: name of the table.
        schema: of its files.
        limits: when a file is full.
        opening: opens a file.
    """

    def __init__(self, folder: Path, table: str, schema: pa.Schema, limits: FileLimits, opening: Opening) -> None:
        self._folder, self._table, self._schema, self._limits, self._opening = folder, table, schema, limits, opening
        self._sink: Any = None
        self._writer: Any = None
        self._path = folder
        self._opened_s = 0.0
        self._rows = self._size = self._lost = 0

    def write(self, batch: pa.RecordBatch, number: int, now_s: float) -> int:
        """Adds a batch; the bytes it took on disk.

        Args:
            batch: of the table.
            number: of the file, where a new one has to be opened.
            now_s: by the rising clock.

        Raises:
            OSError: it could not be written; nothing of it will be read.
        """
        before = self._size
        try:
            if self._writer is None:
                self._open(number, now_s)
            self._writer.write_batch(batch)
            self._size = int(self._sink.tell())
        except Exception:
            self._abandon()
            raise
        self._rows += batch.num_rows
        return self._size - before

    def full(self, now_s: float) -> bool:
        """Whether the open file is."""
        if self._writer is None:
            return False
        limits, age_s = self._limits, now_s - self._opened_s
        return self._rows >= limits.rows or self._size >= limits.size or age_s >= limits.age_s

    def rotate(self) -> None:
        """Ends the open file, if there is one, and gives it its whole name.

        Raises:
            OSError: it could not be ended; its batches stay readable.
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
        self._forget()

    def take_lost(self) -> int:
        """Rows of files that somebody has removed while they were open, since this was last asked. No write tells."""
        if self._writer is not None and not self._path.exists():
            self._abandon()
        lost, self._lost = self._lost, 0
        return lost

    def _open(self, number: int, now_s: float) -> None:
        self._path = self._folder / f"{self._table}-{number:06}{OPEN}"
        self._sink = self._opening(str(self._path))
        self._writer = pa.ipc.new_stream(self._sink, self._schema)
        self._opened_s = now_s

    def _abandon(self) -> None:
        """Leaves a file that cannot be written to as it is, or removes it if nothing in it is whole."""
        with suppress(Exception):
            self._sink.close()
        if not self._rows:
            with suppress(OSError):
                self._path.unlink()
        elif not self._path.exists():
            self._lost += self._rows
        self._forget()

    def _forget(self) -> None:
        self._sink = self._writer = None
        self._rows = self._size = 0
