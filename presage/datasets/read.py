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

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.datasets.adapters import READERS, SUFFIXES, detect
from presage.datasets.adapters.source import Source, Workflow
from presage.datasets.origin import Origin
from presage.datasets.schema import concat, drop_invalid, trace_schema, validate
from presage.datasets.store import is_store, scan_store
from presage.errors import TraceError

Chunks = Callable[[], Iterator[Source]]
"""Begins a reading."""


@dataclass(frozen=True)
class ReadResult:
    """A valid trace, and what was left out of it.

    Args:
        table: conforming, validated, in canonical order.
        skipped: how many rows or workflows were skipped for each reason; empty unless `skip_bad` was asked for.
    """

    table: pa.Table
    skipped: Mapping[str, int]


def read_traces(
    paths: Sequence[str | Path],
    *,
    skip_bad: bool = False,
    source_format: str = "auto",
    progress: Callable[[int], None] | None = None,
) -> ReadResult:
    """Read and validate traces.

    Args:
        paths: Parquet stores, `.parquet` files and files of the formats in `presage.datasets.adapters`, mixed freely.
        skip_bad: leave out workflows with a bad row and count them, instead of raising.
        source_format: "auto" goes by the file name; the name of a format reads every path as that format.
        progress: called with the number of steps read since its last call.

    Raises:
        TraceError: a path is missing or of an unknown kind, a file is damaged, a row or a workflow breaks the schema, a
            workflow stands in two sources, states differ in size, or nothing is left.
    """
    if not paths:
        raise TraceError("no traces given: name at least one store, .parquet, .jsonl or .jsonl.gz file")
    opened = [open_source(path, source_format=source_format, skip_bad=skip_bad, progress=progress) for path in paths]
    sources = [_collected(str(path), begin) for path, begin in zip(paths, opened, strict=True)]
    table = concat([source.table for source in sources], [source.origin.names[0] for source in sources])
    origin = Origin.join([source.origin for source in sources])
    if not skip_bad:
        return ReadResult(validate(table, origin), {})
    skipped = Counter[str]()
    spoiled: set[Workflow] = set()
    for source in sources:
        skipped.update(source.skipped)
        spoiled |= source.spoiled
    table, origin, lost = without(table, origin, spoiled)
    if lost:
        skipped["workflow with a skipped row"] = lost
    table, dropped = drop_invalid(table, origin)
    skipped.update({f"workflow with {reason}": count for reason, count in dropped.items()})
    return ReadResult(table, dict(skipped))


def open_source(
    path: str | Path,
    *,
    source_format: str = "auto",
    skip_bad: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Chunks:
    """What reads a path when called; arguments as `read_traces`.

    Raises:
        TraceError: the path is missing or of an unknown kind.
    """
    path = Path(path)
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder; a trace is wanted here: check the path")
    if source_format != "auto":
        if source_format not in READERS:
            raise TraceError(f"unknown trace format {source_format!r}; known: auto, {', '.join(READERS)}")
        return partial(READERS[source_format], path, skip_bad=skip_bad, progress=progress)
    if path.is_dir() and is_store(path):
        return partial(scan_store, path, progress=progress)
    name = detect(path)
    if name is None and path.is_dir():
        raise TraceError(
            f"{path}: a folder, but no trace store (no _manifest.json in it) and no files of spans: name its files one "
            "by one, or the format"
        )
    if name is None:
        known = ", ".join((*SUFFIXES, ".json"))
        raise TraceError(f"{path}: unknown kind of file; known: {known}, or a store: rename it or name its format")
    return partial(READERS[name], path, skip_bad=skip_bad, progress=progress)


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
