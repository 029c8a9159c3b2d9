"""Passes the events of requests on as lifecycle events of workflows."""

from __future__ import annotations

from collections.abc import Sequence

from presage.serving_hooks.lifecycle.emitter import LifecycleEvents
from presage.serving_hooks.listeners import Listener
from presage.serving_hooks.workflows import EndReason, RunningStep, Workflow
from presage.serving_hooks.workflows.choices import LeftStep


class LifecycleListener(Listener[object]):
    """Emits the events of workflows. It stands behind the forecasts, which it reads in the record."""

    def __init__(self, events: LifecycleEvents) -> None:
        self.switch, self._events = events.switch, events

    def request_arrived(self, request: object, step: RunningStep | None) -> None:
        """A step arrives."""
        if step is not None:
            self._events.attempt(self._events.arrived, step)

    def request_finished(self, request: object, step: RunningStep | None, left: LeftStep | None) -> None:
        """A step leaves; what is expected next was just forecast."""
        if step is None or left is None:
            return
        self._events.attempt(self._events.finished, step, left.finish_reason, left.output_tokens)
        if not step.step.last:
            self._events.attempt(self._events.expected, step.workflow, step.workflow.forecasts.next_agents)

    def answer_parsed(self, workflow: Workflow, finish_reason: str | None, tools: Sequence[str] | None) -> None:
        """The answer of the latest step was parsed, which may have renewed the forecasts."""
        self._events.attempt(self._events.expected, workflow, workflow.forecasts.next_agents)

    def workflow_ended(self, workflow: Workflow, reason: EndReason) -> None:
        """A workflow has ended."""
        self._events.attempt(self._events.ended, workflow, reason)

    def held(self, workflow: Workflow, most_s: float | None) -> None:
        """Admission holds a workflow for at most so long, or admits it (None)."""
        if most_s is None:
            self._events.attempt(self._events.resumed, workflow)
        else:
            self._events.attempt(self._events.held, workflow, most_s)
