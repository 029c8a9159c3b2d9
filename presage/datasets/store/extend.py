"""Workflows that a store has and a new source has otherwise: those that went on are extended, those cut completed.

Steps of both are one step if they began at one moment and are of one kind; what one of them does not know, the other
tells. The rest is laid side by side by time. A step that followed all that had ended before it in its part follows all
that had ended before it in both, so a session that goes on after a day is a chain. Whether the workflow is complete is
said by the part that has its last step. So the result does not depend on which part came first.

A workflow is in conflict where a step has no time, or the parts tell different things of one step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_WORKED_OUT: Final = ("step", "parent_steps", "complete", "success")
_NEEDED: Final = ("started_at", "ended_at", "kind", "agent", "parent_steps", "complete", "success")
_NEVER: Final = 2**63 - 1


@dataclass
class _Joined:
    """Rows of workflows that were joined: of each step that of the stored part, else of the new one, and its twin in
    the new part, -1 without one."""

    row: list[int] = field(default_factory=list)
    twin: list[int] = field(default_factory=list)
    workflow: list[int] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    parents: list[list[int]] = field(default_factory=list)
    agent: list[int] = field(default_factory=list)
    complete: list[bool] = field(default_factory=list)
    success: list[bool | None] = field(default_factory=list)


def joined(
    table: pa.Table, parts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[pa.Table, NDArray[np.bool_], NDArray[np.bool_]]:
    """Join workflows: of each the rows in `table` that are stored, and those that are new, in step order.

    Returns the rows of the joined workflows in order, without those in conflict and those that gained nothing, and
    whether each workflow is one of the former and of the latter, both bool [workflows].
    """
    columns = {name: table.column(name) for name in _NEEDED}
    for name in ("started_at", "ended_at"):
        columns[name] = columns[name].cast(pa.int64())
    values = {name: column.to_pylist() for name, column in columns.items()}
    result_rows = _Joined()
    conflict, grown = np.zeros(len(parts), bool), np.zeros(len(parts), bool)
    for number, (stored, new) in enumerate(parts):
        if any(values["started_at"][row] is None for row in (*stored, *new)):
            conflict[number] = True
            continue
        grown[number] = _join(values, stored, new, number, result_rows)
    workflow = np.array(result_rows.workflow, np.int64)
    twins = pa.array(result_rows.twin, mask=np.array(result_rows.twin) < 0)
    mine, other = table.take(pa.array(result_rows.row, pa.int64())), table.take(twins.cast(pa.int64()))
    result = {}
    for name in table.column_names:
        own, theirs = mine[name], other[name]
        result[name] = own
        if name in _WORKED_OUT or not theirs.length() or theirs.null_count == len(theirs):
            continue
        differ = pc.and_(pc.is_valid(own), pc.is_valid(theirs)).to_numpy()
        if name == "agent":  # where one part lacked what names it, the other does not
            result[name] = table[name].take(pa.array(result_rows.agent, pa.int64()))
            differ &= pc.fill_null(pc.equal(mine["complete"], other["complete"]), False).to_numpy()
        same = _equal(own, theirs)
        np.logical_or.at(conflict, workflow[differ & ~same], True)
        gained = pc.and_(pc.is_null(own), pc.is_valid(theirs)).to_numpy()
        if gained.any():
            np.logical_or.at(grown, workflow[gained], True)
            result[name] = pc.if_else(pa.array(gained), theirs, own)
    result["step"] = pa.array(result_rows.step, pa.int32())
    result["parent_steps"] = pa.array(result_rows.parents, pa.list_(pa.int32()))
    result["complete"] = pa.array(result_rows.complete, pa.bool_())
    result["success"] = pa.array(result_rows.success, pa.bool_())
    keep = (grown & ~conflict)[workflow]
    rows = pa.table({name: result[name] for name in table.column_names}).cast(table.schema).filter(pa.array(keep))
    return rows, conflict, ~grown & ~conflict


def _equal(mine: pa.ChunkedArray, theirs: pa.ChunkedArray) -> NDArray[np.bool_]:
    if pa.types.is_nested(mine.type):
        return np.array([left == right for left, right in zip(mine.to_pylist(), theirs.to_pylist(), strict=True)], bool)
    same: NDArray[np.bool_] = pc.fill_null(pc.equal(mine, theirs), True).to_numpy()
    return same


def _join(
    values: dict[str, list[Any]], stored: Sequence[int], new: Sequence[int], number: int, result_rows: _Joined
) -> bool:
    """Add one workflow; whether it has more than what is stored."""
    started, ended, complete = values["started_at"], values["ended_at"], values["complete"]
    twin = {}
    by_key = dict(zip(_keys(values, stored), stored, strict=True))
    only_new = []
    for key, row in zip(_keys(values, new), new, strict=True):
        if key in by_key:
            twin[by_key[key]] = row
        else:
            only_new.append(row)

    def by_time(row: int) -> tuple[Any, ...]:
        return started[row], _end(ended[row]), values["kind"][row], values["agent"][row]

    rows = list(heapq.merge(stored, only_new, key=by_time))
    step = {row: place for place, row in enumerate(rows)}
    step |= {other: step[row] for row, other in twin.items()}
    follows = _follow_all(values, stored) | _follow_all(values, new)
    parts = [
        (row, {step[part[index]] for index in values["parent_steps"][row] or ()})
        for part in (stored, new)
        for row in part
    ]
    told = dict(parts)
    waits: list[set[int]] = []
    frontier = _Frontier()
    for row in rows:
        before = frontier.until(started[row])
        mine = told[row] | told.get(twin.get(row, row), set())
        waits.append(set(before) if row in follows or twin.get(row) in follows else mine)
        frontier.add(_end(ended[row]), step[row], waits[-1])
    last = rows[-1]
    lasts = [row for row in (last, twin.get(last)) if row is not None]
    whole = any(complete[row] for row in lasts)
    success = next((values["success"][row] for row in lasts if values["success"][row] is not None), None)
    result_rows.row += rows
    result_rows.twin += [twin.get(row, -1) for row in rows]
    result_rows.agent += [
        twin[row] if row in twin and complete[twin[row]] and not complete[row] else row for row in rows
    ]
    result_rows.workflow += [number] * len(rows)
    result_rows.step += range(len(rows))
    result_rows.parents += [sorted(waited_for) for waited_for in waits]
    result_rows.complete += [whole] * len(rows)
    result_rows.success += [success] * len(rows)
    named = zip(rows, result_rows.agent[-len(rows) :], strict=True)
    renamed = any(values["agent"][row] != values["agent"][other] for row, other in named)
    return bool(only_new) or renamed or whole != complete[stored[0]] or success != values["success"][stored[0]]


def _keys(values: dict[str, list[Any]], rows: Sequence[int]) -> list[tuple[Any, ...]]:
    """What identifies each step in its workflow: its start, its kind, and a count of those that share them."""
    seen: dict[tuple[Any, ...], int] = {}
    keys = []
    for row in rows:
        key = values["started_at"][row], values["kind"][row]
        seen[key] = seen.get(key, 0) + 1
        keys.append((*key, seen[key]))
    return keys


def _follow_all(values: dict[str, list[Any]], rows: Sequence[int]) -> set[int]:
    """The rows of a part that waited for all that had ended before them there."""
    frontier = _Frontier()
    follows = set()
    for place, row in enumerate(rows):
        waited = set(values["parent_steps"][row] or ())
        if waited == frontier.until(values["started_at"][row]):
            follows.add(row)
        frontier.add(_end(values["ended_at"][row]), place, waited)
    return follows


class _Frontier:
    """The steps that have ended at a moment and that no other of them waited for; moments do not run backwards."""

    def __init__(self) -> None:
        self._running: list[tuple[int, int, set[int]]] = []
        self._open: set[int] = set()

    def add(self, end: int, step: int, waited: set[int]) -> None:
        heapq.heappush(self._running, (end, step, waited))

    def until(self, moment: int) -> set[int]:
        while self._running and self._running[0][0] <= moment:
            _, step, waited = heapq.heappop(self._running)
            self._open.add(step)
            self._open -= waited
        return set(self._open)


def _end(moment: int | None) -> int:
    return _NEVER if moment is None else moment
