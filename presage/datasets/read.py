"""Reads traces from any mix of sources into one valid table in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from presage.datasets.adapters import open_sources
from presage.datasets.adapters.files.tables import is_frame, read_frame
from presage.datasets.adapters.spans.exports import are_spans
from presage.datasets.adapters.spans.reader import read_span_frame
from presage.datasets.schema import concat, trace_schema
from presage.datasets.schema.source import Origin, Source, Workflow, named
from presage.datasets.schema.validate import drop_invalid, refuse_all_skipped, validate, without
from presage.datasets.store import names_of
from presage.errors import TraceError
from presage.wording import counted

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]


@dataclass(frozen=True, eq=False, repr=False)
class Traces:
    """A valid trace in canonical order (by workflow type, workflow id and step), one row a step.

    Attributes:
        table: conforms to `presage.datasets.schema.trace_schema`.
        skipped: number of skipped rows or workflows, by reason; without `skip_bad`, only recordings have any.
        notices: number of things in spans that were not read, or were mended, by what they were.

    Where one of the sources is a store that folds names, its mapping folds those of all (`NameMapping.of(table)`).
    """

    table: pa.Table
    skipped: Mapping[str, int]
    notices: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.table)

    @property
    def workflows(self) -> int:
        """Number of workflows."""
        return int(pc.sum(pc.equal(self.table["step"], 0)).as_py() or 0)

    def to_pandas(self) -> pd.DataFrame:
        """One row a step."""
        return self.table.to_pandas()

    def __repr__(self) -> str:
        types = pc.unique(self.table["workflow_type"]).to_pylist()
        shown = ", ".join(types[:5]) + (", …" if len(types) > 5 else "")
        return f"Traces({counted(self.workflows, 'workflow')}, {counted(len(self), 'step')}; workflow types: {shown})"


def read_traces(
    traces: str | Path | pd.DataFrame | Sequence[str | Path | pd.DataFrame],
    *,
    skip_bad: bool = False,
    source_format: str = "auto",
    parents_elsewhere: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Traces:
    """Read and validate traces.

    Args:
        traces: Parquet stores, files of the formats in `presage.datasets.adapters`, and pandas data frames with one
            row a step and the columns of a trace; one of them, or a list that mixes them freely.
        skip_bad: leave out workflows with a bad row and count them, instead of raising.
        source_format: the format of every path; "auto" detects it by name and content.
        parents_elsewhere: as for `open_sources`.
        progress: called with the number of steps read since its last call.

    Raises:
        TraceError: a path is missing or of an unknown kind, a file is damaged, a row or a workflow breaks the schema (a
            row of a frame is named by its index, as in `frame.iloc`), two sources have the same workflow, states differ
            in size, or nothing is left.
    """
    given = [traces] if isinstance(traces, str | Path) or is_frame(traces) else list(traces)
    if not given:
        raise TraceError("no traces given: name at least one store, file or folder of spans")
    paths = [source for source in given if not is_frame(source)]
    opened = [
        (named(source_paths), begin)
        for source_paths, begin in open_sources(paths, source_format, skip_bad, parents_elsewhere)
    ]
    frames = [source for source in given if is_frame(source)]
    for number, frame in enumerate(frames):
        name = "DataFrame" if len(frames) == 1 else f"DataFrame {number}"
        spans = are_spans([*map(str, frame.columns), *filter(None, frame.index.names)])
        opened.append((name, partial(read_span_frame if spans else read_frame, frame, name, skip_bad)))
    names = names_of(paths)
    sources = [_collected(name, begin(), progress).folded(names) for name, begin in opened]
    table = concat([source.table for source in sources], [source.origin.names[0] for source in sources])
    origin = Origin.join([source.origin for source in sources])
    skipped, notices = Counter[str](), Counter[str]()
    spoiled: set[Workflow] = set()
    for source in sources:
        skipped.update(source.skipped)
        notices.update(source.notices)
        spoiled |= source.spoiled
    if not skip_bad:
        return Traces(names.on(validate(table, origin)), dict(skipped), dict(notices))
    if spoiled:
        skipped["workflow with a skipped row"] = len(spoiled)
    table, dropped = drop_invalid(*without(table, origin, spoiled))
    refuse_all_skipped(table.num_rows, dropped, origin.name)
    skipped.update({f"workflow with {reason}": count for reason, count in dropped.items()})
    return Traces(names.on(table), dict(skipped), dict(notices))


def _collected(name: str, reading: Iterator[Source], progress: Callable[[int], None]) -> Source:
    chunks: list[Source] = []
    skipped, notices = Counter[str](), Counter[str]()
    for chunk in reading:
        chunks.append(chunk)
        skipped.update(chunk.skipped)
        notices.update(chunk.notices)
        progress(chunk.table.num_rows)
    chunks = chunks or [Source(trace_schema().empty_table(), Origin.of(name, 0))]
    return Source(
        concat([chunk.table for chunk in chunks], [name] * len(chunks)),
        Origin.chunks([chunk.origin for chunk in chunks]),
        skipped,
        frozenset[Workflow]().union(*(chunk.spoiled for chunk in chunks)),
        notices=notices,
    )
