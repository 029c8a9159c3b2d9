"""Workflows whose steps lie in several traces, and workflow types that one trace does not tell.

Rows wait on disk, partitioned by workflow id, until every trace was read. Steps then count over the whole conversation
in start order, and a trace waits for the traces that ended before it began, as siblings do in `tree.py`. The workflow
type is `gen_ai.workflow.name`, else the outermost workflow, chain or agent span, else the service; a trace without a
root takes the type of the other traces of its service, if they have one type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from presage.datasets.adapters.spans.partitions import Partitions
from presage.datasets.adapters.spans.tree import UNKNOWN_SERVICE, Siblings, TraceFacts
from presage.datasets.schema.source import Workflow

_MANY: Final = 2


class _Trace(NamedTuple):
    """A waiting trace: its rows in the partition, in step order, and its facts."""

    rows: list[int]
    workflow: str | None
    service: str
    top: str | None
    rooted: bool
    begin: int
    end: int
    complete: bool


class PendingConversations:
    """Steps that wait for the other traces.

    Args:
        waiting: where to keep them.
    """

    def __init__(self, waiting: Partitions) -> None:
        self._waiting = waiting
        self._types: dict[str, set[str]] = {}  # of each service, up to `_MANY`
        self._named: dict[str, set[str | None]] = {}  # `gen_ai.workflow.name` of each service, up to `_MANY`

    def learn(self, facts: TraceFacts) -> None:
        """Record the workflow type of a trace under its service."""
        if facts.workflow is None and not facts.rooted:
            return
        service = facts.service or UNKNOWN_SERVICE
        for seen, value in ((self._types, facts.known_type), (self._named, facts.workflow)):
            known: set[Any] = seen.setdefault(service, set())
            if len(known) < _MANY:
                known.add(value)

    def add(self, rows: pa.Table) -> None:
        """Keep rows of `StepRows.tables`; a row of step -1 notes that its trace lost spans."""
        self._waiting.add(rows, "workflow_id")

    def workflows(self) -> Iterator[tuple[pa.Table, set[Workflow]]]:
        """For each partition the rows of its workflows, and the spoiled workflows, whose rows are left out."""
        for number in range(self._waiting.count):
            table = self._waiting.rows(number)
            if table is not None:
                yield self._joined(table)

    def _joined(self, table: pa.Table) -> tuple[pa.Table, set[Workflow]]:
        groups, bad = self._groups(table)
        local = _Local(table)
        rows: list[int] = []
        steps: list[int] = []
        parents: list[tuple[int, ...]] = []
        keys: list[Workflow] = []
        complete: list[bool] = []
        counts: list[int] = []
        for key, traces in groups.items():
            if key in bad:
                continue
            found, waited = local.number(traces)
            rows += found
            steps += range(len(found))
            parents += waited
            keys.append(key)
            complete.append(all(trace.complete for trace in traces))
            counts.append(len(found))
        workflow = pa.array(np.repeat(np.arange(len(keys)), counts))
        columns = {
            "workflow_type": pa.array([kind for kind, _ in keys], pa.string()).take(workflow),
            "workflow_id": pa.array([name for _, name in keys], pa.string()).take(workflow),
            "step": pa.array(steps, pa.int32()),
            "parent_steps": pa.array(parents, pa.list_(pa.int32())),
            "complete": pa.array(complete, pa.bool_()).take(workflow),
        }
        kept = table.drop_columns(list(columns)).take(pa.array(rows, pa.int64()))
        for name, column in columns.items():
            kept = kept.append_column(name, column)
        return kept, bad

    def _groups(self, table: pa.Table) -> tuple[dict[Workflow, list[_Trace]], set[Workflow]]:
        """The traces of each workflow, by begin, and the workflows that lost spans."""
        names = ("workflow_id", "trace", "step", "workflow", "service", "top", "rooted", "trace_begin", "trace_end")
        columns = [table.column(name).to_pylist() for name in (*names, "complete")]
        traces: dict[tuple[str, str], _Trace] = {}
        lost: set[tuple[str, str]] = set()
        for row, (workflow_id, trace, step, named, service, top, rooted, begin, end, complete) in enumerate(
            zip(*columns, strict=True)
        ):
            one = traces.get((workflow_id, trace))
            if one is None:
                service = service or UNKNOWN_SERVICE
                one = _Trace([], named, service, top, rooted, begin, end, complete)
                traces[workflow_id, trace] = one
            if step < 0:
                lost.add((workflow_id, trace))
            else:
                one.rows.append(row)
        applications: dict[tuple[str, str | None, str], list[tuple[tuple[str, str], _Trace]]] = {}
        for key, one in sorted(traces.items(), key=lambda item: (item[1].begin, item[0])):
            named = one.workflow if one.workflow is not None or one.rooted else self._only(self._named, one.service)
            service = "" if named is not None else one.service
            applications.setdefault((key[0], named, service), []).append((key, one))
        groups: dict[Workflow, list[_Trace]] = {}
        bad_groups: set[Workflow] = set()
        for (workflow_id, named, service), members in applications.items():
            top = next((one.top for _, one in members if one.top is not None), None)
            workflow = (named or top or self._only(self._types, service) or service, workflow_id)
            groups.setdefault(workflow, []).extend(one for _, one in members)
            if any(key in lost for key, _ in members):
                bad_groups.add(workflow)
        for members_of in groups.values():
            members_of.sort(key=lambda one: one.begin)
        return groups, bad_groups

    @staticmethod
    def _only(seen: dict[str, Any], service: str) -> str | None:
        known = seen.get(service, set())
        value: str | None = next(iter(known)) if len(known) == 1 else None
        return value


class _Local:
    """Step numbers within traces, renumbered within workflows."""

    def __init__(self, table: pa.Table) -> None:
        self._step = table.column("step").to_pylist()
        self._start = table.column("start").to_pylist()
        self._leaf = table.column("leaf").to_pylist()
        self._parents = table.column("parent_steps").to_pylist()

    def number(self, traces: list[_Trace]) -> tuple[list[int], list[tuple[int, ...]]]:
        """The rows of a workflow in order, and the steps each waited for."""
        waits: dict[int, tuple[int, ...]] = {}
        siblings = Siblings(-1, ())
        order: list[tuple[int, int, int, int]] = []
        for place, trace in enumerate(traces):
            rows = sorted(trace.rows, key=self._step.__getitem__)
            given = siblings.waited_for(trace.begin)
            for row in rows:
                local = self._parents[row]
                waits[row] = tuple(rows[parent] for parent in local) if local else given
                order.append((self._start[row], place, self._step[row], row))
            leaves = tuple(row for row in rows if self._leaf[row])
            siblings.ended(trace.begin, trace.end, leaves, place)
        found = [row for *_, row in sorted(order)]
        step = {row: i for i, row in enumerate(found)}
        return found, [tuple(sorted(map(step.__getitem__, waits[row]))) for row in found]
