"""Online counts: they forecast if there is no model, or if it has too little evidence.

For each workflow type they count which agents, or END, came 1..K steps after the last one and the last two agents, and
keep the median of the output tokens that remained at an agent's steps. Contexts of different length are interpolated by
Witten–Bell smoothing, as in `predictors/next_agent/ngram.py`: with N outcomes counted after context c, T of them
distinct, and c' the next shorter context,

    P(o | c) = (count(c, o) + T · P(o | c')) / (N + T)

down to the uniform distribution. Memory is bounded: the least recently used types, agents and contexts are dropped.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.serving_hooks.workflows.identity import tenant_of
from presage.serving_hooks.workflows.live import STEPS_KEPT, Counted, token_count

ORDER: Final = 2
"""Agents in the longest context."""


@dataclass(frozen=True)
class BackoffConfig:
    """Sizes of the counts, and the evidence that a forecast needs.

    Attributes:
        horizon: K, steps ahead.
        agents, contexts: agents, and sequences of one or two agents, kept of each type.
        lengths: latest values that a median is over.
        min_evidence: steps of an agent with a known outcome that a forecast needs.
    """

    horizon: int = 3
    types: int = 64
    agents: int = 32
    contexts: int = 256
    lengths: int = 64
    min_evidence: int = 5


class OnlineCounts:
    """The counts of every workflow type."""

    def __init__(self, config: BackoffConfig | None = None) -> None:
        self.config = config or BackoffConfig()
        self._types: OrderedDict[str, _OfType] = OrderedDict()

    def __len__(self) -> int:
        return len(self._types)

    def next_agents(self, workflow_type: str, last: Sequence[str]) -> Counted | None:
        """The forecast after the agents `last`, oldest first; None if there is too little evidence of the last one."""
        counts = self._types.get(workflow_type)
        return counts.next_agents(last) if counts is not None and last else None

    def remaining(self, workflow_type: str, agent: str) -> tuple[int, float] | None:
        """Number and median of the remaining output tokens at steps of `agent`; None if there are too few."""
        counts = self._types.get(workflow_type)
        return counts.remaining(agent) if counts is not None else None

    def of_type(self, workflow_type: str) -> _OfType:
        """The counts of a workflow type, to count on; the type is then the most recently used."""
        counts = self._types.get(workflow_type)
        if counts is None:
            counts = self._types[workflow_type] = _OfType(self.config)
            if len(self._types) > self.config.types:
                del self._types[type_to_drop(self._types)]
        self._types.move_to_end(workflow_type)
        return counts


def type_to_drop(types: Collection[str]) -> str:
    """The least recently used type, the first, of the tenant with most types, so that no tenant evicts another's."""
    of_tenant = Counter(map(tenant_of, types))
    most = max(of_tenant.values())
    return next(name for name in types if of_tenant[tenant_of(name)] == most)


class _OfType:
    """Counts of one workflow type. Columns are agents, END last; row 0 is the empty context."""

    def __init__(self, config: BackoffConfig) -> None:
        self.config = config
        self.names: tuple[str, ...] = ()
        self._used = np.array([config.agents])  # columns
        self.columns: OrderedDict[str, int] = OrderedDict()
        self.rows: OrderedDict[tuple[str, ...], int] = OrderedDict()
        self.free = list(range(config.contexts, 0, -1))
        self.lengths: dict[str, _LatestValues] = {}
        self.counts = np.zeros((config.contexts + 1, config.horizon, config.agents + 1), np.float32)

    def follow(self, before: Sequence[str], agent: str | None) -> None:
        """Counts that `agent`, or the end if None, followed the agents `before` (the last K + 1, oldest first)."""
        column = self.config.agents if agent is None else self._column(agent)
        for k in range(min(self.config.horizon, len(before))):
            until = len(before) - k
            self.counts[0, k, column] += 1
            for order in range(1, min(ORDER, until) + 1):
                self.counts[self._row(tuple(before[until - order : until])), k, column] += 1

    def next_agents(self, last: Sequence[str]) -> Counted | None:
        row = self.rows.get((last[-1],))
        if row is None:
            return None
        evidence = int(self.counts[row, 0].sum())
        if evidence < self.config.min_evidence:
            return None
        pair = self.rows.get(tuple(last[-ORDER:])) if len(last) >= ORDER else None
        used = self._used
        counted = self.counts[[0, row] if pair is None else [0, row, pair]].take(used, 2).astype(np.float64)
        distinct = np.maximum((counted > 0).sum(2, keepdims=True), 1)  # 1 of nothing: the wider row's mixture
        total = counted.sum(2, keepdims=True) + distinct
        mixed: NDArray[np.float64] = np.full(counted.shape[1:], 1.0 / len(used))
        for count, different, whole in zip(counted, distinct, total, strict=True):
            mixed = (count + different * mixed) / whole
        return Counted(evidence, mixed.astype(np.float32), self.names)

    def left(self, agent: str, tokens: float) -> None:
        """Records that `tokens` output tokens remained at the start of a step of `agent`, its own included."""
        self._column(agent)
        self.lengths.setdefault(agent, _LatestValues(self.config.lengths)).add(tokens)

    def remaining(self, agent: str) -> tuple[int, float] | None:
        values = self.lengths.get(agent)
        return (len(values), values.median) if values and len(values) >= self.config.min_evidence else None

    def _column(self, agent: str) -> int:
        column = self.columns.get(agent)
        if column is None:
            column = len(self.columns) if len(self.columns) < self.config.agents else self._forget()
            self.columns[agent] = column
            by_column = sorted(self.columns.items(), key=lambda item: item[1])
            self.names = tuple(name for name, _ in by_column)
            self._used = np.array([*range(len(self.names)), self.config.agents])
        self.columns.move_to_end(agent)
        return column

    def _forget(self) -> int:
        """Drops the least recently used agent and returns its column."""
        agent, column = self.columns.popitem(last=False)
        self.counts[:, :, column] = 0
        self.lengths.pop(agent, None)
        for context in [context for context in self.rows if agent in context]:
            row = self.rows.pop(context)
            self.counts[row] = 0
            self.free.append(row)
        return column

    def _row(self, context: tuple[str, ...]) -> int:
        row = self.rows.get(context)
        if row is None:
            if len(self.rows) == self.config.contexts:
                _, row = self.rows.popitem(last=False)
                self.counts[row] = 0
            else:
                row = self.free.pop()
            self.rows[context] = row
        self.rows.move_to_end(context)
        return row


class _LatestValues:
    """The median of the latest `most` numbers."""

    __slots__ = ("_arrived", "_sorted")

    def __init__(self, most: int) -> None:
        self._arrived: deque[float] = deque(maxlen=most)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        if len(self._arrived) == self._arrived.maxlen:
            del self._sorted[bisect_left(self._sorted, self._arrived[0])]
        self._arrived.append(value)
        insort(self._sorted, value)

    @property
    def median(self) -> float:
        middle = len(self._sorted) // 2
        return (self._sorted[middle] + self._sorted[~middle]) / 2


MOST_OPEN: Final = 64
"""Steps of one workflow that run at once; beyond that the oldest count as aborted."""


class WorkflowHistory:
    """What online counts need of a running workflow: its latest agents, and the tokens before each of its first steps.

    Attributes:
        recent: the last K + 1 agents, oldest first; restarts after a step that was missed or had no agent.
    """

    __slots__ = ("_agents", "_before", "_open", "_produced", "_within", "recent")

    def __init__(self) -> None:
        self.recent: tuple[str, ...] = ()
        self._agents: tuple[str, ...] = ()
        self._before = array("d")
        self._produced, self._within = 0.0, False  # whether the step that began last has not completed
        self._open: tuple[int, ...] = ()  # steps that have not completed: how many entries there were once each began

    def begun(self, counts: OnlineCounts, workflow_type: str, agent: str) -> None:
        """Records the start of a step; others may still run."""
        self._within = True
        if agent:
            counts.of_type(workflow_type).follow(self.recent, agent)
            self.recent = (*self.recent, agent)[-counts.config.horizon - 1 :]
            if len(self._agents) < STEPS_KEPT:
                agents = *self._agents, agent
                self._agents = self.recent if agents == self.recent else agents  # share the tuple of short workflows
                self._before.append(self._produced)
        else:
            self.recent = ()
        self._open = (*self._open, len(self._before))[-MOST_OPEN:]

    def completed(self, output_tokens: object, place: int = -1) -> float | None:
        """Records the end of a step; returns its output tokens as a number, None if unknown.

        `place` is that of the step among those that run, in the order of their starts; by default the latest.
        """
        began = 0
        if self._open:
            place %= len(self._open)
            began, latest = self._open[place], place == len(self._open) - 1
            self._open = self._open[:place] + self._open[place + 1 :]
            self._within = self._within and not latest
        produced = token_count(output_tokens)
        if produced is None:
            self._unknown()
            return None
        self._produced += produced
        for later in range(began, len(self._before)):  # they began while it ran; in a trace it precedes them
            self._before[later] += produced
        return produced

    def missed(self) -> None:
        """Records that steps were missed."""
        self.recent, self._within, self._open = (), False, ()
        self._unknown()

    def ended(self, counts: OnlineCounts, workflow_type: str) -> None:
        """Lets `counts` learn from the ended workflow. One that ended within its latest step is skipped.

        An earlier step that has not completed was aborted too: what was left at its start and before is unknown.
        """
        if self._within:
            return
        own = counts.of_type(workflow_type)
        own.follow(self.recent, None)
        place = self._open[-1] if self._open else 0
        for agent, before in zip(self._agents[place:], self._before[place:], strict=True):
            own.left(agent, self._produced - before)

    def _unknown(self) -> None:
        """Marks the remaining tokens of all steps so far as unknown."""
        self._agents, self._before = (), array("d")
        self._open = (0,) * len(self._open)
