"""Passes the scheduler's events to the recorder: steps that begin and leave, forecasts, states, ends of workflows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from presage.datasets.recording import RECORDED_EXPIRED, RECORDED_FINISHED
from presage.features.moment import Moment
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.forecasting.live import LiveForecast
from presage.serving_hooks.modes import Switch
from presage.serving_hooks.recorder.config import RecorderConfig
from presage.serving_hooks.recorder.recorder import NoRecorder, StepRecorder, start
from presage.serving_hooks.vllm.engine import EnginePort, EngineRequest, Iteration
from presage.serving_hooks.workflows import EndReason, Workflow, WorkflowTable
from presage.serving_hooks.workflows.choices import LeftStep


class Observing:
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
        self._port, self._table, self._step, self._choices = port, table, table.step, table.choices
        self._switch = Switch("recorder", counts)
        self._text = config is not None and config.text == "on"
        self._configured = config is not None
        if config is not None:
            decode = port.config.decoder() if self._text else None
            model = port.config.served_model
            self._records = start(config, model=model, state_layer=state_layer, decode=decode)
            table.subscribe(self._ended)

    @property
    def on(self) -> bool:
        """Whether steps are recorded."""
        return self._configured and self._switch.on

    def scheduled(self, output: Iteration) -> None:
        """Records the steps that an iteration schedules for the first time."""
        if self._configured and output.scheduled_new_reqs:
            self._switch.attempt(self._begun, output)

    def left(self, request: EngineRequest, step: LeftStep, state_comes: bool) -> None:
        """A step leaves the engine with this request, completed or aborted; its state comes later or not at all."""
        if self._configured:
            self._switch.attempt(self._left, request, step, state_comes)

    def forecast(self, request_id: str, live: LiveForecast) -> None:
        """Records a forecast of a running or just completed step."""
        self._switch.attempt(self._records.forecast, request_id, live)

    def states(self, request_ids: Sequence[str], moment: Moment, states: Any) -> None:
        """Records hidden states of such steps, float16 [n, d]."""
        self._switch.attempt(self._records.states, request_ids, moment, states)

    def _begun(self, output: Iteration) -> None:
        for request, cached in self._port.found_tokens(output):
            step = self._step(request.request_id)
            if step is not None and self._choices.begins(request.request_id):
                self._records.begun(
                    request.request_id,
                    step,
                    input_tokens=request.num_prompt_tokens,
                    cached_input_tokens=cached,
                    input_text=list(request.prompt_token_ids) if self._text and request.prompt_token_ids else None,
                )

    def answered(self, workflow: str, tools: Sequence[str]) -> None:
        """The answer of the workflow's latest step was parsed: the tools that it calls."""
        running = self._table.get(workflow)
        if running is not None and running.recorded is not None:
            self._switch.attempt(self._records.answered, running.recorded, tools)
            running.recorded = None

    def _left(self, request: EngineRequest, step: LeftStep, state_comes: bool) -> None:
        of = self._step(request.request_id)
        running = self._table.get(of.workflow) if of is not None and step.completed else None
        if running is not None:
            running.recorded = step.request_id
        self._records.completed(
            step.request_id,
            output_tokens=step.output_tokens,
            finish_reason=step.finish_reason,
            output_text=list(request.output_token_ids) if self._text else None,
            state_comes=state_comes,
        )

    def _ended(self, workflow: Workflow, reason: EndReason) -> None:
        step, how = workflow.step, RECORDED_EXPIRED if reason is EndReason.EXPIRED else RECORDED_FINISHED
        self._switch.attempt(self._records.ended, step.sent[0], step.workflow_id, how)

    @property
    def counts(self) -> EventCounts:
        """What the recorder wrote, and what it did not."""
        return self._records.counts

    def status(self) -> dict[str, Any]:
        """The recorder's status; `on` is false once it has failed."""
        return {**self._records.status(), "on": self.on}

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {"recorded workflows": self._records.debug_state().get("workflows", 0)}

    def close(self) -> None:
        """Writes buffered rows, for some seconds at most."""
        self._switch.attempt(self._records.close)
