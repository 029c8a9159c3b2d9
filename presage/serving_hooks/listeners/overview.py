"""Which workflows run and have ended lately, and which agents have come: what a person looks at first.

Each caller sees its own tenant. Names are those that clients sent or that were recognised, which `presage explain` asks
for; no text is kept, so of an agent there is no system prompt here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.listeners import Listener
from presage.serving_hooks.modes import Switch
from presage.serving_hooks.workflows import EndReason, RunningStep, Workflow, WorkflowTable
from presage.serving_hooks.workflows.choices import LeftStep
from presage.serving_hooks.workflows.identity import DRAWN_IDS, tenant_of, unscoped

MOST_ENDED: Final = 1000
"""Workflows that have ended and are still shown, the latest of all tenants."""
MOST_AGENTS: Final = 4096
"""Agents that are shown, those that came last of all tenants."""
MOST_CALLS: Final = 4096
"""Pairs of agents that follow one another, likewise."""
MOST_ON_PAGE: Final = 500
LEAST_ENDED: Final = 20
"""Workflows of a type that must have ended before they tell how it is recognised."""
MOST_TYPES: Final = 256


@dataclass(slots=True)
class _SeenAgent:
    steps: int = 0
    model: str = ""


class Overview(Listener[Any]):
    """Follows workflows and agents.

    Args:
        model_of: the model that served a request.
        clock: seconds, that of the table.
    """

    def __init__(
        self, table: WorkflowTable, counts: EventCounts, model_of: Callable[[Any], str], clock: Callable[[], float]
    ) -> None:
        self.switch = Switch("overview", counts)
        self._table, self._model_of, self._clock = table, model_of, clock
        self._ended: deque[tuple[float, Workflow, EndReason]] = deque(maxlen=MOST_ENDED)
        self._agents: OrderedDict[tuple[str, str, str], _SeenAgent] = OrderedDict()
        self._calls: OrderedDict[tuple[str, str, str, str], int] = OrderedDict()  # tenant, type, agent, next agent
        self._inferred: OrderedDict[str, tuple[int, int]] = OrderedDict()  # ended workflows, and those of one step

    def request_arrived(self, request: Any, step: RunningStep | None) -> None:
        """Counts that an agent follows the one whose step left last."""
        if step is None or not step.opens or (before := step.workflow.left_agent) is None:
            return
        workflow_type, agent = step.step.sent
        call = tenant_of(step.step.workflow_id), workflow_type, before, agent
        self._calls[call] = self._calls.pop(call, 0) + 1
        if len(self._calls) > MOST_CALLS:
            self._calls.popitem(last=False)

    def request_finished(self, request: Any, step: RunningStep | None, left: LeftStep | None) -> None:
        """Counts a step of its agent."""
        if step is None or left is None:
            return
        step.workflow.left_agent = step.step.sent[1]
        name = tenant_of(step.step.workflow_id), *step.step.sent
        seen = self._agents.pop(name, None) or _SeenAgent()
        seen.steps, seen.model = seen.steps + 1, self._model_of(request)
        self._agents[name] = seen
        if len(self._agents) > MOST_AGENTS:
            self._agents.popitem(last=False)

    def workflow_ended(self, workflow: Workflow, reason: EndReason) -> None:
        """Keeps what is shown of it, and nothing else that it holds."""
        shown = Workflow(workflow.step, workflow.arrived_at, latest=workflow.latest)
        self._ended.append((self._clock(), shown, reason))
        if not unscoped(workflow.step.workflow_id).startswith(DRAWN_IDS):
            return
        key = workflow.step.stats_key
        ended, single = self._inferred.pop(key, (0, 0))
        self._inferred[key] = ended + 1, single + (workflow.latest == 0)
        if len(self._inferred) > MOST_TYPES:
            self._inferred.popitem(last=False)

    def one_step(self) -> dict[str, float]:
        """The share of workflows of one step, by type with its tenant, where most inferred ones have no more: either
        the application has single requests, or its runs are not recognised as one workflow.
        """
        return {key: single / ended for key, (ended, single) in self._inferred.items() if self.in_doubt(key)}

    def in_doubt(self, stats_key: str) -> bool:
        """Whether most inferred workflows of a type, with its tenant, have one step."""
        ended, single = self._inferred.get(stats_key, (0, 0))
        return ended >= LEAST_ENDED and 2 * single > ended

    def agents(self, tenant: str) -> dict[str, Any]:
        """`agents`: name, workflow type, steps and latest model of each agent of a tenant, the latest first; `calls`:
        how many `times` a step of `agent` was followed by one of `next`, the latest first.
        """
        agents = [
            {"agent": agent, "workflow_type": workflow_type, "steps": seen.steps, "model": seen.model}
            for (of_tenant, workflow_type, agent), seen in reversed(self._agents.items())
            if of_tenant == tenant
        ]
        calls = [
            {"workflow_type": workflow_type, "agent": agent, "next": following, "times": times}
            for (of_tenant, workflow_type, agent, following), times in reversed(self._calls.items())
            if of_tenant == tenant
        ]
        return {"agents": agents, "calls": calls}

    def workflows(self, tenant: str, first: int, most: int) -> dict[str, Any]:
        """A page of a tenant's workflows: those that run, the latest active first, then those that ended, likewise.

        Args:
            first: how many to leave out.
            most: at most MOST_ON_PAGE are shown.

        Returns:
            `running` and `ended`, how many there are, `first`, and `workflows`: names, latest agent, steps, requests in
            flight, seconds since the first request and since the latest event, and a state: running, away, paused, or
            how it has ended.
        """
        running = self._table.running_of(tenant)
        ended = [end for end in self._ended if tenant_of(end[1].step.workflow_id) == tenant]
        page = islice(
            chain(islice(self._running(tenant), running), self._past(ended)), first, first + min(most, MOST_ON_PAGE)
        )
        return {"running": running, "ended": len(ended), "first": first, "workflows": list(page)}

    def _running(self, tenant: str) -> Iterator[dict[str, Any]]:
        now = self._clock()
        for workflow in reversed(self._table):
            if tenant_of(workflow.step.workflow_id) != tenant:
                continue
            idle = "paused" if now < workflow.paused_until else "away"
            yield _as_plain(workflow, "running" if workflow.requests else idle, now, now - workflow.active_at)

    def _past(self, ends: list[tuple[float, Workflow, EndReason]]) -> Iterator[dict[str, Any]]:
        now = self._clock()
        for ended_at, workflow, reason in reversed(ends):
            yield _as_plain(workflow, reason.value, now, now - ended_at)


def _as_plain(workflow: Workflow, state: str, now: float, idle_s: float) -> dict[str, Any]:
    step = workflow.step
    return {
        "workflow_id": unscoped(step.workflow_id),
        "workflow_type": step.sent[0],
        "agent": step.sent[1],
        "steps": workflow.latest + 1,
        "requests": len(workflow.requests),
        "state": state,
        "arrived_ago_s": round(now - workflow.arrived_at, 3),
        "active_ago_s": round(idle_s, 3),
    }
