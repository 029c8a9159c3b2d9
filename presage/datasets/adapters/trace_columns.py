"""The spans of a partition, sorted by trace, as numbers that a tree is built from.

Strings stay in Arrow: an id, a service or a name is a number here, and its text is looked up when one is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.adapters.conversations import TraceFacts
from presage.datasets.adapters.span_tree import NEVER_ENDED, TraceSpans, TraceSteps
from presage.datasets.adapters.spans import CONTENT
from presage.datasets.adapters.text_files import Place


class TraceColumns:
    """The numbers of a partition as Python lists, rows sorted by trace, notes of lost spans first.

    Args:
        table: spans, of `SPAN_SCHEMA`.

    Attributes:
        order: row of the table for each row here, int64 [rows].
        bounds: where each trace starts, and the end of the last.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        trace = codes(table.column("trace"))
        self.order = np.lexsort((table.column("span").is_valid().to_numpy(), trace))
        self.bounds = np.flatnonzero(np.diff(trace[self.order], prepend=-1, append=-1)).tolist()
        self._span, self._parent = self._pair("span", "parent")
        self._node, self._node_parent = self._pair("node", "node_parent")
        self._service = codes(table.column("service"))[self.order].tolist()
        self._session = codes(table.column("session"))[self.order].tolist()
        self._workflow = codes(table.column("workflow"))[self.order].tolist()
        self._role = table.column("role").to_numpy()[self.order].tolist()
        self._naming = table.column("naming").to_numpy()[self.order].tolist()
        self._remote = table.column("remote").to_numpy()[self.order].tolist()
        self._start = table.column("start").to_numpy()[self.order].tolist()
        self._end = pc.fill_null(table.column("end"), NEVER_ENDED).to_numpy()[self.order].tolist()
        self._texts = {name: table.column(name) for name in ("trace", "label", "service", "session", "workflow")}
        self._bad = table.column("bad").to_numpy()[self.order]

    def any_bad(self, first: int, stop: int) -> bool:
        """Whether a trace lost a span, or a value of one."""
        return bool(self._bad[first:stop].any())

    def first_span(self, first: int, stop: int) -> int:
        """The first row of a trace that is a span; `stop` if there is none."""
        return next((row for row in range(first, stop) if self._span[row] >= 0), stop)

    def spans(self, first: int, stop: int) -> TraceSpans:
        """The spans of a trace."""
        part = slice(first, stop)

        def same(one: int, other: int) -> bool:
            rows = self.order[[first + one, first + other]]
            content = self._table.select(CONTENT).take(pa.array(rows)).to_pylist()
            return bool(content[0] == content[1])

        return TraceSpans(
            span=self._span[part],
            parent=self._parent[part],
            remote=self._remote[part],
            role=self._role[part],
            naming=self._naming[part],
            service=self._service[part],
            node=self._node[part],
            node_parent=self._node_parent[part],
            start=self._start[part],
            end=self._end[part],
            same=same,
        )

    def place(self, row: int) -> tuple[Place, str]:
        """Where a span was read, and its id."""
        found = self._table.select(["file", "line", "span"]).take(pa.array([self.order[row]])).to_pylist()[0]
        return Place(found["file"], found["line"]), found["span"]

    def facts(self, first: int, stop: int, steps: TraceSteps | None) -> TraceFacts:
        """What is known of a trace as a whole; `steps` is None where its spans are no tree."""
        root = None if steps is None or steps.root is None else first + steps.root
        top = None if steps is None or steps.top is None else first + steps.top
        begin = root if root is not None else min(range(first, stop), key=self._start.__getitem__)
        return TraceFacts(
            trace=str(self._text("trace", first)),
            session=self._agreed("session", self._session, first, stop, root),
            workflow=self._earliest("workflow", self._workflow, first, stop, root),
            service=self._text("service", begin),
            top=None if top is None else self._text("label", top),
            complete=steps is not None and steps.complete,
            begin=steps.started[0] if steps is not None and steps.row else self._start[begin],
            end=steps.end if steps is not None else self._start[begin],
            rooted=root is not None,
        )

    def _pair(self, one: str, other: str) -> tuple[list[int], list[int]]:
        """Two columns with the same number for the same string."""
        rows = self._table.num_rows
        both = codes(pa.chunked_array([*self._table.column(one).chunks, *self._table.column(other).chunks]))
        return both[:rows][self.order].tolist(), both[rows:][self.order].tolist()

    def _agreed(self, name: str, values: Sequence[int], first: int, stop: int, root: int | None) -> str | None:
        """The root's value, else the one that all spans agree in that have any."""
        if root is not None and values[root] >= 0:
            return self._text(name, root)
        found = set(values[first:stop]) - {-1}
        return self._text(name, values.index(found.pop(), first, stop)) if len(found) == 1 else None

    def _earliest(self, name: str, values: Sequence[int], first: int, stop: int, root: int | None) -> str | None:
        """The root's value, else that of the span that started first among those that have one."""
        if root is not None and values[root] >= 0:
            return self._text(name, root)
        rows = [row for row in range(first, stop) if values[row] >= 0]
        return self._text(name, min(rows, key=self._start.__getitem__)) if rows else None

    def _text(self, column: str, row: int) -> str | None:
        text: str | None = self._texts[column][int(self.order[row])].as_py()
        return text


def codes(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """A number for each distinct string, -1 for null; int64 [rows]."""
    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().combine_chunks()
    numbers: NDArray[np.int64] = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers
