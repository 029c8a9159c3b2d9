"""All prefixes of all workflows as ragged arrays, with their labels.

A position is a step and stands for the prefix that ends there. Rows are steps, workflow after workflow. The labels of a
position are the next K outcomes. Positions after END, or after the point where a trace was cut (the next step is
unknown, not END), are masked.

`transition_matrix` holds the transition probabilities between agents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.tasks import task_of
from presage.features.moment import Moment
from presage.features.vocabulary import Vocabulary

MASKED: Final = -1

SIZES: Final = ("input_tokens", "output_tokens")
"""Token counts of a step (the output's only at completion), stored as log(1 + x), NaN if not recorded.

Text lengths are not inputs: an engine does not know them, and in production they identify workflows (a customer's
name, a pasted log) without predicting the next step."""


@dataclass(frozen=True)
class Prefixes:
    """Prefixes of W workflows with n steps, and labels K steps ahead.

    Attributes:
        vocabulary: meaning of the indices.
        offsets: int64 [W+1]; workflow w has the rows offsets[w]:offsets[w+1].
        workflow_type: int32 [W], index of the workflow's type (T: unknown).
        task: int32 [W], equal for workflows of one task, which stay on one side of any split.
        agent: int32 [n], index of the step's agent (V: unknown).
        outcomes: int32 [n, K], index of the outcome 1..K steps ahead (V: END, V+1: an agent not in the vocabulary,
            MASKED: unknown).
        sizes: float32 [n, 2], the columns of SIZES.
        states: semantic state of each step at each moment, float32 [n, d], NaN rows if not recorded; a moment without
            states is absent.
    """

    vocabulary: Vocabulary
    offsets: NDArray[np.int64]
    workflow_type: NDArray[np.int32]
    task: NDArray[np.int32]
    agent: NDArray[np.int32]
    outcomes: NDArray[np.int32]
    sizes: NDArray[np.float32]
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
        """Rows of the given workflows, in their order, int64 [m]."""
        lengths = np.diff(self.offsets)[workflows]
        starts = np.repeat(self.offsets[:-1][workflows] - np.cumsum(lengths) + lengths, lengths)
        return starts + np.arange(lengths.sum())

    def take(self, workflows: NDArray[np.int64]) -> Prefixes:
        """The given workflows, in the given order."""
        rows = self.rows_of(workflows)
        return replace(
            self,
            offsets=np.concatenate([[0], np.cumsum(np.diff(self.offsets)[workflows])]).astype(np.int64),
            workflow_type=self.workflow_type[workflows],
            task=self.task[workflows],
            agent=self.agent[rows],
            outcomes=self.outcomes[rows],
            sizes=self.sizes[rows],
            states={moment: states[rows] for moment, states in self.states.items()},
        )

    def with_states(self, states: Mapping[Moment, NDArray[np.float32]]) -> Prefixes:
        """The same prefixes with these states."""
        return replace(self, states=dict(states))

    def without_tokens(self) -> Prefixes:
        """The same prefixes with all token counts unknown."""
        return replace(self, sizes=np.full_like(self.sizes, np.nan))


def prefixes_of(table: pa.Table, vocabulary: Vocabulary, horizon: int) -> Prefixes:
    """Prefixes, labels and sizes of a trace in canonical order (as `read_traces` returns it), without states."""
    type_code = _codes(table["workflow_type"])
    id_code = _codes(table["workflow_id"])
    starts = np.ones(len(table), bool)
    starts[1:] = (type_code[1:] != type_code[:-1]) | (id_code[1:] != id_code[:-1])
    first = np.flatnonzero(starts)
    offsets = np.append(first, len(table)).astype(np.int64)
    agent = vocabulary.encode_agents(table["agent"])
    complete = np.asarray(table["complete"].to_numpy(), bool)[first]
    task = task_of(table).take(pa.array(first))
    return Prefixes(
        vocabulary=vocabulary,
        offsets=offsets,
        workflow_type=vocabulary.encode_types(table["workflow_type"])[first],
        task=_codes(task),
        agent=agent,
        outcomes=_outcomes(agent, offsets, complete, vocabulary, horizon),
        sizes=_sizes(table),
        states={},
    )


def _codes(column: pa.ChunkedArray | pa.Array) -> NDArray[np.int32]:
    encoded = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return np.asarray(pc.dictionary_encode(encoded).indices.to_numpy(zero_copy_only=False), np.int32)


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


def _sizes(table: pa.Table) -> NDArray[np.float32]:
    counts = [pc.cast(table[name], pa.float32(), safe=False).to_numpy() for name in SIZES]  # rounded above 2^24
    return np.log1p(np.stack(counts, axis=1).astype(np.float32))


def join(first: Prefixes, second: Prefixes) -> Prefixes:
    """Both parts of one trace, which share vocabulary and task numbers, one after the other."""
    return replace(
        first,
        offsets=np.concatenate([first.offsets, second.offsets[1:] + first.offsets[-1]]),
        workflow_type=np.concatenate([first.workflow_type, second.workflow_type]),
        task=np.concatenate([first.task, second.task]),
        agent=np.concatenate([first.agent, second.agent]),
        outcomes=np.concatenate([first.outcomes, second.outcomes]),
        sizes=np.concatenate([first.sizes, second.sizes]),
        states={m: np.concatenate([s, second.states[m]]) for m, s in first.states.items() if m in second.states},
    )


def transition_counts(prefixes: Prefixes) -> NDArray[np.int64]:
    """Counts of outcome j directly after agent i, int64 [V+1, V+1]; row V is the unknown agent, column V is END.

    Steps whose next step is unknown (the trace was cut) are not counted.
    """
    size = prefixes.vocabulary.outcomes
    following = prefixes.outcomes[:, 0]
    known = (following >= 0) & (following < size)
    counts = np.zeros((size, size), np.int64)
    np.add.at(counts, (prefixes.agent[known], following[known]), 1)
    return counts


def transition_matrix(prefixes: Prefixes) -> NDArray[np.float32]:
    """A: the row-normalised forward transition matrix between agents, float32 [V+1, V+1] (PBKV, appendix B).

    Row and column V belong to the unknown agent and are zero: END is no agent and receives no message.
    """
    counts = transition_counts(prefixes).astype(np.float32)
    counts[:, -1] = 0.0
    counts[-1, :] = 0.0
    total = counts.sum(axis=1, keepdims=True)
    matrix: NDArray[np.float32] = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
    return matrix
