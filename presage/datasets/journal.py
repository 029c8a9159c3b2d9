"""What an ingestion has done so far, so that the same command goes on after a kill.

A folder `.ingest/<digest of the command>` in the store holds the runs of the first pass, the parts of the second, and
`journal.jsonl`: a line for each group of sources that was read and for each range that was written. A line counts once
it is whole, and is written after the files it names. A source that changed since (its size, its time) is read again.
Whoever holds the store is alone with its journals.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from presage.datasets.manifest import WORK, Part
from presage.datasets.spill import Run, Spilled

_ABANDONED_S: Final = 24 * 3600
_JOURNAL: Final = "journal.jsonl"


class SourcesRead(msgspec.Struct, tag="sources read"):
    """A group of sources was spilled."""

    identities: list[str]
    sources: list[Spilled]
    runs: list[Run]


class Planned(msgspec.Struct, tag="planned"):
    """The ranges of the second pass: what follows counts for this plan only."""

    store: str
    runs: list[str]
    ends: list[int]


class RangeWritten(msgspec.Struct, tag="range written"):
    """A range of workflows was checked and written."""

    number: int
    parts: list[Part]
    workflows: int = 0
    steps: int = 0
    already_present: int = 0
    repeated: int = 0
    skipped: dict[str, int] = {}


_Entry = SourcesRead | Planned | RangeWritten


class Journal:
    """The journal of one ingestion.

    Args:
        root: folder of the store, held by its only writer.
        command: what the ingestion was asked for; the same words find the same journal.
    """

    def __init__(self, root: Path, command: list[str]) -> None:
        name = hashlib.sha256(json.dumps(command).encode()).hexdigest()[:16]
        self.folder = root / WORK / name
        self.staging = self.folder / "parts"
        self._path = self.folder / _JOURNAL
        self._sweep_abandoned()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._entries = self._load()

    def sources_read(self, identities: list[str]) -> list[SourcesRead]:
        """The groups that were read and have not changed since, in the order of the sources; other runs are removed."""
        found: dict[int, SourcesRead] = {}
        taken = set[int]()
        for entry in reversed(self._entries):
            if not isinstance(entry, SourcesRead):
                continue
            numbers = [source.number for source in entry.sources]
            unchanged = [identities[number] for number in numbers] == entry.identities
            if unchanged and taken.isdisjoint(numbers) and all((self.folder / r.name).is_file() for r in entry.runs):
                found[numbers[0]] = entry
                taken.update(numbers)
        kept = {run.name for entry in found.values() for run in entry.runs}
        for path in self.folder.glob("*.arrow"):
            if path.name not in kept:
                path.unlink()
        return [found[number] for number in sorted(found)]

    def next_prefix(self) -> str:
        """A name for new runs that no run before had."""
        return f"run-{len(self._entries)}"

    def ranges_written(self, plan: Planned) -> dict[int, RangeWritten]:
        """By number the ranges of this very plan that were written; what belongs to another plan is removed."""
        plans = [place for place, entry in enumerate(self._entries) if isinstance(entry, Planned)]
        if plans and self._entries[plans[-1]] == plan:
            later = self._entries[plans[-1] :]
            written = [entry for entry in later if isinstance(entry, RangeWritten)]
            whole = [e for e in written if all((self.staging / part.path).is_file() for part in e.parts)]
            return {entry.number: entry for entry in whole}
        shutil.rmtree(self.staging, ignore_errors=True)
        self.add(plan)
        return {}

    def add(self, entry: _Entry) -> None:
        """Remember."""
        with self._path.open("ab") as sink:
            sink.write(msgspec.json.encode(entry) + b"\n")
            sink.flush()
            os.fsync(sink.fileno())
        self._entries.append(entry)

    def discard(self) -> None:
        """Forget all of it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self.folder.parent.rmdir()

    def _load(self) -> list[_Entry]:
        entries: list[_Entry] = []
        with suppress(FileNotFoundError):
            whole = 0
            for line in self._path.read_bytes().splitlines(keepends=True):
                try:
                    if not line.endswith(b"\n"):
                        break
                    entries.append(msgspec.json.decode(line, type=_Entry))
                except msgspec.MsgspecError:
                    break  # of another release, or damaged: what follows is done again
                whole += len(line)
            os.truncate(self._path, whole)
        return entries

    def _sweep_abandoned(self) -> None:
        """Remove what commands left that nobody repeated for a day."""
        for folder in self.folder.parent.glob("*"):
            with suppress(OSError):
                if folder != self.folder and time.time() - _touched(folder) > _ABANDONED_S:
                    shutil.rmtree(folder)


def _touched(folder: Path) -> float:
    journal = folder / _JOURNAL
    return (journal if journal.exists() else folder).stat().st_mtime
