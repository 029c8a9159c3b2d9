"""Converts batches of raw rows of any file format to conforming chunks; bad rows raise or are skipped."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from presage.datasets.schema import COLUMN_TYPES, CommonSizes, concat, conform, state_sizes
from presage.datasets.schema.columns import KINDS, REFUSALS, first_refused
from presage.datasets.schema.source import Origin, RowError, Source, Workflow, salvage


class RawRows(Protocol):
    """Rows in the form of their source."""

    def table(self, start: int, stop: int, origin: Origin) -> pa.Table:
        """Raw columns of the rows from start to stop (excluded) with their origin; raises a RowError for a bad row."""
        ...

    def workflow(self, row: int) -> tuple[object, object]:
        """The workflow type and id of a row; values that are not strings if the row lacks them."""
        ...


class Batch(NamedTuple):
    """A bounded number of rows, and the bytes read from disk for them and all earlier ones."""

    rows: RawRows
    origin: Origin
    read_bytes: int = 0


def sources(batches: Iterable[Batch], name: str, skip_bad: bool) -> Iterator[Source]:
    """Convert the batches of the source called `name` to conforming chunks.

    With `skip_bad`, bad rows are counted and their workflows marked as spoiled; a row without a workflow is attributed
    to that of the nearest row before it. Otherwise raises TraceError, which names the row and the column.
    """
    common = CommonSizes()
    last: Workflow | None = None
    read_before = 0

    def conforming(batch: Batch, start: int, stop: int) -> pa.Table:
        part = batch.origin.part(slice(start, stop))
        table = conform(batch.rows.table(start, stop, part), part, common.sizes)
        common.add(state_sizes(table.schema), name)
        return table

    for batch in batches:
        count, origin = len(batch.origin.places), batch.origin
        skipped, spoiled = Counter[str](), set[Workflow]()

        def on_bad(row: int, error: RowError) -> None:
            skipped[f"{'line' if origin.lined[0] else 'row'} with {error.reason}"] += 1  # noqa: B023
            if (workflow := _last_workflow(batch.rows, row, last)) is not None:  # noqa: B023
                spoiled.add(workflow)  # noqa: B023

        if skip_bad:
            good = salvage(count, lambda start, stop: conforming(batch, start, stop), on_bad)  # noqa: B023
            table = concat([table for _, _, table in good], [name] * len(good))
            kept = [slice(start, stop) for start, stop, _ in good] or [slice(0)]
            origin = Origin.chunks([origin.part(rows) for rows in kept])
        else:
            table = conforming(batch, 0, count)
        last = _last_workflow(batch.rows, count - 1, last)
        table, notices = _known_counts(table)
        yield Source(table, origin, dict(skipped), frozenset(spoiled), batch.read_bytes - read_before, notices)
        read_before = batch.read_bytes


def _known_counts(table: pa.Table) -> tuple[pa.Table, dict[str, int]]:
    """The rows with unknown counts of tokens where a request that was not aborted has 0, as one without usage does."""
    notices = {}
    answered = pc.and_(
        pc.equal(table["kind"], "llm"), pc.fill_null(pc.not_equal(table["finish_reason"], "abort"), True)
    )
    for name in ("input_tokens", "output_tokens"):
        zero = pc.and_(answered, pc.fill_null(pc.equal(table[name], 0), False))
        if count := pc.sum(zero).as_py() or 0:
            place = table.schema.get_field_index(name)
            known = pc.if_else(zero, pa.scalar(None, table[name].type), table[name])
            table = table.set_column(place, table.schema.field(place), known)
            notices[f"{name} of 0, which is no count: unknown"] = count
    return table, notices


def _last_workflow(rows: RawRows, row: int, before: Workflow | None) -> Workflow | None:
    """The workflow of a row, else of the nearest earlier row with one, else `before`."""
    for place in range(row, -1, -1):
        workflow_type, workflow_id = rows.workflow(place)
        if isinstance(workflow_type, str) and isinstance(workflow_id, str):
            return workflow_type, workflow_id
    return before


def array_of(values: Sequence[Any], name: str, origin: Origin, *, from_pandas: bool) -> pa.Array:
    """Python values of a column as the first Arrow type that accepts them all; the caller casts to the schema.

    None is a missing value; `from_pandas`, so are NaN and NaT. Otherwise the values come from JSON, with checked types.
    Raises RowError for a value of a wrong type, or that does not fit.
    """
    kind = KINDS[COLUMN_TYPES[name]]
    if from_pandas and pa.types.is_timestamp(COLUMN_TYPES[name]):
        values = [v.isoformat() if isinstance(v, dt.datetime) and v == v else v for v in values]  # NaT != NaT
    bad = 0
    for arrow_type in kind.arrow:
        try:
            return pa.array(values, arrow_type, from_pandas=from_pandas)
        except REFUSALS:
            bad = max(bad, first_refused(values, arrow_type, from_pandas=from_pandas))
    if not from_pandas:
        message = f"the value does not fit; expected {kind.words} (in valid Unicode): correct it"
        raise origin.bad(bad, name, message, f"{name} does not fit")
    raise wrong_type(values[bad], bad, name, origin)


def wrong_type(value: Any, row: int, name: str, origin: Origin) -> RowError:
    """The error for a value of a wrong Python type."""
    message = f"type {type(value).__name__}; expected {KINDS[COLUMN_TYPES[name]].words}: convert it"
    return origin.bad(row, name, message, f"{name} of a wrong type")
