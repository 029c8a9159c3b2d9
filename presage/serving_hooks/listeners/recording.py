"""Passes the events of requests to the recorder: steps that begin and leave, forecasts, states, ends of workflows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from presage.datasets.recording import RECORDED_EXPIRED, RECORDED_FINISHED
from presage.features.moment import Moment
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.listeners import Found, Listener, Request
from presage.serving_hooks.modes import Switch
from presage.serving_hooks.recorder.recorder import NoRecorder, StepRecorder
from presage.serving_hooks.status import RecorderStatus
from presage.serving_hooks.workflows import EndReason, RunningStep, Workflow
from presage.serving_hooks.workflows.choices import Choices, LeftStep
from presage.serving_hooks.workflows.live import LiveForecast


class Recording(Listener[Request]):
    """Passes the events to a recorder, if there is one.

    Args:
        recorder: `NoRecorder` where nothing is recorded.
        choices: the requests that are one step together.
        begun: what is recorded of a request as its step begins, as arguments of `StepRecorder.begun`.
        completed: the same as its step leaves, of `StepRecorder.completed`.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        choices: Choices,
        counts: EventCounts,
        begun: Callable[[Request, Found], Mapping[str, Any]],
        completed: Callable[[Request], Mapping[str, Any]],
    ) -> None:
        self.switch = Switch("recorder", counts)  # for good: its files would have a gap
        self._recorder, self._choices = recorder, choices
        self._begun, self._completed = begun, completed
        self._configured = not isinstance(recorder, NoRecorder)

    @property
    def on(self) -> bool:
        """Whether steps are recorded."""
        return self._configured and self.switch.on

    def forecast(self, request_id: str, live: LiveForecast) -> None:
        """Records a forecast of a running or just completed step."""
        self.switch.attempt(self._recorder.forecast, request_id, live)

    def states(self, request_ids: Sequence[str], moment: Moment, states: Any) -> None:
        """Records hidden states of such steps, float16 [n, d]."""
        self.switch.attempt(self._recorder.states, request_ids, moment, states)

    def request_scheduled(self, request: Request, step: RunningStep | None, found: Found) -> None:
        """Records that a step begins."""
        if step is not None and self._choices.begins(step.request_id):
            step.recorded = self._recorder.begun(step, **self._begun(request, found))

    def request_finished(self, request: Request, step: RunningStep | None, left: LeftStep | None) -> None:
        """Records that a step has left; the recorder knows it by the request that began it."""
        if left is None:
            return
        if step is not None and left.completed:
            step.workflow.recorded = left.request_id
        self._recorder.completed(
            left.request_id,
            output_tokens=left.output_tokens,
            finish_reason=left.finish_reason,
            state_comes=step is not None and step.state_comes and left.request_id == step.request_id,
            **self._completed(request),
        )

    def answer_parsed(self, workflow: Workflow, finish_reason: str | None, tools: Sequence[str] | None) -> None:
        """Records the tools that an answer calls."""
        if workflow.recorded is not None and tools is not None:
            self._recorder.answered(workflow.recorded, tools)
            workflow.recorded = None

    def workflow_ended(self, workflow: Workflow, reason: EndReason) -> None:
        """Records how a workflow has ended."""
        self._recorder.ended(workflow, RECORDED_EXPIRED if reason is EndReason.EXPIRED else RECORDED_FINISHED)

    @property
    def counts(self) -> EventCounts:
        """What the recorder wrote, and what it did not."""
        return self._recorder.counts

    def status(self) -> RecorderStatus:
        """The recorder's status; `on` is false once it has failed."""
        return replace(self._recorder.status(), on=self.on)

    def close(self) -> None:
        """Writes buffered rows, for some seconds at most."""
        self.switch.attempt(self._recorder.close)
