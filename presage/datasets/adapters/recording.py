"""`--format recording`: the folder of an engine's recorder (`presage.datasets.recording`), also while it is written.

Two readings of bounded memory: the first of numbers alone, which decides what becomes a row (`recording_plan.py`), the
second of everything, a chunk at a time. What is left out is counted whether or not bad rows are skipped: a recording is
cut wherever its engine was, and clients name their workflows as they like.

A workflow is named `ID@INSTANCE.RUN`. So two engines that served workflows of the same id, or one engine after its
restart, are kept apart, always, and what a store has of one recording does not depend on what else was ingested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.datasets.adapters.recording_files import Engine, Served, batches, engines
from presage.datasets.adapters.recording_plan import END_NUMBERS, NUMBERS, Plan, plan
from presage.datasets.adapters.source import Source
from presage.datasets.origin import Origin
from presage.datasets.schema import STATE_COLUMNS, conform, trace_schema
from presage.errors import TraceError

_CHUNK_BYTES: Final = 16 * 2**20
_CHUNK_ROWS: Final = 2**14
_AS_THEY_ARE: Final = (
    "workflow_type",
    "agent",
    "input_tokens",
    "output_tokens",
    "cached_input_tokens",
    "finish_reason",
    "started_at",
    "ended_at",
    "input_text",
    "output_text",
)


def read_recording(
    path: Path, *, skip_bad: bool = False, progress: Callable[[int], None] | None = None
) -> Iterator[Source]:
    """Read a recording, or one engine of it.

    Args:
        path: the folder of the recorder's settings, or one of its `engine-…` folders.
        skip_bad: makes no difference.
        progress: called with the number of steps read since its last call.

    Raises:
        TraceError: this is no recording, it is of another version, states of its engines differ in size, or there is
            no step in it that can be taken yet.
    """
    del skip_bad
    name, rows = str(path), 0
    skipped = Counter[str]()
    for engine in engines(path):
        # Ends first: whoever sees one finds all of its steps on disk.
        ends = [batch for batch, _ in batches(engine, "ends", END_NUMBERS, skipped)]
        numbers = (batch for batch, _ in batches(engine, "steps", NUMBERS, Counter()))
        planned = plan(numbers, ends, engine.records, skipped)
        for table in _tables(engine, planned, skipped):
            origin = Origin.of(name, table.num_rows, first=rows + 1)
            rows += table.num_rows
            if progress is not None:
                progress(table.num_rows)
            yield Source(conform(table, origin), origin, _taken(skipped))
    left_out = _taken(skipped)
    if not rows:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in left_out.items()) or "it is empty"
        raise TraceError(
            f"{name}: a recording with no workflow that can be taken yet ({reasons}): serve workflows that name their "
            "type and agents, and read it again when some have ended"
        )
    yield Source(trace_schema().empty_table(), Origin.of(name, 0), left_out)


def _taken(skipped: Counter[str]) -> dict[str, int]:
    found = {reason: count for reason, count in skipped.items() if count}
    skipped.clear()
    return found


def _tables(engine: Engine, planned: Plan, skipped: Counter[str]) -> Iterator[pa.Table]:
    """The rows of an engine, raw, in tables of bounded size."""
    waiting: list[pa.Table] = []
    seen = np.zeros(len(planned.keys), bool)
    for batch, served in batches(engine, "steps", None, skipped):
        runs, steps = (batch[name].to_numpy().astype(np.int64) for name in ("run", "step"))
        places = planned.find(runs, steps)
        fresh = np.flatnonzero(places >= 0)
        fresh = fresh[np.unique(places[fresh], return_index=True)[1]]
        fresh = fresh[~seen[places[fresh]]]
        seen[places[fresh]] = True
        if not len(fresh):
            continue
        waiting.append(_table(batch.take(pa.array(fresh)), engine, served, planned, places[fresh]))
        if sum(t.num_rows for t in waiting) >= _CHUNK_ROWS or sum(t.nbytes for t in waiting) >= _CHUNK_BYTES:
            yield pa.concat_tables(waiting, promote_options="default")
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting, promote_options="default")


def _table(
    batch: pa.RecordBatch,
    engine: Engine,
    served: Served,
    planned: Plan,
    places: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> pa.Table:
    runs = batch["run"].cast(pa.string())
    columns = {name: batch[name] for name in _AS_THEY_ARE}
    columns["workflow_id"] = pc.binary_join_element_wise(batch["workflow_id"], f"@{engine.name}.", runs, "")
    columns["step"] = pa.array(planned.steps[places])
    columns["complete"] = pa.array(planned.complete[places])
    columns["model"] = pa.repeat(pa.scalar(served.model, pa.string()), batch.num_rows)
    has_state = pa.repeat(False, batch.num_rows)
    for name in STATE_COLUMNS:
        states = _states(batch[name], f"{engine.folder}, column {name!r}")
        if states is not None:
            columns[name] = states
            has_state = pc.or_(has_state, states.is_valid())
    columns["state_layer"] = pc.if_else(has_state, pa.scalar(served.state_layer, pa.int32()), None)
    return pa.table(columns)


def _states(column: pa.LargeBinaryArray, where: str) -> pa.Array | None:
    """Raw float16 as fixed_size_list<float16>[d]; None where no step has a state.

    Raises:
        TraceError: states differ in size.
    """
    if column.null_count == len(column):
        return None
    lengths = pc.unique(pc.binary_length(column.drop_null())).to_pylist()
    if len(lengths) > 1 or not lengths[0] or lengths[0] % 2:
        raise TraceError(f"{where}: states of {len(lengths)} sizes in one batch; one is wanted: the file is damaged")
    size = lengths[0] // 2
    null = column.is_null().to_numpy(zero_copy_only=False)
    halves = np.zeros((len(column), size), np.float16)
    halves[~null] = np.frombuffer(b"".join(column.drop_null().to_pylist()), np.float16).reshape(-1, size)
    return pa.FixedSizeListArray.from_arrays(pa.array(halves.reshape(-1)), size, mask=pa.array(null))
