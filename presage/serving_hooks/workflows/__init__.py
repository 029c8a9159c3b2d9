"""The table of running workflows: it alone decides when a workflow begins and ends.

What is known of a workflow stands in its record, and is gone with it. Components that keep more elsewhere subscribe,
and drop it when the table announces the end. It announces each end once; the workflow's remaining requests are then
served as requests without a workflow.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final

from presage.serving_hooks.counts import EVENTS, METADATA_LEFT_OUT, EventCounts
from presage.serving_hooks.workflows.choices import Choices
from presage.serving_hooks.workflows.identity import Step, tenant_of
from presage.serving_hooks.workflows.quiet import QuietLimits

if TYPE_CHECKING:
    from presage.continuation import PromptedWorkflow
    from presage.serving_hooks.forecasting.live import LiveForecast, LiveLengths
    from presage.serving_hooks.policies.accounts import Account
    from presage.serving_hooks.policies.next_use import ReturnCurve

TIME_TO_LIVE_S: Final = 600.0
"""The default: longer than most tools take."""

MOST_WORKFLOWS: Final = 100_000
"""Running at once, by default. Requests of further workflows are counted, and served as requests without one."""

QUIET_LEAST_S: Final = 1.0
"""No workflow ends sooner by being quiet."""
_LOOK_AGAIN_S: Final = 10.0
"""Seconds after which a quiet workflow is looked at again: its type may return sooner than it did."""
_MOST_ENDED: Final = 4096
"""Workflows that ended by being quiet, and may come back."""

TENANT_SHARE: Final = 4
"""One tenant may have a fourth of them, so that no tenant can fill the table."""


class EndReason(StrEnum):
    """Why a workflow ended."""

    FINISHED = "finished"
    """Its client ended it: with its last step, or over HTTP."""
    EXPIRED = "expired"
    """It had no request in the engine for its time to live."""
    ABORTED = "aborted"
    """Its last step was aborted, or its trace was truncated."""


@dataclass(slots=True, eq=False)
class WorkflowForecasts:
    """The latest forecasts for a workflow (`vllm/step_forecasts.py`); times are seconds of the engine's clock.

    Attributes:
        next_agents: as its latest step began or completed; None if none was made, or it no longer holds.
        growth: tokens by which its context still grows; None without a forecast.
        curve: of its return time from `since`; None while a step is computed, or without a forecast.
        hold: of the end of a hold by admission, and since when; None while it is not held.
        arrived_at: when its latest step arrived.
        started: the request that has started last.
        unanswered: request and forecast of the step that completed last, while features of its answer may come.
        calling: likewise, while the tools that its answer calls may come.
        pending: what retention has not received yet: a step, its forecast, and the rows of it that still hold.
    """

    next_agents: LiveForecast | None = None
    growth: LiveLengths | None = None
    curve: ReturnCurve | None = None
    since: float = 0.0
    hold: tuple[ReturnCurve, float] | None = None
    arrived_at: float | None = None
    started: str | None = None
    unanswered: tuple[str, LiveForecast] | None = None
    calling: tuple[str, LiveForecast] | None = None
    pending: tuple[Step, LiveForecast | None, slice | None] | None = None


@dataclass(slots=True, eq=False)
class RunningStep:
    """A request in the engine that is a step of a workflow, or one of several choices of it.

    Attributes:
        opens: whether the step arrives with this request; False for further choices of it.
        remaining_tokens: output tokens of this step and all later ones, by which it is ranked; None if unknown.
        awaits_state: the forecast that its prefill state may renew.
        preempted: whether it must be computed again.
        state_comes: whether the recorder gets its completion state later.
    """

    request_id: str
    step: Step
    workflow: Workflow
    opens: bool = True
    remaining_tokens: float | None = None
    awaits_state: LiveForecast | None = None
    preempted: bool = False
    state_comes: bool = False


_NO_REQUESTS: Final[dict[str, RunningStep]] = {}
"""Shared by workflows without requests, which are most; never written to."""


@dataclass(slots=True, eq=False)
class Workflow:
    """A running workflow: everything that is known of it.

    Attributes:
        step: the latest to arrive.
        arrived_at: when its first request arrived, seconds of the table's clock.
        active_at: when one of its requests last arrived or left, seconds of the table's clock.
        steps: how many have arrived.
        requests: its steps in the engine, by request id.
        forecasts: the latest for it.
        account: what admission decides on; None where it is off.
        recorded: the request by which the recorder knows its latest completed step, until the answer was parsed.
        prompted: what its prompts were, as identity is inferred from them; None for most named workflows.
    """

    step: Step
    arrived_at: float
    active_at: float
    steps: int = 0
    requests: dict[str, RunningStep] = field(default_factory=lambda: _NO_REQUESTS)
    forecasts: WorkflowForecasts = field(default_factory=WorkflowForecasts)
    account: Account | None = None
    recorded: str | None = None
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
        self._subscribers: list[Subscriber] = []
        self._quiet = QuietLimits()
        self._due: list[tuple[float, int, str, float]] = []
        self._order = count()
        self._ended_quiet: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Workflow]:
        """The running workflows, least recently active first."""
        return iter(self._running.values())

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
            now = self._clock()
            running = self._running[workflow] = Workflow(step, now, now)
            self._came_back(workflow, step, now)
        else:
            now = self._clock()
            if not running.requests:
                self._quiet.returned(step.stats_key, now - running.active_at, running.steps + 1)
            running.step, running.active_at = step, now
            self._running.move_to_end(workflow)
        running.steps += 1
        running.requests = running.requests or {}
        made = RunningStep(request_id, step, running)
        running.requests[request_id] = self._steps[request_id] = made
        return made

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
            if not running.requests:
                self._look_again(running)
        return left

    def end(self, workflow: str, reason: EndReason) -> bool:
        """Ends the workflow with this key and announces it; False if it is not running."""
        running = self._running.pop(workflow, None)
        if running is None:
            return False
        self.ends[reason] += 1
        if reason is not EndReason.EXPIRED:
            self._quiet.told(running.step.stats_key)
        tenant = tenant_of(running.step.workflow_id)
        self._of_tenant[tenant] -= 1
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
        for announce in self._subscribers:
            announce(running, reason)
        for request_id in running.requests:
            del self._steps[request_id]
        return True

    def expire(self) -> None:
        """Ends the workflows whose time to live has passed. Costs O(expired workflows + busy ones before them)."""
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            _, _, workflow, active_at = heappop(self._due)
            running = self._running.get(workflow)
            if running is None or running.requests or running.active_at != active_at:
                continue
            if now > active_at + self._quiet_s(running):
                self._ended_quiet[workflow] = active_at
                if len(self._ended_quiet) > _MOST_ENDED:
                    self._ended_quiet.popitem(last=False)
                self.end(workflow, EndReason.EXPIRED)
            else:
                self._look_again(running)
        while self._running:
            workflow, running = next(iter(self._running.items()))
            if now - running.active_at < self._time_to_live_s:
                return
            if running.requests:  # a request in the engine keeps its workflow
                running.active_at = now
                self._running.move_to_end(workflow)
            else:
                self.end(workflow, EndReason.EXPIRED)

    def _quiet_s(self, running: Workflow) -> float:
        """Seconds without a request after which it has probably ended."""
        return max(QUIET_LEAST_S, self._quiet.seconds(running.step.stats_key))

    def _look_again(self, running: Workflow) -> None:
        now, active_at = self._clock(), running.active_at
        due = min(max(now, active_at + self._quiet_s(running)), now + _LOOK_AGAIN_S)
        heappush(self._due, (due, next(self._order), running.key, active_at))

    def _came_back(self, workflow: str, step: Step, now: float) -> None:
        """A workflow begins; if it was ended too early, its return is one after all."""
        active_at = self._ended_quiet.pop(workflow, None)
        if active_at is not None:
            self._quiet.returned(step.stats_key, now - active_at, 1)
            self._counts.add(EVENTS, "workflows that came back after their end")

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {
            "workflows": len(self._running),
            "requests": len(self._steps),
            "choices": len(self.choices),
            "tenants": len(self._of_tenant),
        }
