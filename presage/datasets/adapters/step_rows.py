"""Steps of many traces, gathered as numbers and written as rows of a trace, texts last and a stretch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.adapters.conversations import TraceFacts
from presage.datasets.adapters.span_tree import NEVER_ENDED, TraceSteps
from presage.datasets.adapters.spans import Role
from presage.datasets.schema import TIMESTAMP

_CHUNK_ROWS: Final = 16384
_CHUNK_BYTES: Final = 32 * 2**20
_TEXTS: Final = ("system_prompt", "input_text", "output_text")
_FROM_SPANS: Final = ("model", "input_tokens", "output_tokens", "cached_input_tokens", "finish_reason", *_TEXTS)
_NS_PER_US: Final = 1000


@dataclass
class StepRows:
    """Steps in the order they were added; rows count in the sorted partition, `trace` in `facts`."""

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
        """The steps of a trace that begins at row `first`."""
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

    def add_spoiled(self, first: int, facts: TraceFacts) -> None:
        """A trace that lost spans, as one row that is no step (number -1): its conversation has to know."""
        lost = TraceSteps([0], [0], [-1], [()], [facts.begin], [facts.end], (), facts.end, None, None, False)
        self.add(lost, first, facts)
        self.step[-1] = -1

    def tables(self, spans: pa.Table, order: NDArray[np.int64]) -> Iterator[pa.Table]:
        """The rows, in stretches that fit in memory.

        Args:
            spans: the partition.
            order: row of the partition for each row of the sorted one, int64 [rows].

        Returns:
            The columns of a trace, the `line` each row was read from, and what `Conversations` needs.
        """
        rows = order[np.asarray(self.row, np.int64)]
        for start, stop in stretches(text_bytes(spans)[rows]):
            yield self._table(spans, order, slice(start, stop))

    def _table(self, spans: pa.Table, order: NDArray[np.int64], part: slice) -> pa.Table:
        rows = pa.array(order[self.row[part]])
        trace = np.asarray(self.trace[part], np.int64)
        columns = {name: spans.column(name).take(rows) for name in _FROM_SPANS}
        wrapper = np.asarray(self.wrapper[part], np.int64)
        if (wrapper >= 0).any():
            around = pa.array(order[np.maximum(wrapper, 0)], mask=wrapper < 0)
            columns = {name: pc.coalesce(column, spans.column(name).take(around)) for name, column in columns.items()}
        started, ended = np.asarray(self.started[part], np.int64), np.asarray(self.ended[part], np.int64)
        first = int(trace.min())
        facts = self.facts[first : int(trace.max()) + 1]
        of_trace = pa.array(trace - first)
        texts = {
            "workflow_type": [one.told_type for one in facts],
            "workflow_id": [one.workflow_id for one in facts],
            "trace": [one.trace for one in facts],
            "workflow": [one.workflow for one in facts],
            "service": [one.service for one in facts],
            "top": [one.top for one in facts],
        }
        columns |= {name: pa.array(values, pa.string()).take(of_trace) for name, values in texts.items()}
        truths = {"complete": [one.complete for one in facts], "rooted": [one.rooted for one in facts]}
        columns |= {name: pa.array(values, pa.bool_()).take(of_trace) for name, values in truths.items()}
        times = {"trace_begin": [one.begin for one in facts], "trace_end": [one.end for one in facts]}
        columns |= {name: pa.array(values, pa.int64()).take(of_trace) for name, values in times.items()}
        return pa.table(
            columns
            | {
                "agent": spans.column("label").take(pa.array(order[self.agent[part]])),
                "kind": pc.if_else(pc.equal(spans.column("role").take(rows), int(Role.TOOL)), "tool", "llm"),
                "step": pa.array(self.step[part], pa.int32()),
                "parent_steps": pa.array(self.parents[part], pa.list_(pa.int32())),
                "started_at": pa.array(started // _NS_PER_US).cast(TIMESTAMP),
                "ended_at": pa.array(ended // _NS_PER_US, mask=ended == NEVER_ENDED).cast(TIMESTAMP),
                "start": pa.array(started),
                "leaf": pa.array(self.leaf[part], pa.bool_()),
                "line": spans.column("line").take(rows),
            }
        )


def text_bytes(table: pa.Table) -> NDArray[np.int64]:
    """Bytes of text in each row, int64 [rows]."""
    total = np.zeros(table.num_rows, np.int64)
    for name in _TEXTS:
        total += pc.fill_null(pc.binary_length(table.column(name)), 0).to_numpy()
    return total


def stretches(row_bytes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(start, stop) of stretches of rows, bounded in rows and in bytes; `row_bytes` is int64 [rows]."""
    ends = np.cumsum(row_bytes)
    start = 0
    while start < len(ends):
        limit = _CHUNK_BYTES + (int(ends[start - 1]) if start else 0)
        stop = min(start + _CHUNK_ROWS, max(start + 1, int(np.searchsorted(ends, limit, side="right"))), len(ends))
        yield start, stop
        start = stop
