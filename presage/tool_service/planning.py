"""Which tool to prepare for which workflow and when, who gets one, and from whom one is taken: decisions alone.

A tool is prepared for a workflow when a step that is expected, or that runs, is likely and soon enough to need it
(`start_in`), by what was learnt of earlier steps (`ToolUsage`). A workflow that asks gets the one that
was prepared for it, else one that nobody needs, else a new one. It keeps the tool until it gives it back or ends. What
was prepared for a workflow that did not need it is kept for others while that may pay, and then removed.

When to begin is a weighing of idle time against waiting. A second in which a step waits costs as much as w seconds in
which a prepared tool is idle. The tool will be needed with probability p, at a time of which samples are known; where
it is not needed, it is idle until that shows. Being ready a moment later costs w moments with the probability p F that
it is needed before, F the share of samples before, and else saves one. So it should be ready at the share F = 1 / (p
(1 + w)) of samples, and is not worth preparing where that is more than all of them. ThunderAgent (§4.4) prepares at
the start of a program and pays the idle time.

`service.py` carries the decisions out with processes and a database.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Final, Protocol

import msgspec

from presage.serving_hooks.lifecycle.event import LifecycleEvent
from presage.tool_service.config import ToolSettings
from presage.tool_service.resources import Resource, State, WorkflowKey

_LATEST: Final = 64
"""Latest steps and preparations that count."""
_MOST_ROLES: Final = 1024
"""Agents, by workflow type, that a tool is learnt of; beyond, the least recently seen one is forgotten."""
_SAMPLES: Final = 9


@dataclass(slots=True, eq=False)
class _Role:
    """The steps of one agent in workflows without the tool: which needed it, and the seconds until they did."""

    needed: deque[bool] = field(default_factory=lambda: deque(maxlen=_LATEST))
    after_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))


class ToolUsage:
    """Of one tool.

    Args:
        setup_s: how long preparing takes until the first time is measured.
    """

    def __init__(self, setup_s: float) -> None:
        self._first = setup_s
        self._setups: deque[float] = deque(maxlen=_LATEST)
        self._roles: OrderedDict[tuple[str, str], _Role] = OrderedDict()

    @property
    def setup_s(self) -> float:
        """The median of the latest times of preparing."""
        return median(self._setups) if self._setups else self._first

    def prepared(self, seconds: float) -> None:
        """Preparing took so long."""
        self._setups.append(seconds)

    def stepped(self, workflow_type: str, agent: str, after_s: float | None) -> None:
        """A step of this agent needed the tool after so many seconds, or did not (None)."""
        role = self._roles.setdefault((workflow_type, agent), _Role())
        self._roles.move_to_end((workflow_type, agent))
        role.needed.append(after_s is not None)
        if after_s is not None:
            role.after_s.append(after_s)
        if len(self._roles) > _MOST_ROLES:
            self._roles.popitem(last=False)

    def probability(self, workflow_type: str, agent: str) -> float:
        """That a step of this agent needs the tool: n of N steps give n / (N + 1), so that what was never seen is not
        prepared for."""
        role = self._roles.get((workflow_type, agent))
        return sum(role.needed) / (len(role.needed) + 1) if role is not None else 0.0

    def after_s(self, workflow_type: str, agent: str) -> Sequence[float]:
        """Seconds from the beginning of such a step until it needs the tool, at evenly spaced quantiles."""
        role = self._roles.get((workflow_type, agent))
        if role is None or not role.after_s:
            return (0.0,)
        sorted_s = sorted(role.after_s)
        return [sorted_s[(2 * i + 1) * len(sorted_s) // (2 * _SAMPLES)] for i in range(_SAMPLES)]

    def to_json(self) -> bytes:
        """To keep over a restart."""
        roles = [
            [*key, {"needed": list(role.needed), "after_s": list(role.after_s)}] for key, role in self._roles.items()
        ]
        return msgspec.json.encode({"setups": list(self._setups), "roles": roles})

    def restore(self, kept: bytes) -> None:
        """Goes on from `to_json`."""
        restored = msgspec.json.decode(kept)
        self._setups.extend(restored["setups"])
        for workflow_type, agent, role in restored["roles"]:
            learnt = self._roles[workflow_type, agent] = _Role()
            learnt.needed.extend(role["needed"])
            learnt.after_s.extend(role["after_s"])


def start_in(needed_s: Sequence[float], probability: float, setup_s: float, wait_cost: float) -> float | None:
    """Seconds from now at which preparing should begin; None: only once it is asked for.

    Args:
        needed_s: equally likely seconds from now until the tool is needed; at least one.
        probability: that it is needed.
        setup_s: how long preparing takes.
        wait_cost: of a second in which a step waits for it, in seconds in which it is idle.
    """
    worth = probability * (1 + wait_cost)
    if worth < 1:
        return None
    before = math.ceil(len(needed_s) / worth)
    return max(0.0, sorted(needed_s)[before - 1] - setup_s)


def spare_s(setup_s: float, wait_cost: float) -> float:
    """Seconds for which a prepared tool that nobody needs is kept for others: until its idle time has cost as much as
    the wait that it could save, which is never more than twice the best choice in hindsight (the ski-rental rule)."""
    return setup_s * wait_cost


class Later(Protocol):
    """A call that is yet to come."""

    def cancel(self) -> object: ...  # noqa: D102


class ToolPort(Protocol):
    """Carries out what is decided."""

    def now(self) -> float:
        """Seconds since any fixed time, as events have them."""

    def later(self, seconds: float, call: Callable[[], None]) -> Later:
        """Calls after so many seconds."""

    def set_up(self, name: str, key: WorkflowKey) -> Resource:
        """Begins to prepare a tool; `ToolPlan.ready` or `ToolPlan.remove` follows."""

    def remove(self, resource: Resource) -> None:
        """Begins to remove a tool; `ToolPlan.gone` follows."""

    def keep(self, resource: Resource) -> None:
        """A tool has another state or workflow."""

    def changed(self) -> None:
        """Who waits may get one now."""


@dataclass(slots=True, eq=False)
class RunningWorkflow:
    """What is known of a running workflow.

    Attributes:
        seen: when something of it was last heard, seconds of the port's `now`.
        agent, began: agent of the step that runs or ran last, and when it began; None before the first.
        unneeded: tools that this step could still turn out to need, which the workflow did not have as it began.
        likely: those of them that it will probably ask for. A forecast of the next step changes nothing for these.
        planned: what will prepare a tool later.
    """

    seen: float
    agent: str | None = None
    began: float = 0.0
    unneeded: set[str] = field(default_factory=set)
    likely: set[str] = field(default_factory=set)
    planned: dict[str, Later] = field(default_factory=dict)


class ToolPlan:
    """The tools that there are, and who uses them or waits for them.

    Attributes:
        usage: by tool.
        resources: by id, in the order of their creation.
        workflows: the least recently heard of first.
        waiting: by tool, the workflows that have asked for one and have none in use, in the order in which they asked.
        counts: by tool and what happened: `prepared` (before anybody asked), `asked for` (on demand), `unneeded`
            (removed unused), `removed`.
    """

    def __init__(self, tools: Mapping[str, ToolSettings], port: ToolPort) -> None:
        self._tools, self._port = tools, port
        self.usage = {name: ToolUsage(settings.setup_s) for name, settings in tools.items()}
        self.resources: dict[str, Resource] = {}
        self.workflows: OrderedDict[WorkflowKey, RunningWorkflow] = OrderedDict()
        self.waiting: dict[str, list[WorkflowKey]] = {name: [] for name in tools}
        self.counts: Counter[tuple[str, str]] = Counter()

    # --- events ---

    def workflow(self, key: WorkflowKey) -> RunningWorkflow:
        """A workflow of which something is heard now."""
        workflow = self.workflows.get(key)
        if workflow is None:
            workflow = self.workflows[key] = RunningWorkflow(0.0)
        workflow.seen = self._port.now()
        self.workflows.move_to_end(key)
        return workflow

    def hear(self, key: WorkflowKey, event: LifecycleEvent) -> None:
        """Takes an event of a workflow other than its end."""
        workflow = self.workflow(key)
        if event.kind == "step.started":
            if workflow.agent is None or event.at >= workflow.began:
                self._begins(key, workflow, event)
        elif event.kind == "expected" and event.next_agents is not None and event.at >= workflow.began:
            returns = sorted((event.return_s or {"0.5": 0.0}).values())
            for name in self._without(key):
                if name in workflow.likely:
                    continue
                usage = self.usage[name]
                shares = {
                    agent: share * usage.probability(event.workflow_type, agent)
                    for agent, share in event.next_agents.items()
                }
                likeliest = max(shares, key=shares.__getitem__, default="")
                after = usage.after_s(event.workflow_type, likeliest)
                needed = [back + later for back in returns for later in after]
                self._plan(key, workflow, name, sum(shares.values()), needed, event.at)

    def end(self, key: WorkflowKey) -> None:
        """A workflow has ended: what it used is removed, what was prepared for it is for others."""
        workflow = self.workflows.pop(key, None)
        if workflow is not None:
            for planned in workflow.planned.values():
                planned.cancel()
            for name in workflow.unneeded & self._tools.keys():
                self.usage[name].stepped(key[1], workflow.agent or "", None)
        for resource in list(self._of(key)):
            if resource.state == "used":
                self.remove(resource)
            elif resource.state != "removing":
                self._free(resource)

    def _begins(self, key: WorkflowKey, workflow: RunningWorkflow, event: LifecycleEvent) -> None:
        """A step begins; the one before has shown whether it needed tools."""
        for name in workflow.unneeded & self._tools.keys():
            self.usage[name].stepped(event.workflow_type, workflow.agent or "", None)
        workflow.agent, workflow.began = event.agent, event.at
        workflow.unneeded, workflow.likely = set(self._without(key)), set()
        for name in self._without(key):
            usage = self.usage[name]
            probability = usage.probability(event.workflow_type, event.agent)
            if self._plan(key, workflow, name, probability, usage.after_s(event.workflow_type, event.agent), event.at):
                workflow.likely.add(name)

    def _plan(
        self,
        key: WorkflowKey,
        workflow: RunningWorkflow,
        name: str,
        probability: float,
        needed: Sequence[float],
        at: float,
    ) -> bool:
        """Prepares a tool for a workflow now or later, or frees what is prepared for it, if it will hardly need it.

        `needed` are seconds from `at`. Returns whether it may well need it.
        """
        planned = workflow.planned.pop(name, None)
        if planned is not None:
            planned.cancel()
        passed, setup_s = max(0.0, self._port.now() - at), self.usage[name].setup_s
        begin = start_in([seconds - passed for seconds in needed], probability, setup_s, self._tools[name].wait_cost)
        mine = self.mine(key, name)
        if mine is not None:
            if begin is None and key not in self.waiting[name]:
                self._free(mine)
        elif begin is not None and begin <= 0:
            self._prepare_for(key, name)
        elif begin is not None:
            workflow.planned[name] = self._port.later(begin, partial(self._prepare_for, key, name))
        return begin is not None

    def _prepare_for(self, key: WorkflowKey, name: str) -> None:
        """Prepares a tool for a workflow, if there is room; one that nobody needs becomes its own."""
        workflow = self.workflows.get(key)
        if workflow is None:
            return
        workflow.planned.pop(name, None)
        if self.mine(key, name) is not None or self.full(name, key[0], self.workflows):
            return
        spare = self._spare(name)
        if spare is not None:
            self._write(spare, workflow=key)
        elif self._room(name):
            self._create(name, key)
            self.counts[name, "prepared"] += 1

    # --- who gets one ---

    def used(self, key: WorkflowKey, name: str) -> Resource | None:
        """The tool that a workflow uses already."""
        return next((resource for resource in self._of(key, name) if resource.state == "used"), None)

    def mine(self, key: WorkflowKey, name: str) -> Resource | None:
        """The tool that a workflow has, in use or prepared for it."""
        return next((resource for resource in self._of(key, name) if resource.state != "removing"), None)

    def asks(self, key: WorkflowKey, name: str) -> None:
        """A workflow needs a tool from now on; it waits until it `leaves`."""
        workflow = self.workflows.get(key)
        if workflow is not None and name in workflow.unneeded:
            workflow.unneeded.discard(name)
            workflow.likely.discard(name)
            after_s = max(0.0, self._port.now() - workflow.began)
            self.usage[name].stepped(key[1], workflow.agent or "", after_s)
        self.waiting[name].append(key)

    def leaves(self, key: WorkflowKey, name: str) -> None:
        """It waits no longer: it has one, or goes without."""
        self.waiting[name].remove(key)
        for mine in self._of(key, name):
            if mine.state in ("preparing", "ready") and key not in self.waiting[name]:
                self._free(mine)
        self._port.changed()

    def claim(self, key: WorkflowKey, name: str) -> tuple[Resource | None, bool]:
        """The tool that a workflow which waits will get, if there is one for it now; first come, first served.

        Returns:
            The tool, and whether it was begun right now. `may_use` says whether it can be handed out.
        """
        mine = self.mine(key, name)
        if mine is None and key == self._next(name):
            mine = self._spare(name)
            if mine is not None:
                self._write(mine, workflow=key)
            elif self._room(name):
                self.counts[name, "asked for"] += 1
                return self._create(name, key), True
            else:
                self._make_room(name)
        return mine, False

    def may_use(self, key: WorkflowKey, resource: Resource) -> bool:
        """Whether a tool is this workflow's, ready, and within what its tenant may use."""
        return resource.state == "ready" and resource.workflow == key and not self.full(resource.tool, key[0])

    def hand(self, key: WorkflowKey, resource: Resource) -> None:
        """A workflow gets a tool that it may use."""
        self._write(resource, state="used", workflow=key)

    # --- what happens to tools ---

    def ready(self, resource: Resource, took_s: float) -> None:
        """A tool can be used, after so many seconds."""
        self.usage[resource.tool].prepared(took_s)
        if resource.state == "preparing":
            self._write(resource, state="ready", workflow=resource.workflow)
        self._port.changed()

    def remove(self, resource: Resource) -> None:
        """A tool is needed no longer."""
        if resource.state != "removing":
            resource.state, resource.at = "removing", self._port.now()
            self._port.remove(resource)

    def gone(self, resource: Resource) -> None:
        """Nothing is left of a tool."""
        self.resources.pop(resource.id, None)
        self.counts[resource.tool, "removed"] += 1
        self._port.changed()

    def of_tool(self, name: str) -> list[Resource]:
        """All of one kind."""
        return [resource for resource in self.resources.values() if resource.tool == name]

    def _of(self, key: WorkflowKey, name: str | None = None) -> list[Resource]:
        return [
            resource
            for resource in self.resources.values()
            if resource.workflow == key and name in (None, resource.tool)
        ]

    def _without(self, key: WorkflowKey) -> list[str]:
        """The tools that a workflow does not use."""
        used = {resource.tool for resource in self._of(key) if resource.state == "used"}
        return [name for name in self._tools if name not in used]

    def _room(self, name: str) -> bool:
        return len(self.of_tool(name)) < self._tools[name].most

    def full(self, name: str, tenant: str, claims: Collection[WorkflowKey] = ()) -> bool:
        """Whether the workflows of a tenant use as many as they may; what `claims` have prepared counts too."""
        most = self._tools[name].most_per_tenant
        if most is None:
            return False
        of_tenant = [
            resource
            for resource in self.of_tool(name)
            if resource.workflow is not None and resource.workflow[0] == tenant
        ]
        return (
            sum(
                resource.state == "used" or (resource.state != "removing" and resource.workflow in claims)
                for resource in of_tenant
            )
            >= most
        )

    def _next(self, name: str) -> WorkflowKey | None:
        """The workflow that has waited longest of those that have none and may have one."""
        for key in self.waiting[name]:
            if self.mine(key, name) is None and not self.full(name, key[0], self.waiting[name]):
                return key
        return None

    def _spare(self, name: str) -> Resource | None:
        """One that nobody needs, preferably ready."""
        free = [
            resource
            for resource in self.of_tool(name)
            if resource.workflow is None and resource.state in ("preparing", "ready")
        ]
        return min(free, key=lambda resource: (resource.state != "ready", resource.at), default=None)

    def _make_room(self, name: str) -> None:
        """Frees the tool that was last prepared for a workflow that has not asked for it or may not have it now, if
        there is any."""
        waiting = {key for key in self.waiting[name] if not self.full(name, key[0])}
        claimed = [resource for resource in self.of_tool(name) if resource.state in ("preparing", "ready")]
        early = [resource for resource in claimed if resource.workflow is not None and resource.workflow not in waiting]
        if early:
            self._free(max(early, key=lambda resource: resource.at))

    def _create(self, name: str, key: WorkflowKey) -> Resource:
        resource = self._port.set_up(name, key)
        self.resources[resource.id] = resource
        return resource

    def _free(self, resource: Resource) -> None:
        """Nobody needs it at present."""
        self._write(resource, workflow=None)
        self._port.changed()

    def _write(self, resource: Resource, *, state: State | None = None, workflow: WorkflowKey | None) -> None:
        if state is not None:
            resource.state = state
        resource.workflow, resource.at = workflow, self._port.now()
        self._port.keep(resource)
        if resource.state == "ready" and workflow is None:
            kept_s = spare_s(self.usage[resource.tool].setup_s, self._tools[resource.tool].wait_cost)
            self._port.later(kept_s, partial(self._unneeded, resource, resource.at))

    def _unneeded(self, resource: Resource, since: float) -> None:
        """Removes a tool that nobody has needed since then."""
        if resource.state == "ready" and resource.workflow is None and resource.at == since:
            self.counts[resource.tool, "unneeded"] += 1
            self.remove(resource)
