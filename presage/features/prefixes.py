"""All prefixes of all workflows as ragged arrays, with their labels.

A position is a step and stands for the prefix that ends there. Rows are steps, workflow after workflow. The labels of a
position are the next K outcomes. Positions after END, or after the point where a trace was cut (the next step is
unknown, not END), are masked.

`transition_matrix` holds the transition probabilities between agents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.schema import workflow_codes
from presage.datasets.tasks import task_of
from presage.features.moment import Moment
from presage.features.served_steps import TOOLS_CALLED
from presage.features.vocabulary import Vocabulary, codes, token_counts, tools_called, unknown_names

MASKED: Final = -1

SIZES: Final = ("input_tokens", "output_tokens")
"""Token counts of a step (the output's only at completion), stored as log(1 + x), NaN if not recorded.

Text lengths are not inputs: an engine does not know them, and in production they identify workflows (a customer's
name, a pasted log) without predicting the next step."""


@dataclass(frozen=True)
class Prefixes:
    """Prefixes of W workflows with n steps, and labels K steps ahead.

    Attributes:
        offsets: int64 [W+1]; workflow w has the rows offsets[w]:offsets[w+1].
        workflow_type: int32 [W] (T: unknown).
        task: int32 [W], equal for workflows of one task, which stay on one side of any split.
        agent: int32 [n] (V: unknown).
        outcomes: int32 [n, K], index of the outcome 1..K steps ahead (V: END, V+1: an agent not in the vocabulary,
            MASKED: unknown).
        sizes: float32 [n, 2], the columns of SIZES.
        called: float32 [n, 1 + Z], the tools that the output calls (`vocabulary.tools_called`), NaN rows if unknown.
        states: semantic states by moment, float32 [n, d], NaN rows if not recorded; a moment without any is absent.
    """

    vocabulary: Vocabulary
    offsets: NDArray[np.int64]
    workflow_type: NDArray[np.int32]
    task: NDArray[np.int32]
    agent: NDArray[np.int32]
    outcomes: NDArray[np.int32]
    sizes: NDArray[np.float32]
    called: NDArray[np.float32]
    states: Mapping[Moment, NDArray[np.float32]]

    @property
    def workflows(self) -> int:
        """W."""
        return len(self.offsets) - 1

    @property
    def steps(self) -> int:
        """n."""
        return len(self.agent)

    @property
    def horizon(self) -> int:
        """K."""
        return int(self.outcomes.shape[1])

    @property
    def workflow(self) -> NDArray[np.int64]:
        """int64 [n], the workflow each row belongs to."""
        return np.repeat(np.arange(self.workflows), np.diff(self.offsets))

    @property
    def position(self) -> NDArray[np.int64]:
        """int64 [n], number of earlier steps in the workflow."""
        return np.arange(self.steps) - np.repeat(self.offsets[:-1], np.diff(self.offsets))

    def rows_of(self, workflows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of the given workflows, in the given order."""
        lengths = np.diff(self.offsets)[workflows]
        ends = np.cumsum(lengths)
        rows: NDArray[np.int64] = np.repeat(self.offsets[:-1][workflows] - ends + lengths, lengths)
        return rows + np.arange(lengths.sum())

    def take(self, workflows: NDArray[np.int64]) -> Prefixes:
        """The given workflows, in the given order."""
        rows = self.rows_of(workflows)
        return replace(
            self,
            offsets=np.append(0, np.cumsum(np.diff(self.offsets)[workflows])).astype(np.int64),
            workflow_type=self.workflow_type[workflows],
            task=self.task[workflows],
            agent=self.agent[rows],
            outcomes=self.outcomes[rows],
            sizes=self.sizes[rows],
            called=self.called[rows],
            states={moment: states[rows] for moment, states in self.states.items()},
        )

    def without_steps(self, dropped: NDArray[np.bool_]) -> Prefixes:
        """The same workflows as if these steps, bool [n], had never been; those with no other step are left out."""
        rows = np.flatnonzero(~dropped)
        lengths = np.bincount(self.workflow[rows], minlength=self.workflows)
        left = np.flatnonzero(lengths)
        offsets = np.append(0, np.cumsum(lengths[left])).astype(np.int64)
        complete = self.outcomes[self.offsets[1:][left] - 1, 0] == self.vocabulary.end
        return replace(
            self,
            offsets=offsets,
            workflow_type=self.workflow_type[left],
            task=self.task[left],
            agent=self.agent[rows],
            outcomes=_outcomes(self.agent[rows], offsets, complete, self.vocabulary, self.horizon),
            sizes=self.sizes[rows],
            called=self.called[rows],
            states={moment: states[rows] for moment, states in self.states.items()},
        )

    def with_states(self, states: Mapping[Moment, NDArray[np.float32]]) -> Prefixes:
        """The same prefixes with these states."""
        return replace(self, states=dict(states))

    def with_unknown_names(self, rng: np.random.Generator) -> Prefixes:
        """The same prefixes after a release that renames (`unknown_names`); the labels stay those of the old names."""
        agent, types = unknown_names(self.agent, self.workflow_type, self.offsets, self.vocabulary, rng)
        new, workflow = np.append(self.vocabulary.new_agents, self.vocabulary.unknown), self.workflow
        if len(new) == 1:
            return replace(self, workflow_type=types, agent=agent)
        rows = np.flatnonzero(np.isin(agent, new))
        agent[rows] = self.vocabulary.unknown
        rows = rows[self.vocabulary.numbers_types[types[workflow[rows]]]]
        agent[rows] = self.vocabulary.number(self.agent[rows], workflow[rows])
        became = np.tile(np.arange(self.vocabulary.unseen + 1, dtype=np.int32), (self.workflows, 1))
        became[:, new[:-1]] = self.vocabulary.unseen
        rows = rows[np.isin(self.agent[rows], new[:-1]) & (agent[rows] < self.vocabulary.unknown)]
        became[workflow[rows], self.agent[rows]] = agent[rows]
        outcomes = np.where(self.outcomes < 0, self.outcomes, became[workflow[:, None], self.outcomes])
        return replace(self, workflow_type=types, agent=agent, outcomes=outcomes)

    @property
    def named_outcomes(self) -> NDArray[np.int32]:
        """The outcomes, int32 [n, K], without new agents of which nobody knows the name yet, since their workflow calls
        them for the first time later: they are agents not in the vocabulary."""
        if not len(self.vocabulary.new_agents):
            return self.outcomes
        later = (self.outcomes >= 0) & (self._number[self.outcomes] > self.new_agents[:, None])
        return np.where(later, np.int32(self.vocabulary.unseen), self.outcomes)

    @property
    def new_agents(self) -> NDArray[np.int64]:
        """int64 [n], number of new agents that the workflow has called so far, of those in the vocabulary."""
        called = self._number[self.agent]
        for start, stop in pairwise(self.offsets.tolist()):
            called[start:stop] = np.maximum.accumulate(called[start:stop])
        return called

    @property
    def _number(self) -> NDArray[np.int64]:
        """int64 [V+2], the number of each outcome among the new agents, from 1; 0 for all others."""
        number = np.zeros(self.vocabulary.unseen + 1, np.int64)
        number[self.vocabulary.new_agents] = np.arange(len(self.vocabulary.new_agents)) + 1
        return number

    def without_tokens(self) -> Prefixes:
        """The same prefixes with all token counts unknown."""
        return replace(self, sizes=np.full_like(self.sizes, np.nan))

    def without_answers(self) -> Prefixes:
        """The same prefixes with all tools unknown."""
        return replace(self, called=np.full_like(self.called, np.nan))


def prefixes_of(table: pa.Table, vocabulary: Vocabulary, horizon: int) -> Prefixes:
    """Prefixes, labels, sizes and tools of served steps in canonical order (`served_steps`), without states."""
    begins = np.diff(workflow_codes(table), prepend=-1) != 0
    first = np.flatnonzero(begins)
    offsets = np.append(first, len(table)).astype(np.int64)
    workflow_type = vocabulary.encode_types(table["workflow_type"])
    agent = vocabulary.encode_calls(table["agent"], workflow_type, np.cumsum(begins))
    complete = np.asarray(table["complete"].to_numpy(), bool)[first]
    return Prefixes(
        vocabulary=vocabulary,
        offsets=offsets,
        workflow_type=workflow_type[first],
        task=codes(task_of(table).take(pa.array(first))),
        agent=agent,
        outcomes=_outcomes(agent, offsets, complete, vocabulary, horizon),
        sizes=np.log1p(np.stack([token_counts(table[name]) for name in SIZES], axis=1)),
        called=tools_called(table[TOOLS_CALLED], vocabulary.tools),
        states={},
    )


def _outcomes(
    agent: NDArray[np.int32],
    offsets: NDArray[np.int64],
    complete: NDArray[np.bool_],
    vocabulary: Vocabulary,
    horizon: int,
) -> NDArray[np.int32]:
    """Labels int32 [n, K]: the k-th next agent, END right after the last step of a complete workflow, else MASKED."""
    steps = len(agent)
    outcome_of = np.append(np.arange(len(vocabulary.agents)), vocabulary.unseen).astype(np.int32)
    rows = np.arange(steps)
    last = np.repeat(offsets[1:], np.diff(offsets)) - 1
    ends = np.repeat(complete, np.diff(offsets))
    outcomes = np.full((steps, horizon), MASKED, np.int32)
    for k in range(1, horizon + 1):
        ahead = rows + k
        inside = ahead <= last
        outcomes[inside, k - 1] = outcome_of[agent[ahead[inside]]]
        outcomes[(ahead == last + 1) & ends, k - 1] = vocabulary.end
    return outcomes


def join(first: Prefixes, second: Prefixes) -> Prefixes:
    """Both parts of one trace, which share vocabulary and task numbers, one after the other."""
    names = ("workflow_type", "task", "agent", "outcomes", "sizes", "called")
    rows: dict[str, Any] = {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in names}
    return replace(
        first,
        offsets=np.concatenate([first.offsets, second.offsets[1:] + first.offsets[-1]]),
        states={m: np.concatenate([s, second.states[m]]) for m, s in first.states.items() if m in second.states},
        **rows,
    )


def transition_matrix(prefixes: Prefixes) -> NDArray[np.float32]:
    """A: the row-normalised forward transition matrix between agents, float32 [V+1, V+1] (PBKV, appendix B).

    Row and column V belong to the unknown agent and are zero: END is no agent and receives no message. Steps whose next
    step is unknown (the trace was cut) are not counted.
    """
    agents, following = prefixes.vocabulary.unknown, prefixes.outcomes[:, 0]
    is_followed = (following >= 0) & (following < agents) & (prefixes.agent < agents)
    steps = np.zeros((agents + 1, agents + 1), np.int64)
    np.add.at(steps, (prefixes.agent[is_followed], following[is_followed]), 1)
    counts = steps.astype(np.float32)
    total = counts.sum(axis=1, keepdims=True)
    matrix: NDArray[np.float32] = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
    return matrix
