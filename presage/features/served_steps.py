"""The steps of a trace that an engine or a gateway serves: one sequence for training, evaluation and serving.

They are the LLM steps, numbered from 0. A tool call is no request: a server sees it only as the time until the next
request, and by its name in the answer that calls it. So tool rows become `tools_called` of the LLM step that called
them, and an LLM step that waited for tools waited for the LLM steps that called these. A predictor that learnt tool
calls as steps would forecast steps that no server ever sees.

A tool was called by the latest LLM step among those it waited for, directly or through other tools. Where
`parent_steps` are not recorded, that is the LLM step before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.schema import workflow_codes
from presage.errors import InputError, TraceError

TOOLS_CALLED: Final = "tools_called"


def served_steps(table: pa.Table) -> pa.Table:
    """The LLM steps of a trace in canonical order, numbered anew; the same table if it has no tool call.

    A `tools_called` that a step has is kept. The other steps get theirs from tool rows if their workflow type has any,
    else it stays unknown. Raises TraceError if there is no LLM step.
    """
    llm = np.asarray(pc.equal(table["kind"], "llm").to_numpy(), bool)
    if llm.all():
        return table
    if not llm.any():
        raise TraceError('the traces have no LLM step (kind "llm"): a predictor forecasts the requests to a model')
    workflow = workflow_codes(table)
    offsets = np.r_[np.flatnonzero(np.diff(workflow, prepend=-1)), len(table)].astype(np.int64)
    callers, parents = _callers(table, llm, offsets)
    step = np.cumsum(llm) - 1
    first = np.r_[0, np.cumsum(llm)][offsets[:-1]]
    made = {
        "step": pa.array((step - first[np.repeat(np.arange(len(first)), np.diff(offsets))])[llm], pa.int32()),
        "parent_steps": parents,
        TOOLS_CALLED: pc.coalesce(table[TOOLS_CALLED].filter(pa.array(llm)), _called(table, llm, callers)),
    }
    steps = table.filter(pa.array(llm))
    for name, column in made.items():
        if column is not None:
            steps = steps.set_column(steps.schema.get_field_index(name), steps.schema.field(name), column)
    return steps


def running_steps(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """As `served_steps`, of one workflow so far, its steps in order and keyed by column names.

    Raises InputError if there is no LLM step.
    """
    llm = [step.get("kind", "llm") == "llm" for step in steps]
    if all(llm):
        return list(steps)
    if not any(llm):
        raise InputError('no LLM step (kind "llm") so far; a forecast is made at a request to a model')
    callers, _ = _of_workflow(llm, [step.get("parent_steps") for step in steps])
    called: dict[int | None, list[str]] = {}
    for step, caller, served in zip(steps, callers, llm, strict=True):
        if not served:
            called.setdefault(caller, []).append(step["agent"])
    return [
        {**step, TOOLS_CALLED: called.get(place, []) if (own := step.get(TOOLS_CALLED)) is None else own}
        for place, step in enumerate(steps)
        if llm[place]
    ]


def _callers(
    table: pa.Table, llm: NDArray[np.bool_], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], pa.Array | None]:
    """The row of the LLM step that called each tool, int64 [rows], -1 for none; and `parent_steps` of the LLM steps,
    None where they are not recorded.
    """
    rows = np.arange(len(table))
    before = np.maximum.accumulate(np.where(llm, rows, -1))
    callers = np.where(before >= np.repeat(offsets[:-1], np.diff(offsets)), before, -1)
    if table["parent_steps"].null_count == len(table):
        return callers, None
    given = table["parent_steps"].to_pylist()
    kinds = llm.tolist()
    parents: list[list[int] | None] = []
    for begin, end in pairwise(offsets.tolist()):
        own = given[begin:end]
        if not all(kinds[begin:end]):
            own_callers, own = _of_workflow(kinds[begin:end], own)
            callers[begin:end] = [-1 if caller is None else begin + caller for caller in own_callers]
        parents += [waited_for for waited_for, served in zip(own, kinds[begin:end], strict=True) if served]
    return callers, pa.array(parents, table.schema.field("parent_steps").type)


def _of_workflow(
    llm: Sequence[bool], parents: Sequence[Sequence[int] | None]
) -> tuple[list[int | None], list[list[int] | None]]:
    """For each step of a workflow the LLM step that called it, by its place, and the LLM steps it waited for, by their
    numbers among LLM steps; both None where unknown.
    """
    waited: list[set[int]] = []  # the LLM steps that each step waited for, by their places
    callers: list[int | None] = []
    numbers: list[list[int] | None] = []
    number = np.r_[0, np.cumsum(llm)].tolist()
    latest: int | None = None
    for place, given in enumerate(parents):
        if given is None:
            llm_steps = set() if latest is None else {latest}
        else:
            llm_steps = set().union(*({earlier} if llm[earlier] else waited[earlier] for earlier in given))
        waited.append(llm_steps)
        callers.append(max(llm_steps, default=None))
        numbers.append(None if given is None else sorted(number[step] for step in llm_steps))
        if llm[place]:
            latest = place
    return callers, numbers


def _called(table: pa.Table, llm: NDArray[np.bool_], callers: NDArray[np.int64]) -> pa.Array:
    """The tools that each LLM step called, in order; null in workflow types without a tool row."""
    tools = np.flatnonzero(~llm & (callers >= 0))
    tools = tools[np.argsort(callers[tools], kind="stable")]
    counts = np.bincount(callers[tools], minlength=len(table))[llm]
    offsets = pa.array(np.r_[0, np.cumsum(counts)], pa.int32())
    names = table["agent"].take(pa.array(tools)).combine_chunks()
    called = pa.ListArray.from_arrays(offsets, names)
    using = pc.unique(table["workflow_type"].filter(pa.array(~llm)))
    uses_tools = pc.is_in(table["workflow_type"].filter(pa.array(llm)), using).combine_chunks()
    return pc.if_else(uses_tools, called, pa.scalar(None, called.type))
