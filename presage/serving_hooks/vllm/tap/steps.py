"""Whose states they are: rows that came back from the worker become states of the steps of workflows.

The rows of an iteration are read before vLLM counts its tokens: so the forecast of a step that goes on is made again
within the same update, and a step that ends in it ends with its completion state.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import COMPLETION, PREFILL
from presage.serving_hooks.vllm import compat
from presage.serving_hooks.vllm.forecasts import Forecasts, ReadsStates
from presage.serving_hooks.vllm.tap.connector import StatesConnector
from presage.serving_hooks.vllm.tap.messages import Rows, States
from presage.serving_hooks.vllm.workflows import Workflows

logger = logging.getLogger(__name__)

ON = "on"
NOT_READ = "off: nobody reads states of the model that is served"
NO_CONNECTOR = "off: start with --worker-cls and the StatesConnector for the states that the predictor reads"
NO_EVICTION = "off: eviction is vLLM's own, and nobody else reads the forecasts"
SEVERAL_ROWS = "off: with speculative decoding a step has several rows a request"
OTHER_WIDTH = "off: the predictor learnt states of another width than the served model has"


class StatesOfSteps:
    """The scheduler's side of the tap.

    Args:
        workflows: told the states of their steps.

    Attributes:
        told: "on", or why there are no states.
    """

    def __init__(self, workflows: Workflows) -> None:
        self.told = NOT_READ
        self._workflows = workflows
        self._last: Rows | None = None

    def begin(self, scheduler: Any, forecasts: Forecasts) -> None:
        """Taps the model, if there is anybody who reads its states, and a way for them."""
        source = forecasts.next_agents
        if not isinstance(source, ReadsStates) or not source.projections:
            return
        connector = compat.connector(scheduler, StatesConnector)
        widths = {len(weights) for weights, _ in source.projections.values()}
        if connector is None:
            self.told = NO_CONNECTOR
        elif self._workflows.retention is None:
            self.told = NO_EVICTION
        elif compat.speculates(scheduler):
            self.told = SEVERAL_ROWS
        elif widths != {compat.hidden_size(scheduler)}:
            self.told = OTHER_WIDTH
        else:
            self.told = ON
            source.await_states()
            self._workflows.tap(source, self._completion)
            connector.tap(lambda name: self._workflows.step(name) is not None, source.projections)
        logger.log(logging.INFO if self.told == ON else logging.WARNING, "hidden states: %s", self.told)

    def read(self, output: Any) -> None:
        """What the worker computed in an iteration, before vLLM takes its tokens."""
        if self.told != ON:
            return
        self._last = None
        for states in compat.of_kind(States, compat.worker_meta(output)):
            for name, state in zip(*(states.rows(PREFILL) or ((), ())), strict=True):
                if np.isfinite(state).all():
                    self._workflows.prefill_state(name, state)
            self._last = states.rows(COMPLETION)

    def _completion(self, request_id: str) -> NDArray[np.float32] | None:
        if self._last is None or request_id not in self._last[0]:
            return None
        state: NDArray[np.float32] = self._last[1][self._last[0].index(request_id)]
        return state if np.isfinite(state).all() else None
