"""The vocabulary of a predictor: workflow types, agents, and outcomes.

Agents are identified by name alone: workflow types that call the same agent share what is learnt about it, and the
workflow type is an input of its own. Names are folded as those of the training trace were (`names`). All names outside
the vocabulary then map to one value, `unknown`.

Numbering of V agents: inputs 0..V-1 are agents and V is the unknown agent; outcomes 0..V-1 are agents, V is END (the
workflow finishes) and V+1 an agent unknown to training (a label, never a forecast).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.schema.names import NO_NAMES, NameMapping
from presage.errors import TraceError
from presage.features.served_steps import TOOLS_CALLED

TOOLS_KEPT: Final = 32


@dataclass(frozen=True)
class Vocabulary:
    """T workflow types, V agents, and the Z tools that answers call most often, sorted until `extended`.

    `names` folds the names of steps before they are looked up; those of the vocabulary are folded already.
    """

    workflow_types: tuple[str, ...]
    agents: tuple[str, ...]
    tools: tuple[str, ...] = ()
    names: NameMapping = NO_NAMES

    @classmethod
    def from_table(cls, table: pa.Table) -> Vocabulary:
        """The vocabulary of a trace; raises TraceError if it has fewer than two agents."""
        agents = sorted(pc.unique(table["agent"]).to_pylist())
        if len(agents) < 2:
            raise TraceError(
                f"the traces name {len(agents)} agent: a next-agent predictor needs at least 2; "
                "check that the agent column distinguishes the roles of an application, or, if one agent works alone, "
                "train return-time, remaining-length and context-growth, which need no other"
            )
        tools = most_frequent(pc.list_flatten(table[TOOLS_CALLED]), TOOLS_KEPT)
        types = sorted(pc.unique(table["workflow_type"]).to_pylist())
        return cls(tuple(types), tuple(agents), tuple(sorted(tools)), NameMapping.of(table))

    def extended(self, table: pa.Table, beside: Mapping[str, str]) -> Vocabulary:
        """With the new names of a trace: agents right after those `beside` which they stand, all others at the end."""
        more = Vocabulary.from_table(table)
        agents = list(self.agents)
        for name in reversed(more.agents):  # so that those beside one agent end up in order
            if name not in self._agent_index and name in beside:
                agents.insert(agents.index(beside[name]) + 1, name)
        of_own = dict.fromkeys((*agents, *more.agents))
        types, tools = (dict.fromkeys((*getattr(self, of), *getattr(more, of))) for of in ("workflow_types", "tools"))
        return replace(
            self,
            workflow_types=tuple(types),
            agents=tuple(of_own),
            tools=tuple(tools)[: max(TOOLS_KEPT, len(self.tools))],
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
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Vocabulary:
        """Inverse of `to_dict`."""
        names = NameMapping.from_dict(data["names"]) if "names" in data else NO_NAMES
        return cls(tuple(data["workflow_types"]), tuple(data["agents"]), tuple(data["tools"]), names)


def encode(column: pa.ChunkedArray, names: Sequence[str]) -> NDArray[np.int32]:
    """Index of each value among `names`, int32 [rows]; len(names) for an unknown one and for null."""
    found = pc.index_in(column, value_set=pa.array(names, pa.string()))
    return np.asarray(pc.fill_null(found, len(names)).to_numpy(), np.int32)


def most_frequent(column: pa.ChunkedArray, most: int) -> list[str]:
    """The most frequent names of a column, the most frequent first."""
    counts = pc.value_counts(pc.drop_null(column)).to_pylist()
    return [c["values"] for c in sorted(counts, key=lambda c: (-c["counts"], c["values"]))[:most]]


def tools_called(column: pa.ChunkedArray, tools: tuple[str, ...]) -> NDArray[np.float32]:
    """The number of tools that each step's output calls, and whether each of `tools` is among them.

    float32 [rows, 1 + Z], NaN where they are unknown, and without `tools`.
    """
    found = np.full((len(column), 1 + len(tools)), np.nan, np.float32)
    if not tools:
        return found
    called = column.combine_chunks()
    counts = np.asarray(pc.cast(pc.list_value_length(called), pa.float32()).to_numpy(zero_copy_only=False))
    found[:, 0] = counts
    found[~np.isnan(counts), 1:] = 0.0
    named = encode(pc.list_flatten(called), tools)
    known = named < len(tools)
    found[pc.list_parent_indices(called).to_numpy()[known], 1 + named[known]] = 1.0
    return found


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
