"""Call graphs with a hidden intent; three presets resemble code repair, research and customer triage.

Given the intent, the next agent depends only on (previous agent, current agent, retries so far). So a process is a few
small tables, and its forecasts K steps ahead are exact. `workflows.py` draws traces from a process and lists the
accuracies of the presets; `tests/datasets/test_synthetic_workflows.py` checks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

END: Final = "END"


@dataclass(frozen=True)
class Branch:
    """One edge of the call graph."""

    next: str  # the agent called next, or END
    weight: float  # unnormalised probability
    intents: tuple[float, ...] = ()  # factor of the weight for each intent; empty means 1 for all
    after: Mapping[str, float] = field(default_factory=dict)  # factor if this agent ran one step before the current one
    retry: float = 1.0  # factor for each retry so far, up to `SyntheticProcess.max_retries`
    counts: bool = False  # whether taking this edge counts as a retry


@dataclass(frozen=True)
class SyntheticProcess:
    """A workflow type with known transition probabilities."""

    name: str  # of the process, and of the workflow type it generates
    graph: Mapping[str, tuple[Branch, ...]]  # branches of each agent
    start: str  # the first agent
    intents: tuple[float, ...]  # prior probability of each
    max_retries: int  # retries beyond this number have no effect
    signal: float  # distance of the intents in a state, in standard deviations of its noise
    next_signal: float  # the same for the next agent in a completion state
    tokens: Mapping[str, tuple[int, int]]  # per agent, mean input tokens of its own part and mean output tokens

    @cached_property
    def agents(self) -> tuple[str, ...]:
        """Agents in sorted order; an agent's index is its position here, END is the index after the last."""
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
        """Index of a process state; `previous` is the number of agents for the first step."""
        return (previous * len(self.agents) + agent) * (self.max_retries + 1) + retries

    @cached_property
    def _tables(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        agents = len(self.agents)
        weights = np.zeros((len(self.intents), self.states + 1, agents + 1))
        weights[:, -1, -1] = 1.0
        following = np.full((self.states + 1, agents + 1), self.states, np.int64)
        for previous, agent, retries in np.ndindex(agents + 1, agents, self.max_retries + 1):
            state = self.state(previous, agent, retries)
            following[state, :-1] = [self.state(agent, called, retries) for called in range(agents)]
            before = self.agents[previous] if previous < agents else ""
            for branch in self.graph[self.agents[agent]]:
                outcome = self.outcome(branch.next)
                weight = branch.weight * branch.after.get(before, 1.0) * branch.retry**retries
                weights[:, state, outcome] += weight * np.asarray(branch.intents or 1.0)
                if branch.counts:
                    following[state, outcome] = self.state(agent, outcome, min(self.max_retries, retries + 1))
        return weights / weights.sum(axis=-1, keepdims=True), following

    @property
    def transition(self) -> NDArray[np.float64]:
        """P(next outcome | intent, state), float64 [intents, S + 1, agents + 1]; END is absorbing."""
        return self._tables[0]

    @property
    def next_state(self) -> NDArray[np.int64]:
        """The state after an outcome, int64 [S + 1, agents + 1]."""
        return self._tables[1]

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


_RETRY: Final = SyntheticProcess(
    name="retry",
    start="planner",
    intents=(0.3, 0.3, 0.25, 0.15),
    max_retries=3,
    signal=1.3,
    next_signal=1.2,
    graph={
        "planner": (
            Branch("retriever", 0.53, (4.66, 1, 0.19, 0.49)),
            Branch("coder", 0.38, (0.28, 1.76, 3.61, 0.19)),
            Branch("reader", 0.17, (0.38, 1, 0.38, 9.52)),
        ),
        "retriever": (
            Branch("reader", 0.77, (1.6, 1, 0.73, 1)),
            Branch("coder", 0.28, (0.19, 1.29, 3.61, 1), after={"planner": 0.5}),
        ),
        "reader": (
            Branch("coder", 0.53, (1.29, 2.64, 1.76, 0.11), after={"retriever": 1.5}),
            Branch("retriever", 0.33, (1.29, 0.19, 0.19, 1), after={"retriever": 0.35}, retry=0.7),
            Branch("writer", 0.23, (0.11, 0.19, 0.19, 9.52)),
        ),
        "coder": (
            Branch("tester", 0.81, (1, 1.76, 1, 0.49), after={"reviewer": 0.5}),
            Branch("reviewer", 0.23, (1, 0.19, 3.61, 4.66), after={"tester": 3.0}),
        ),
        "tester": (
            Branch("coder", 0.53, (0.28, 3.02, 0.38, 0.38), retry=0.75, counts=True),
            Branch("reviewer", 0.38, (1.76, 0.38, 3.02, 1)),
            Branch("retriever", 0.17, (3.02, 0.19, 0.19, 0.38), retry=1.2, counts=True),
        ),
        "reviewer": (
            Branch("writer", 0.53, (1, 1, 1, 2.64), after={"coder": 0.7}, retry=1.3),
            Branch("coder", 0.33, (0.49, 1.29, 1.93, 0.19), after={"tester": 0.6}, counts=True),
            Branch(END, 0.15, (0.38, 1.76, 0.38, 1)),
        ),
        "writer": (
            Branch(END, 0.52),
            Branch("reviewer", 0.23, (1.76, 0.38, 0.38, 3.61), after={"reviewer": 0.4}),
        ),
    },
    tokens={
        "planner": (420, 180),
        "retriever": (160, 60),
        "reader": (1400, 240),
        "coder": (900, 650),
        "tester": (500, 120),
        "reviewer": (700, 260),
        "writer": (450, 380),
    },
)

_RESEARCH: Final = SyntheticProcess(
    name="research",
    start="planner",
    intents=(0.4, 0.35, 0.25),
    max_retries=4,
    signal=1.3,
    next_signal=1.2,
    graph={
        "planner": (
            Branch("searcher", 0.63, (3.61, 0.73, 0.28)),
            Branch("analyst", 0.28, (0.19, 1, 4.66)),
            Branch("reader", 0.17, (0.38, 3.61, 0.38)),
        ),
        "searcher": (
            Branch("reader", 0.72, (1.29, 1.6, 0.38)),
            Branch("searcher", 0.17, (1.76, 0.28, 0.49), after={"searcher": 0.2}, counts=True),
            Branch("analyst", 0.17, (0.19, 0.38, 6.96), after={"verifier": 2.0}),
        ),
        "reader": (
            Branch("verifier", 0.53, (2.28, 0.49, 0.73), after={"searcher": 1.4}),
            Branch("reader", 0.23, (0.19, 3.61, 0.19), after={"reader": 0.5}, retry=0.8, counts=True),
            Branch("analyst", 0.33, (0.28, 1.29, 2.64), after={"reader": 2.0}),
        ),
        "analyst": (
            Branch("verifier", 0.48, (1.76, 1, 0.28)),
            Branch("critic", 0.33, (0.28, 0.38, 3.61), after={"critic": 0.4}),
            Branch("writer", 0.28, (0.49, 2.28, 0.49), after={"critic": 2.5}),
        ),
        "verifier": (
            Branch("searcher", 0.48, (2.64, 0.38, 0.28), retry=0.7, counts=True),
            Branch("reader", 0.23, (0.38, 2.64, 0.28), after={"reader": 0.5}, retry=0.8, counts=True),
            Branch("writer", 0.38, (0.49, 1, 1.93), retry=1.2),
        ),
        "critic": (
            Branch("analyst", 0.58, (0.38, 0.73, 2.28), retry=0.75, counts=True),
            Branch("writer", 0.48, (1.76, 1.29, 0.49), retry=1.2),
        ),
        "writer": (
            Branch("critic", 0.38, (0.28, 0.28, 3.61), after={"critic": 0.2}, retry=0.9),
            Branch("editor", 0.33, (0.38, 2.64, 0.38)),
            Branch(END, 0.25, (2.64, 0.38, 0.61), after={"critic": 2.0}),
        ),
        "editor": (
            Branch(END, 0.49),
            Branch("writer", 0.28, retry=0.6, counts=True),
        ),
    },
    tokens={
        "planner": (380, 210),
        "searcher": (120, 40),
        "reader": (2200, 300),
        "analyst": (800, 520),
        "verifier": (640, 110),
        "critic": (700, 260),
        "writer": (900, 900),
        "editor": (1000, 700),
    },
)

_TRIAGE: Final = SyntheticProcess(
    name="triage",
    start="greeter",
    intents=(0.35, 0.3, 0.2, 0.15),
    max_retries=3,
    signal=1.3,
    next_signal=1.2,
    graph={
        "greeter": (
            Branch("user", 0.81),
            Branch("router", 0.23),
        ),
        "user": (
            Branch("router", 0.38, (0.73, 0.73, 1, 2.64), after={"greeter": 3.0, "resolver": 0.4}),
            Branch("resolver", 0.38, (1, 1, 2.28, 0.19), after={"resolver": 2.5, "greeter": 0.2}),
            Branch("lookup", 0.23, (3.02, 0.28, 0.28, 0.28), after={"resolver": 0.6}),
            Branch(END, 0.08, (1.76, 1.76, 0.19, 1), after={"greeter": 0.0, "router": 0.1}, retry=1.5),
        ),
        "router": (
            Branch("lookup", 0.48, (3.61, 0.38, 0.49, 0.19)),
            Branch("refunds", 0.33, (0.19, 4.66, 0.28, 0.28)),
            Branch("resolver", 0.17, (0.38, 0.28, 5.78, 0.38)),
            Branch("human", 0.12, (0.11, 0.19, 0.28, 15.25), retry=1.4),
        ),
        "lookup": (
            Branch("resolver", 0.63, (1.29, 0.38, 1.76, 0.49)),
            Branch("lookup", 0.17, (1.76, 0.38, 0.38, 0.38), after={"lookup": 0.3}, counts=True),
            Branch("refunds", 0.17, (0.11, 6.96, 0.19, 0.38)),
            Branch("router", 0.12, (0.38, 0.38, 0.38, 6.96), counts=True),
        ),
        "refunds": (
            Branch("user", 0.43, (1, 0.73, 1, 1), after={"user": 0.6}),
            Branch("lookup", 0.38, (1.76, 0.73, 1, 0.38), after={"lookup": 0.15}),
            Branch("resolver", 0.28, (0.73, 1.93, 0.73, 0.19), after={"lookup": 2.5}, retry=1.2),
        ),
        "resolver": (
            Branch("user", 0.63, (0.61, 0.49, 3.02, 0.49), after={"user": 0.7}, retry=0.7, counts=True),
            Branch(END, 0.21, (1.93, 1.6, 0.19, 0.38), retry=1.3),
            Branch("human", 0.12, (0.19, 0.38, 0.49, 12.29)),
        ),
        "human": (
            Branch(END, 0.37),
            Branch("user", 0.33, retry=0.7, counts=True),
            Branch("refunds", 0.17, (0.38, 4.66, 0.19, 1), after={"refunds": 0.2}),
        ),
    },
    tokens={
        "greeter": (200, 40),
        "user": (60, 45),
        "router": (260, 25),
        "lookup": (300, 90),
        "refunds": (420, 140),
        "resolver": (650, 220),
        "human": (150, 80),
    },
)

PROCESSES: Final[Mapping[str, SyntheticProcess]] = MappingProxyType(
    {process.name: process for process in (_RETRY, _RESEARCH, _TRIAGE)}
)
