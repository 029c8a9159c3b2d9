"""Workflows as sequences of agents and parallel blocks: what a profile learns from.

Steps between one step and the next that all later steps wait for run in parallel where `parent_steps` says so: they are
one block, a multiset, because their order carries no meaning. Without `parent_steps` a step waits for the one before
it. A step for which nobody waits counts as joined by the next step that is not its sibling.

A symbol is an agent's name or, for a block, the sorted tuple of names that can be in it. Blocks of one workflow type
that share an agent have the same symbol, so that a fan-out of one, two or all of its agents is the same event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.schema import workflow_codes
from presage.features.input_profiles import masked
from presage.features.return_times import ReturnEncoder, return_rows
from presage.features.served_steps import served_steps
from presage.features.vocabulary import token_counts

Symbol = str | tuple[str, ...]
"""An agent, or the agents of a parallel block."""

Parents = tuple[int, ...] | None
"""The steps that a step waited for; None if not recorded: the one before it."""

NUMBERS: Final = ("output_tokens", "return_s", "input_tokens")
"""The numbers of a step that a profile describes by percentiles; the return time in seconds."""


@dataclass(frozen=True)
class Item:
    """A step, or a block of `size` parallel steps."""

    symbol: Symbol
    size: int = 1


@dataclass(frozen=True)
class WorkflowSteps:
    """The steps of one workflow: agents and parents, one a step; `rows` are its rows in the trace."""

    agents: Sequence[str]
    parents: Sequence[Parents]
    complete: bool
    rows: slice

    @cached_property
    def blocks(self) -> list[list[int]]:
        """The steps in order, those that run in parallel together."""
        return _blocks(self)


@dataclass(frozen=True, eq=False)
class TypeSequences:
    """The workflows of one type, the earliest first where times are recorded.

    Attributes:
        numbers: float64 [n, 3], the NUMBERS of the steps of the whole trace, NaN where unknown.
        timed: whether every workflow has a start.
        overlapping: workflows without `parent_steps` in which a step starts before the one before it ended.
    """

    workflows: Sequence[WorkflowSteps]
    numbers: NDArray[np.float64]
    timed: bool
    overlapping: int


def sequences_of(table: pa.Table) -> dict[str, TypeSequences]:
    """The workflows of a trace in canonical order, by workflow type."""
    table = served_steps(table)
    first = np.flatnonzero(np.diff(workflow_codes(table), prepend=-1))
    ends = np.r_[first[1:], len(table)]
    heads = pa.array(first)
    types = table["workflow_type"].take(heads).to_pylist()
    complete = table["complete"].take(heads).to_pylist()
    agents, parents = table["agent"].to_pylist(), _parents(table)
    started, ended = (pc.cast(table[name], pa.int64()).to_numpy(zero_copy_only=False) for name in _TIMES)
    began = np.asarray(started, np.float64)[first]
    early = np.r_[False, np.asarray(started, np.float64)[1:] < np.asarray(ended, np.float64)[:-1]]
    early[first] = False
    numbers = _numbers(table)
    dated_workflows: dict[str, list[tuple[float, WorkflowSteps]]] = {}
    overlapping = dict.fromkeys(types, 0)
    for number, (kind, begin, end) in enumerate(zip(types, first.tolist(), ends.tolist(), strict=True)):
        steps = WorkflowSteps(agents[begin:end], parents[begin:end], complete[number], slice(begin, end))
        dated_workflows.setdefault(kind, []).append((began[number], steps))
        overlapping[kind] += bool(early[begin:end].any()) and not any(
            waited_for is not None for waited_for in steps.parents
        )
    result = {}
    for kind, dated in sorted(dated_workflows.items()):
        timed = not any(np.isnan(begun) for begun, _ in dated) and len({begun for begun, _ in dated}) > 1
        ordered = sorted(dated, key=lambda dated_steps: dated_steps[0]) if timed else dated
        result[kind] = TypeSequences([steps for _, steps in ordered], numbers, timed, overlapping[kind])
    return result


_TIMES: Final = ("started_at", "ended_at")


def _parents(table: pa.Table) -> list[Parents]:
    if table["parent_steps"].null_count == len(table):
        return [None] * len(table)
    return [None if earlier is None else tuple(earlier) for earlier in table["parent_steps"].to_pylist()]


def _numbers(table: pa.Table) -> NDArray[np.float64]:
    """The NUMBERS of every step, float64 [n, 3]."""
    numbers = np.full((len(table), len(NUMBERS)), np.nan)
    for column, name in enumerate(NUMBERS):
        if name in table.column_names:
            numbers[:, column] = token_counts(table[name])
    if not any(table[name].null_count == len(table) for name in _TIMES):
        plain = masked(table, frozenset())
        label = return_rows(plain, ReturnEncoder.fit(plain)).label.astype(np.float64)
        numbers[:, NUMBERS.index("return_s")] = np.where(np.isfinite(label), label / 1e3, np.nan)
    return numbers


def _blocks(steps: WorkflowSteps) -> list[list[int]]:
    """A step stands alone if every earlier step is its ancestor and every later one its descendant: the steps without a
    successor so far are its parents, and every later step without a parent after it has it as a parent.
    """
    count = len(steps.agents)
    if all(waited_for is None or waited_for == (index - 1,) for index, waited_for in enumerate(steps.parents) if index):
        return [[index] for index in range(count)]
    parents = _joined(steps.parents)
    alone = np.ones(count, bool)
    sinks: set[int] = set()
    for index, waited_for in enumerate(parents):
        alone[index] = sinks <= waited_for
        sinks -= waited_for
        sinks.add(index)
    # A step stands alone if all steps after it reach back to it: each has a parent at or after it, and none skips it.
    reach = [max(waited_for, default=-1) for waited_for in parents]
    least = count
    for index in range(count - 1, -1, -1):
        alone[index] &= least >= index
        least = min(least, reach[index]) if index else least
    result: list[list[int]] = []
    together = False
    for index in range(count):
        if not alone[index] and together:
            result[-1].append(index)
        else:
            result.append([index])
        together = not alone[index]
    return result


def _joined(parents: Sequence[Parents]) -> list[set[int]]:
    """Parents of each step; a step without a successor is also a parent of the next step that is not its sibling."""
    joined = [
        set((index - 1,) if index and recorded is None else recorded or ()) for index, recorded in enumerate(parents)
    ]
    waited: set[int] = set().union(*joined) if joined else set()
    given = [frozenset(waited_for) for waited_for in joined]
    dangling: dict[frozenset[int], list[int]] = {}
    for index, own in enumerate(given):
        for siblings in [parents for parents in dangling if own and parents != own]:
            joined[index].update(dangling.pop(siblings))
        if index not in waited:
            dangling.setdefault(own, []).append(index)
    return joined


class Alphabet:
    """The symbols of one workflow type: agents, and blocks of those that run in parallel."""

    def __init__(self, members: Iterable[Sequence[str]], known: Iterable[str] | None = None) -> None:
        """From the agents of the blocks, sets that share an agent joined; and the `known` agents, None for any."""
        joined: list[set[str]] = []
        for block in {tuple(sorted(set(names))) for names in members}:
            touching = [other for other in joined if not other.isdisjoint(block)]
            joined = [other for other in joined if other.isdisjoint(block)] + [set(block).union(*touching)]
        self.blocks: list[tuple[str, ...]] = sorted(tuple(sorted(block)) for block in joined)
        self._block = {agent: block for block in self.blocks for agent in block}
        self.known = None if known is None else frozenset(known)

    @classmethod
    def of(cls, workflows: Iterable[WorkflowSteps], known: Iterable[str] | None) -> Alphabet:
        """The alphabet of training workflows."""
        made = cls((), known)
        wide = [
            [made.name(w.agents[index]) for index in block] for w in workflows for block in w.blocks if len(block) > 1
        ]
        return cls(wide, known)

    def name(self, agent: str) -> str:
        """The agent, or OTHER for an unknown one."""
        return agent if self.known is None or agent in self.known else OTHER

    def block(self, agent: str) -> tuple[str, ...] | None:
        """The block that an agent can be in."""
        return self._block.get(self.name(agent))

    def items(self, steps: WorkflowSteps) -> list[Item]:
        """The workflow as steps and blocks; a block with an agent that no known block has names all its own agents."""
        return list(self._items(steps))

    def _items(self, steps: WorkflowSteps) -> Iterator[Item]:
        for block in steps.blocks:
            names = [self.name(steps.agents[index]) for index in block]
            if len(block) == 1:
                yield Item(names[0])
                continue
            own_block = self._block.get(names[0], ())
            yield Item(own_block if set(names) <= set(own_block) else tuple(sorted(set(names))), len(block))


OTHER: Final = "<other>"
"""The symbol of all agents that are not known by name."""
