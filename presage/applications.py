"""Which application an agent belongs to, where clients name no workflow type: by who calls whom.

A workflow without a type is named after the agent that begins it. Where a request is not recognised as the next step of
its workflow (after a pause of hours, say), another agent of the same application seems to begin one, and its type is
another. So the types of agents are merged: those of agents that call each other, and that of an agent with the one
application that calls it, if it is called at least as often as it begins. An agent that several applications call, or
that begins on its own, such as a chat under a common system prompt, keeps its type.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final

LEAST_CALLS: Final = 2
"""Workflows of a type in which an agent must have been called, since one link may be wrong."""
MOST_AGENTS: Final = 64
"""Agents that are remembered, those seen last."""


class Applications:
    """The applications of one tenant. Agents are known by the types of the workflows that they begin."""

    def __init__(self, most_agents: int = MOST_AGENTS) -> None:
        self._most_agents = most_agents
        self._begun: OrderedDict[str, int] = OrderedDict()
        self._called: dict[str, Counter[str]] = {}
        self._merged: dict[str, str] | None = {}

    def step(self, agent: str, workflow_type: str, begins: bool) -> None:
        """The first step of this agent in a workflow of this type, which it begins or not."""
        if begins:
            self._seen(agent)
            self._begun[agent] += 1
            if self._begun[agent] == self._called[agent].total() + 1:
                self._merged = None
        if agent == workflow_type or begins or workflow_type not in self._begun:
            return
        self._seen(agent)
        calls = self._called[agent]
        calls[workflow_type] += 1
        if calls[workflow_type] == LEAST_CALLS or calls.total() == self._begun[agent]:
            self._merged = None  # else nothing has changed, and merging takes milliseconds for many agents

    def type_of(self, agent: str) -> str:
        """The type of the workflows that this agent begins; its own unless it belongs to another application."""
        if self._merged is None:
            self._merged = self._merge()
        return self._merged.get(agent, agent)

    def __len__(self) -> int:
        """Agents and calls that are remembered."""
        return len(self._begun) + sum(map(len, self._called.values()))

    def _seen(self, agent: str) -> None:
        self._begun.setdefault(agent, 0)
        self._called.setdefault(agent, Counter())
        self._begun.move_to_end(agent)
        if len(self._begun) > self._most_agents:
            oldest, _ = self._begun.popitem(last=False)
            del self._called[oldest]
            for calls in self._called.values():
                calls.pop(oldest, None)
            self._merged = None

    def _merge(self) -> dict[str, str]:
        """The type of each agent that has another one's."""
        callers = {
            agent: {caller for caller, times in counts.items() if times >= LEAST_CALLS and caller in self._begun}
            for agent, counts in self._called.items()
            if counts.total() >= self._begun[agent]
        }
        above = {agent: _reached(agent, callers) for agent in callers}
        merged: dict[str, str] = {}
        for agent in callers:
            circle = {other for other in above[agent] if agent in above.get(other, ())} | {agent}
            tops = {other for other in above[agent] - circle if not callers.get(other)}
            if len(tops) == 1:
                merged[agent] = tops.pop()
            elif not above[agent] - circle:
                merged[agent] = max(circle, key=lambda other: (self._begun[other], other))
        return {agent: workflow_type for agent, workflow_type in merged.items() if workflow_type != agent}


def _reached(agent: str, callers: dict[str, set[str]]) -> set[str]:
    """Those that call an agent, and those that call these."""
    reached: set[str] = set()
    waiting = [agent]
    while waiting:
        for caller in callers.get(waiting.pop(), ()):
            if caller not in reached:
                reached.add(caller)
                waiting.append(caller)
    return reached
