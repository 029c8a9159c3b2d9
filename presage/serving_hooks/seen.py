"""What the counts are to learn of a running workflow, until it is known how it went on."""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from presage.serving_hooks.backoff import OnlineCounts

STEPS_KEPT: Final = 64
"""Of so many of a workflow's first steps it is learnt how much was left at them."""
_NO_COUNT: Final = 2**63


class Seen:
    """The latest agents of a workflow, and what it had produced before each of its first steps.

    Attributes:
        recent: the last K + 1 agents, oldest first; from the last one that was missed, or had no name.
    """

    __slots__ = ("_agents", "_before", "_produced", "_within", "recent")

    def __init__(self) -> None:
        self.recent: tuple[str, ...] = ()
        self._agents: tuple[str, ...] = ()
        self._before = array("d")
        self._produced, self._within = 0.0, False

    def begun(self, counts: OnlineCounts, workflow_type: str, agent: str) -> None:
        """A step begins. If the one before it was never completed, what that produced is unknown."""
        if self._within:
            self._unknown()
        self._within = True
        if not agent:
            self.recent = ()
            return
        counts.follow(workflow_type, self.recent, agent)
        self.recent = (*self.recent, agent)[-counts.config.horizon - 1 :]
        if len(self._agents) < STEPS_KEPT:
            agents = *self._agents, agent
            self._agents = self.recent if agents == self.recent else agents  # most are short: one tuple, not two
            self._before.append(self._produced)

    def completed(self, output_tokens: object) -> float | None:
        """It has produced so many tokens; None where that is no number of tokens, and so unknown."""
        self._within = False
        if isinstance(output_tokens, int | float | np.number) and 0 <= output_tokens < _NO_COUNT:
            produced = float(output_tokens)
            self._produced += produced
            return produced
        self._unknown()
        return None

    def missed(self) -> None:
        """Steps went by unseen."""
        self.recent, self._within = (), False
        self._unknown()

    def ended(self, counts: OnlineCounts, workflow_type: str) -> None:
        """The workflow has ended. Within a step nothing is learnt: that is no end, it was broken off."""
        if self._within:
            return
        counts.follow(workflow_type, self.recent, None)
        for agent, before in zip(self._agents, self._before, strict=True):
            counts.left(workflow_type, agent, self._produced - before)

    def _unknown(self) -> None:
        """What was left is unknown at every step so far, and known again from the next one on."""
        self._agents, self._before = (), array("d")
