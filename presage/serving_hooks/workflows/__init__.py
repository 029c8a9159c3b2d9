"""The table of running workflows: it alone decides when a workflow begins and ends.

What is known of a workflow stands in its record, and is gone with it. Components that keep more elsewhere subscribe,
and drop it when the table announces the end. It announces each end once; the workflow's remaining requests are then
served as requests without a workflow.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from presage.serving_hooks.counts import METADATA_LEFT_OUT, EventCounts
from presage.serving_hooks.workflows.choices import Choices
from presage.serving_hooks.workflows.identity import Step, tenant_of
from presage.serving_hooks.workflows.recorded import RecordedStep, RecordedWorkflow

if TYPE_CHECKING:
    from presage.continuation import PromptedWorkflow
    from presage.serving_hooks.policies.accounts import Account
    from presage.serving_hooks.policies.next_use import ReturnCurve
    from presage.serving_hooks.workflows.live import LiveForecast, LiveLengths, LiveReturn

TIME_TO_LIVE_S: Final = 600.0
"""The default: longer than most tools take."""

PAUSED_S: Final = 3 * 86_400.0
"""How long a workflow is kept whose client says that it pauses: a human may answer after a weekend."""

MOST_WORKFLOWS: Final = 100_000
"""Running at once, by default. Requests of further workflows are counted, and served as requests without one."""

TENANT_SHARE: Final = 4
"""One tenant may have a fourth of them, so that no tenant can fill the table."""


MOST_TYPES_OF_TENANT: Final = 1000
"""Workflow types of a tenant that are shown to it, the latest."""


class EndReason(StrEnum):
    """Why a workflow ended."""

    FINISHED = "finished"
    """Its client ended it: with its last step, or over HTTP."""
    EXPIRED = "expired"
    """It had no request in the engine for its time to live."""
    ABORTED = "aborted"
    """Its last step was aborted, or its trace was truncated."""


class PartState:
    """What a part of an engine or a gateway keeps of one running workflow."""

    __slots__ = ()


class Hold(NamedTuple):
    """Admission holds a workflow: when the hold ends, and since when it lasts."""

    ends: ReturnCurve
    since: float


class CompletedForecast(NamedTuple):
    """The forecast made as a request completed."""

    request_id: str
    forecast: LiveForecast


class PendingForecast(NamedTuple):
    """What retention has not received yet: a step, its forecast, and the rows of it that still hold."""

    step: Step
    forecast: LiveForecast | None
    rows: slice | None


@dataclass(slots=True, eq=False)
class WorkflowForecasts:
    """The latest forecasts for a workflow (`vllm/step_forecasts.py`); times are seconds of the engine's clock.

    Attributes:
        next_agents: as its latest step began or completed; None if none was made, or it no longer holds.
        growth: tokens by which its context still grows; None without a forecast.
        curve: of its return time from `since`; None while a step is computed, or without a forecast.
        hold: by admission; None while it is not held.
        arrived_at: when its latest step arrived.
        started: the request that has started last.
        unanswered: of the step that completed last, while features of its answer may come.
        calling: likewise, while the tools that its answer calls may come.
        pending: for retention; None once it has received it.
    """

    next_agents: LiveForecast | None = None
    growth: LiveLengths | None = None
    curve: ReturnCurve | None = None
    since: float = 0.0
    hold: Hold | None = None
    arrived_at: float | None = None
    started: str | None = None
    unanswered: CompletedForecast | None = None
    calling: CompletedForecast | None = None
    pending: PendingForecast | None = None


@dataclass(slots=True, eq=False)
class EmittedEvents:
    """What the lifecycle events of a workflow go on from (`lifecycle/emitter.py`).

    Attributes:
        sequence: number of the next event.
        held: whether it was reported as held.
        ended: whether its end was: nothing follows.
        expected: the forecasts that were emitted last, of next agents and of the return time.
    """

    sequence: int = 0
    held: bool = False
    ended: bool = False
    expected: tuple[LiveForecast | None, LiveReturn | None] = (None, None)


@dataclass(slots=True, eq=False)
class RunningStep:
    """A request in the engine that is a step of a workflow, or one of several choices of it.

    Attributes:
        opens: whether the step arrives with this request; False for further choices of it.
        number: in its workflow, from 0.
        remaining_tokens: output tokens of this step and all later ones, by which it is ranked; None if unknown.
        awaits_state: the forecast that its prefill state may renew.
        preempted: whether it must be computed again.
        state_comes: whether the recorder gets its completion state later.
        recorded: where it is recorded; None if it is not.
    """

    request_id: str
    step: Step
    workflow: Workflow
    opens: bool = True
    number: int = 0
    remaining_tokens: float | None = None
    awaits_state: LiveForecast | None = None
    preempted: bool = False
    state_comes: bool = False
    recorded: RecordedStep | None = None


_NO_REQUESTS: Final[dict[str, RunningStep]] = {}
"""Shared by workflows without requests, which are most; never written to."""


@dataclass(slots=True, eq=False)
class Workflow:
    """A running workflow: everything that is known of it. Offline callers of forecasts make one of a step alone.

    Attributes:
        step: the latest to arrive.
        arrived_at: when its first request arrived, seconds of the table's clock.
        active_at: when one of its requests last arrived or left, seconds of the table's clock.
        steps: how many have arrived.
        latest: the number of the latest step, from 0.
        left_by, left_at: workflow type and agent of the step that left last, and when.
        left_agent: the agent of that step as the client sent it, in engine and gateway alike; None before.
        deadline_at: when it has to have ended; infinity without a deadline.
        paused_until: when it expires though it pauses; 0 while it does not.
        requests: its steps in the engine, by request id.
        forecasts: the latest for it.
        forecast_state, context_state, return_state: what the sources of next agents, context growth and return times go
            on from; None before its first forecast.
        account: what admission decides on; None where it is off.
        last_place: where its last request to a pool of models went; None before.
        prefill: sent or planned for its next request; None without one.
        run: where it is recorded; None if it is not, or no step has begun.
        recorded: the request by which the recorder knows its latest completed step, until the answer was parsed.
        emitted: of its lifecycle events; None where nobody gets them.
        prompted: what its prompts were, as identity is inferred from them; None for most named workflows.
    """

    step: Step
    arrived_at: float = 0.0
    active_at: float = 0.0
    steps: int = 0
    latest: int = -1
    left_by: tuple[str, str] | None = None
    left_at: float = 0.0
    left_agent: str | None = None
    deadline_at: float = math.inf
    paused_until: float = 0.0
    requests: dict[str, RunningStep] = field(default_factory=lambda: _NO_REQUESTS)
    forecasts: WorkflowForecasts = field(default_factory=WorkflowForecasts)
    forecast_state: PartState | None = None
    context_state: PartState | None = None
    return_state: PartState | None = None
    account: Account | None = None
    last_place: PartState | None = None
    prefill: PartState | None = None
    run: RecordedWorkflow | None = None
    recorded: str | None = None
    emitted: EmittedEvents | None = None
    prompted: PromptedWorkflow | None = None

    @property
    def key(self) -> str:
        """Its key in the table."""
        return self.step.workflow


Subscriber = Callable[[Workflow, EndReason], object]
"""Called once when a workflow has ended, with its `requests` at that moment. Must not raise."""


class WorkflowTable:
    """The running workflows, least recently active first, and which requests are their steps.

    Args:
        time_to_live_s: seconds without a request after which a workflow expires; longer than tools take.
        counts: of workflows refused because the table was full.
        most: workflows running at once.

    Attributes:
        choices: the requests that are one step together.
    """

    def __init__(
        self,
        time_to_live_s: float,
        clock: Callable[[], float],
        counts: EventCounts | None = None,
        most: int = MOST_WORKFLOWS,
    ) -> None:
        self.ends: Counter[EndReason] = Counter()
        self.choices = Choices()
        self._time_to_live_s, self._clock, self._most = time_to_live_s, clock, most
        self._counts = EventCounts() if counts is None else counts
        self._running: OrderedDict[str, Workflow] = OrderedDict()
        self._steps: dict[str, RunningStep] = {}
        self._of_tenant: Counter[str] = Counter()
        self._types: dict[str, OrderedDict[str, None]] = {}
        self._subscribers: list[Subscriber] = []

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Workflow]:
        """The running workflows, least recently active first."""
        return iter(self._running.values())

    def __reversed__(self) -> Iterator[Workflow]:
        return reversed(self._running.values())

    def __contains__(self, workflow: str) -> bool:
        """Whether the workflow with this key is running."""
        return workflow in self._running

    def get(self, workflow: str) -> Workflow | None:
        """The workflow with this key, if it is running."""
        return self._running.get(workflow)

    def step(self, request_id: str) -> RunningStep | None:
        """A request in the engine as a step; None if it belongs to no running workflow."""
        return self._steps.get(request_id)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Calls `subscriber` at the end of each workflow, in the order of subscription."""
        self._subscribers.append(subscriber)

    def arrived(self, request_id: str, step: Step) -> RunningStep | None:
        """Records that a request enters the engine as this step; None if the table has no room for its workflow."""
        workflow = step.workflow
        running = self._running.get(workflow)
        if running is None:
            tenant = tenant_of(step.workflow_id)
            if len(self._running) >= self._most:
                self._counts.add(METADATA_LEFT_OUT, "workflows", "too many")
                return None
            if tenant and self._of_tenant[tenant] >= max(1, self._most // TENANT_SHARE):
                self._counts.add(METADATA_LEFT_OUT, "workflows", "too many of one tenant")
                return None
            self._of_tenant[tenant] += 1
            if tenant:
                self._note_type(tenant, step.workflow_type)
            now = self._clock()
            running = self._running[workflow] = Workflow(step, now, now)
        else:
            running.step, running.active_at, running.paused_until = step, self._clock(), 0.0
            self._running.move_to_end(workflow)
        running.steps += 1
        running.requests = running.requests or {}
        opens = self.choices.arrives(request_id, step)
        if opens:
            running.latest = running.latest + 1 if step.number is None else step.number
        made = RunningStep(request_id, step, running, opens, running.latest)
        running.requests[request_id] = self._steps[request_id] = made
        return made

    def running_of(self, tenant: str) -> int:
        """How many workflows of a tenant are running."""
        return self._of_tenant[tenant]

    def types_of(self, tenant: str) -> Collection[str]:
        """The workflow types of a tenant's latest workflows."""
        return list(self._types.get(tenant, ()))

    def _note_type(self, tenant: str, workflow_type: str) -> None:
        types = self._types.setdefault(tenant, OrderedDict())  # as many as the server has keys
        types[workflow_type] = None
        types.move_to_end(workflow_type)
        if len(types) > MOST_TYPES_OF_TENANT:
            types.popitem(last=False)

    def finished(self, request_id: str) -> RunningStep | None:
        """Records that a request leaves the engine, completed or not; returns the step that it was."""
        left = self._steps.pop(request_id, None)
        if left is not None:
            running = left.workflow
            del running.requests[request_id]
            if not running.requests:
                running.requests = _NO_REQUESTS  # an emptied dict keeps its size
            running.active_at = self._clock()
            self._running.move_to_end(running.key)
        return left

    def end(self, workflow: str, reason: EndReason) -> bool:
        """Ends the workflow with this key and announces it; False if it is not running."""
        running = self._running.pop(workflow, None)
        if running is None:
            return False
        self.ends[reason] += 1
        tenant = tenant_of(running.step.workflow_id)
        self._of_tenant[tenant] -= 1
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
        for announce in self._subscribers:
            announce(running, reason)
        for request_id in running.requests:
            del self._steps[request_id]
        return True

    def pause(self, workflow: str) -> bool:
        """Keeps the workflow with this key until its next request, `PAUSED_S` at most; False if it is not running."""
        running = self._running.get(workflow)
        if running is not None:
            running.paused_until = self._clock() + PAUSED_S
        return running is not None

    def expire(self) -> None:
        """Ends the workflows whose time to live has passed. Costs O(expired workflows + busy ones before them)."""
        now = self._clock()
        while self._running:
            workflow, running = next(iter(self._running.items()))
            if now - running.active_at < self._time_to_live_s:
                return
            if running.requests or now < running.paused_until:  # a request in the engine keeps its workflow
                running.active_at = now
                self._running.move_to_end(workflow)
            else:
                self.end(workflow, EndReason.EXPIRED)

    def clear_some(self, most: int) -> bool:
        """Ends up to `most` workflows as expired, in whatever state a failure has left them; returns whether all are.

        Their requests are served as requests without a workflow.
        """
        for _ in range(min(most, len(self._running))):
            _, running = self._running.popitem(last=False)
            for announce in self._subscribers:
                announce(running, EndReason.EXPIRED)
        if self._running:
            return False
        self._steps.clear()
        self._of_tenant.clear()
        self.choices.clear()
        return True

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {
            "workflows": len(self._running),
            "requests": len(self._steps),
            "choices": len(self.choices),
            "tenants": len(self._of_tenant),
        }
