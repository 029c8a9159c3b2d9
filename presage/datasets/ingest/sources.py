"""The first pass of an ingestion: reads sources in groups, locally or on Ray Data, and records them in the journal.

Only `spill_on_ray` imports Ray. Without `RAY_ADDRESS` it starts a cluster on this machine. Workers write their runs
into the store's folder, so they must share its file system.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from presage.datasets.adapters import Chunks, open_request_logs, open_sources
from presage.datasets.ingest.spill import Journal, SortedRun, SourcesRead, Spilled, spill
from presage.datasets.schema import CommonSizes, trace_schema
from presage.datasets.schema.names import NameMapping
from presage.datasets.schema.source import Workflow, named
from presage.errors import ConfigurationError, OutputError, PresageError, TraceError
from presage.wording import install

GROUP_BYTES: Final = 32 * 2**20

FOLDED: Final = "name folded by patterns"
"""How the notices of distinct names that were folded begin."""

Progress = Callable[[str, float | None], None]
"""Called with the current activity and the share done, 0 to 1, or None if unknown."""


@dataclass(frozen=True)
class Feed:
    """A source; `identity` changes when it does: by default, as for an MLflow experiment, whenever it is read."""

    name: str
    begin: Chunks
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    size: int | None = None  # in bytes, None if unknown
    path: Path | None = None  # if it is a single path, which any process can read


@dataclass(frozen=True)
class Gathered:
    """All sources, by number, as runs on disk, in source order; the schema is common to their rows and the store.

    An interrupted ingestion had already read `resumed` of them.
    """

    sources: list[Spilled]
    runs: list[SortedRun]
    schema: pa.Schema
    resumed: int
    types: pa.Table | None = None  # as `application_types` has them

    @cached_property
    def spoiled(self) -> set[Workflow]:
        """Workflows that lost a row."""
        return set[Workflow]().union(*(source.spoiled for source in self.sources))

    @property
    def notices(self) -> dict[str, int]:
        """What was not read or was mended, and how often."""
        counts = Counter[str]()
        for source in self.sources:
            counts.update(source.notices)
        folded = set[tuple[str, str]]().union(*(source.folded for source in self.sources))
        counts.update(f"{FOLDED}: {column.replace('_', ' ')}" for column, _ in folded)
        return dict(counts.most_common())


def feeds_of(
    sources: Sequence[str | Path | Feed], source_format: str, skip_bad: bool, parents_elsewhere: bool
) -> list[Feed]:
    """The sources of an ingestion; all span files together are one source."""
    feeds = []
    given = [source for source in sources if not isinstance(source, Feed)]
    for paths, begin in open_sources(given, source_format, skip_bad, parents_elsewhere):
        identities, sizes = zip(*map(_identity, paths), strict=True)
        if len(paths) == 1:
            feeds.append(Feed(named(paths), begin, identities[0], sizes[0], paths[0]))
        else:
            files = "\n".join(f"{path.absolute()}:{identity}" for path, identity in zip(paths, identities, strict=True))
            feeds.append(Feed(named(paths), begin, hashlib.sha256(files.encode()).hexdigest(), sum(sizes)))
    return feeds + [feed for feed in sources if isinstance(feed, Feed)]


def request_logs(paths: Sequence[str | Path], workflow_type: str | None = None, skip_bad: bool = False) -> Feed:
    """Logs of requests without workflows as one source, whose workflows are inferred; see `open_request_logs`."""
    logs = [Path(path) for path in paths]
    begin = open_request_logs(logs, workflow_type, skip_bad)
    identities, sizes = zip(*map(_identity, logs), strict=True)
    told = "\n".join([str(workflow_type), *map(str, logs), *identities])
    return Feed(named(logs), begin, hashlib.sha256(told.encode()).hexdigest(), sum(sizes))


def gather(
    inputs: Sequence[Feed],
    journal: Journal,
    held: tuple[int | None, int | None],
    store: str,
    *,
    source_format: str,
    skip_bad: bool,
    parents_elsewhere: bool,
    on_ray: bool,
    names: NameMapping,
    progress: Progress,
) -> Gathered:
    """Read the sources that the journal does not have; options as for `ingest`.

    `held` are the widths of the states in the store, which errors call `store`; `names` folds names. Raises TraceError
    as the readers, or if states of two sources, or of a source and the store, differ in size.
    """
    identities = [feed.identity for feed in inputs]
    entries = journal.sources_read(identities)
    read_before = {source.number for entry in entries for source in entry.sources}
    meter = _Meter(inputs, read_before, progress)
    common = CommonSizes()
    common.add(held, f"the store {store}")
    prefix = journal.next_prefix()

    def spilled() -> Iterator[tuple[list[Spilled], list[SortedRun]]]:
        tasks = []
        for numbers in _groups(inputs, read_before):
            name, paths = f"{prefix}-{numbers[0]}", [inputs[number].path for number in numbers]
            if on_ray and None not in paths:
                absolute = [str(path.absolute()) for path in paths if path is not None]
                size = sum(inputs[number].size or 0 for number in numbers)
                folder = str(journal.folder.absolute())
                options = source_format, skip_bad, parents_elsewhere
                tasks.append(PathsToSpill(numbers, absolute, size, *options, folder, name, names.to_dict()))
            else:
                chunks = ((number, inputs[number].name, inputs[number].begin()) for number in numbers)
                yield spill(chunks, journal.folder, name, meter.add, names)
        if on_ray:
            yield from spill_on_ray(tasks, meter.add)

    for entry in entries:
        for source in entry.sources:
            common.add(source.sizes, inputs[source.number].name)
    meter.add(0)
    for sources, runs in spilled():
        for source in sources:
            common.add(source.sizes, inputs[source.number].name)
        entries.append(SourcesRead([identities[source.number] for source in sources], sources, runs))
        journal.add(entries[-1])
    entries.sort(key=lambda entry: entry.sources[0].number)
    return Gathered(
        sorted((source for entry in entries for source in entry.sources), key=lambda source: source.number),
        [run for entry in entries for run in entry.runs],
        trace_schema(*common.sizes),
        len(read_before),
    )


class _Meter:
    def __init__(self, inputs: Sequence[Feed], read_before: set[int], progress: Progress) -> None:
        sizes = [feed.size for feed in inputs]
        self._total = None if None in sizes else max(1, sum(size or 0 for size in sizes))
        self._read = sum(sizes[number] or 0 for number in read_before)
        self._progress = progress

    def add(self, read_bytes: int) -> None:
        self._read += read_bytes
        self._progress("reading traces", None if self._total is None else min(1.0, self._read / self._total))


def _groups(inputs: Sequence[Feed], read_before: set[int]) -> Iterator[list[int]]:
    """The source numbers of each journal entry: single paths up to a size, or another source."""
    waiting: list[int] = []
    size = 0
    for number, feed in enumerate(inputs):
        if number in read_before:
            continue
        if feed.path is None:
            yield [number]
            continue
        waiting.append(number)
        size += feed.size or 0
        if size >= GROUP_BYTES:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


def _identity(path: Path) -> tuple[str, int]:
    if not path.is_dir():
        stat = path.stat()
        return f"{stat.st_size}:{stat.st_mtime_ns}", stat.st_size
    files = [(file.relative_to(path).as_posix(), file.stat()) for file in sorted(path.rglob("*")) if file.is_file()]
    stats = "\n".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in files)
    return hashlib.sha256(stats.encode()).hexdigest(), sum(stat.st_size for _, stat in files)


class PathsToSpill(msgspec.Struct):
    """A group of paths for a worker to read into runs."""

    numbers: list[int]
    paths: list[str]
    size: int
    source_format: str
    skip_bad: bool
    parents_elsewhere: bool
    folder: str
    prefix: str
    names: dict[str, list[list[str]]]


class _Answer(msgspec.Struct):
    """The result of a worker; errors are messages, because exceptions may not be serialisable."""

    sources: list[Spilled] = []
    runs: list[SortedRun] = []
    read_bytes: int = 0
    bad_input: str | None = None
    not_written: str | None = None


def spill_on_ray(
    tasks: Sequence[PathsToSpill], progress: Callable[[int], None]
) -> Iterator[tuple[list[Spilled], list[SortedRun]]]:
    """Read groups of paths on Ray, yielded as they finish; `progress` gets the bytes on disk of each finished group.

    Raises TraceError as the readers, OutputError if a worker cannot write, and ConfigurationError without Ray.
    """
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray
        import ray.data
    except ImportError as error:
        raise ConfigurationError(
            f"Ray is not installed; reading traces on a cluster needs it: {install('distributed')}. Or leave --ray out"
        ) from error
    if not tasks:
        return

    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        items = [{"task": msgspec.json.encode(task).decode()} for task in tasks]
        answers = ray.data.from_items(items, override_num_blocks=len(items)).map(_answer)
        for row in answers.iter_rows():
            answer = msgspec.json.decode(row["answer"], type=_Answer)
            if answer.bad_input is not None:
                raise TraceError(answer.bad_input)
            if answer.not_written is not None:
                raise OutputError(answer.not_written)
            progress(answer.read_bytes)
            yield answer.sources, answer.runs
    finally:
        if ours:
            ray.shutdown()


def _answer(row: dict[str, Any]) -> dict[str, Any]:
    """Spill one group; runs on a worker."""
    task = msgspec.json.decode(row["task"], type=PathsToSpill)
    try:
        chunks = (
            (number, path, begin())
            for number, path in zip(task.numbers, task.paths, strict=True)
            for _, begin in open_sources([path], task.source_format, task.skip_bad, task.parents_elsewhere)
        )
        names = NameMapping.from_dict(task.names)
        answer = _Answer(*spill(chunks, Path(task.folder), task.prefix, names=names), task.size)
    except OSError as error:
        answer = _Answer(not_written=f"{task.folder}: cannot be written by a Ray worker ({error.strerror or error})")
    except PresageError as error:
        answer = _Answer(bad_input=str(error))
    return {"answer": msgspec.json.encode(answer).decode()}
