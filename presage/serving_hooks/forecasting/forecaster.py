"""Forecasts for running workflows, one event at a time.

The forecaster keeps a state for each workflow, so an event costs one step and not the whole prefix. Forecasts equal
those of `NextAgentPredictor.forecast` and `RemainingLengthPredictor.forecast` on the steps so far. Events raise no
exceptions: if a predictor fails, online counts forecast; if they have too little data, the forecast has source "none"
and a reason. Not thread-safe.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.input_profiles import STATES, TEXT, TOKENS
from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.predictors.common.forecast import Source
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.counts import ModelKind
from presage.serving_hooks.forecasting.adapters import PROJECTED, LengthAdapter, NextAgentAdapter
from presage.serving_hooks.forecasting.circuit_breaker import Budget, CircuitBreaker, Refused
from presage.serving_hooks.forecasting.fallback_chain import FallbackChain, ForecastState
from presage.serving_hooks.forecasting.live import NO_MODEL, NO_STEP, NOT_AWAITED, LiveForecast, Projection
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.workflows import EndReason
from presage.serving_hooks.workflows.identity import Key, scoped, shared, short, tenant_of


class Forecaster:
    """Forecasts with one version of the predictors.

    Args:
        predictor, version: of next agents, and its version in the registry; None leaves next agents to `back_off`.
        lengths, lengths_version: likewise of remaining output tokens.
        back_off: online counts, which learn from the events and forecast if a predictor does not; None for none.
        served_model, state_layer: whose hidden states the engine captures; see `NextAgentAdapter`.
        max_workflows: states kept; the least recently active one is dropped first. If a dropped workflow continues, the
            forecaster recognises it by its step number and makes no forecast; without step numbers it looks new.
        budget: limits of each predictor's circuit breaker.
        monitor: receives every event; during its drift alarms the counts forecast.
        inputs: counter of the inputs that come with events; None for a new one.
        clock: seconds, rising.

    Attributes:
        counts: forecasts by kind of model, source and reason.
        states: hidden states that arrived by `on_prefill_state`, by the reason why one was not used; None if it was.
        errors: exceptions caught in `close`, by name.
        inputs: "steps" that began, and of these with "tokens", "text" or "states".
        awaits_states: whether prefill states arrive later, by `on_prefill_state`; costs a copy of a workflow's state
            while its step waits for one.
        breakers: of each predictor.
    """

    def __init__(
        self,
        predictor: NextAgentPredictor | None,
        version: int | None = None,
        *,
        lengths: RemainingLengthPredictor | None = None,
        lengths_version: int | None = None,
        back_off: OnlineCounts | None = None,
        served_model: str | None = None,
        state_layer: int | None = None,
        max_workflows: int = 100_000,
        budget: Budget | None = None,
        monitor: ForecastMonitor | None = None,
        inputs: Counter[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.predictor, self.version, self.max_workflows = predictor, version, max_workflows
        self.lengths = lengths
        self.counts: Counter[tuple[ModelKind, Source, str | None]] = Counter()
        self.states: Counter[str | None] = Counter()
        self.errors: Counter[str] = Counter()
        self.inputs: Counter[str] = Counter() if inputs is None else inputs
        self.awaits_states = False
        self.breakers = {
            kind: CircuitBreaker(kind if number is None else f"{kind} version {number}", budget or Budget(), clock)
            for kind, number in (("next-agent", version), ("remaining-length", lengths_version))
        }
        self._no_source = predictor is None and lengths is None and back_off is None
        self._chain = FallbackChain(
            NextAgentAdapter(predictor, version, served_model, state_layer) if predictor is not None else None,
            LengthAdapter(lengths, lengths_version) if lengths is not None else None,
            back_off,
            self.breakers["next-agent"],
            self.breakers["remaining-length"],
            monitor,
        )
        self.monitor = monitor
        self._workflows: OrderedDict[Key, ForecastState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workflows)

    def follows(self, workflow_type: str, workflow_id: str) -> bool:
        """Whether it keeps a state of this workflow."""
        return (short(workflow_type), short(workflow_id)) in self._workflows

    def on_prefill(
        self,
        workflow_type: str,
        workflow_id: str,
        agent: str,
        *,
        step: int | None = None,
        input_tokens: int | None = None,
        input_text: str | None = None,
        system_prompt: str | None = None,
        model: str | None = None,
        prefill_state: NDArray[Any] | None = None,
    ) -> LiveForecast:
        """Returns the forecast once a step has read its prompt.

        Args:
            workflow_type, workflow_id, agent: the application, one run of it, and the role.
            step: its number in the workflow, from 0, if the caller knows it.
            input_tokens, model: size of the prompt, and the model that serves it.
            input_text, system_prompt: the prompt, and the agent's constant part of it, for predictors that read text.
            prefill_state: hidden state after prefill [d], for predictors that read states.
        """
        given = {
            "agent": agent if isinstance(agent, str) else "",  # an agent without a name is an unknown one
            "input_tokens": input_tokens,
            "input_text": input_text,
            "system_prompt": system_prompt,
            "model": model,
            "prefill_state": prefill_state,
        }
        self.inputs["steps"] += 1
        if input_tokens is not None:
            self.inputs[TOKENS] += 1
        if input_text is not None or system_prompt is not None:
            self.inputs[TEXT] += 1
        if prefill_state is not None:
            self.inputs[STATES] += 1
        return self._forecast(PREFILL, partial(self._begun, workflow_type, workflow_id, step, given))

    def on_completion(
        self,
        workflow_type: str,
        workflow_id: str,
        *,
        output_tokens: int | None = None,
        output_text: str | None = None,
        completion_state: NDArray[Any] | None = None,
        projected: NDArray[np.float32] | None = None,
    ) -> LiveForecast:
        """Returns the forecast once the workflow's latest step has produced its last token.

        Remaining tokens are those forecast when the step began, less what it has produced. `projected` is the
        completion state projected by `projections`, float32 [c], in place of `completion_state`.
        """
        given = {
            "output_tokens": output_tokens,
            "output_text": output_text,
            "completion_state": completion_state,
            PROJECTED: projected,
        }
        return self._forecast(COMPLETION, partial(self._completed, workflow_type, workflow_id, given))

    @property
    def projections(self) -> dict[Moment, Projection]:
        """W and b by moment, for workers that project hidden states; empty if the predictor reads none of this model.

        Captured states are rounded to float16 before they are projected, as in traces.
        """
        return self._chain.projections

    def on_prefill_state(
        self, workflow_type: str, workflow_id: str, projected: NDArray[np.float32], of: LiveForecast
    ) -> LiveForecast | None:
        """Forecasts a step again once its prefill state has arrived, projected by `projections` to float32 [p].

        `of` is the forecast that `on_prefill` returned for this step; the new one equals that of `on_prefill` with the
        state. None if the state arrives too late or cannot be used: the earlier forecast then stays valid. Only
        `states` counts it.
        """
        try:
            key = short(workflow_type), short(workflow_id)
            running = self._state_of(key)
            if running is None or running.awaited is None or running.awaited.forecast is not of:
                self.states[NOT_AWAITED] += 1
                return None
            live = self._chain.with_state(key[0], running, running.awaited, projected)
        except Exception as error:
            self.states[type(error).__name__] += 1
            return None
        if isinstance(running.agents, Refused):
            self.states[running.agents.reason] += 1
            return None
        self.states[None] += 1
        self.inputs[STATES] += 1
        if self.monitor is not None and self._chain.claimed is not None:
            self.monitor.again(*key, self._chain.claimed)
        return live

    def close(self, workflow_type: str, workflow_id: str, reason: EndReason = EndReason.FINISHED) -> None:
        """Drops the state of a workflow that has ended; an unknown workflow is ignored.

        Online counts learn from finished and expired workflows; the monitor judges ends of finished ones only.
        """
        try:
            key = short(workflow_type), short(workflow_id)
            if self.monitor is not None:
                self.monitor.ended(*key, reason)
            running = self._workflows.pop(key, None)
            if running is not None and reason is not EndReason.ABORTED:
                self._chain.ended(key[0], running)
        except Exception as error:
            self.errors[type(error).__name__] += 1

    def reset(self) -> None:
        """Closes all circuit breakers. A workflow that missed a step of a predictor gets no more of its forecasts."""
        for breaker in self.breakers.values():
            breaker.reset()

    def _state_of(self, key: Key) -> ForecastState | None:
        """The state of that workflow, marked as recently active."""
        running = self._workflows.get(key)
        if running is not None:
            self._workflows.move_to_end(key)
        return running

    def _forecast(self, moment: Moment, event: Callable[[], LiveForecast | str]) -> LiveForecast:
        """Returns and counts the event's forecast; of source "none" if the event is invalid or fails."""
        try:
            live = NO_MODEL if self._no_source else event()
        except Exception as error:
            live = type(error).__name__  # the message might contain text of the request
        if isinstance(live, str):
            live = self._chain.nothing(moment, live)
        self.counts["next-agent", live.source, live.reason] += 1
        self.counts["remaining-length", live.remaining.source, live.remaining.reason] += 1
        return live

    def _begun(
        self, workflow_type: str, workflow_id: str, step: int | None, given: Mapping[str, Any]
    ) -> LiveForecast | str:
        key = shared(workflow_type), short(workflow_id)
        running = self._state_of(key)
        if running is None:
            running = self._chain.open(workflow_type, shared(scoped(tenant_of(workflow_id), workflow_type)))
            self._workflows[key] = running
            if len(self._workflows) > self.max_workflows:
                self._workflows.popitem(last=False)
        if step is not None and step != running.steps:
            running.miss(step)
        running.steps, running.within = running.steps + 1, True
        try:
            live = self._chain.begun(key[0], running, given, self.awaits_states)
        except Exception:
            running.miss(running.steps)  # the predictors' states may disagree
            raise
        if self.monitor is not None:
            self.monitor.begun(*key, given["agent"], self._chain.claimed or live, step)
        return live

    def _completed(self, workflow_type: str, workflow_id: str, given: Mapping[str, Any]) -> LiveForecast | str:
        key = short(workflow_type), short(workflow_id)
        running = self._state_of(key)
        if running is None or not running.within:
            return NO_STEP
        running.within = False
        try:
            live = self._chain.completed(key[0], running, given)
        except Exception:
            running.miss(running.steps)
            raise
        if self.monitor is not None:
            self.monitor.completed(*key, self._chain.claimed or live, given["output_tokens"])
        return live


_MOST_OLDER: Final = 8


class VersionedForecaster:
    """The forecasters of successive model versions, with the interface of one.

    A workflow keeps the version it began with, since a predictor's state of a workflow means nothing to another
    predictor. New workflows begin with the latest version. An older version stays, with its breakers and monitor, while
    workflows of it run. Beyond `_MOST_OLDER` older versions the oldest is dropped; its workflows continue on the latest
    version as workflows with missed steps. Workers project hidden states for the latest version only.
    """

    def __init__(self, first: Forecaster) -> None:
        self.latest = first
        self._older: list[Forecaster] = []

    @property
    def under_older(self) -> int:
        """Running workflows of older versions."""
        return sum(map(len, self._older))

    def take_over(self, forecaster: Forecaster) -> None:
        """Makes `forecaster` the latest. Call `await_states` again if prefill states arrive later."""
        self._older = [older for older in (self.latest, *self._older) if len(older)][:_MOST_OLDER]
        self.latest = forecaster

    def on_prefill(
        self,
        workflow_type: str,
        workflow_id: str,
        agent: str,
        *,
        step: int | None = None,
        input_tokens: int | None = None,
    ) -> LiveForecast:
        """As `Forecaster.on_prefill`."""
        of = self._of(workflow_type, workflow_id)
        return of.on_prefill(workflow_type, workflow_id, agent, step=step, input_tokens=input_tokens)

    def on_prefill_state(
        self, workflow_type: str, workflow_id: str, projected: NDArray[np.float32], forecast: LiveForecast
    ) -> LiveForecast | None:
        """As `Forecaster.on_prefill_state`; None for a workflow of an older version."""
        of = self._of(workflow_type, workflow_id)
        if of is not self.latest:
            return None
        return of.on_prefill_state(workflow_type, workflow_id, projected, forecast)

    def on_completion(
        self,
        workflow_type: str,
        workflow_id: str,
        *,
        output_tokens: int | None = None,
        projected: NDArray[np.float32] | None = None,
    ) -> LiveForecast:
        """As `Forecaster.on_completion`; without its state for a workflow of an older version."""
        of = self._of(workflow_type, workflow_id)
        state = projected if of is self.latest else None
        return of.on_completion(workflow_type, workflow_id, output_tokens=output_tokens, projected=state)

    def close(self, workflow_type: str, workflow_id: str, reason: EndReason = EndReason.FINISHED) -> None:
        """As `Forecaster.close`."""
        of = self._of(workflow_type, workflow_id)
        of.close(workflow_type, workflow_id, reason)
        if of is not self.latest and not len(of):
            self._older.remove(of)

    @property
    def projections(self) -> Mapping[Moment, Projection]:
        """Those of the latest version."""
        return self.latest.projections

    def await_states(self) -> None:
        """Expects prefill states by `on_prefill_state` from now on."""
        self.latest.awaits_states = True

    def _of(self, workflow_type: str, workflow_id: str) -> Forecaster:
        for older in self._older:
            if older.follows(workflow_type, workflow_id):
                return older
        return self.latest
