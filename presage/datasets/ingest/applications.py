"""Inferred workflow types of recordings: every workflow of an application gets the type that it had at last.

Gateway and engine name such a type after the agent that begins a workflow, until they have seen who calls whom. Here
the same class sees the first step of each agent in each workflow, in time order, of all recordings of an ingestion.
Workflows are found by their ids, which no other recording has, in any source: one in two sources gets one type.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from presage.applications import Applications
from presage.datasets.adapters.recording import batches, engines, trace_ids
from presage.datasets.schema.names import NameMapping
from presage.datasets.schema.source import Source
from presage.datasets.store.parts import Manifest, rows_of

MERGED: Final = "workflow of the inferred type"
"""How the notices begin of workflows that get another type."""
_INFERRED: Final = re.compile(r"app-[0-9a-f]{8}")
_KEYS: Final = ["run", "workflow_id", "tenant", "workflow_type", "agent"]
_COLUMNS: Final = ["workflow_id", "workflow_type"]


def application_types(recordings: Iterable[Path], names: NameMapping) -> pa.Table:
    """`workflow_id` and the last `workflow_type` of the workflows whose type is inferred, and not folded by `names`.

    Raises TraceError as `read_recording`.
    """
    firsts, types = [], [pa.table({name: pa.array([], pa.string()) for name in _COLUMNS})]
    for engine in {engine.name: engine for path in recordings for engine in engines(path)}.values():
        if steps := [batch for batch, _ in batches(engine, "steps", [*_KEYS, "step", "started_at"], Counter())]:
            grouped = pa.Table.from_batches(steps).group_by(_KEYS, use_threads=False)
            first = grouped.aggregate([("step", "min"), ("started_at", "min")])
            firsts.append(first.append_column("id", trace_ids(first, engine)))
    if not firsts:
        return types[0]
    joint = pa.concat_tables(firsts).sort_by([("started_at_min", "ascending"), ("step_min", "ascending")])
    applications: dict[str | None, Applications] = {}
    for batch in joint.select([*_KEYS[2:], "step_min"]).to_batches(max_chunksize=2**14):
        for tenant, workflow_type, agent, step in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            own = agent.replace("agent-", "app-", 1)
            of_tenant = applications.setdefault(tenant, Applications(most_agents=1024))
            if _INFERRED.fullmatch(own):  # no type is named after another agent
                of_tenant.step(own, workflow_type, begins=step == 0)
    of_types = joint.group_by(["tenant", "workflow_type"]).aggregate([("id", "distinct")])
    for tenant, recorded, ids in zip(*of_types.columns, strict=True):
        if _INFERRED.fullmatch(recorded.as_py()) and names.workflow_type(recorded.as_py()) == recorded.as_py():
            final = applications[tenant.as_py()].type_of(recorded.as_py())
            types.append(pa.table([ids.values, pa.repeat(final, len(ids.values))], names=_COLUMNS))
    return pa.concat_tables(types)


def retyped(begin: Callable[[], Iterator[Source]], types: pa.Table) -> Iterator[Source]:
    """The chunks of a source with these types, and notices of how many workflows get another one."""
    for chunk in begin():
        table = _with_types(chunk.table, types)
        first = pc.equal(table["step"], 0)
        pairs = zip(*(each["workflow_type"].filter(first).to_pylist() for each in (chunk.table, table)), strict=True)
        notices = Counter(f"{MERGED} {old}, of the application {new}" for old, new in pairs if old != new)
        yield replace(chunk, table=table, notices={**chunk.notices, **notices})


def as_stored(table: pa.Table, types: pa.Table, root: Path, manifest: Manifest) -> pa.Table:
    """The rows with the types under which the store has these workflows: what an earlier ingestion named stays."""
    ids = pc.unique(table["workflow_id"])
    ids = ids.filter(pc.is_in(ids, value_set=types["workflow_id"]))
    matching = (rows for part in manifest.parts if len(ids) for rows in rows_of(ids, root, part, manifest.sizes))
    stored = [rows.select(_COLUMNS) for rows in matching]
    return _with_types(table, pa.concat_tables(stored)) if stored else table


def _with_types(table: pa.Table, types: pa.Table) -> pa.Table:
    place = pc.index_in(table["workflow_id"], value_set=types["workflow_id"])
    column = pc.coalesce(types["workflow_type"].take(place), table["workflow_type"])
    position = table.schema.get_field_index("workflow_type")
    return table.set_column(position, table.schema.field(position), column)
