"""What Parquet, CSV and data frames have in common: batches of raw rows become conforming chunks, bad rows cut out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from presage.datasets.adapters.source import Source, Workflow, salvage
from presage.datasets.origin import Origin, RowError
from presage.datasets.schema import concat, conform, state_sizes, trace_schema


class RawRows(Protocol):
    """Rows as their source has them."""

    def table(self, start: int, stop: int, origin: Origin) -> pa.Table:
        """Raw columns of the rows from `start` (included) to `stop` (excluded), which have this origin.

        Raises:
            RowError: a row cannot be read at all, or has a value that cannot be meant.
        """
        ...

    def workflow(self, row: int) -> tuple[object, object]:
        """The type and id of the workflow of a row, each no string where the row does not tell."""
        ...


@dataclass(frozen=True)
class Batch:
    """A bounded number of rows.

    Args:
        rows: what `origin` is of.
        origin: where they came from.
        read_bytes: bytes on disk read for them and for those before.
    """

    rows: RawRows
    origin: Origin
    read_bytes: int = 0


def sources(
    batches: Iterable[Batch], name: str, skip_bad: bool, progress: Callable[[int], None] | None
) -> Iterator[Source]:
    """Batches as conforming chunks.

    Args:
        batches: of one source, in their order.
        name: of the source.
        skip_bad: count rows that are bad instead of raising. Their workflow is marked as spoiled; where a row does not
            tell its workflow, that is the workflow of the row before it.
        progress: called with the number of steps read since its last call.

    Raises:
        TraceError: a value is missing or has a wrong type; names the row and the column.
    """
    sizes: tuple[int | None, int | None] = (None, None)
    last: Workflow | None = None
    read_before = 0
    for batch in batches:
        source = _source(batch, name, skip_bad, sizes, last, batch.read_bytes - read_before)
        found = state_sizes(source.table.schema)
        sizes = (sizes[0] or found[0], sizes[1] or found[1])
        last = _workflow(batch.rows, len(batch.origin.places) - 1)
        read_before = batch.read_bytes
        if progress is not None:
            progress(source.table.num_rows)
        yield source


def _source(
    batch: Batch,
    name: str,
    skip_bad: bool,
    sizes: tuple[int | None, int | None],
    last: Workflow | None,
    read_bytes: int,
) -> Source:
    """A batch as a chunk; `last` is the workflow of the row before it."""
    rows, origin = batch.rows, batch.origin
    skipped, spoiled = Counter[str](), set[Workflow]()

    def build(start: int, stop: int) -> pa.Table:
        nonlocal sizes
        part = origin.part(start, stop)
        table = conform(rows.table(start, stop, part), part, sizes)
        found = state_sizes(table.schema)
        sizes = (sizes[0] or found[0], sizes[1] or found[1])
        return table

    def on_bad(row: int, error: RowError) -> None:
        skipped[f"{'line' if origin.lined[0] else 'row'} with {error.reason}"] += 1
        workflow = _workflow(rows, row) or (_workflow(rows, row - 1) if row else last)
        if workflow is not None:
            spoiled.add(workflow)

    count = len(origin.places)
    if not skip_bad:
        return Source(build(0, count), origin, read_bytes=read_bytes)
    stretches = salvage(count, build, on_bad)
    tables = [table for _, _, table in stretches] or [trace_schema().empty_table()]
    parts = [origin.part(start, stop) for start, stop, _ in stretches] or [origin.part(0, 0)]
    table = concat(tables, [name] * len(tables))
    return Source(table, Origin.chunks(parts), dict(skipped), frozenset(spoiled), read_bytes)


def _workflow(rows: RawRows, row: int) -> Workflow | None:
    if row < 0:
        return None
    workflow_type, workflow_id = rows.workflow(row)
    return (workflow_type, workflow_id) if isinstance(workflow_type, str) and isinstance(workflow_id, str) else None
