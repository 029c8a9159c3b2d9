"""The spans of a partition as columns by trace, and its steps as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.adapters.files.text import Place
from presage.datasets.adapters.spans.conventions import CONTENT, Flag, Naming, Role
from presage.datasets.adapters.spans.tree import NEVER_ENDED, TraceFacts, TraceSpans, TraceSteps
from presage.datasets.schema import TIMESTAMP
from presage.datasets.schema.columns import dictionary_encoded, hashes, ranks

_OF_SPANS: Final = tuple(column.name for column in fields(TraceSpans) if column.name != "contents")


class TraceColumns:
    """The numbers of a partition, of `SPAN_SCHEMA`, as lists; rows sorted by trace, markers of lost spans first, then
    by span id, so that nothing depends on the order in which they were read.

    Attributes:
        order: row of the table for each sorted row, int64 [rows].
        bounds: start of each trace, and the end of the last.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        trace = codes(table.column("trace"))
        places = {}
        for own, other in (("span", "parent"), ("node", "node_parent")):  # equal strings get equal numbers
            both = ranks(pa.chunked_array([*table.column(own).chunks, *table.column(other).chunks]))
            places[own], places[other] = both[: table.num_rows], both[table.num_rows :]
        self.order = np.lexsort((places["span"], trace))
        self.bounds = np.flatnonzero(np.diff(trace[self.order], prepend=-1, append=-1)).tolist()
        columns = {name: table.column(name).to_numpy() for name in ("role", "naming", "remote", "start", "flags")}
        columns["end"] = pc.fill_null(table.column("end"), NEVER_ENDED).to_numpy()
        columns |= {name: codes(table.column(name)) for name in ("service", "session", "workflow", "call")}
        self._columns = {name: column[self.order].tolist() for name, column in (columns | places).items()}
        self._start = self._columns["start"]
        self._texts = {
            name: table.column(name) for name in ("trace", "label", "service", "session", "workflow", "links")
        }

    def first_span(self, first: int, stop: int) -> int:
        """The first row of a trace that is a span and no marker of a lost one; `stop` without one."""
        return next((row for row in range(first, stop) if self._columns["span"][row] >= 0), stop)

    def spans(self, first: int, stop: int) -> TraceSpans:
        """The spans of a trace."""
        part = slice(first, stop)

        def contents(rows: Sequence[int]) -> list[tuple[Any, ...]]:
            selected = self._table.select(CONTENT).take(pa.array(self.order[[first + row for row in rows]]))
            return [tuple(row.values()) for row in selected.to_pylist()]

        return TraceSpans(**{name: self._columns[name][part] for name in _OF_SPANS}, contents=contents)

    def place(self, row: int) -> tuple[Place, str]:
        """Where a span was read, and its id."""
        read_at = self._table.select(["file", "line", "span"]).take(pa.array([self.order[row]])).to_pylist()[0]
        return Place(read_at["file"], read_at["line"]), read_at["span"]

    def facts(self, first: int, stop: int, steps: TraceSteps | None) -> TraceFacts:
        """The facts of a trace; `steps` is None if its spans are not a tree."""
        root = None if steps is None or steps.root is None else first + steps.root
        top = None if steps is None or steps.top is None else first + steps.top
        begin = root if root is not None else min(range(first, stop), key=self._start.__getitem__)
        return TraceFacts(
            trace=str(self._text("trace", first)),
            session=self._said("session", first, stop, root, agreed=True),
            workflow=self._said("workflow", first, stop, root, agreed=False),
            service=self._text("service", begin),
            top=None if top is None else self._text("label", top),
            links=None if root is None else self._text("links", root),
            whole=steps is not None and steps.whole,
            stopped=steps is not None and steps.stopped,
            failed=steps is not None and steps.failed,
            begin=steps.started[0] if steps is not None and steps.row else self._start[begin],
            end=steps.end if steps is not None else self._start[begin],
            rooted=root is not None,
            opened=self._start[root] if root is not None and steps is not None and steps.root not in steps.row else 0,
        )

    def _said(self, name: str, first: int, stop: int, root: int | None, agreed: bool) -> str | None:
        """The root's value, else the only value among the spans, or unless `agreed` that of the earliest with one."""
        values = self._columns[name]
        if root is not None and values[root] >= 0:
            return self._text(name, root)
        rows = [row for row in range(first, stop) if values[row] >= 0]
        if not rows or (agreed and len({values[row] for row in rows}) > 1):
            return None
        return self._text(name, min(rows, key=self._start.__getitem__))

    def _text(self, column: str, row: int) -> str | None:
        text: str | None = self._texts[column][int(self.order[row])].as_py()
        return text


def with_cached_tokens(spans: pa.Table) -> pa.Table:
    """Spans whose input counts have cached tokens in them.

    One request with more cached tokens than input proves how its provider and model are counted in its trace; where the
    instrumentation of others of them left no such proof, they are counted likewise.
    """
    flags = spans.column("flags").to_numpy()
    proven = flags & int(Flag.OUTSIDE) != 0
    if not proven.any():
        return spans
    keys = [codes(spans.column(name)) for name in ("trace", "provider", "model")]
    _, group = np.unique(np.stack(keys), axis=1, return_inverse=True)
    outside = np.zeros(int(group.max()) + 1, bool)
    outside[group[proven]] = True
    cache = pc.add(*(pc.fill_null(spans.column(f"{name}_tokens"), 0) for name in ("cached_input", "cache_written")))
    added = pa.array(np.where(outside[group] & ~proven, cache.to_numpy(), 0), pa.int32())
    place = spans.schema.get_field_index("input_tokens")
    return spans.set_column(place, spans.schema.field(place), pc.add(spans.column("input_tokens"), added))


def codes(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """A number for each distinct string, -1 for null; int64 [rows]."""
    numbers = pc.fill_null(dictionary_encoded(column).indices, -1).to_numpy(zero_copy_only=False)
    return np.asarray(numbers, np.int64)


_CHUNK_ROWS: Final = 16384
_CHUNK_BYTES: Final = 32 * 2**20
_TEXTS: Final = ("system_prompt", "input_text", "output_text")
_FROM_SPANS: Final = ("model", "input_tokens", "output_tokens", "cached_input_tokens", "finish_reason", *_TEXTS)
_OF_SPAN: Final = ("naming", "role", "flags", "line", "span", "call", "start", "end")
_FACTS: Final = [*[pa.string()] * 7, *[pa.bool_()] * 4, *[pa.int64()] * 3]
"""The types of the columns that a workflow id and `TraceFacts` become."""
_NS_PER_US: Final = 1000
SPOILED, NOT_WHOLE = -1, -2
"""Marks in place of a step: a trace that lost a span to `skip_bad`, and one that is not whole and has no step."""


class StepRows:
    """Steps of traces, in the order added."""

    def __init__(self) -> None:
        self._added: list[tuple[TraceSteps, int, TraceFacts, int]] = []

    def add(self, steps: TraceSteps, first: int, facts: TraceFacts, number: int = 0) -> None:
        """Add the steps of a trace that begins at row `first` of the sorted partition, numbered from `number` on."""
        self._added.append((steps, first, facts, number))

    def add_mark(self, first: int, facts: TraceFacts, mark: int) -> None:
        """Mark a trace without steps by one row, for its conversation: `SPOILED` or `NOT_WHOLE`."""
        times = [facts.begin], [facts.end]
        lost = TraceSteps([0], [0], [-1], [()], *times, [False], facts.end, None, None, False, False, False)
        self.add(lost, first, facts, mark)

    def tables(self, spans: pa.Table, order: NDArray[np.int64], *, keyed: bool = False) -> Iterator[pa.Table]:
        """The rows, in tables that fit in memory; `order` is the row of the partition `spans` for each sorted row.

        The columns are those of a trace, the `line` each row was read from, and what `PendingConversations` needs, if
        `keyed` with a `key` that a step and its copies share.
        """
        counts = [len(steps.row) for steps, *_ in self._added]
        first = np.repeat(np.array([first for _, first, *_ in self._added], np.int64), counts)
        trace = np.repeat(np.arange(len(counts)), counts)

        def flat(name: str) -> list[Any]:
            return [value for steps, *_ in self._added for value in getattr(steps, name)]

        number = [place for steps, *_, start in self._added for place in range(start, start + len(steps.row))]
        wrapper = np.array(flat("wrapper"), np.int64)
        row, agent = (order[np.array(flat(name), np.int64) + first] for name in ("row", "agent"))
        rows = pa.table(
            {
                "row": row,
                "agent": agent,
                "wrapper": pa.array(order[np.maximum(wrapper + first, 0)], mask=wrapper < 0),
                "start": np.array(flat("started"), np.int64),
                "ended": np.array(flat("ended"), np.int64),
                "parent_steps": pa.array(flat("parents"), pa.list_(pa.int32())),
                "step": pa.array(number, pa.int32()),
                "leaf": pa.array(flat("leaf"), pa.bool_()),
            }
        )
        for start, stop in row_ranges(text_bytes(spans)[row]):
            part = trace[start:stop]
            facts = [facts for _, _, facts, _ in self._added[part[0] : part[-1] + 1]]
            yield self._table(spans, rows.slice(start, stop - start), facts, pa.array(part - part[0]), keyed)

    @staticmethod
    def _table(spans: pa.Table, rows: pa.Table, facts: Sequence[TraceFacts], trace: pa.Array, keyed: bool) -> pa.Table:
        """Of some rows, with the index of their trace in `facts`."""
        row, around = rows["row"], rows["wrapper"]
        columns = {name: spans.column(name).take(row) for name in _FROM_SPANS}
        if around.null_count < len(rows):
            columns = {name: pc.coalesce(column, spans.column(name).take(around)) for name, column in columns.items()}
        given = zip(*((trace_facts.workflow_id, *trace_facts) for trace_facts in facts), strict=True)
        for name, kind, values in zip(("workflow_id", *TraceFacts._fields), _FACTS, given, strict=True):
            columns[name] = pa.array(values, kind).take(trace)
        columns |= {name: rows[name] for name in ("step", "parent_steps", "leaf", "start", "ended")}
        span_columns = spans.select(_OF_SPAN).take(row)
        agent = spans.column("label").take(rows["agent"])
        # What no span names is named as its missing root would: by the workflow.
        unnamed = pc.and_(pc.equal(span_columns["naming"], int(Naming.NOT)), pc.invert(columns["rooted"]))
        unnamed = pc.and_(unnamed, pc.equal(rows["agent"], row))
        started, ended = (rows[name].to_numpy() for name in ("start", "ended"))
        unanswered = pc.bit_wise_and(span_columns["flags"], pa.scalar(int(Flag.UNANSWERED), pa.int8()))
        return pa.table(
            columns
            | {
                "workflow_type": pa.array([trace_facts.known_type for trace_facts in facts], pa.string()).take(trace),
                "agent": pc.if_else(unnamed, pc.coalesce(columns["workflow"], agent), agent),
                "kind": pc.if_else(pc.equal(span_columns["role"], int(Role.TOOL)), "tool", "llm"),
                "started_at": pa.array(started // _NS_PER_US).cast(TIMESTAMP),
                "ended_at": pa.array(ended // _NS_PER_US, mask=ended == NEVER_ENDED).cast(TIMESTAMP),
                "unanswered": pc.not_equal(unanswered, 0),
                "complete": pc.and_not(columns["whole"], columns["stopped"]),
                "success": pc.if_else(columns["failed"], False, pa.scalar(None, pa.bool_())),
                "line": span_columns["line"],
            }
            | ({"key": _keys(span_columns)} if keyed else {})
        )


def _keys(spans: pa.Table) -> pa.ChunkedArray:
    """A number that a step and its copies share: of the id of its response or call, else of its span if that is random,
    and of its times."""
    span, call, start, end = (spans[name] for name in ("span", "call", "start", "end"))
    random = pc.and_(pc.equal(pc.utf8_length(span), 16), pc.invert(pc.starts_with(span, "00")))
    names = pc.coalesce(call, pc.if_else(random, span, None))
    key = hashes(pc.fill_null(names, "")).astype(np.int64)
    for times, factor in ((start, 0x1E3779B97F4A7C15), (pc.fill_null(end, 0), 0x42B2AE3D27D4EB4F)):
        key ^= times.to_numpy() * np.int64(factor)  # wraps
    return pc.if_else(pc.and_(pc.is_valid(names), pc.is_valid(end)), pa.array(key), None)


def with_values(table: pa.Table, columns: Iterable[tuple[str, Sequence[Any]]]) -> pa.Table:
    """A table with other values in some columns."""
    for name, values in columns:
        place = table.schema.get_field_index(name)
        field = table.schema.field(place)
        table = table.set_column(place, field, pa.array(values, field.type))
    return table


def text_bytes(table: pa.Table) -> NDArray[np.int64]:
    """Bytes of text in each row, int64 [rows]."""
    total = np.zeros(table.num_rows, np.int64)
    for name in _TEXTS:
        total += pc.fill_null(pc.binary_length(table.column(name)), 0).to_numpy()
    return total


def row_ranges(row_bytes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive row ranges, bounded in rows and in bytes; `row_bytes` is int64 [rows]."""
    ends = np.cumsum(row_bytes)
    start = 0
    while start < len(ends):
        limit = _CHUNK_BYTES + (int(ends[start - 1]) if start else 0)
        stop = min(start + _CHUNK_ROWS, max(start + 1, int(np.searchsorted(ends, limit, side="right"))), len(ends))
        yield start, stop
        start = stop
