"""What the steps of workflows are like: running means, and how long each agent's tools take.

The means forget: one in `_FORGET` of what they say goes with each step. Pauses are kept by workflow type and agent,
since a test run and a search differ a hundred times; names come with requests, so the table has an end.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from presage.serving_hooks.policies.step_times import IterationCosts
from presage.serving_hooks.policies.throughput import Rates

ENOUGH_STEPS: Final = 32
"""Steps, and pauses, below which nothing is said."""

MOST_AGENTS: Final = 10_000
"""Agents, over all workflow types, whose pauses are kept."""

_FORGET: Final = 50


class RunningMean:
    """A mean of rows: of all so far, and once there are more than `_FORGET`, mostly of the last ones.

    Args:
        width: numbers in a row.

    Attributes:
        count: rows seen.
        mean: float64 [width].
    """

    __slots__ = ("count", "mean")

    def __init__(self, width: int = 1) -> None:
        self.count = 0
        self.mean = np.zeros(width)

    def observe(self, *row: float) -> None:
        """One row more."""
        self.count += 1
        self.mean += (np.asarray(row) - self.mean) / min(self.count, _FORGET)


class Workload:
    """Means over all workflows."""

    def __init__(self) -> None:
        self._prompts = RunningMean(2)
        self._outputs = RunningMean()
        self._pauses = RunningMean()
        self._by_agent: dict[tuple[str, str], RunningMean] = {}

    @property
    def new_tokens(self) -> float:
        """Prompt tokens of a step that its workflow had not computed before."""
        return float(self._prompts.mean[0])

    @property
    def output_tokens(self) -> float:
        """Output tokens of a step."""
        return float(self._outputs.mean[0])

    def begins(self, new_tokens: int, reusable_tokens: int) -> None:
        """A step begins, with so many prompt tokens of each kind."""
        self._prompts.observe(new_tokens, reusable_tokens)

    def completes(self, output_tokens: int) -> None:
        """A step has had its last token."""
        self._outputs.observe(output_tokens)

    def paused(self, workflow_type: str, agent: str, seconds: float) -> None:
        """So long after a step of `agent` its workflow sent the next."""
        self._pauses.observe(seconds)
        known = self._by_agent.get((workflow_type, agent))
        if known is None:
            if len(self._by_agent) == MOST_AGENTS:
                return
            known = self._by_agent[workflow_type, agent] = RunningMean()
        known.observe(seconds)

    def pause_s(self, workflow_type: str, agent: str) -> float | None:
        """How long the pause after a step of `agent` is; None where nobody's was seen."""
        known = self._by_agent.get((workflow_type, agent), self._pauses)
        return float(known.mean[0]) if known.count else None

    def rates(self, costs: IterationCosts | None, most_decoding: int) -> Rates | None:
        """All a decision needs; None while too little was seen of any of it."""
        few = min(self._prompts.count, self._outputs.count, self._pauses.count) < ENOUGH_STEPS
        if costs is None or few or not self.output_tokens > 0:
            return None
        new, reusable = map(float, self._prompts.mean)
        return Rates(*costs, self.output_tokens, new, reusable, float(self._pauses.mean[0]), most_decoding)
