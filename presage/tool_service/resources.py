"""Prepared tools in a database, so that a restart finds them: a row is there before its tool, and goes after it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from presage.errors import OutputError
from presage.tool_service.drivers import Handle

State = Literal["preparing", "ready", "used", "removing"]

WorkflowKey = tuple[str, str, str]
"""Tenant, workflow type and id."""

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS resources (
    id TEXT PRIMARY KEY, tool TEXT, state TEXT, tenant TEXT, workflow_type TEXT, workflow_id TEXT, at REAL, handle TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ended (
    tenant TEXT, workflow_type TEXT, workflow_id TEXT, at REAL, PRIMARY KEY (tenant, workflow_type, workflow_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS ended_at ON ended (at);
"""


@dataclass(slots=True, eq=False)
class Resource:
    """One prepared tool.

    Attributes:
        state: `used` from when it was handed out.
        workflow: for which it is prepared, or that uses it; None for whichever asks first.
        at: when it got this state, seconds since 1970.
        handle: of the driver; empty until it is ready.
    """

    id: str
    tool: str
    state: State
    workflow: WorkflowKey | None
    at: float
    handle: Handle


class ResourceTable:
    """The database, used by one thread at a time.

    Each change is with the kernel before it returns, which outlives the process.

    Raises:
        OutputError: the file cannot be written, or is no such database.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            self._database = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise OutputError(f"{file}: no database of the tool service can be kept there ({error})") from error

    def fact(self, name: str) -> bytes | None:
        """What is kept under this name."""
        row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return row[0] if row is not None else None

    def keep_fact(self, name: str, value: bytes) -> None:
        """Keeps it."""
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def put(self, resource: Resource) -> None:
        """Writes a resource as it is now."""
        self._database.execute(
            "INSERT OR REPLACE INTO resources VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                resource.id,
                resource.tool,
                resource.state,
                *(resource.workflow or (None, None, None)),
                resource.at,
                msgspec.json.encode(resource.handle).decode(),
            ),
        )

    def drop(self, resource_id: str) -> None:
        """Nothing is left of this resource."""
        self._database.execute("DELETE FROM resources WHERE id = ?", (resource_id,))

    def __iter__(self) -> Iterator[Resource]:
        rows = self._database.execute("SELECT * FROM resources").fetchall()
        for resource_id, tool, state, tenant, workflow_type, workflow_id, since_s, handle in rows:
            workflow = None if workflow_id is None else (tenant, workflow_type, workflow_id)
            yield Resource(resource_id, tool, state, workflow, since_s, msgspec.json.decode(handle))

    def end(self, workflow: WorkflowKey, at: float) -> None:
        """The workflow has ended at this time: what happened before and is told later is late."""
        self._database.execute("INSERT OR REPLACE INTO ended VALUES (?, ?, ?, ?)", (*workflow, at))

    def ended_since(self, workflow: WorkflowKey, at: float) -> bool:
        """Whether it ended at this time or later; the same id may be that of another run afterwards."""
        where = "tenant = ? AND workflow_type = ? AND workflow_id = ? AND at >= ?"
        return self._database.execute(f"SELECT 1 FROM ended WHERE {where}", (*workflow, at)).fetchone() is not None

    def forget_ended(self, before: float, most: int) -> None:
        """Forgets workflows that ended before this time, and all but the latest `most`."""
        oldest = "SELECT at FROM ended ORDER BY at DESC LIMIT 1 OFFSET ?"
        self._database.execute(f"DELETE FROM ended WHERE at < ? OR at <= ({oldest})", (before, most))

    def close(self) -> None:
        """Closes the file."""
        self._database.close()
