"""Who reads what others wrote: measured, a workflow type and an agent at a time.

PBKV (appendix G.1) holds that an agent touches only blocks it has touched before in this workflow. That is so where
each agent has its own conversation. Where every prompt begins with the common history it is not: the next agent reads
all that was written so far, most of it for the first time, and a score that waits for the first touch gives it up.

So each time a step begins, the blocks of its workflow that its agent had not touched are counted, and those of them it
found. The rate is the probability by which such a block counts for the agent: near 0 the paper's rule, near 1 the
history-first one. A block the cache has lost is in neither count; one behind a lost block counts as not touched, since
a prefix breaks there, so under heavy loss rates are too low, never too high.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PRIOR_BLOCKS: Final = 32
"""Blocks counted as not touched before the first is seen: a few steps decide, not one."""

MOST_AGENTS: Final = 10_000
"""Agents, over all workflow types, that are counted: names come with requests, and a table must not grow with them."""


class Sharing:
    """Counts and rates of all workflow types."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, tuple[int, int]]] = {}
        self._rates: dict[str, dict[str, float]] = {}
        self._agents = 0

    def observe(self, workflow_type: str, agent: str, touched: int, others: int) -> None:
        """A step of `agent` began: of `others` blocks it had not touched before, it now found `touched`."""
        if not others:
            return
        known = self._counts.get(workflow_type, {}).get(agent)
        if known is None:
            if self._agents == MOST_AGENTS:
                return
            self._agents, known = self._agents + 1, (0, PRIOR_BLOCKS)
        touched, others = known[0] + touched, known[1] + others
        self._counts.setdefault(workflow_type, {})[agent] = touched, others
        self._rates.setdefault(workflow_type, {})[agent] = touched / others

    def rates(self, workflow_type: str) -> Mapping[str, float]:
        """Of each agent that has had the choice: the share of untouched blocks it went on to touch, in [0, 1)."""
        return self._rates.get(workflow_type, {})
