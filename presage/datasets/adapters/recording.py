"""Reads `--format recording`: the folder of an engine's recorder, also while the engine is writing.

Two passes in bounded memory: `plan` reads only numbers and selects the rows, then the rows are read in chunks.
Meanwhile files may grow, end inside a batch, be renamed or removed; whole batches are read, other bytes counted.

docs/recorder.md ("What ingestion takes") says which runs become workflows, and how these are named. A store accepts a
workflow only once, so a decision about a run must be final.
"""

from __future__ import annotations

import fcntl
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets import recording as layout
from presage.datasets.adapters.spans.tree import NEVER_ENDED, Siblings, Steps
from presage.datasets.schema import STATE_COLUMNS, conform, trace_schema
from presage.datasets.schema.source import Origin, Source
from presage.errors import TraceError

_CHUNK_BYTES: Final = 16 * 2**20
_CHUNK_ROWS: Final = 2**14
_OF_TRACE: Final = tuple(name for name in layout.STEPS.names if name in trace_schema().names)
_READ: Final = {"run", "step", "client_step", "workflow_type", "workflow_id", "agent", "input_tokens", "finish_reason"}
_TIMES: Final = ("started_at", "ended_at", "goes_on_from")
NUMBERS: Final = tuple(name for name in layout.STEPS.names if name in {*_READ, *_TIMES, "quotes"})
_SOON_US: Final = 5000
"""A client may have the whole answer, and ask again, so long before the server has noted the end."""
END_NUMBERS: Final = ("run", "steps", "how")
_REPORTED: Final = ("run", "step", "success", "score")
UNNUMBERED: Final = -1
_MOST_PAUSES: Final = 256

WAITING: Final = "workflow still running: left for a later ingestion"
NO_BEGINNING: Final = "workflow of which the first step was not recorded"
CUT: Final = "step of a workflow after one that was not recorded"
NAMELESS: Final = "step without a workflow type or an agent, or of an agent called END"
ATTEMPT: Final = "failed attempt: its client left, and asked again for the step of that number"
TORN: Final = "file that ends inside a batch"
TORN_BYTES: Final = "byte after the last whole batch of a file"


def read_recording(path: Path, skip_bad: bool = False) -> Iterator[Source]:
    """Read the folder of a recording, or one of its `engine-…` folders; see `Reader`.

    `skip_bad` has no effect: clients choose workflow names freely, and a recording may be cut at any point, so bad
    steps are always counted and skipped. Raises TraceError if there is no usable step yet, too.
    """
    del skip_bad
    name, rows, skipped = str(path), 0, Counter[str]()
    for engine in engines(path):
        # Read ends first: when an end is on disk, all of its steps are.
        ends = [batch for batch, _ in batches(engine, "ends", END_NUMBERS, skipped)]
        numbers = (batch for batch, _ in batches(engine, "steps", NUMBERS, Counter()))
        planned = plan(numbers, ends, engine.records, skipped)
        judged = _judged(planned, [batch for batch, _ in batches(engine, "outcomes", _REPORTED, skipped)])
        for table in _tables(engine, planned, judged, skipped):
            origin = Origin.of(name, table.num_rows, first=rows + 1)
            rows += table.num_rows
            yield Source(conform(table, origin), origin, _taken(skipped))
    left_out = _taken(skipped)
    if not rows:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in left_out.items()) or "it is empty"
        raise TraceError(
            f"{name}: a recording without a usable workflow yet ({reasons}): read it again when some have "
            "ended, which their client says or their time to live; to an engine they must name their type and agents"
        )
    yield Source(trace_schema().empty_table(), Origin.of(name, 0), left_out)


def _taken(skipped: Counter[str]) -> dict[str, int]:
    counts = {reason: count for reason, count in skipped.items() if count}
    skipped.clear()
    return counts


def _tables(
    engine: RecordedEngine, planned: RowPlan, judged: Mapping[str, pa.Array], skipped: Counter[str]
) -> Iterator[pa.Table]:
    """The raw rows of an engine, in tables of bounded size."""
    waiting: list[pa.Table] = []
    seen = np.zeros(len(planned.keys) + 1, bool)
    seen[-1] = True  # a step that does not become a row
    for batch, served in batches(engine, "steps", None, skipped):
        runs, steps = (batch[name].to_numpy().astype(np.int64) for name in ("run", "step"))
        places, rows = np.unique(planned.find(runs, steps), return_index=True)
        fresh = ~seen[places]
        seen[places] = True
        if not fresh.any():
            continue
        table = _table(batch.take(pa.array(rows[fresh])), engine, served, planned, places[fresh])
        for name, column in judged.items():
            table = table.append_column(name, column.take(pa.array(places[fresh])))
        waiting.append(table)
        if sum(t.num_rows for t in waiting) >= _CHUNK_ROWS or sum(t.nbytes for t in waiting) >= _CHUNK_BYTES:
            yield pa.concat_tables(waiting, promote_options="default")
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting, promote_options="default")


def _table(
    batch: pa.RecordBatch, engine: RecordedEngine, served: Served, planned: RowPlan, places: NDArray[np.int64]
) -> pa.Table:
    columns = {name: batch[name] for name in _OF_TRACE}
    columns["workflow_id"] = trace_ids(batch, engine)
    columns["step"] = pa.array(planned.steps[places])
    columns["complete"] = pa.array(planned.complete[places])
    columns["parent_steps"] = planned.parents.take(pa.array(places))
    columns["model"] = pc.coalesce(batch["model"], pa.scalar(served.model, pa.string()))
    has_state = pa.repeat(False, batch.num_rows)
    for name in STATE_COLUMNS:
        states = _states(batch[name], f"{engine.folder}, column {name!r}")
        if states is not None:
            columns[name] = states
            has_state = pc.or_(has_state, states.is_valid())
    columns["state_layer"] = pc.if_else(has_state, pa.scalar(served.state_layer, pa.int32()), None)
    return pa.table(columns)


def trace_ids(steps: pa.RecordBatch | pa.Table, engine: RecordedEngine) -> pa.Array | pa.ChunkedArray:
    """The ids that the workflows of n recorded steps of an engine have in traces, string [n]."""
    return pc.binary_join_element_wise(steps["workflow_id"], f"@{engine.name}.", steps["run"].cast(pa.string()), "")


def _states(column: pa.LargeBinaryArray, where: str) -> pa.Array | None:
    """Raw float16 as fixed_size_list<float16>[d]; None if no step has a state."""
    if column.null_count == len(column):
        return None
    lengths = pc.unique(pc.binary_length(column.drop_null())).to_pylist()
    if len(lengths) > 1 or not lengths[0] or lengths[0] % 2:
        raise TraceError(f"{where}: states of {len(lengths)} sizes in one batch; expected one: the file is damaged")
    size = lengths[0] // 2
    null = column.is_null().to_numpy(zero_copy_only=False)
    halves = np.zeros((len(column), size), np.float16)
    halves[~null] = np.frombuffer(b"".join(column.drop_null().to_pylist()), np.float16).reshape(-1, size)
    return pa.FixedSizeListArray.from_arrays(pa.array(halves.reshape(-1)), size, mask=pa.array(null))


class RowPlan(NamedTuple):
    """The n steps of one engine that become rows."""

    keys: NDArray[np.int64]  # ascending, from `key`
    steps: NDArray[np.int32]  # number of the step in the trace
    complete: NDArray[np.bool_]  # whether its run is complete
    parents: pa.Array  # the steps that each waited for, list<int32>

    def find(self, runs: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index of each of n recorded steps in the plan, int64 [n]; -1 for steps that do not become a row."""
        wanted = key(runs, steps)
        places = np.searchsorted(self.keys, wanted)
        is_planned = np.append(self.keys, -1)[places] == wanted  # keys are never negative
        return np.where(is_planned, places, -1)


def _judged(planned: RowPlan, outcomes: Sequence[pa.RecordBatch]) -> dict[str, pa.Array]:
    """What was reported of each of the n planned steps: `success` of its run, and its own `step_score`.

    A report on the last answer of a complete run says the same of the run, unless the run has a report of its own.
    """
    run = planned.keys >> 32
    success, score = np.full(len(run), -1, np.int8), np.full(len(run), np.nan, np.float32)
    last = np.append(run[1:] != run[:-1], True)[: len(run)] & planned.complete
    for of_whole in (False, True):
        for batch in outcomes:
            reported = batch.filter(pc.equal(batch["step"].is_null(), of_whole))
            runs = reported["run"].to_numpy()
            told = reported["success"].to_numpy(zero_copy_only=False).astype(np.int8)
            if not of_whole:
                place = planned.find(runs, reported["step"].to_numpy().astype(np.int64))
                score[place[place >= 0]] = reported["score"].to_numpy()[place >= 0]
                ends = np.append(last, False)[place]
                runs, told = runs[ends], told[ends]
            order = np.argsort(runs, kind="stable")
            place = np.searchsorted(runs[order], run)
            is_planned = np.append(runs[order], -1)[place] == run
            success[is_planned] = told[order][place[is_planned]]
    return {
        "success": pa.array(success.astype(bool), mask=success < 0),
        "step_score": pa.array(score, from_pandas=True),
    }


def key(runs: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Run and step combined into one number, int64 [n]."""
    return runs << 32 | steps


def plan(
    steps: Iterable[pa.RecordBatch], ends: Iterable[pa.RecordBatch], records: bool, skipped: Counter[str]
) -> RowPlan:
    """Select the steps of an engine that become rows, and count the others in `skipped`.

    `steps` are the columns NUMBERS of its steps, `ends` the columns END_NUMBERS of its ends, which must be read first;
    `records` is whether the engine is still recording.
    """
    ended = _ended_runs(ends)
    quoted: dict[int, list[int]] = {}
    numbers = _numbers(steps, skipped, quoted)
    run, step, client, aborted = numbers[:4]
    parents: list[tuple[int, ...]] = []
    # As the engine's forecasters know it: the same run, client's number, agent and prompt tokens.
    attempt = (aborted == 1) & (client != UNNUMBERED)
    attempt[:-1] &= (np.diff(numbers[[0, 2, 4, 5]]) == 0).all(axis=0)
    attempt[-1:] = False
    kept = np.zeros(len(run), bool)
    numbered = np.zeros(len(run), np.int32)
    complete = np.zeros(len(run), bool)
    for start, stop in pairwise([*np.flatnonzero(np.diff(run, prepend=-1)).tolist(), len(run)]):
        end = ended.get(int(run[start]))
        if end is None and records:
            skipped[WAITING] += 1
            continue
        failed = attempt[start:stop]
        whole = step[start:stop] == np.arange(stop - start)
        whole[~failed] &= _unbroken(client[start:stop][~failed])
        count = int(whole.sum())
        skipped[CUT if count else NO_BEGINNING] += stop - start - count if count else 1
        skipped[ATTEMPT] += int(failed.sum())
        kept[start:stop] = whole & ~failed
        numbered[start:stop] = np.cumsum(whole & ~failed) - 1
        complete[start:stop] = end == count
        of_run = numbers[:, start:stop][:, whole & ~failed]
        quotes = [quoted.get(place, []) for place in key(of_run[0], of_run[1]).tolist()]
        started, until, before = of_run[6:].tolist()
        parents += _waited_for(of_run[1].tolist(), started, until, before, quotes)
    return RowPlan(key(run, step)[kept], numbered[kept], complete[kept], pa.array(parents, pa.list_(pa.int32())))


def _waited_for(
    step: list[int], started: list[int], ended: list[int], goes_on_from: list[int], quotes: list[list[int]]
) -> list[Steps]:
    """The steps that each of n steps of a run waited for, by their places.

    Without overlap each waits for the one before. Else a step whose prompt goes on from that of an earlier one is of
    its thread, and a thread between two steps of another one is nested there. As siblings of a span (`spans/tree.py`),
    a nested thread waits for those at its place that ended before, except those followed by another one, else for the
    step before it; and so does the next step. A step that quotes answers waits only for those that it quotes and for
    what came of them.

    Args:
        step: their numbers, ascending.
        started, ended: microseconds; `ended` -1 if unknown.
        goes_on_from: the number of the step, -1 if unknown.
        quotes: the numbers of the steps.
    """
    place = {number: row for row, number in enumerate(step)}
    until = [max(begun, end - _SOON_US) if end >= 0 else NEVER_ENDED for begun, end in zip(started, ended, strict=True)]
    if all(end <= begun for end, begun in zip(accumulate(until, max), started[1:], strict=False)):
        return [(row - 1,) if row else () for row in range(len(step))]
    following: dict[int, int] = {}
    threads: list[list[int]] = []
    thread_of: dict[int, list[int]] = {}
    parents: list[Steps] = [()] * len(step)
    for row, number in enumerate(goes_on_from):
        before = place.get(number, -1)
        before = before if before < row else -1
        if before < 0 or before in following:
            thread_of[row] = []
            threads.append(thread_of[row])
            beside = before >= 0 and started[row] < until[following[before]]  # else what followed may be why it waited
            parents[row] = (before,) if beside else ()
        else:
            following[before], thread_of[row] = row, thread_of[before]
            parents[row] = (before,)
        thread_of[row].append(row)
    pauses = sorted((until[before], before, started[after]) for before, after in following.items())
    inside: dict[int, list[list[int]]] = {}
    for thread in threads:
        latest = bisect_right(pauses, (started[thread[0]], len(step)))
        near = reversed(pauses[max(0, latest - _MOST_PAUSES) : latest])
        inside.setdefault(next((before for _, before, end in near if until[thread[-1]] <= end), -1), []).append(thread)
    for before, nested in inside.items():
        siblings = Siblings(-1, (before,) if before >= 0 else ())
        for number, thread in enumerate(nested):
            first, last = thread[0], thread[-1]
            parents[first] = parents[first] or siblings.waited_for(started[first])
            siblings.ended(started[first], until[last], (last,), number)
        if before >= 0:
            parents[following[before]] = siblings.waited_for(started[following[before]])
    for thread in threads:
        first = thread[0]
        sources = {place[number] for number in quotes[first] if number in place}
        if sources and len(parents[first]) > 1:
            parents[first] = tuple(row for row in parents[first] if _comes_of(row, sources, parents)) or parents[first]
    # Of steps that begin at one time the last of a thread may come later.
    return [tuple(sorted(before for before in waited if before < row)) for row, waited in enumerate(parents)]


def _comes_of(row: int, sources: set[int], parents: Sequence[Steps]) -> bool:
    """Whether a step is one of these, or has waited for one, whatever was in between."""
    seen, waiting = {row}, [row]
    while waiting:
        if (row := waiting.pop()) in sources:
            return True
        fresh = {before for before in parents[row] if before >= min(sources)} - seen
        seen |= fresh
        waiting += fresh
    return False


def _unbroken(client: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each step of a run precedes any missing one by its client's numbers, int64 [n] in order; bool [n]."""
    order = np.argsort(client, kind="stable")
    if client[order[0]] == UNNUMBERED or not (np.diff(client[order]) > 0).all():
        return np.ones(len(client), bool)
    by_client = np.empty(len(client), bool)
    by_client[order] = client[order] == np.arange(len(client))
    return by_client


def _ended_runs(ends: Iterable[pa.RecordBatch]) -> dict[int, int]:
    """The number of steps of each ended run, from the columns END_NUMBERS of the ends."""
    steps_by_run: dict[int, int] = {}
    for batch in ends:
        recorded = batch.filter(pc.is_in(batch["how"], pa.array(layout.RECORDED_ENDS)))
        steps_by_run.update(zip(recorded["run"].to_pylist(), recorded["steps"].to_pylist(), strict=True))
    return steps_by_run


def _numbers(steps: Iterable[pa.RecordBatch], skipped: Counter[str], quoted: dict[int, list[int]]) -> NDArray[np.int64]:
    """Of all named steps, each once, sorted, int64 [9, n]: run, step, client's step (or UNNUMBERED), whether aborted,
    prompt tokens (-1 if unknown), a number for the agent, start, end and the step that it goes on from (-1 likewise).
    What steps quote is added to `quoted`, by `key`.
    """
    parts, agents = [np.empty((9, 0), np.int64)], dict[str, int]()
    for batch in steps:
        named = pc.not_equal(batch["agent"], "END")
        for name in ("workflow_type", "workflow_id", "agent"):
            named = pc.and_(named, pc.not_equal(pc.utf8_trim_whitespace(batch[name]), ""))
        skipped[NAMELESS] += named.false_count
        columns = (
            *(batch["run"], batch["step"], pc.fill_null(batch["client_step"], UNNUMBERED)),
            pc.equal(pc.fill_null(batch["finish_reason"], ""), "abort").cast(pa.int64()),
            pc.fill_null(batch["input_tokens"], -1),
            pa.array([agents.setdefault(agent, len(agents)) for agent in batch["agent"].to_pylist()], pa.int64()),
            *(pc.fill_null(batch[name].cast(pa.int64()), -1) for name in _TIMES),
        )
        quoting = batch.filter(batch["quotes"].is_valid())
        keys = key(*(quoting[name].to_numpy().astype(np.int64) for name in ("run", "step"))).tolist()
        quoted.update(zip(keys, quoting["quotes"].to_pylist(), strict=True))
        parts.append(np.stack([column.filter(named).to_numpy().astype(np.int64) for column in columns]))
    numbers = np.concatenate(parts, axis=1)
    # Sorted; a batch that was written twice counts once.
    return numbers[:, np.unique(key(*numbers[:2]), return_index=True)[1]]


class RecordedEngine(NamedTuple):
    """One engine of a recording: its folder, its instance's name, and whether it is still recording."""

    folder: Path
    name: str
    records: bool


class Served(NamedTuple):
    """What an engine served while it wrote a file."""

    model: str | None  # None if unknown
    state_layer: int | None  # of the recorded states, counted from 1; None for states after the final norm


def is_recording(path: Path) -> bool:
    """Whether a folder is a recording, or one engine of it."""
    return bool(_folders(path))


def engines(path: Path) -> list[RecordedEngine]:
    """The engines of a recording, sorted by name, or the one of an engine's folder; a TraceError if there is none."""
    name = layout.INSTANCE_FOLDER
    if folders := _folders(path):
        return [
            RecordedEngine(folder, folder.name.removeprefix(name), _records(folder / layout.LOCK)) for folder in folders
        ]
    raise TraceError(
        f"{path}: no recording ({name}*/{layout.LOCK} is missing); expected the folder of the recorder's settings: "
        "check the path"
    )


def batches(
    engine: RecordedEngine, table: str, columns: Sequence[str] | None, lost: Counter[str]
) -> Iterator[tuple[pa.RecordBatch, Served]]:
    """All whole batches of a table in write order, each with what the engine served.

    Reads all columns, or those given, and counts unreadable items in `lost` by reason. Raises TraceError if a file has
    another version, or is not part of a recording.
    """
    names = [path for path in engine.folder.iterdir() if layout.FILE_NAME.fullmatch(path.name)]
    for path in sorted(path for path in names if path.name.startswith(f"{table}-")):
        try:
            yield from _file_batches(path, table, columns, lost)
        except FileNotFoundError:
            # The recorder has closed and renamed it. If it was removed, its steps are missing.
            whole = path.with_name(path.name.replace(layout.OPEN, layout.WHOLE))
            with suppress(FileNotFoundError):
                yield from _file_batches(whole, table, columns, lost)


def _folders(path: Path) -> list[Path]:
    if path.name.startswith(layout.INSTANCE_FOLDER) and (path / layout.LOCK).is_file():
        return [path]
    return sorted(lock.parent for lock in path.glob(f"{layout.INSTANCE_FOLDER}*/{layout.LOCK}"))


def _records(lock: Path) -> bool:
    """Whether a running engine holds the lock; the lock of a copied folder is free."""
    with suppress(OSError):
        try:
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _file_batches(
    path: Path, table: str, columns: Sequence[str] | None, lost: Counter[str]
) -> Iterator[tuple[pa.RecordBatch, Served]]:
    size = path.stat().st_size
    if not size:
        return
    names = list(columns or layout.TABLES[table].names)
    schema = pa.schema([layout.TABLES[table].field(name) for name in names])
    with pa.memory_map(str(path)) as source:
        reader = served = None
        while True:
            position = source.tell()
            try:
                if reader is None or served is None:
                    served, lacks = _served(pa.ipc.open_stream(source).schema, path, table)
                    wanted = [layout.TABLES[table].get_field_index(name) for name in names if name not in lacks]
                    source.seek(0)
                    options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
                    reader = pa.ipc.open_stream(source, options=options)
                position = source.tell()
                batch = reader.read_next_batch()
                batch.validate(full=True)
            except StopIteration:
                return
            except (pa.ArrowException, OSError):
                lost[TORN] += 1
                lost[TORN_BYTES] += size - position
                return
            there = set(batch.schema.names)
            columns_of = [batch[f.name] if f.name in there else pa.nulls(len(batch), f.type) for f in schema]
            yield pa.RecordBatch.from_arrays(columns_of, schema=schema), served


def _served(schema: pa.Schema, path: Path, table: str) -> tuple[Served, tuple[str, ...]]:
    """What an engine served while it wrote a file, and the last columns that a file of an earlier version lacks."""
    facts = schema.metadata or {}
    version = facts.get(layout.VERSION_KEY, b"none").decode(errors="replace")
    if version not in (layout.VERSION, *layout.ADDED) or layout.INSTANCE_KEY not in facts:
        raise TraceError(
            f"{path}: recording version {version}, this release reads versions "
            f"{', '.join((*layout.ADDED, layout.VERSION))}: ingest it with the release that recorded it"
        )
    lacks = layout.ADDED.get(version, ()) if table == "steps" else ()
    if not schema.equals(pa.schema([column for column in layout.TABLES[table] if column.name not in lacks])):
        raise TraceError(f"{path}: not the columns of {table} in a recording: remove the file, or record again")
    served = Served(
        facts[layout.MODEL_KEY].decode() if layout.MODEL_KEY in facts else None,
        int(facts[layout.LAYER_KEY]) if layout.LAYER_KEY in facts else None,
    )
    return served, lacks
