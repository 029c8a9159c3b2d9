"""Makes the events of running workflows where these are served, and passes them to subscribers in the same process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from itertools import count
from math import isfinite
from typing import Any, Final, Literal

from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.forecasting.forecasts import ReturnTimes
from presage.serving_hooks.lifecycle.event import LifecycleEvent, LifecycleKind, Subscriber
from presage.serving_hooks.modes import Switch
from presage.serving_hooks.workflows import EmittedEvents, EndReason, RunningStep, Workflow
from presage.serving_hooks.workflows.identity import Step, tenant_of, unscoped
from presage.serving_hooks.workflows.live import LiveForecast

_FINISH_REASONS: Final = frozenset(
    ("stop", "length", "tool_calls", "function_call", "content_filter", "repetition", "abort", "error")
)
"""Those that are shown; servers behind a gateway may answer with any text in their place."""


class LifecycleEvents:
    """Makes the events of the workflows of one process and passes them to the subscribers, in order of subscription.

    Args:
        server: what serves them.
        returns: forecasts of return times; None without any.
        now: seconds since 1970.
        instance: name of this process, unique over all.

    Attributes:
        switch: off once this code has failed.
    """

    def __init__(
        self,
        server: Literal["engine", "gateway"],
        returns: ReturnTimes | None,
        counts: EventCounts,
        now: Callable[[], float] = time.time,
        instance: str | None = None,
    ) -> None:
        self.switch = Switch("lifecycle events", counts)
        self._instance = instance or secrets.token_hex(4)
        self._source = f"/presage/{server}/{self._instance}"
        self._returns, self._counts, self._now = returns, counts, now
        self._numbers = count()
        self._subscribers: list[tuple[Switch, Subscriber]] = []

    @property
    def on(self) -> bool:
        """Whether somebody gets events; only then workflows have to be followed for them."""
        return bool(self._subscribers) and self.switch.on

    def subscribe(self, subscriber: Subscriber) -> None:
        """Calls `subscriber` with each event from now on."""
        self._subscribers.append((Switch("lifecycle events", self._counts), subscriber))

    def attempt(self, event: Callable[..., None], *args: Any) -> None:
        """Calls one of the methods below if somebody gets events. Does not raise."""
        if self._subscribers:
            self.switch.attempt(event, *args)

    def arrived(self, running: RunningStep) -> None:
        """A request of a workflow has arrived."""
        if running.workflow.emitted is None:
            self._latest("workflow.started", running.workflow)
        if running.opens:
            self._latest("step.started", running.workflow)

    def finished(self, running: RunningStep, finish_reason: str | None, output_tokens: int | None) -> None:
        """A step was answered, failed or was aborted."""
        reason = finish_reason if finish_reason in _FINISH_REASONS else None
        details = {"finish_reason": reason, "output_tokens": output_tokens}
        self._emit("step.finished", running.workflow, running.step, running.number, **details)

    def expected(self, workflow: Workflow, live: LiveForecast | None) -> None:
        """What is forecast for a workflow between two steps, if it is new and anything is known."""
        if workflow.requests:
            return
        emitted = self._emitted(workflow)
        away = self._returns.away(workflow) if self._returns is not None else None
        back = away[0] if away is not None and away[0].quantiles else None
        live = live if live is not None and len(live.probabilities) else None
        before, emitted.expected = emitted.expected, (live, back)
        if (live is None and back is None) or (live is before[0] and back is before[1]):
            return
        details: dict[str, Any] = {}
        if live is not None:
            details |= {"next_agents": dict(live.next_agents()), "end": live.end}
        elif back is not None:
            details["end"] = back.end
        if back is not None:
            seconds = zip(map(str, back.quantiles), back.seconds, strict=True)
            details["return_s"] = {quantile: round(value, 3) for quantile, value in seconds if isfinite(value)}
        self._latest("expected", workflow, **details)

    def held(self, workflow: Workflow, at_most_s: float | None) -> None:
        """A workflow waits until there is room for it; reported once until it is resumed."""
        if not self._emitted(workflow).held:
            self._emitted(workflow).held = True
            self._latest("held", workflow, at_most_s=at_most_s)

    def resumed(self, workflow: Workflow) -> None:
        """A workflow is no longer held."""
        if self._emitted(workflow).held:
            self._emitted(workflow).held = False
            self._latest("resumed", workflow)

    def ended(self, workflow: Workflow, reason: EndReason) -> None:
        """A workflow has ended; of its steps that still run, nothing more is told."""
        self._latest("ended", workflow, reason=reason.value)
        self._emitted(workflow).ended = True

    @staticmethod
    def _emitted(workflow: Workflow) -> EmittedEvents:
        if workflow.emitted is None:
            workflow.emitted = EmittedEvents()
        return workflow.emitted

    def _latest(self, kind: LifecycleKind, workflow: Workflow, **details: Any) -> None:
        self._emit(kind, workflow, workflow.step, workflow.latest, **details)

    def _emit(self, kind: LifecycleKind, workflow: Workflow, step: Step, number: int, **details: Any) -> None:
        emitted = self._emitted(workflow)
        if emitted.ended:
            return
        event = LifecycleEvent(
            f"{self._instance}-{next(self._numbers)}",
            kind,
            self._source,
            round(self._now(), 6),  # as CloudEvents have it
            step.sent[0],
            unscoped(step.workflow_id),
            emitted.sequence,
            max(0, number),
            step.sent[1],
            tenant_of(step.workflow_id),
            **details,
        )
        emitted.sequence += 1
        for switch, subscriber in self._subscribers:
            switch.attempt(subscriber, event)
