"""What the steps of workflows are like: running means, and how long each agent's tools take.

The means forget: one in `_FORGET` of what they say goes with each step. Pauses are kept by workflow type and agent,
since a test run and a search differ a hundred times; names come with requests, so the table has an end.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.serving_hooks.policies.step_times import IterationCosts
from presage.serving_hooks.policies.throughput import Rates

ENOUGH_STEPS: Final = 32
"""Steps, and pauses, below which nothing is said."""

MOST_AGENTS: Final = 10_000
"""Agents, over all workflow types, whose pauses are kept."""

_FORGET: Final = 50


class RunningMean:
    """A mean: of all so far, and once there are more than `_FORGET`, mostly of the last ones.

    Attributes:
        count: numbers seen.
        mean: of them.
    """

    __slots__ = ("count", "mean")

    def __init__(self) -> None:
        self.count, self.mean = 0, 0.0

    def observe(self, number: float) -> None:
        """One more."""
        self.count += 1
        self.mean += (number - self.mean) / min(self.count, _FORGET)


class Workload:
    """Means over all workflows."""

    def __init__(self) -> None:
        self._new, self._reusable, self._outputs = RunningMean(), RunningMean(), RunningMean()
        self._pauses = RunningMean()
        self._agents: dict[tuple[str, str], int] = {}
        self._by_agent: list[RunningMean] = []
        self._pause_s = np.full(1, np.nan)  # of each agent, NaN where none was seen; of nobody at the end

    @property
    def new_tokens(self) -> float:
        """Prompt tokens of a step that its workflow had not computed before."""
        return self._new.mean

    @property
    def output_tokens(self) -> float:
        """Output tokens of a step."""
        return self._outputs.mean

    def begins(self, new_tokens: int, reusable_tokens: int) -> None:
        """A step begins, with so many prompt tokens of each kind."""
        self._new.observe(new_tokens)
        self._reusable.observe(reusable_tokens)

    def completes(self, output_tokens: int) -> None:
        """A step has had its last token."""
        self._outputs.observe(output_tokens)

    def agent(self, workflow_type: str, agent: str) -> int:
        """The number of an agent among `pauses_s`; −1 where there are too many."""
        key = workflow_type, agent
        number = self._agents.get(key)
        if number is None:
            if len(self._by_agent) == MOST_AGENTS:
                return -1
            number = self._agents[key] = len(self._by_agent)
            self._by_agent.append(RunningMean())
            if number + 1 == len(self._pause_s):
                self._pause_s = np.concatenate([self._pause_s, np.full(len(self._pause_s), np.nan)])
        return number

    def paused(self, workflow_type: str, agent: str, seconds: float) -> None:
        """So long after a step of `agent` its workflow sent the next."""
        self._pauses.observe(seconds)
        number = self.agent(workflow_type, agent)
        if number >= 0:
            known = self._by_agent[number]
            known.observe(seconds)
            self._pause_s[number] = known.mean

    def pauses_s(self) -> NDArray[np.float64]:
        """How long the pause after a step of each agent is, by number: its own mean, else that of all, else NaN."""
        mean = self._pauses.mean if self._pauses.count else np.nan
        return np.where(np.isnan(self._pause_s), mean, self._pause_s)

    def rates(self, costs: IterationCosts | None, most_decoding: int) -> Rates | None:
        """All a decision needs; None while too little was seen of any of it."""
        few = min(self._new.count, self._outputs.count, self._pauses.count) < ENOUGH_STEPS
        if costs is None or few or not self.output_tokens > 0:
            return None
        return Rates(*costs, self.output_tokens, self._new.mean, self._reusable.mean, self._pauses.mean, most_decoding)
