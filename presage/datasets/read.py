"""Traces from any mix of sources as one valid table: what every command that takes TRACES calls first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from presage.datasets.adapters import READERS, SUFFIXES, detect
from presage.datasets.adapters.source import Source, Workflow, salvage
from presage.datasets.origin import Origin, RowError
from presage.datasets.schema import KNOWN_COLUMNS, check_version, concat, conform, drop_invalid, trace_schema, validate
from presage.datasets.store import is_store, read_store
from presage.errors import TraceError


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
    sources = [_read(Path(path), source_format, skip_bad, progress) for path in paths]
    table = concat([source.table for source in sources], [source.origin.names[0] for source in sources])
    origin = Origin.join([source.origin for source in sources])
    if not skip_bad:
        return ReadResult(validate(table, origin), {})
    skipped = Counter[str]()
    spoiled: set[Workflow] = set()
    for source in sources:
        skipped.update(source.skipped)
        spoiled |= source.spoiled
    table, origin, lost = _without(table, origin, spoiled)
    if lost:
        skipped["workflow with a skipped row"] = lost
    table, dropped = drop_invalid(table, origin)
    skipped.update({f"workflow with {reason}": count for reason, count in dropped.items()})
    return ReadResult(table, dict(skipped))


def _read(path: Path, source_format: str, skip_bad: bool, progress: Callable[[int], None] | None) -> Source:
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder; a trace is wanted here: check the path")
    if source_format != "auto":
        if source_format not in READERS:
            raise TraceError(f"unknown trace format {source_format!r}; known: auto, {', '.join(READERS)}")
        return READERS[source_format](path, skip_bad=skip_bad, progress=progress)
    if path.is_dir():
        if not is_store(path):
            raise TraceError(
                f"{path}: a folder, but no trace store (no _manifest.json in it): name its files one by one"
            )
        table = read_store(path)
    elif path.suffix == ".parquet":
        return _read_parquet(path, skip_bad, progress)
    else:
        name = detect(path)
        if name is None:
            known = ", ".join((*SUFFIXES, ".parquet"))
            raise TraceError(f"{path}: unknown kind of file; known: {known}, or a store: rename it or name its format")
        return READERS[name](path, skip_bad=skip_bad, progress=progress)
    if progress is not None:
        progress(table.num_rows)
    return Source(table, Origin.of(str(path), table.num_rows), {}, frozenset())


def _read_parquet(path: Path, skip_bad: bool, progress: Callable[[int], None] | None) -> Source:
    try:
        with pq.ParquetFile(path) as file:
            check_version(file.schema_arrow.metadata, str(path))
            raw = file.read(columns=[name for name in file.schema_arrow.names if name in KNOWN_COLUMNS])
    except (pa.ArrowException, OSError) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(f"{path}: cannot be read as Parquet ({detail[:200]}): copy or write the file again") from error
    if progress is not None:
        progress(raw.num_rows)
    if not skip_bad:
        table = conform(raw, str(path))
        return Source(table, Origin.of(str(path), table.num_rows), {}, frozenset())
    skipped = Counter[str]()
    spoiled: set[Workflow] = set()

    def on_bad(row: int, error: RowError) -> None:
        skipped[f"row with {error.reason}"] += 1
        workflow = (str(raw["workflow_type"][row]), str(raw["workflow_id"][row]))
        spoiled.add(workflow)

    parts = salvage(raw.num_rows, lambda start, stop: conform(raw.slice(start, stop - start), str(path)), on_bad)
    table = concat([part for _, _, part in parts], [str(path)] * len(parts)) if parts else trace_schema().empty_table()
    # Not the place in the file any more where rows were skipped: from here on only workflows are named.
    return Source(table, Origin.of(str(path), table.num_rows), dict(skipped), frozenset(spoiled))


def _without(table: pa.Table, origin: Origin, workflows: set[Workflow]) -> tuple[pa.Table, Origin, int]:
    """The rows of all other workflows, their origin, and how many workflows were taken out."""
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
