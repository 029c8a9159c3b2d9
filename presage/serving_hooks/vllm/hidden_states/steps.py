"""Assigns the states that the worker sends to the steps of workflows.

The states of an iteration are read before vLLM processes its tokens. So a running step gets a new forecast within the
same update, and a step that ends has its completion state. The predictor reads projected states, the recorder whole
ones, of completions an iteration later.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import COMPLETION, MOMENTS, PREFILL, Moment
from presage.serving_hooks.forecasting.forecasts import Forecasts, ReadsStates
from presage.serving_hooks.listeners import Listener
from presage.serving_hooks.listeners.recording import Recording
from presage.serving_hooks.vllm import engine
from presage.serving_hooks.vllm.engine import EnginePort, EngineRequest, Iteration
from presage.serving_hooks.vllm.hidden_states.connector import States, StatesConnector
from presage.serving_hooks.vllm.step_forecasts import StepForecasts
from presage.serving_hooks.workflows import RunningStep, WorkflowTable
from presage.serving_hooks.workflows.choices import LeftStep
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import Projection

logger = logging.getLogger(__name__)

ON = "on"
NOT_READ = "off: no predictor reads hidden states of this model"
_START = "`presage serve --states on`, or with --worker-cls and the StatesConnector,"
NO_CONNECTOR = f"off: start with {_START} to send states to the predictor"
NO_EVICTION = "off: vLLM's own eviction is in use, and no other policy reads the forecasts"
SEVERAL_ROWS = "off: with speculative decoding each request has several rows per step"
OTHER_WIDTH = "off: the predictor was trained on states of another width than those of the served model"

NOT_RECORDED = "off: the recorder is not configured to record states"
NO_WAY = f"off: start with {_START} to record states"

_RECORDED: Final[dict[str, tuple[Moment, ...]]] = {"off": (), "prefill": (PREFILL,), "both": MOMENTS}


class RequestStates(Listener[EngineRequest]):
    """Requests hidden states from the worker: projected ones for the predictor, whole ones for the recorder.

    Attributes:
        predictor_states, recorder_states: "on", or why predictor or recorder get no states.
    """

    def __init__(
        self,
        port: EnginePort,
        forecasts: Forecasts,
        step_forecasts: StepForecasts,
        table: WorkflowTable,
        recorder: Recording[EngineRequest],
        recorded: Literal["off", "prefill", "both"] = "off",
    ) -> None:
        self.predictor_states, self.recorder_states = NOT_READ, NOT_RECORDED
        self.switch = step_forecasts.switch
        self._port, self._source = port, forecasts.next_agents
        self._step_forecasts, self._table, self._recorder = step_forecasts, table, recorder
        self._recorded = _RECORDED[recorded]
        self._came: tuple[States, ...] = ()
        self._connector: StatesConnector | None = None
        self.renew()

    def renew(self) -> None:
        """Requests states if the predictor or the recorder reads them; called again when the predictor has changed."""
        source, port = self._source, self._port
        before = self.predictor_states, self.recorder_states
        reader = source if isinstance(source, ReadsStates) and source.projections else None
        connector = self._connector = port.connector(StatesConnector)
        self.predictor_states = NOT_READ if reader is None else self._why_off(reader, connector)
        self.recorder_states = NOT_RECORDED
        if self._recorded:
            self.recorder_states = NO_WAY if connector is None else SEVERAL_ROWS if port.config.speculates else ON
        projections: Mapping[Moment, Projection] = {}
        self._step_forecasts.state_source = None
        if reader is not None and self.predictor_states == ON:
            projections = reader.projections
            reader.await_states()
            self._step_forecasts.state_source = reader, self.completion_state
        if connector is not None and ON in (self.predictor_states, self.recorder_states, *before):
            whole = self._recorded if self.recorder_states == ON else ()
            connector.request_states(self._step_of, projections, whole)
        if (self.predictor_states, self.recorder_states) != before:
            _log_state("hidden states: %s", self.predictor_states)
            if self._recorded:
                _log_state("recorded states: %s", self.recorder_states)

    def read(self, iteration: Iteration, output: Any) -> None:
        """Reads the states of an iteration; called before vLLM processes its tokens."""
        if self._connector is None or ON not in (self.predictor_states, self.recorder_states):
            return
        self._connector.reads(iteration)
        came = engine.worker_metadata(output)
        self._came = () if came is None else tuple(engine.of_kind(States, came))
        for states in self._came:
            if self.predictor_states == ON:
                for name, state in states.rows(PREFILL):
                    if np.isfinite(state).all():
                        self._step_forecasts.prefill_state(name, state)
            if self.recorder_states == ON:
                for moment, (names, rows) in states.whole():
                    self._recorder.states(names, moment, rows)

    def request_finished(self, request: EngineRequest, step: RunningStep | None, left: LeftStep | None) -> None:
        """Requests the state from which the last token was sampled, if it will be recorded."""
        if self._connector is None or self.recorder_states != ON or not engine.completed(request):
            return
        comes = self._connector.ended(request.request_id)
        if step is not None:
            step.state_comes = comes

    def _step_of(self, request_id: str) -> Step | None:
        running = self._table.step(request_id)
        return running.step if running is not None else None

    def _why_off(self, reader: ReadsStates, connector: StatesConnector | None) -> str:
        if connector is None:
            return NO_CONNECTOR
        if self._step_forecasts.retention is None:
            return NO_EVICTION
        if self._port.config.speculates:
            return SEVERAL_ROWS
        widths = {len(weights) for weights, _ in reader.projections.values()}
        return ON if widths == {self._port.config.hidden_size} else OTHER_WIDTH

    def completion_state(self, request_id: str) -> NDArray[np.float32] | None:
        """The projected completion state of a request that completed in the last iteration."""
        for states in self._came:
            state = states.row(COMPLETION, request_id)
            if state is not None and np.isfinite(state).all():
                return state
        return None


def _log_state(message: str, state: str) -> None:
    logger.log(logging.INFO if state == ON else logging.WARNING, message, state)
