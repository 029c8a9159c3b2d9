"""The file in which events wait for delivery: SQLite in WAL mode, the oldest first.

Any number of processes may append, one delivers. What was appended survives the end of any process, also by SIGKILL;
when the machine itself fails, the last moments that its kernel had not written yet are lost.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from presage.errors import ConfigurationError

_VERSION: Final = 1
_BUSY_S: Final = 5.0


class WaitingEvent(NamedTuple):
    """An event in the file: its place in the order, its id, and its JSON."""

    number: int
    id: str
    body: bytes


class Outbox:
    """The file, opened by one thread or process.

    Raises:
        ConfigurationError: it cannot be opened, or is something else.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Names of workflows are nobody else's business. A file that exists is not opened here: closing it again
            # would drop the locks of any other connection of this process.
            path.touch(0o600)
            self._file = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            (version,) = self._file.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._file.execute(
                    "CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT, body BLOB)"
                )
                self._file.execute(f"PRAGMA user_version={_VERSION}")
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(
                f"webhook.file is {path}, which cannot be used ({error}); give a file that may be written"
            ) from None
        if version not in (0, _VERSION):
            raise ConfigurationError(
                f"webhook.file is {path}, of version {version}; this Presage reads {_VERSION}: give another file"
            )

    def append(self, events: Iterable[tuple[str, bytes]], most: int) -> int:
        """Adds events, ids and JSON; drops the oldest beyond `most`, and returns how many.

        Raises:
            sqlite3.Error: the disk is full or fails; nothing is added.
        """
        with self._file:
            self._file.execute("BEGIN IMMEDIATE")
            self._file.executemany("INSERT INTO events (id, body) VALUES (?, ?)", events)
            beyond = "DELETE FROM events WHERE number <= (SELECT max(number) FROM events) - ?"
            return self._file.execute(beyond, (most,)).rowcount

    def oldest(self, most: int) -> list[WaitingEvent]:
        """The first events that wait."""
        rows = self._file.execute("SELECT number, id, body FROM events ORDER BY number LIMIT ?", (most,))
        return [WaitingEvent(*row) for row in rows]

    def delivered(self, number: int) -> None:
        """Removes the events up to this number."""
        self._file.execute("DELETE FROM events WHERE number <= ?", (number,))

    @property
    def waiting(self) -> int:
        """How many wait. Only the oldest ever leave, so the numbers have no gaps."""
        ends = "SELECT (SELECT max(number) FROM events) - (SELECT min(number) FROM events) + 1"
        return int(self._file.execute(ends).fetchone()[0] or 0)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
