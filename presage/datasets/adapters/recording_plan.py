"""Which recorded steps become rows of a trace, under which numbers: decided from numbers alone, an engine at a time.

A run is a workflow as one engine saw it. What is decided of it must never change, for a store takes a workflow once:

- A run waits while its engine records and has not said that it ended.
- Steps count in the order they began. A step that is not there (dropped, in a file that was lost, running when the
  engine was killed, of an agent without a name) cuts the run: what came before it stays, and is right-censored.
- Where the client numbered every step, and none twice, a number that is missing is a step that this engine never saw:
  it cuts the run likewise. A run that does not begin with the first step is left out.
- A run is complete if it ended, by word or by silence, and nothing of it is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.recording import SAID, SILENT

NUMBERS: Final = ("run", "step", "client_step", "workflow_type", "workflow_id", "agent")
END_NUMBERS: Final = ("run", "steps", "how")

WAITING: Final = "workflow still running: left for a later ingestion"
NO_BEGINNING: Final = "workflow of which the first step was not recorded"
CUT: Final = "step of a workflow after one that was not recorded"
NAMELESS: Final = "step without a workflow type or an agent, or of an agent called END"
UNNUMBERED: Final = -1


@dataclass(frozen=True)
class Plan:
    """The steps of one engine that become rows.

    Attributes:
        keys: int64 [n], rising, as `key` makes them.
        steps: int32 [n], number of the step in the trace.
        complete: bool [n], of its run.
    """

    keys: NDArray[np.int64]
    steps: NDArray[np.int32]
    complete: NDArray[np.bool_]

    def find(self, runs: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """The place of each of n recorded steps in the plan, int64 [n]; -1 for those that become no row."""
        wanted = key(runs, steps)
        places = np.searchsorted(self.keys, wanted)
        found = np.zeros(len(wanted), bool)
        inside = places < len(self.keys)
        found[inside] = self.keys[places[inside]] == wanted[inside]
        return np.where(found, places, -1)


def key(runs: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for run and step, int64 [n]."""
    return runs << 32 | steps


def plan(steps: Iterable[pa.RecordBatch], ends: Iterable[pa.RecordBatch], records: bool, skipped: Counter[str]) -> Plan:
    """What becomes of the steps of one engine.

    Args:
        steps: columns NUMBERS of its steps.
        ends: columns END_NUMBERS of its ends, which were read before the steps.
        records: whether it still records.
        skipped: counts what is left out.
    """
    ended = _ended(ends)
    run, step, client = _numbers(steps, skipped)
    if not len(run):
        return Plan(run, step.astype(np.int32), np.zeros(0, bool))
    kept = np.zeros(len(run), bool)
    numbered = np.zeros(len(run), np.int32)
    complete = np.zeros(len(run), bool)
    starts = np.flatnonzero(np.r_[True, run[1:] != run[:-1]])
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(run)], strict=True):
        end = ended.get(int(run[start]))
        if end is None and records:
            skipped[WAITING] += 1
            continue
        whole = _unbroken(step[start:stop], client[start:stop])
        count = int(whole.sum())
        skipped[CUT if count else NO_BEGINNING] += stop - start - count if count else 1
        kept[start:stop] = whole
        numbered[start:stop] = np.cumsum(whole) - 1
        complete[start:stop] = end == count
    return Plan(key(run, step)[kept], numbered[kept], complete[kept])


def _unbroken(step: NDArray[np.int64], client: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which steps of a run, int64 [n] in their order, come before any that is missing; bool [n]."""
    places = np.arange(len(step))
    whole: NDArray[np.bool_] = step == places
    order = np.argsort(client, kind="stable")
    if client[order[0]] != UNNUMBERED and (np.diff(client[order]) > 0).all():
        by_client = np.empty(len(step), bool)
        by_client[order] = client[order] == places
        whole &= by_client
    return whole


def _ended(ends: Iterable[pa.RecordBatch]) -> dict[int, int]:
    """By run, after how many steps it ended."""
    found: dict[int, int] = {}
    for batch in ends:
        known = batch.filter(pc.is_in(batch["how"], pa.array([SAID, SILENT])))
        found.update(zip(known["run"].to_pylist(), known["steps"].to_pylist(), strict=True))
    return found


def _numbers(
    steps: Iterable[pa.RecordBatch], skipped: Counter[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Run, step and client's step (UNNUMBERED where there is none) of all steps with names, by run and step, each once;
    int64 [n] each."""
    columns: list[list[NDArray[np.int64]]] = [[np.empty(0, np.int64)] for _ in range(3)]
    for batch in steps:
        named = _named(batch)
        skipped[NAMELESS] += int(len(named) - named.sum())
        client = pc.fill_null(batch["client_step"], UNNUMBERED)
        for column, values in zip(columns, (batch["run"], batch["step"], client), strict=True):
            column.append(values.to_numpy(zero_copy_only=False)[named].astype(np.int64))
    run, step, client_step = (np.concatenate(column) for column in columns)
    _, first = np.unique(key(run, step), return_index=True)  # sorted; a batch that was written twice counts once
    return run[first], step[first], client_step[first]


def _named(batch: pa.RecordBatch) -> NDArray[np.bool_]:
    good = np.ones(batch.num_rows, bool)
    for name in ("workflow_type", "workflow_id", "agent"):
        good &= pc.greater(pc.utf8_length(pc.utf8_trim_whitespace(batch[name])), 0).to_numpy(zero_copy_only=False)
    good &= pc.not_equal(batch["agent"], "END").to_numpy(zero_copy_only=False)
    return good
