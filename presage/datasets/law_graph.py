"""A law: a call graph whose branches hang on a hidden intent, on order and on retries, as a finite Markov process.

Given the intent, where a workflow goes next depends on (previous agent, current agent, retries so far) alone. So the
whole process is a few small tables, and what follows K steps ahead is exact: no sampling, no truncation. This module
knows those tables; `law.py` draws traces from them and filters the intent out of what a trace shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

END: Final = "END"


@dataclass(frozen=True)
class Branch:
    """One edge of the call graph.

    Args:
        next: the agent called next, or END.
        weight: unnormalised probability.
        intents: factor of the weight for each intent; empty means 1 for all.
        after: factor of the weight where the given agent stood one step before the current one.
        retry: factor of the weight for each retry so far, up to `Law.max_retries`.
        counts: does taking this edge count as a retry?
    """

    next: str
    weight: float
    intents: tuple[float, ...] = ()
    after: Mapping[str, float] = field(default_factory=dict)
    retry: float = 1.0
    counts: bool = False


@dataclass(frozen=True)
class Law:
    """A known law of a workflow type.

    Args:
        name: of the law, and of the workflow type it generates.
        graph: branches of each agent.
        start: the first agent.
        intents: prior probability of each intent.
        max_retries: retries past this many change nothing any more.
        signal: how far apart the intents lie in a state, in standard deviations of its noise.
        next_signal: the same for the next agent in a completion state.
        tokens: per agent, mean input tokens that are its own and mean output tokens.
    """

    name: str
    graph: Mapping[str, tuple[Branch, ...]]
    start: str
    intents: tuple[float, ...]
    max_retries: int
    signal: float
    next_signal: float
    tokens: Mapping[str, tuple[int, int]]

    @cached_property
    def agents(self) -> tuple[str, ...]:
        """Agents in sorted order; an agent's index everywhere is its place here, END is the index after the last."""
        return tuple(sorted(self.graph))

    @property
    def states(self) -> int:
        """Number S of process states (previous agent or none, agent, retries); state S is the end."""
        return (len(self.agents) + 1) * len(self.agents) * (self.max_retries + 1)

    @property
    def start_state(self) -> int:
        """The state of every first step."""
        return self.state(len(self.agents), self.agents.index(self.start), 0)

    def state(self, previous: int, agent: int, retries: int) -> int:
        """Index of a process state; `previous` is the number of agents where there is none."""
        return (previous * len(self.agents) + agent) * (self.max_retries + 1) + retries

    @cached_property
    def transition(self) -> NDArray[np.float64]:
        """P(next outcome | intent, state), float64 [intents, S + 1, agents + 1]; from the end only END follows."""
        agents = len(self.agents)
        table = np.zeros((len(self.intents), self.states + 1, agents + 1))
        table[:, -1, -1] = 1.0
        for previous in range(agents + 1):
            before = self.agents[previous] if previous < agents else ""
            for agent, name in enumerate(self.agents):
                for retries in range(self.max_retries + 1):
                    state = self.state(previous, agent, retries)
                    for branch in self.graph[name]:
                        weight = branch.weight * branch.after.get(before, 1.0) * branch.retry**retries
                        table[:, state, self.outcome(branch.next)] += weight * np.asarray(branch.intents or 1.0)
        return np.asarray(table / table.sum(axis=-1, keepdims=True))

    @cached_property
    def next_state(self) -> NDArray[np.int64]:
        """The state after an outcome, int64 [S + 1, agents + 1]."""
        agents = len(self.agents)
        table = np.full((self.states + 1, agents + 1), self.states, np.int64)
        for previous in range(agents + 1):
            for agent, name in enumerate(self.agents):
                counting = {branch.next for branch in self.graph[name] if branch.counts}
                for retries in range(self.max_retries + 1):
                    state = self.state(previous, agent, retries)
                    for following, called in enumerate(self.agents):
                        more = min(self.max_retries, retries + (called in counting))
                        table[state, following] = self.state(agent, following, more)
        return table

    def outcome(self, name: str) -> int:
        """Index of an agent or of END among the outcomes."""
        return len(self.agents) if name == END else self.agents.index(name)

    def ahead(self, horizon: int) -> NDArray[np.float64]:
        """P(outcome k steps ahead | intent, state), END absorbing, float64 [horizon, intents, S + 1, agents + 1]."""
        steps = [self.transition]
        for _ in range(horizon - 1):
            # One step by the transition, the rest by the table before: [z, s, o] × [z, next state(s, o), outcome].
            later = steps[-1][:, self.next_state, :]
            steps.append(np.einsum("zso,zsop->zsp", self.transition, later))
        return np.stack(steps)
