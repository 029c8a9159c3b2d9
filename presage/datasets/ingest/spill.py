"""Files of a running ingestion: sorted runs of rows, and the journal from which it resumes after a kill.

Each workflow has a key: a hash of its type, then a hash of its id. Rows are buffered, sorted by key and written as a
run: an Arrow IPC file of small batches with known first and last keys. Reading a range of keys touches only the
overlapping batches, so memory does not grow with the data.

`.ingest/<digest of the command>` in the store holds the runs of the first pass, the parts of the second, and
`journal.jsonl`: one line for each group of sources read and each range written, appended after the files it names. A
source that has changed since (size or time) is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.schema import CommonSizes, concat, state_sizes
from presage.datasets.schema.columns import hashes
from presage.datasets.schema.names import NO_NAMES, NameMapping
from presage.datasets.schema.source import Origin, Source, Workflow
from presage.datasets.store.parts import WORK, Part

RUN_BYTES: Final = 64 * 2**20
BATCH_BYTES: Final = 2**18
_KEY: Final = pa.field(".key", pa.uint64())
_SOURCE: Final = pa.field(".source", pa.int32())
_PLACE: Final = pa.field(".place", pa.int64())
LAST_KEY: Final = 2**64 - 1


@dataclass(frozen=True)
class SortedRun:
    """A file of rows sorted by key: first key, last key and bytes in memory of each batch."""

    name: str
    batches: list[tuple[int, int, int]]


@dataclass
class Spilled:
    """A source whose rows were spilled; `number` is its index in the ingestion, `lined` whether its rows are lines.

    `folded` are the names that were folded, each with its column.
    """

    number: int
    rows: int = 0
    lined: bool = False
    sizes: tuple[int | None, int | None] = (None, None)
    skipped: dict[str, int] = field(default_factory=dict)
    notices: dict[str, int] = field(default_factory=dict)
    spoiled: set[Workflow] = field(default_factory=set)
    folded: set[tuple[str, str]] = field(default_factory=set)


def spill(
    sources: Iterable[tuple[int, str, Iterator[Source]]],
    folder: Path,
    prefix: str,
    progress: Callable[[int], None] = lambda _: None,
    names: NameMapping = NO_NAMES,
) -> tuple[list[Spilled], list[SortedRun]]:
    """Read sources, (number, name, chunks) of each, into runs whose names begin with a prefix; `names` folds theirs.

    `progress` is called with the bytes on disk read since its last call. Raises TraceError as the readers, or if states
    differ in size.
    """
    writer, common = _Writer(folder, prefix), CommonSizes()
    done = []
    for number, name, chunks in sources:
        spilled, of_source = Spilled(number), CommonSizes()
        for read in chunks:
            chunk = read.folded(names)
            spilled.folded |= _changed(read.table, chunk.table)
            spilled.rows += chunk.table.num_rows
            spilled.lined = chunk.origin.lined[0]
            common.add(state_sizes(chunk.table.schema), name)
            of_source.add(state_sizes(chunk.table.schema), name)
            for total, more in ((spilled.skipped, chunk.skipped), (spilled.notices, chunk.notices)):
                for reason, count in more.items():
                    total[reason] = total.get(reason, 0) + count
            spilled.spoiled |= chunk.spoiled
            writer.add(chunk, number)
            progress(chunk.read_bytes)
        spilled.sizes = of_source.sizes
        done.append(spilled)
    return done, writer.close()


def _changed(before: pa.Table, after: pa.Table) -> set[tuple[str, str]]:
    """The names that were folded, each with its column."""
    folded = set()
    for column in ("agent", "workflow_type") if after is not before else ():
        changed = before[column].filter(pc.not_equal(before[column], after[column]))
        folded |= {(column, name) for name in pc.unique(changed).to_pylist()}
    return folded


def ranges(runs: Sequence[SortedRun], wanted_bytes: int) -> list[int]:
    """The last key of each range; a range takes about `wanted_bytes` of memory."""
    batches = sorted(((low + high) // 2, size) for run in runs for low, high, size in run.batches)
    ends, filled = [], 0
    for middle, size in batches:
        if filled + size > wanted_bytes and filled:
            ends.append(middle)
            filled = 0
        filled += size
    # Several batches may lie around one key: a workflow larger than a range.
    return sorted({*ends, LAST_KEY})


def read_range(
    folder: Path, runs: Iterable[SortedRun], low: int, high: int, names: Sequence[str], lined: Sequence[bool]
) -> tuple[pa.Table, Origin]:
    """The rows with a key from `low` to `high`, both included; those of a workflow in the order they were read.

    `names` and `lined` (whether its rows are lines) are of each source, by number.
    """
    tables: list[pa.Table] = []
    sources, places = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
    for run in runs:
        first = bisect_left(run.batches, low, key=lambda batch: batch[1])
        touched = [number for number in range(first, len(run.batches)) if run.batches[number][0] <= high]
        if not touched:
            continue
        with pa.OSFile(str(folder / run.name)) as file:
            reader = pa.ipc.open_file(file)
            for number in touched:
                batch = reader.get_batch(number)
                keys = batch[_KEY.name].to_numpy()
                start, stop = np.searchsorted(keys, np.uint64(low)), np.searchsorted(keys, np.uint64(high), "right")
                rows = pa.Table.from_batches([batch.slice(start, stop - start)])
                sources.append(rows[_SOURCE.name].to_numpy())
                places.append(rows[_PLACE.name].to_numpy())
                tables.append(rows.drop_columns([_KEY.name, _SOURCE.name, _PLACE.name]))
    table = concat(tables, [""] * len(tables))
    return table, Origin(tuple(names), np.concatenate(sources), np.concatenate(places), tuple(lined))


def keys(table: pa.Table) -> NDArray[np.uint64]:
    """The key of the workflow of each row, uint64 [rows]."""
    types, ids = (hashes(table[column]) for column in ("workflow_type", "workflow_id"))
    return types << np.uint64(32) | ids


class _Writer:
    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder, self._prefix = folder, prefix
        self._waiting: list[pa.Table] = []
        self._bytes = 0
        self._runs: list[SortedRun] = []

    def add(self, chunk: Source, number: int) -> None:
        rows = chunk.table.num_rows
        if not rows:
            return
        source = pa.array(np.full(rows, number, np.int32))
        table = chunk.table.append_column(_KEY, pa.array(keys(chunk.table)))
        table = table.append_column(_SOURCE, source).append_column(_PLACE, pa.array(chunk.origin.places))
        self._waiting.append(table)
        self._bytes += table.nbytes
        if self._bytes >= RUN_BYTES:
            self._write()

    def close(self) -> list[SortedRun]:
        if self._waiting:
            self._write()
        return self._runs

    def _write(self) -> None:
        """Write the buffered rows as a run."""
        table = pa.concat_tables(self._waiting, promote_options="default")  # missing state columns become null
        self._waiting, self._bytes = [], 0
        order = np.argsort(table[_KEY.name].to_numpy(), kind="stable")
        table = table.take(pa.array(order)).combine_chunks()
        sorted_keys = table[_KEY.name].to_numpy()
        rows = max(1, BATCH_BYTES * table.num_rows // max(1, table.nbytes))
        run = SortedRun(f"{self._prefix}-{len(self._runs)}.arrow", [])
        with (self._folder / run.name).open("wb") as sink:
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            with pa.ipc.new_file(sink, table.schema, options=options) as writer:
                for start in range(0, table.num_rows, rows):
                    part = table.slice(start, rows)
                    writer.write_table(part)
                    last = start + part.num_rows - 1
                    run.batches.append((int(sorted_keys[start]), int(sorted_keys[last]), part.nbytes))
            sink.flush()
            os.fsync(sink.fileno())
        self._runs.append(run)


_ABANDONED_S: Final = 24 * 3600
_JOURNAL: Final = "journal.jsonl"


class SourcesRead(msgspec.Struct, tag="sources read"):
    """A group of sources was spilled."""

    identities: list[str]
    sources: list[Spilled]
    runs: list[SortedRun]


class Planned(msgspec.Struct, tag="planned"):
    """The ranges of the second pass; later entries belong to this plan."""

    store: str
    runs: list[str]
    ends: list[int]


class RangeWritten(msgspec.Struct, tag="range written"):
    """A range of workflows was validated and written."""

    number: int
    parts: list[Part]
    workflows: int = 0
    steps: int = 0
    already_present: int = 0
    repeated: int = 0
    skipped: dict[str, int] = {}
    extended: int = 0
    replaced: dict[str, list[str]] = {}  # ids of workflows to remove from earlier parts, by workflow type


_Entry = SourcesRead | Planned | RangeWritten


class Journal:
    """The journal of an ingestion into a store that this process has locked; equal commands have the same journal."""

    def __init__(self, root: Path, command: list[str]) -> None:
        name = hashlib.sha256(json.dumps(command).encode()).hexdigest()[:16]
        self.folder = root / WORK / name
        self.staging = self.folder / "parts"
        self._path = self.folder / _JOURNAL
        self._sweep_abandoned()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._entries = self._load()

    def sources_read(self, identities: list[str]) -> list[SourcesRead]:
        """The groups that were read and are unchanged, in source order; removes all other runs."""
        by_first: dict[int, SourcesRead] = {}
        taken = set[int]()
        for entry in reversed(self._entries):
            if not isinstance(entry, SourcesRead):
                continue
            numbers = [source.number for source in entry.sources]
            unchanged = [identities[number] for number in numbers] == entry.identities
            if unchanged and taken.isdisjoint(numbers) and all((self.folder / r.name).is_file() for r in entry.runs):
                by_first[numbers[0]] = entry
                taken.update(numbers)
        kept = {run.name for entry in by_first.values() for run in entry.runs}
        for path in self.folder.glob("*.arrow"):
            if path.name not in kept:
                path.unlink()
        return [by_first[number] for number in sorted(by_first)]

    def next_prefix(self) -> str:
        """A new prefix for the file names of runs."""
        return f"run-{len(self._entries)}"

    def ranges_written(self, plan: Planned) -> dict[int, RangeWritten]:
        """The written ranges of this plan, by number; removes the parts of any other plan."""
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
        """Append an entry to the file."""
        with self._path.open("ab") as sink:
            sink.write(msgspec.json.encode(entry) + b"\n")
            sink.flush()
            os.fsync(sink.fileno())
        self._entries.append(entry)

    def discard(self) -> None:
        """Remove the journal and its files."""
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
                    break  # of another release, or damaged: redo what follows
                whole += len(line)
            os.truncate(self._path, whole)
        return entries

    def _sweep_abandoned(self) -> None:
        """Remove journals that no command has resumed within a day."""
        for folder in self.folder.parent.glob("*"):
            with suppress(OSError):
                if folder != self.folder and time.time() - _touched(folder) > _ABANDONED_S:
                    shutil.rmtree(folder)


def _touched(folder: Path) -> float:
    journal = folder / _JOURNAL
    return (journal if journal.exists() else folder).stat().st_mtime
