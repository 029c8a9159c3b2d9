"""Tools of workflows in virtual time: they take time to set up, only so many are there at once, and idle ones cost.

A request whose tool is late arrives as much later. `tool_service/planning.py` decides, as in the tool service. What is
replayed differs from it in three things: a workflow keeps a tool until it ends, setting up never fails, and removing
takes no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from presage.errors import EngineError
from presage.serving_hooks.lifecycle.emitter import expectation
from presage.serving_hooks.lifecycle.event import LifecycleEvent, LifecycleKind
from presage.serving_hooks.replay.metrics import Figures, ToolLife, VirtualClock
from presage.serving_hooks.replay.policies import AT_START, EXPECTED, NO_SETUP
from presage.serving_hooks.replay.tools_file import tool_of
from presage.serving_hooks.replay.workload import JobStep, ReplayJob
from presage.serving_hooks.tool_service.config import ToolSettings
from presage.serving_hooks.tool_service.planning import ToolPlan
from presage.serving_hooks.tool_service.resources import Resource, WorkflowKey
from presage.serving_hooks.workflows.identity import Step, tenant_of

CallAt = Callable[[float, Callable[[], None]], None]
"""Calls at a time, seconds of the virtual clock, among all that happens in the order of time."""


class _Timer:
    """A call that is yet to come."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """It will not come."""
        self.call = None


class ReplayTools:
    """The tools of one run.

    Args:
        tools: by name.
        preparation: one of `policies.PREPARATIONS`.
        seed: of the times of set-up.
        agents, returns: sources of forecasts, for `expected`.
        clock: theirs.

    Attributes:
        lives: of all tools that were set up, in the order in which that began.
        waits: of calls: number of the job, from when to when.
        limit_waits: calls that waited since as many tools were there as may be.
    """

    def __init__(
        self,
        jobs: Sequence[ReplayJob],
        tools: Mapping[str, ToolSettings],
        preparation: str,
        seed: int,
        clock: VirtualClock,
        agents: Any = None,
        returns: Any = None,
    ) -> None:
        self._jobs, self._tools, self._preparation, self._seed = jobs, tools, preparation, seed
        self._clock, self._agents, self._returns = clock, agents, returns
        self._plan = ToolPlan(tools, self)
        self._keys = [(tenant_of(job.workflow_id), job.workflow_type, job.workflow_id) for job in jobs]
        self._numbers = {key: number for number, key in enumerate(self._keys)}
        self._running = [0] * len(jobs)
        self._calling: dict[tuple[WorkflowKey, str], list[tuple[float, Callable[[float], None]]]] = {}
        self._had: set[tuple[WorkflowKey, str]] = set()  # calls of these workflows have had these tools
        self._of: dict[str, ToolLife] = {}  # by id, those that are there
        self._dirty = False
        self._call_at: CallAt
        self.lives: list[ToolLife] = []
        self.waits: list[tuple[int, float, float]] = []
        self.limit_waits = 0
        self._limit_waited_s = 0.0

    def attach(self, call_at: CallAt) -> None:
        """Takes what the virtual time is told by."""
        self._call_at = call_at

    # --- what happens to workflows ---

    def began(self, number: int, at_s: float) -> None:
        """A job begins."""
        self._now(at_s)
        if self._preparation == AT_START:
            for name in self._tools:
                self._plan.asks(self._keys[number], name)
        self._settle()

    def arrived(self, number: int, index: int, at_s: float) -> None:
        """A request of a job arrives."""
        if self._preparation != EXPECTED:
            return
        self._now(at_s)
        job, one = self._jobs[number], self._jobs[number].steps[index]
        self._running[number] += 1
        self._returns.arrived(_step(job, index), one.prompt_tokens, self._clock.now)
        self._agents.on_prefill(
            job.workflow_type, job.workflow_id, one.agent, step=index, input_tokens=one.prompt_tokens
        )
        self._hear(number, index, "step.started")

    def answered(self, number: int, index: int, at_s: float, ended: bool) -> None:
        """A request has its last token, which has ended the job or not."""
        self._call_at(at_s, partial(self._answered, number, index, at_s, ended))

    def follow(
        self, step: JobStep, number: int, ended_s: float, call_at: CallAt, arrive: Callable[[float], None]
    ) -> None:
        """The last parent of a step has ended: calls `arrive` with the seconds that tools are late, once all are there.

        Args:
            call_at: calls in the turn of the step, among all that happens at one time.
        """
        key = self._keys[number]
        named = [(tool_of(call.tool, self._tools), call.after_s) for call in step.after_tools]
        calls = [(tool, after_s) for tool, after_s in named if tool is not None and (key, tool) not in self._had]
        self._follow(key, ended_s, calls, call_at, arrive, 0.0)

    def check_ended(self) -> None:
        """Checks that nobody waits.

        Raises:
            EngineError: workflows wait for tools of one another.
        """
        if self._calling:
            names = sorted({name for _, name in self._calling})
            raise EngineError(
                f"{len(self._calling)} workflows wait for {' and '.join(names)}, and those that have one wait for "
                "another tool: no more fit. Raise most"
            )

    def figures(self) -> Figures:
        """The figures of tools beside those of every replay.

        Returns:
            tools_set_up, tools_unused: tools that were set up, and of these, those that no call ever needed.
            tools_at_once: the most at one time.
            tool_setup_waited_s: seconds of set-up for which calls waited, in all.
            tool_hidden_share: share of the set-up of needed tools for which nobody waited; if it took any time.
            tool_limit_waits, tool_limit_waited_s: how often a call waited since no more tools may be there, and for how
                long, in all.
            tool_idle_s: tools times seconds in which they were ready, and no call had needed them yet.
            tool_held_s: tools times seconds from the beginning of their set-up to their removal.
        """
        needed = [life for life in self.lives if life.needed_s is not None]
        set_up_s = sum(life.ready_s - life.began_s for life in needed)
        waited_s = sum(life.waited_s for life in needed)
        changes = [(life.began_s, 1) for life in self.lives] + [(life.gone_s, -1) for life in self.lives]
        at_once = np.cumsum([change for _, change in sorted(changes)])
        idle_s = [
            max(0.0, (life.gone_s if life.needed_s is None else life.needed_s) - life.ready_s) for life in self.lives
        ]
        found = {
            "tools_set_up": float(len(self.lives)),
            "tools_unused": float(len(self.lives) - len(needed)),
            "tools_at_once": float(at_once.max()) if len(at_once) else 0.0,
            "tool_setup_waited_s": waited_s,
            "tool_limit_waits": float(self.limit_waits),
            "tool_limit_waited_s": self._limit_waited_s,
            "tool_idle_s": sum(idle_s),
            "tool_held_s": sum(life.gone_s - life.began_s for life in self.lives),
        }
        return found | ({"tool_hidden_share": 1.0 - waited_s / set_up_s} if set_up_s > 0 else {})

    # --- what the plan decides ---

    def now(self) -> float:
        """Seconds of the virtual clock."""
        return self._clock.now

    def later(self, seconds: float, call: Callable[[], None]) -> _Timer:
        """Calls after so many seconds."""
        timer, at_s = _Timer(call), self._clock.now + seconds
        self._call_at(at_s, partial(self._due, timer, at_s))
        return timer

    def set_up(self, name: str, key: WorkflowKey) -> Resource:
        """Begins to set a tool up."""
        now, setup_s = self._clock.now, self._setup_s(name, key)
        resource = Resource(f"{len(self.lives)}", name, "preparing" if setup_s else "ready", key, now, {})
        life = self._of[resource.id] = ToolLife(name, self._numbers[key], now, now + setup_s)
        self.lives.append(life)
        if setup_s:
            self.later(setup_s, partial(self._ready, resource, setup_s))
        return resource

    def remove(self, resource: Resource) -> None:
        """Removes a tool; one that is being set up too."""
        self._of.pop(resource.id).gone_s = self._clock.now
        self._plan.gone(resource)

    def keep(self, resource: Resource) -> None:
        """Nothing to keep: a replay does not go on after a restart."""

    def changed(self) -> None:
        """Who waits may get a tool now."""
        self._dirty = True

    def _setup_s(self, name: str, key: WorkflowKey) -> float:
        """The same for a workflow under every preparation but `no-setup`."""
        settings = self._tools[name]
        if self._preparation == NO_SETUP:
            return 0.0
        if not settings.replay.setup_sigma:
            return settings.setup_s
        rng = np.random.default_rng([self._seed, self._numbers[key], list(self._tools).index(name)])
        return float(rng.lognormal(math.log(settings.setup_s), settings.replay.setup_sigma))

    def _ready(self, resource: Resource, took_s: float) -> None:
        if resource.id in self._of:
            self._plan.ready(resource, took_s)

    def _due(self, timer: _Timer, at_s: float) -> None:
        self._now(at_s)
        if timer.call is not None:
            timer.call()
            self._settle()

    def _now(self, at_s: float) -> None:
        """Time has come this far; a job that waited to begin has arrived earlier."""
        self._clock.now = max(self._clock.now, at_s)

    def _hear(self, number: int, index: int, kind: LifecycleKind, **details: Any) -> None:
        (tenant, workflow_type, workflow_id), now = self._keys[number], self._clock.now
        agent = self._jobs[number].steps[index].agent
        event = LifecycleEvent("", kind, "", now, workflow_type, workflow_id, 0, index, agent, tenant, **details)
        self._plan.hear(self._keys[number], event)
        self._settle()

    def _answered(self, number: int, index: int, at_s: float, ended: bool) -> None:
        self._now(at_s)
        if self._preparation == EXPECTED:
            job, one, step = self._jobs[number], self._jobs[number].steps[index], _step(self._jobs[number], index)
            self._running[number] -= 1
            live = self._agents.on_completion(job.workflow_type, job.workflow_id, output_tokens=one.output_tokens)
            back = self._returns.completed(step, one.output_tokens, one.finish_reason, at_s)
            if one.finish_reason is not None or one.tools is not None:
                back = self._returns.answered(step, one.finish_reason, one.tools) or back
            details = expectation(live if len(live.probabilities) else None, back if back.quantiles else None)
            if ended:
                self._agents.close(job.workflow_type, job.workflow_id)
                self._returns.ended(step.workflow)
            elif not self._running[number] and details:
                self._hear(number, index, "expected", **details)
        if ended:
            key = self._keys[number]
            self._plan.end(key)
            for name, waiting in self._plan.waiting.items():
                if key in waiting:  # since its start, and it never needed one
                    self._plan.leaves(key, name)
            self._settle()

    def _follow(
        self,
        key: WorkflowKey,
        ended_s: float,
        calls: Sequence[tuple[str, float]],
        call_at: CallAt,
        arrive: Callable[[float], None],
        late_s: float,
    ) -> None:
        """As `follow`; calls that come after a late one are as late."""
        if not calls:
            arrive(late_s)
            return
        (name, after_s), *others = calls
        at_s = ended_s + after_s + late_s
        then = partial(self._follow, key, ended_s, others, call_at, arrive)
        call_at(at_s, partial(self._need, key, name, at_s, lambda waited_s: then(late_s + waited_s)))

    def _need(self, key: WorkflowKey, name: str, at_s: float, then: Callable[[float], None]) -> None:
        """A call needs a tool now."""
        self._now(at_s)
        if key not in self._plan.waiting[name] and self._plan.used(key, name) is None:
            self._plan.asks(key, name)
        self._calling.setdefault((key, name), []).append((at_s, then))
        self._hand_out(key, name)
        self._settle()
        if (key, name) in self._calling and self._plan.mine(key, name) is None:
            self.limit_waits += 1

    def _settle(self) -> None:
        """Hands out what can be handed out."""
        self._dirty = True
        while self._dirty:
            self._dirty = False
            for name, waiting in self._plan.waiting.items():
                for key in list(waiting):
                    resource, _ = self._plan.claim(key, name)
                    if resource is not None and self._plan.may_use(key, resource):
                        self._plan.hand(key, resource)
                        self._plan.leaves(key, name)
                        self._hand_out(key, name)

    def _hand_out(self, key: WorkflowKey, name: str) -> None:
        """The calls of a workflow go on, if it has the tool."""
        used, now = self._plan.used(key, name), self._clock.now
        if used is None:
            return
        life = self._of[used.id]
        for asked_s, then in self._calling.pop((key, name), ()):
            self._had.add((key, name))
            if life.needed_s is None:
                life.needed_s = asked_s
                life.waited_s = max(0.0, life.ready_s - max(asked_s, life.began_s))
                self._limit_waited_s += now - asked_s - life.waited_s
            if now > asked_s:
                self.waits.append((self._numbers[key], asked_s, now))
            then(now - asked_s)


def _step(job: ReplayJob, index: int) -> Step:
    return Step(job.workflow_type, job.workflow_id, job.steps[index].agent, index)
