"""From spilled spans to workflows, a partition at a time: the second half of every span format.

A trace is a workflow, unless it has a conversation (session) id: then all traces of that conversation are one. Spans
come partitioned by trace, so a tree is whole in its partition. Steps whose workflow cannot be told from their trace
alone are spilled once more, by workflow id, and numbered by `conversations.py` when every trace has been seen:

- those of a conversation, whose traces may lie in any partition;
- those of a trace without a root that does not name its workflow: its type is learnt from the other traces.

Memory holds the numbers of one partition as Python lists and one chunk of rows with its texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.adapters.conversations import HELPERS, Conversations, TraceFacts
from presage.datasets.adapters.documents import Place
from presage.datasets.adapters.intake import Intake
from presage.datasets.adapters.source import Source, Workflow
from presage.datasets.adapters.span_tree import NEVER_ENDED, BrokenTreeError, TraceSpans, TraceSteps, steps_of
from presage.datasets.adapters.spans import CONTENT, Role
from presage.datasets.adapters.spill import Spill
from presage.datasets.origin import Origin
from presage.datasets.schema import TIMESTAMP, conform, trace_schema
from presage.errors import TraceError

_CHUNK_ROWS: Final = 16384
_CHUNK_BYTES: Final = 32 * 2**20
_TEXTS: Final = ("system_prompt", "input_text", "output_text")
_FROM_SPANS: Final = ("model", "input_tokens", "output_tokens", "cached_input_tokens", *_TEXTS)
_NS_PER_US: Final = 1000


def sources(name: str, intake: Intake, spans: Spill, skip_bad: bool) -> Iterator[Source]:
    """All workflows of the spans that were taken in, in chunks of bounded size.

    Args:
        name: what the user called the source.
        intake: has taken every span.
        spans: where it put them.
        skip_bad: leave out traces that are no trees, and workflows that lost a span, instead of raising.

    Raises:
        TraceError: spans are no tree, or not one step is among them.
        OutputError: the disk of temporary files is full.
    """
    steps = 0
    with Spill(spans.partitions) as waiting:
        conversations = Conversations(waiting)
        reading = _Reading(name, intake, conversations, skip_bad)
        for number in range(spans.partitions):
            table = spans.partition(number)
            if table is not None:
                for source in reading.partition(table):
                    steps += source.table.num_rows
                    yield source
        for table, spoiled in conversations.workflows():
            for start, stop in chunks(_text_bytes(table)):
                steps += stop - start
                yield reading.source(table.slice(start, stop - start), frozenset(spoiled))
                spoiled = set()
            if spoiled:
                yield reading.source(table.slice(0, 0), frozenset(spoiled))
    if intake.skipped:
        yield reading.source(None, frozenset())
    elif not steps:
        raise TraceError(
            f"{name}: {intake.spans} spans, but not one request to a model and no tool call among them (no span with "
            'gen_ai.operation.name "chat", openinference.span.kind "LLM" or mlflow.spanType "CHAT_MODEL"): instrument '
            "the client or framework that calls the model; docs/traces.md says how"
        )


def chunks(row_bytes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(start, stop) of stretches of rows, bounded in rows and in bytes; `row_bytes` is int64 [rows]."""
    ends = np.cumsum(row_bytes)
    start = 0
    while start < len(ends):
        limit = _CHUNK_BYTES + (int(ends[start - 1]) if start else 0)
        stop = min(start + _CHUNK_ROWS, max(start + 1, int(np.searchsorted(ends, limit, side="right"))), len(ends))
        yield start, stop
        start = stop


@dataclass
class _Steps:
    """Steps of many traces of a partition: rows count in the partition, `trace` in `facts`."""

    row: list[int] = field(default_factory=list)
    agent: list[int] = field(default_factory=list)
    wrapper: list[int] = field(default_factory=list)
    parents: list[tuple[int, ...]] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    leaf: list[bool] = field(default_factory=list)
    trace: list[int] = field(default_factory=list)
    facts: list[TraceFacts] = field(default_factory=list)

    def add(self, steps: TraceSteps, first: int, facts: TraceFacts) -> None:
        leaves = set(steps.leaves)
        self.row += [row + first for row in steps.row]
        self.agent += [row + first for row in steps.agent]
        self.wrapper += [row + first if row >= 0 else -1 for row in steps.wrapper]
        self.parents += steps.parents
        self.started += steps.started
        self.ended += steps.ended
        self.step += range(len(steps.row))
        self.leaf += [step in leaves for step in range(len(steps.row))]
        self.trace += [len(self.facts)] * len(steps.row)
        self.facts.append(facts)

    def add_spoiled(self, row: int, facts: TraceFacts) -> None:
        """A trace that lost spans, as one row that is no step: its conversation has to know."""
        self.row.append(row)
        self.agent.append(row)
        self.wrapper.append(-1)
        self.parents.append(())
        self.started.append(0)
        self.ended.append(0)
        self.step.append(-1)
        self.leaf.append(False)
        self.trace.append(len(self.facts))
        self.facts.append(facts)


class _Reading:
    """Turns partitions of spans into sources."""

    def __init__(self, name: str, intake: Intake, conversations: Conversations, skip_bad: bool) -> None:
        self.name = name
        self.intake = intake
        self.conversations = conversations
        self.skip_bad = skip_bad

    def partition(self, table: pa.Table) -> Iterator[Source]:
        """The workflows that this partition tells on its own; the others go to the conversations."""
        codes = _codes(table.column("trace"))
        order = np.argsort(codes, kind="stable")
        bounds = np.flatnonzero(np.diff(codes[order], prepend=-1, append=-1)).tolist()
        columns = _Columns(table, order)
        now, later = _Steps(), _Steps()
        spoiled: set[Workflow] = set()
        for first, stop in pairwise(bounds):
            self._trace(columns, first, stop, now, later, spoiled)
        del columns
        for steps, is_later in ((later, True), (now, False)):
            rows = order[np.asarray(steps.row, np.int64)]
            for start, stop in chunks(_text_bytes(table)[rows]):
                built = _build(table, order, steps, slice(start, stop), is_later)
                if is_later:
                    self.conversations.add(built)
                else:
                    yield self.source(built, frozenset(spoiled))
                    spoiled = set()
        if spoiled:
            yield self.source(None, frozenset(spoiled))

    def source(self, table: pa.Table | None, spoiled: frozenset[Workflow]) -> Source:
        """A conforming chunk; what was skipped since the last chunk goes with it."""
        lines = None
        if table is None:
            conforming = trace_schema().empty_table()
        else:
            if len(self.intake.names) == 1 and table.num_rows and table.column("line")[0].as_py():
                lines = table.column("line").to_numpy()
            conforming = conform(table, Origin.of(self.name, table.num_rows, lines))
        skipped = dict(self.intake.skipped)
        self.intake.skipped.clear()
        return Source(conforming, Origin.of(self.name, conforming.num_rows, lines), skipped, spoiled)

    def _trace(
        self, columns: _Columns, first: int, stop: int, now: _Steps, later: _Steps, spoiled: set[Workflow]
    ) -> None:
        bad = columns.any_bad(first, stop)
        read = columns.readable(first, stop) if bad else slice(first, stop)
        first, stop = read.start, read.stop
        if first == stop:
            return  # only notes of lost spans: nothing is left to go wrong
        try:
            steps = steps_of(columns.spans(first, stop))
        except BrokenTreeError as error:
            row = first + error.row
            if not self.skip_bad:
                raise TraceError(f"{self.intake.at(*columns.place(row))}: {error.message}") from None
            self.intake.skipped[f"trace with a {error.reason}"] += 1
            bad, steps = True, None
        facts = columns.facts(first, stop, steps, bad)
        self.conversations.learn(facts)
        if facts.waits:
            if bad:
                later.add_spoiled(first, facts)
            elif steps is not None and steps.row:
                later.add(steps, first, facts)
        elif bad:
            spoiled.add((facts.told_type, facts.workflow_id))
        elif steps is not None and steps.row:
            now.add(steps, first, facts)


class _Columns:
    """The numbers of a partition as Python lists, rows sorted by trace."""

    def __init__(self, table: pa.Table, order: NDArray[np.int64]) -> None:
        self._table = table
        self._order = order
        ids = _codes(pa.chunked_array([*table.column("span").chunks, *table.column("parent").chunks]))
        self.span = ids[: table.num_rows][order].tolist()
        self.parent = ids[table.num_rows :][order].tolist()
        nodes = _codes(pa.chunked_array([*table.column("node").chunks, *table.column("node_parent").chunks]))
        self.node = nodes[: table.num_rows][order].tolist()
        self.node_parent = nodes[table.num_rows :][order].tolist()
        self.service = _codes(table.column("service"))[order].tolist()
        self.session = _codes(table.column("session"))[order].tolist()
        self.workflow = _codes(table.column("workflow"))[order].tolist()
        self.role = table.column("role").to_numpy()[order].tolist()
        self.naming = table.column("naming").to_numpy()[order].tolist()
        self.remote = table.column("remote").to_numpy()[order].tolist()
        self.start = table.column("start").to_numpy()[order].tolist()
        self.end = pc.fill_null(table.column("end"), NEVER_ENDED).to_numpy()[order].tolist()
        self.bad = table.column("bad").to_numpy()[order]

    def any_bad(self, first: int, stop: int) -> bool:
        return bool(self.bad[first:stop].any())

    def readable(self, first: int, stop: int) -> slice:
        """The rows that are spans; notes of lost ones are put in front of them."""
        rows = sorted(range(first, stop), key=lambda row: self.span[row] >= 0)
        lost = sum(self.span[row] < 0 for row in rows)
        for values in (self.span, self.parent, self.node, self.node_parent, self.service, self.session, self.workflow,
                       self.role, self.naming, self.remote, self.start, self.end):  # fmt: skip
            values[first:stop] = [values[row] for row in rows]
        self._order[first:stop] = self._order[rows]
        return slice(first + lost, stop)

    def spans(self, first: int, stop: int) -> TraceSpans:
        part = slice(first, stop)

        def same(one: int, other: int) -> bool:
            rows = self._order[[first + one, first + other]]
            content = self._table.select(CONTENT).take(pa.array(rows)).to_pylist()
            return bool(content[0] == content[1])

        return TraceSpans(
            span=self.span[part],
            parent=self.parent[part],
            remote=self.remote[part],
            role=self.role[part],
            naming=self.naming[part],
            service=self.service[part],
            node=self.node[part],
            node_parent=self.node_parent[part],
            start=self.start[part],
            end=self.end[part],
            same=same,
        )

    def place(self, row: int) -> tuple[Place, str]:
        """Where a span was read, and its id."""
        found = self._table.select(["file", "line", "span"]).take(pa.array([self._order[row]])).to_pylist()[0]
        return Place(found["file"], found["line"]), found["span"]

    def facts(self, first: int, stop: int, steps: TraceSteps | None, bad: bool) -> TraceFacts:
        root = None if steps is None or steps.root is None else first + steps.root
        begin = min(range(first, stop), key=self.start.__getitem__) if root is None else root
        top = None if steps is None or steps.top is None else first + steps.top
        return TraceFacts(
            trace=str(self._text("trace", first)),
            session=self._of_all("session", self.session, first, stop, root),
            workflow=self._of_first("workflow", self.workflow, first, stop, root),
            service=self._text("service", begin),
            top=None if top is None else self._text("label", top),
            complete=steps is not None and steps.complete,
            begin=steps.started[0] if steps is not None and steps.row else self.start[begin],
            end=steps.end if steps is not None else self.start[begin],
            rooted=root is not None,
            bad=bad,
        )

    def _of_all(self, name: str, codes: Sequence[int], first: int, stop: int, root: int | None) -> str | None:
        """The root's value, else the one that all spans agree in that have any."""
        if root is not None and codes[root] >= 0:
            return self._text(name, root)
        found = {code for code in codes[first:stop] if code >= 0}
        return self._text(name, codes.index(found.pop(), first, stop)) if len(found) == 1 else None

    def _of_first(self, name: str, codes: Sequence[int], first: int, stop: int, root: int | None) -> str | None:
        """The root's value, else that of the span that started first among those that have one."""
        if root is not None and codes[root] >= 0:
            return self._text(name, root)
        rows = [row for row in range(first, stop) if codes[row] >= 0]
        return self._text(name, min(rows, key=self.start.__getitem__)) if rows else None

    def _text(self, column: str, row: int) -> str | None:
        text: str | None = self._table.column(column)[int(self._order[row])].as_py()
        return text


def _build(table: pa.Table, order: NDArray[np.int64], steps: _Steps, part: slice, later: bool) -> pa.Table:
    """Rows of the trace, with `line`, and with the helper columns where they still wait for their conversation."""
    rows = pa.array(order[steps.row[part]])
    trace = np.asarray(steps.trace[part], np.int64)
    facts = steps.facts
    columns = {name: table.column(name).take(rows) for name in _FROM_SPANS}
    wrapper = np.asarray(steps.wrapper[part], np.int64)
    if (wrapper >= 0).any():
        around = pa.array(order[np.maximum(wrapper, 0)], mask=wrapper < 0)
        columns = {name: pc.coalesce(column, table.column(name).take(around)) for name, column in columns.items()}
    started, ended = np.asarray(steps.started[part], np.int64), np.asarray(steps.ended[part], np.int64)
    columns |= {
        "agent": table.column("label").take(pa.array(order[steps.agent[part]])),
        "kind": pc.if_else(pc.equal(table.column("role").take(rows), int(Role.TOOL)), "tool", "llm"),
        "step": pa.array(steps.step[part], pa.int32()),
        "parent_steps": pa.array(steps.parents[part], pa.list_(pa.int32())),
        "started_at": pa.array(started // _NS_PER_US, pa.int64()).cast(TIMESTAMP),
        "ended_at": pa.array(ended // _NS_PER_US, pa.int64(), mask=ended == NEVER_ENDED).cast(TIMESTAMP),
        "workflow_type": _of_traces([one.told_type for one in facts], trace),
        "workflow_id": _of_traces([one.workflow_id for one in facts], trace),
        "complete": pa.array(np.array([one.complete for one in facts], bool)[trace]),
        "line": table.column("line").take(rows),
    }
    if later:
        columns |= {
            "start": pa.array(started),
            "leaf": pa.array(steps.leaf[part]),
            "trace": _of_traces([one.trace for one in facts], trace),
            "workflow": _of_traces([one.workflow for one in facts], trace),
            "service": _of_traces([one.service for one in facts], trace),
            "top": _of_traces([one.top for one in facts], trace),
            "trace_begin": pa.array(np.array([one.begin for one in facts], np.int64)[trace]),
            "trace_end": pa.array(np.array([one.end for one in facts], np.int64)[trace]),
            "rooted": pa.array(np.array([one.rooted for one in facts], bool)[trace]),
        }
        columns["bad"] = pc.less(columns["step"], 0)
        assert set(HELPERS) <= set(columns)
    return pa.table(columns)


def _of_traces(values: list[str | None], trace: NDArray[np.int64]) -> pa.Array:
    return pa.array(values, pa.string()).take(pa.array(trace))


def _codes(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """A number for each distinct string, -1 for null; int64 [rows]."""
    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().combine_chunks()
    codes: NDArray[np.int64] = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes


def _text_bytes(table: pa.Table) -> NDArray[np.int64]:
    """Bytes of text in each row, int64 [rows]."""
    total = np.zeros(table.num_rows, np.int64)
    for name in _TEXTS:
        total += pc.fill_null(pc.binary_length(table.column(name)), 0).to_numpy()
    return total
