"""Percentiles of what an agent produces and reads, and how often a workflow runs it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from presage.features.sequences import NUMBERS, WorkflowSteps
from presage.predictors.profile.automaton import wilson

PERCENTILES: Final = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Percentiles:
    """The PERCENTILES of one number of an agent's steps, each with a 95 % interval.

    The interval is that of the order statistics of as many independent steps as there are workflows: steps of one
    workflow are alike. An end beyond all observations is the extreme observed.
    """

    steps: int
    workflows: int
    values: tuple[float, ...]
    intervals: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, values: NDArray[np.float64], workflows: int) -> Self:
        """Of one or more values from so many workflows."""
        ends = [wilson(q * workflows, workflows) for q in PERCENTILES]
        return cls(
            len(values),
            workflows,
            tuple(np.quantile(values, PERCENTILES).tolist()),
            tuple((float(np.quantile(values, low)), float(np.quantile(values, high))) for low, high in ends),
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """From the JSON values of `asdict`."""
        intervals = tuple((low, high) for low, high in data["intervals"])
        return cls(data["steps"], data["workflows"], tuple(data["values"]), intervals)


AgentNumbers = Mapping[str, Mapping[str, Percentiles]]
"""The percentiles of each agent, by the name of the number (`features.sequences.NUMBERS`); absent if not recorded."""


def agent_numbers(
    workflows: Sequence[WorkflowSteps], numbers: NDArray[np.float64]
) -> dict[str, dict[str, Percentiles]]:
    """The percentiles of every agent, from the numbers of all steps, float64 [n, 3]."""
    rows: dict[str, list[tuple[int, int]]] = {}
    for workflow, steps in enumerate(workflows):
        for row, agent in enumerate(steps.agents, steps.rows.start):
            rows.setdefault(agent, []).append((row, workflow))
    percentiles: dict[str, dict[str, Percentiles]] = {}
    for agent, places in sorted(rows.items()):
        row, workflow = np.array(places).T
        percentiles[agent] = {}
        for column, name in enumerate(NUMBERS):
            values = numbers[row, column]
            recorded = ~np.isnan(values)
            if recorded.any():
                percentiles[agent][name] = Percentiles.of(values[recorded], len(np.unique(workflow[recorded])))
    return percentiles


@dataclass(frozen=True)
class AgentShare:
    """How often a workflow runs an agent: mean and standard deviation of its steps, and the workflows with any."""

    mean: float
    deviation: float
    workflows: int


@dataclass(frozen=True)
class AgentUsage:
    """Which agents and calls the workflows have.

    Attributes:
        workflows: how many.
        agents: by name.
        calls: workflows in which an agent calls another at least once.
    """

    workflows: int
    agents: Mapping[str, AgentShare]
    calls: Mapping[str, Mapping[str, int]]

    @classmethod
    def of(cls, workflows: Iterable[Sequence[str]]) -> Self:
        """From the agents of each workflow, in order."""
        total, squares, having = Counter[str](), Counter[str](), Counter[str]()
        calls: dict[str, Counter[str]] = {}
        count = 0
        for agents in workflows:
            count += 1
            for agent, times in Counter(agents).items():
                total[agent] += times
                squares[agent] += times * times
                having[agent] += 1
            for a, b in {*pairwise(agents)}:
                calls.setdefault(a, Counter())[b] += 1
        shares = {}
        for agent in sorted(total):
            mean = total[agent] / count
            spread = max(squares[agent] / count - mean * mean, 0.0) * count / max(count - 1, 1)
            shares[agent] = AgentShare(mean, math.sqrt(spread), having[agent])
        return cls(count, shares, {a: dict(sorted(called.items())) for a, called in sorted(calls.items())})

    @property
    def steps(self) -> float:
        """Mean steps a workflow."""
        return sum(share.mean for share in self.agents.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        return cls(
            data["workflows"], {name: AgentShare(**share) for name, share in data["agents"].items()}, data["calls"]
        )
