"""Answers of models in an SQLite file: what a run has received, and the cache of results between runs.

Keys are hashes, so no prompt is stored; answers are. An answer that is in the file is not asked for again: so a run
that was killed goes on, and equal prompts at temperature 0 cost one call.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from presage.errors import OutputError


@dataclass(frozen=True)
class ModelAnswer:
    """One answer.

    Attributes:
        prompt_tokens: as the engine counted them.
        cached_tokens: of these, found in its prefix cache; 0 if it does not say.
    """

    text: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Answers:
    """The answers in a file.

    Args:
        most_bytes: of answers; the least recently used ones go first. None: no limit.
    """

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self.path = path
        self._most = most_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=30, isolation_level=None)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT NOT NULL, prompt INTEGER NOT NULL,"
                " cached INTEGER NOT NULL, output INTEGER NOT NULL, bytes INTEGER NOT NULL, used INTEGER NOT NULL)"
            )
            self._file.execute("CREATE INDEX IF NOT EXISTS answers_used ON answers (used)")
            total, latest = self._file.execute("SELECT total(bytes), coalesce(max(used), 0) FROM answers").fetchone()
        except (sqlite3.Error, OSError) as error:
            raise OutputError(f"{path}: no file of answers can be kept there ({error}); give another path") from None
        self._bytes, self._clock = int(total), int(latest)
        self._begun = self._clock

    def get(self, key: str) -> ModelAnswer | None:
        """An answer, or None."""
        row = self._do("SELECT text, prompt, cached, output FROM answers WHERE key = ?", key).fetchone()
        if row is None:
            return None
        if self._most is not None:
            self._clock += 1
            self._do("UPDATE answers SET used = ? WHERE key = ?", self._clock, key)
        return ModelAnswer(*row)

    def put(self, key: str, answer: ModelAnswer) -> int:
        """Keep an answer; the first one for a key stays. How many went that were used since the file was opened."""
        self._clock += 1
        gone = 0
        size = len(answer.text.encode()) + len(key)
        said = (answer.text, answer.prompt_tokens, answer.cached_tokens, answer.output_tokens)
        added = self._do("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)", key, *said, size, self._clock)
        self._bytes += size * added.rowcount
        while self._most is not None and self._bytes > self._most:
            oldest, its, used = self._do("SELECT key, bytes, used FROM answers ORDER BY used LIMIT 1").fetchone()
            self._do("DELETE FROM answers WHERE key = ?", oldest)
            self._bytes -= its
            gone += used > self._begun
        return gone

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _do(self, statement: str, *values: object) -> sqlite3.Cursor:
        try:
            return self._file.execute(statement, values)
        except sqlite3.Error as error:
            raise OutputError(f"{self.path}: answers cannot be kept ({error}); run again to go on") from None


def content_key(
    tenant: str, model: str, version: str, parameters: Mapping[str, Any], messages: list[dict[str, str]]
) -> str:
    """What decides the answer of a deterministic call, and whose it is."""
    said = [tenant, model, version, sorted(parameters.items()), messages]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()
