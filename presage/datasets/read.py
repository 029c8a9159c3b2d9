"""Traces from any mix of sources: what every command that takes TRACES calls first.

`open_source` finds the reader of a path; `read_traces` keeps everything in memory as one valid table, for training.
What need not fit in memory goes through `presage.datasets.ingest`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.datasets.adapters import JOINING, READERS, SUFFIXES, detect
from presage.datasets.adapters.tabular import is_frame, read_frame
from presage.datasets.schema import concat, trace_schema
from presage.datasets.source import JoiningReader, Origin, Source, Workflow, named
from presage.datasets.store import is_store, scan_store
from presage.datasets.validate import drop_invalid, validate
from presage.errors import TraceError

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

_STORE: Final = "store"

Chunks = Callable[[], Iterator[Source]]
"""Begins a reading."""


@dataclass(frozen=True)
class ReadResult:
    """A valid trace, and what was left out of it.

    Args:
        table: conforming, validated, in canonical order.
        skipped: how many rows or workflows were skipped for each reason; empty unless `skip_bad` was asked for, or a
            recording was read.
    """

    table: pa.Table
    skipped: Mapping[str, int]


def read_traces(
    traces: str | Path | pd.DataFrame | Sequence[str | Path | pd.DataFrame],
    *,
    skip_bad: bool = False,
    source_format: str = "auto",
    progress: Callable[[int], None] | None = None,
) -> ReadResult:
    """Read and validate traces.

    Args:
        traces: Parquet stores, files of the formats in `presage.datasets.adapters`, and pandas data frames with one
            row a step and the columns of a trace; one of them, or a list that mixes them freely.
        skip_bad: leave out workflows with a bad row and count them, instead of raising.
        source_format: "auto" goes by the file name; the name of a format reads every path as that format.
        progress: called with the number of steps read since its last call.

    Raises:
        TraceError: a path is missing or of an unknown kind, a file is damaged, a row or a workflow breaks the schema (a
            row of a frame is named by its place, from 0 as in `frame.iloc`), a workflow stands in two sources, states
            differ in size, or nothing is left.
    """
    given = [traces] if isinstance(traces, str | Path) or is_frame(traces) else list(traces)
    if not given:
        raise TraceError("no traces given: name at least one store, file or folder of spans")
    opened = [
        (named(of), open_source(*of, source_format=source_format, skip_bad=skip_bad, progress=progress))
        for of in join([one for one in given if not is_frame(one)], source_format)
    ]
    frames = [one for one in given if is_frame(one)]
    for number, frame in enumerate(frames):
        name = "DataFrame" if len(frames) == 1 else f"DataFrame {number}"
        opened.append((name, partial(read_frame, frame, name, skip_bad=skip_bad, progress=progress)))
    sources = [_collected(name, begin) for name, begin in opened]
    table = concat([source.table for source in sources], [source.origin.names[0] for source in sources])
    origin = Origin.join([source.origin for source in sources])
    skipped = Counter[str]()
    spoiled: set[Workflow] = set()
    for source in sources:
        skipped.update(source.skipped)
        spoiled |= source.spoiled
    if not skip_bad:
        return ReadResult(validate(table, origin), dict(skipped))
    table, origin, lost = without(table, origin, spoiled)
    if lost:
        skipped["workflow with a skipped row"] = lost
    table, dropped = drop_invalid(table, origin)
    skipped.update({f"workflow with {reason}": count for reason, count in dropped.items()})
    return ReadResult(table, dict(skipped))


def join(paths: Sequence[str | Path], source_format: str) -> list[tuple[Path, ...]]:
    """The paths as sources: files of spans are one together, as if they lay in a folder; any other path is one.

    Raises:
        TraceError: a path is missing or of an unknown kind.
    """
    sources: list[tuple[Path, ...]] = []
    places: dict[JoiningReader, int] = {}
    for path in map(Path, paths):
        reader = JOINING.get(_format(path, source_format)) if not path.is_dir() else None
        if reader is None:
            sources.append((path,))
        elif reader in places:
            sources[places[reader]] += (path,)
        else:
            places[reader] = len(sources)
            sources.append((path,))
    return sources


def open_source(
    path: str | Path,
    *more: str | Path,
    source_format: str = "auto",
    skip_bad: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Chunks:
    """What reads a source when called; arguments as `read_traces`.

    Args:
        path: of the source.
        more: the other files of it, where `join` gave several.

    Raises:
        TraceError: the path is missing or of an unknown kind.
    """
    path = Path(path)
    name = _format(path, source_format)
    if more:
        files = (path, *map(Path, more))
        return partial(JOINING[name], files, skip_bad=skip_bad, progress=progress)
    if name == _STORE:
        return partial(scan_store, path, progress=progress)
    return partial(READERS[name], path, skip_bad=skip_bad, progress=progress)


def _format(path: Path, source_format: str) -> str:
    """The format to read a path as.

    Raises:
        TraceError: the path is missing or of an unknown kind.
    """
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder; a trace is wanted here: check the path")
    if source_format != "auto":
        if source_format not in READERS:
            raise TraceError(f"unknown trace format {source_format!r}; known: auto, {', '.join(READERS)}")
        return source_format
    if path.is_dir() and is_store(path):
        return _STORE
    name = detect(path)
    if name is None and path.is_dir():
        raise TraceError(
            f"{path}: a folder, but no trace store (no _manifest.json in it) and no files of spans: name its files one "
            f"by one ({path}/*), or the format"
        )
    if name is None and path.name.endswith((".json", ".json.gz")):
        raise TraceError(
            f"{path}: its first line is no OTLP JSON, no span and no MLflow trace; one a line is wanted, as a "
            "collector's file exporter and span.to_json(indent=None) write them: export it so, or name its format (one "
            "step a line is --format jsonl, or a file name with .jsonl)"
        )
    if name is None:
        known = ", ".join((*SUFFIXES, ".json", ".json.gz"))
        raise TraceError(f"{path}: unknown kind of file; known: {known}, or a store: rename it or name its format")
    return name


def _collected(name: str, begin: Chunks) -> Source:
    """All chunks of a reading as one."""
    chunks = list(begin()) or [Source(trace_schema().empty_table(), Origin.of(name, 0))]
    skipped = Counter[str]()
    for chunk in chunks:
        skipped.update(chunk.skipped)
    return Source(
        concat([chunk.table for chunk in chunks], [name] * len(chunks)),
        Origin.chunks([chunk.origin for chunk in chunks]),
        skipped,
        frozenset[Workflow]().union(*(chunk.spoiled for chunk in chunks)),
    )


def without(table: pa.Table, origin: Origin, workflows: set[Workflow]) -> tuple[pa.Table, Origin, int]:
    """The rows of all but some workflows, their origin, and how many workflows were to be taken out."""
    if not workflows:
        return table, origin, 0
    suspects = np.flatnonzero(
        pc.is_in(table["workflow_id"], pa.array([workflow_id for _, workflow_id in workflows], pa.string())).to_numpy()
    )
    pairs = zip(
        table["workflow_type"].take(suspects).to_pylist(), table["workflow_id"].take(suspects).to_pylist(), strict=True
    )
    keep = np.ones(table.num_rows, bool)
    keep[[row for row, pair in zip(suspects, pairs, strict=True) if pair in workflows]] = False
    return table.filter(pa.array(keep)), origin.filtered(keep), len(workflows)
