"""Passes the scheduler's events to the recorder: steps that begin and leave, forecasts, states, ends of workflows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from presage.datasets.recording import RECORDED_EXPIRED, RECORDED_FINISHED
from presage.features.moment import Moment
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.modes import Switch
from presage.serving_hooks.recorder.config import RecorderConfig
from presage.serving_hooks.recorder.recorder import NoRecorder, StepRecorder, start
from presage.serving_hooks.status import RecorderStatus
from presage.serving_hooks.vllm.engine import EnginePort, EngineRequest, Found
from presage.serving_hooks.vllm.listeners import Listener
from presage.serving_hooks.workflows import EndReason, RunningStep, Workflow, WorkflowTable
from presage.serving_hooks.workflows.choices import LeftStep
from presage.serving_hooks.workflows.live import LiveForecast


class Observing(Listener):
    """Passes the scheduler's events to the recorder, if one is configured.

    Raises:
        ConfigurationError: the configured redaction cannot be loaded.
    """

    def __init__(
        self,
        port: EnginePort,
        config: RecorderConfig | None,
        table: WorkflowTable,
        counts: EventCounts,
        state_layer: int | None = None,
    ) -> None:
        self._records: StepRecorder = NoRecorder()
        self._choices = table.choices
        self.switch = Switch("recorder", counts)
        self._text = config is not None and config.text == "on"
        self._configured = config is not None
        if config is not None:
            decode = port.config.decoder() if self._text else None
            model = port.config.served_model
            self._records = start(config, model=model, state_layer=state_layer, decode=decode)

    @property
    def on(self) -> bool:
        """Whether steps are recorded."""
        return self._configured and self.switch.on

    def forecast(self, request_id: str, live: LiveForecast) -> None:
        """Records a forecast of a running or just completed step."""
        self.switch.attempt(self._records.forecast, request_id, live)

    def states(self, request_ids: Sequence[str], moment: Moment, states: Any) -> None:
        """Records hidden states of such steps, float16 [n, d]."""
        self.switch.attempt(self._records.states, request_ids, moment, states)

    def request_scheduled(self, request: EngineRequest, step: RunningStep | None, found: Found) -> None:
        """Records that a step begins."""
        if step is not None and self._choices.begins(request.request_id):
            self._records.begun(
                request.request_id,
                step.step,
                input_tokens=request.num_prompt_tokens,
                cached_input_tokens=found.tokens,
                input_text=list(request.prompt_token_ids) if self._text and request.prompt_token_ids else None,
            )

    def request_finished(self, request: EngineRequest, step: RunningStep | None, left: LeftStep | None) -> None:
        """Records that a step has left the engine; the recorder knows it by the request that began it."""
        if left is None:
            return
        if step is not None and left.completed:
            step.workflow.recorded = left.request_id
        self._records.completed(
            left.request_id,
            output_tokens=left.output_tokens,
            finish_reason=left.finish_reason,
            output_text=list(request.output_token_ids) if self._text else None,
            state_comes=step is not None and step.state_comes and left.request_id == request.request_id,
        )

    def answer_parsed(self, workflow: Workflow, finish_reason: str | None, tools: Sequence[str] | None) -> None:
        """Records the tools that an answer calls."""
        if workflow.recorded is not None and tools is not None:
            self._records.answered(workflow.recorded, tools)
            workflow.recorded = None

    def workflow_ended(self, workflow: Workflow, reason: EndReason) -> None:
        """Records how a workflow has ended."""
        step, how = workflow.step, RECORDED_EXPIRED if reason is EndReason.EXPIRED else RECORDED_FINISHED
        self._records.ended(step.sent[0], step.workflow_id, how)

    @property
    def counts(self) -> EventCounts:
        """What the recorder wrote, and what it did not."""
        return self._records.counts

    def status(self) -> RecorderStatus:
        """The recorder's status; `on` is false once it has failed."""
        return replace(self._records.status(), on=self.on)

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {"recorded workflows": self._records.debug_state().get("workflows", 0)}

    def close(self) -> None:
        """Writes buffered rows, for some seconds at most."""
        self.switch.attempt(self._records.close)
