"""The vocabulary of a predictor: workflow types, agents, and outcomes.

Agents are identified by name alone: workflow types that call the same agent share what is learnt about it, and the
workflow type is an input of its own. Names are folded as those of the training trace were (`names`). All names outside
the vocabulary then map to one value, `unknown`.

Where an application makes up agents for each task, as CaptainAgent does, names tell little: most never come again. In
such a workflow type an agent that fewer than `LEAST_TASKS` tasks call is none of the vocabulary of a next-agent
predictor. A workflow's agents outside the vocabulary are then numbered in the order of their first calls,
`<new agent 1>`, `<new agent 2>`, …, and these are agents of the vocabulary like any other: what is learnt of the first
new agent of a workflow holds for whoever it is in another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.schema import workflow_codes
from presage.datasets.schema.names import NO_NAMES, NameMapping
from presage.datasets.tasks import task_of
from presage.errors import TraceError
from presage.features.served_steps import TOOLS_CALLED

TOOLS_KEPT: Final = 32
LEAST_TASKS: Final = 3
"""Tasks that call an agent known by its name, as tasks that have a term of texts."""
ENOUGH_TASKS: Final = 20
"""In a workflow type of fewer tasks all agents are known by their names: one of them may come in every tenth task."""
LEAST_SHARE: Final = 0.05
"""Share of a type's steps that agents of few tasks must have to be numbered; with less, there is little to learn."""
MOST_NEW: Final = 6
"""New agents of one workflow that are numbered; further ones are unknown."""
_NEW: Final = "<new agent {}>"


@dataclass(frozen=True)
class Vocabulary:
    """T workflow types, V agents, and the Z tools that answers call most often, sorted until `extended`.

    `names` folds the names of steps before they are looked up; those of the vocabulary are folded already. In workflows
    of the types `numbered` new agents have numbers.
    """

    workflow_types: tuple[str, ...]
    agents: tuple[str, ...]
    tools: tuple[str, ...] = ()
    names: NameMapping = NO_NAMES
    numbered: tuple[str, ...] = ()

    @classmethod
    def from_table(cls, table: pa.Table, *, numbered: bool = False) -> Vocabulary:
        """The vocabulary of a trace; raises TraceError if it has fewer than two agents.

        With `numbered`, agents of few tasks are numbered in workflow types that make them up.
        """
        agents = sorted(pc.unique(table["agent"]).to_pylist())
        if len(agents) < 2:
            raise TraceError(
                f"the traces name {len(agents)} agent: a next-agent predictor needs at least 2; "
                "check that the agent column distinguishes the roles of an application, or, if one agent works alone, "
                "train return-time, remaining-length and context-growth, which need no other"
            )
        made_up, agents = _with_numbers(table, agents) if numbered else ((), agents)
        tools = most_frequent(pc.list_flatten(table[TOOLS_CALLED]), TOOLS_KEPT)
        types = sorted(pc.unique(table["workflow_type"]).to_pylist())
        return cls(tuple(types), tuple(agents), tuple(sorted(tools)), NameMapping.of(table), made_up)

    def extended(self, table: pa.Table, beside: Mapping[str, str]) -> Vocabulary:
        """With the new names of a trace: agents right after those `beside` which they stand, all others at the end."""
        more = Vocabulary.from_table(table, numbered=len(self.numbered) > 0)
        agents = list(self.agents)
        for name in reversed(more.agents):  # so that those beside one agent end up in order
            if name not in self._agent_index and name in beside:
                agents.insert(agents.index(beside[name]) + 1, name)
        of_own = dict.fromkeys((*agents, *more.agents))
        types, tools = (
            dict.fromkeys((*getattr(self, field), *getattr(more, field))) for field in ("workflow_types", "tools")
        )
        return replace(
            self,
            workflow_types=tuple(types),
            agents=tuple(of_own),
            tools=tuple(tools)[: max(TOOLS_KEPT, len(self.tools))],
            numbered=tuple(dict.fromkeys((*self.numbered, *more.numbered))),
        )

    @property
    def unknown(self) -> int:
        """Index of the unknown agent among the inputs."""
        return len(self.agents)

    @property
    def end(self) -> int:
        """Index of END among the outcomes."""
        return len(self.agents)

    @property
    def unseen(self) -> int:
        """Label of a next agent that is not in the vocabulary."""
        return len(self.agents) + 1

    @property
    def outcomes(self) -> int:
        """Number of possible outcomes: V agents and END."""
        return len(self.agents) + 1

    @cached_property
    def _agent_index(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.agents)}

    @cached_property
    def _type_index(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.workflow_types)}

    @cached_property
    def new_agents(self) -> NDArray[np.int32]:
        """Indices of the first, second, … new agent of a workflow, int32 [S]; S is 0 where all agents have names."""
        names = (_NEW.format(number + 1) for number in range(len(self.agents)))
        numbered = takewhile(self._agent_index.__contains__, names)
        return np.array([self._agent_index[name] for name in numbered], np.int32)

    def numbers(self, workflow_type: str) -> bool:
        """Whether new agents have numbers in workflows of this type; of an unknown one, whether they have in all."""
        index = self.workflow_type(workflow_type)
        return bool(self.numbers_types[index])

    @cached_property
    def numbers_types(self) -> NDArray[np.bool_]:
        """The same by the index of each type, bool [T+1]."""
        numbers = [name in self.numbered for name in self.workflow_types]
        return np.array([*numbers, all(numbers)], bool)

    @cached_property
    def _new_in_order(self) -> tuple[int, ...]:
        return tuple(self.new_agents.tolist())

    def call(self, name: str, new: tuple[str, ...] | None) -> tuple[int, tuple[str, ...] | None]:
        """Index of the agent that a workflow calls, and its new agents with this one.

        `new` are those that it called before, in this order (`called_by` undoes it); None where they have no numbers.
        """
        index = self.agent(name)
        if index != self.unknown or not name or new is None:
            return index, new
        folded, earlier = self.names.agent(name), [self.names.agent(other) for other in new]
        if folded in earlier:
            return self._new_in_order[earlier.index(folded)], new
        if len(new) == len(self._new_in_order):
            return index, new
        return self._new_in_order[len(new)], (*new, name)

    def called_by(self, new: tuple[str, ...] | None) -> tuple[str, ...]:
        """The agents as a workflow calls them that has called these new ones, in this order."""
        if not new:
            return self.agents
        agents = list(self.agents)
        for place, name in zip(self._new_in_order, new, strict=False):
            agents[place] = name
        return tuple(agents)

    def agent(self, name: str) -> int:
        """Index of an agent, or `unknown`."""
        index = self._agent_index.get(name)
        return self._agent_index.get(self.names.agent(name), self.unknown) if index is None else index

    def workflow_type(self, name: str) -> int:
        """Index of a workflow type, or T for one that is unknown."""
        return self._type_index.get(self.names.workflow_type(name), len(self.workflow_types))

    def knows_agent(self, name: str) -> bool:
        """Whether the training trace has this agent."""
        return self.agent(name) != self.unknown

    def knows_type(self, name: str) -> bool:
        """Whether the training trace has this workflow type."""
        return self.workflow_type(name) < len(self.workflow_types)

    def encode_agents(self, column: pa.ChunkedArray) -> NDArray[np.int32]:
        """Agent names to indices, int32 [rows]."""
        return encode(self.names.column("agents", column), self.agents)

    def encode_calls(
        self, column: pa.ChunkedArray, workflow_type: NDArray[np.int32], workflow: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        """As `call`, of the steps of workflows in their order, int32 [rows]; types and workflows are [rows] too, and
        workflows do not fall."""
        indices = self.encode_agents(column)
        new = np.flatnonzero((indices == self.unknown) & self.numbers_types[workflow_type])
        if not len(new):
            return indices
        names = codes(self.names.column("agents", column).fill_null(""))[new]
        indices = indices.copy()
        indices[new] = self.number(names, workflow[new])
        return indices

    def number(self, names: NDArray[np.int32], workflow: NDArray[np.int64]) -> NDArray[np.int32]:
        """The indices of new agents, int32 [m], from any numbers of their names, [m], and their workflows, [m], which
        do not fall; `unknown` for those beyond the last number."""
        _, first, pair = np.unique(np.stack([workflow, names]), axis=1, return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")  # of (workflow, name), by first call
        by_first_call = workflow[first[order]]
        number = np.empty(len(order), np.int64)
        number[order] = np.arange(len(by_first_call)) - np.searchsorted(by_first_call, by_first_call)
        indices = np.append(self.new_agents, np.int32(self.unknown))
        numbered: NDArray[np.int32] = indices[np.minimum(number, len(self.new_agents))[pair.reshape(-1)]]
        return numbered

    def encode_types(self, column: pa.ChunkedArray) -> NDArray[np.int32]:
        """Workflow types to indices, int32 [rows]."""
        return encode(self.names.column("workflow_types", column), self.workflow_types)

    def to_dict(self) -> dict[str, Any]:
        """JSON values of the artefact."""
        return {
            "workflow_types": list(self.workflow_types),
            "agents": list(self.agents),
            "tools": list(self.tools),
            **({"names": self.names.to_dict()} if self.names else {}),  # without, digests stay as they were
            **({"numbered": list(self.numbered)} if self.numbered else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Vocabulary:
        """Inverse of `to_dict`."""
        names = NameMapping.from_dict(data["names"]) if "names" in data else NO_NAMES
        named = tuple(data["workflow_types"]), tuple(data["agents"]), tuple(data["tools"])
        return cls(*named, names, tuple(data.get("numbered", ())))


def _with_numbers(table: pa.Table, agents: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """The workflow types that make up agents; and the agents that have names, sorted, with as many numbers as a
    workflow needs."""
    agent, task, kind = encode(table["agent"], agents), codes(task_of(table)), codes(table["workflow_type"])
    few = np.bincount(_distinct(agent, task)[0], minlength=len(agents)) < LEAST_TASKS
    tasks, steps = np.bincount(_distinct(kind, task)[0]), np.bincount(kind)
    makes_up = (tasks >= ENOUGH_TASKS) & (np.bincount(kind[few[agent]], minlength=len(steps)) >= LEAST_SHARE * steps)
    elsewhere = np.isin(np.arange(len(agents)), agent[~makes_up[kind]])
    numbered = few & ~elsewhere
    if not numbered.any() or numbered.sum() > len(agents) - 2:
        return (), agents
    rows = numbered[agent]
    together = _distinct(workflow_codes(table)[rows], agent[rows])
    most = min(MOST_NEW, int(np.unique(together[0], return_counts=True)[1].max()))
    named = [name for name, new in zip(agents, numbered, strict=True) if not new]
    types = pc.unique(table["workflow_type"].combine_chunks()).to_pylist()
    made_up = sorted(name for name, makes in zip(types, makes_up, strict=True) if makes)
    return tuple(made_up), named + [_NEW.format(number + 1) for number in range(most)]


def _distinct(first: NDArray[np.integer], second: NDArray[np.integer]) -> NDArray[np.integer]:
    """The distinct pairs, [2, m]."""
    return np.unique(np.stack([first, second]), axis=1)


def encode(column: pa.ChunkedArray, names: Sequence[str]) -> NDArray[np.int32]:
    """Index of each value among `names`, int32 [rows]; len(names) for an unknown one and for null."""
    places = pc.index_in(column, value_set=pa.array(names, pa.string()))
    return np.asarray(pc.fill_null(places, len(names)).to_numpy(), np.int32)


def most_frequent(column: pa.ChunkedArray, most: int) -> list[str]:
    """The most frequent names of a column, the most frequent first."""
    counts = pc.value_counts(pc.drop_null(column)).to_pylist()
    return [c["values"] for c in sorted(counts, key=lambda c: (-c["counts"], c["values"]))[:most]]


def tools_called(column: pa.ChunkedArray, tools: tuple[str, ...]) -> NDArray[np.float32]:
    """The number of tools that each step's output calls, and whether each of `tools` is among them.

    float32 [rows, 1 + Z], NaN where they are unknown, and without `tools`.
    """
    tools_of_steps = np.full((len(column), 1 + len(tools)), np.nan, np.float32)
    if not tools:
        return tools_of_steps
    called = column.combine_chunks()
    counts = np.asarray(pc.cast(pc.list_value_length(called), pa.float32()).to_numpy(zero_copy_only=False))
    tools_of_steps[:, 0] = counts
    tools_of_steps[~np.isnan(counts), 1:] = 0.0
    named = encode(pc.list_flatten(called), tools)
    recognised = named < len(tools)
    tools_of_steps[pc.list_parent_indices(called).to_numpy()[recognised], 1 + named[recognised]] = 1.0
    return tools_of_steps


def tools_of(called: Sequence[str] | None, tools: tuple[str, ...]) -> NDArray[np.float32]:
    """As `tools_called`, of one step; float32 [1 + Z], or empty where they are unknown."""
    if called is None or not tools:
        return _UNKNOWN
    return np.array([len(called), *(name in called for name in tools)], np.float32)


_UNKNOWN: Final = np.empty(0, np.float32)


def codes(column: pa.ChunkedArray) -> NDArray[np.int32]:
    """A number for each value, equal for equal values, int32 [rows]."""
    return np.asarray(pc.dictionary_encode(column.combine_chunks()).indices.to_numpy(zero_copy_only=False), np.int32)


def token_counts(column: pa.ChunkedArray) -> NDArray[np.float32]:
    """A column of integers as float32 [rows], rounded above 2^24; NaN for null."""
    return np.asarray(pc.cast(column, pa.float32(), safe=False).to_numpy(), np.float32)


_RENAMED: Final = 0.3
"""Share of the agents, and of the workflow types, whose names become unknown."""


def unknown_names(
    agent: NDArray[np.int32],
    workflow_type: NDArray[np.int32],
    offsets: NDArray[np.int64],
    vocabulary: Vocabulary,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Agents int32 [n] and types int32 [W] of W workflows, of which some are unknown now.

    Of each workflow at least one agent that it calls is unknown, and of about one in three the workflow type. Workflow
    w has the agents at offsets[w]:offsets[w+1], int64 [W+1].
    """
    workflows, sizes = len(workflow_type), np.diff(offsets)
    renamed = rng.random((workflows, len(vocabulary.agents) + 1)) < _RENAMED
    drawn = offsets[:-1] + (rng.random(workflows) * sizes).astype(np.int64)
    renamed[np.arange(workflows), agent[drawn]] = True
    types = np.where(rng.random(workflows) < _RENAMED, len(vocabulary.workflow_types), workflow_type)
    unknown = renamed[np.repeat(np.arange(workflows), sizes), agent]
    return np.where(unknown, vocabulary.unknown, agent).astype(np.int32), types.astype(np.int32)
