"""Steps to execution on a static graph: what comes next by the transitions of a workflow type, whatever the workflow.

Source: KVFlow (Pan et al., 2025), as PBKV describes it (section 6.1): every agent of a predefined graph has a distance,
the least number of steps until it may run, and what belongs to the agent furthest away is given up first.

Where we depart. The workflows replayed have no predefined graph, so it is learnt: the transitions seen in a training
part. An agent that other workflows of the type reach in two steps is two steps away in all of them. The order is made
by the hooks' own score: row k of a forecast is 1 for every agent k steps away, and γ is so small that one nearer agent
outweighs seven further ones, so it is the order of distances for up to seven agents a block. What is more than
`DEEPEST` steps away counts as never. Blocks of ended workflows go first, as they do in every policy of the hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.serving_hooks.forecasting.live import LiveForecast

DEEPEST: Final = 6
"""Steps looked ahead: γ^(DEEPEST − 1) is still a few units of the score's whole numbers."""

SETTINGS: Final[Mapping[str, Any]] = {"horizon": DEEPEST, "gamma": 1 / 8, "tie": 0.0, "learn_sharing": False}
"""Of the hooks: only the distance counts, and an agent stands for the blocks it has touched."""

Transitions = Mapping[str, Mapping[str, frozenset[str]]]
"""Of each workflow type, of each agent: those that ever came right after it."""


def distances(transitions: Mapping[str, frozenset[str]], agent: str, deepest: int = DEEPEST) -> dict[str, int]:
    """Steps until each agent may run, after `agent`; itself included, if it can come again. Further ones are left out.

    Args:
        transitions: of one workflow type.
        agent: that runs now.
        deepest: the most steps looked ahead.
    """
    found: dict[str, int] = {}
    front = {agent}
    for steps in range(1, deepest + 1):
        front = {after for one in front for after in transitions.get(one, frozenset())} - found.keys()
        found.update(dict.fromkeys(front, steps))
    return found


class StaticGraph:
    """A source of forecasts that are the same for all workflows of a type.

    Args:
        transitions: that were learnt.
    """

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        names = {name for of in transitions.values() for agent, after in of.items() for name in (agent, *after)}
        self._agents = tuple(sorted(names))
        self._at: dict[tuple[str, str], str] = {}
        self._said: dict[tuple[str, str], NDArray[np.float32]] = {}

    def on_prefill(
        self,
        workflow_type: str,
        workflow_id: str,
        agent: str,
        *,
        step: int | None = None,
        input_tokens: int | None = None,
    ) -> LiveForecast:
        """How far away each agent is from this one."""
        self._at[workflow_type, workflow_id] = agent
        return self._after(workflow_type, agent, PREFILL)

    def on_completion(self, workflow_type: str, workflow_id: str, *, output_tokens: int | None = None) -> LiveForecast:
        """The same, once it has completed."""
        return self._after(workflow_type, self._at[workflow_type, workflow_id], COMPLETION)

    def close(self, workflow_type: str, workflow_id: str) -> None:
        """The workflow has ended."""
        self._at.pop((workflow_type, workflow_id), None)

    def remaining_tokens(self, step: Any, input_tokens: int) -> float | None:
        """A graph of agents knows nothing of tokens."""
        return None

    def _after(self, workflow_type: str, agent: str, moment: Moment) -> LiveForecast:
        rows = self._said.get((workflow_type, agent))
        if rows is None:
            rows = np.zeros((DEEPEST, len(self._agents) + 1), np.float32)
            for name, steps in distances(self._transitions.get(workflow_type, {}), agent).items():
                rows[steps - 1, self._agents.index(name)] = 1.0
            self._said[workflow_type, agent] = rows
        return LiveForecast("back-off", 0, moment, rows, self._agents, None)
