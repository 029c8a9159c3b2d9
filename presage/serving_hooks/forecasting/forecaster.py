"""Forecasts for running workflows, one event at a time: the engine tells what happens, the forecast is the answer.

One state is kept a workflow, so an event costs one step and not the whole prefix. The numbers are those of
`NextAgentPredictor.forecast` and `RemainingLengthPredictor.forecast` on the steps so far; tests hold that.

Fails open: whatever goes wrong, the answer comes from counts of what was seen here, and where those know too little it
is of source "none", with a reason that is counted. Nothing is raised, since the request behind the event must not
suffer. A predictor that fails or is late too often is switched off (`circuit_breaker.py`). Not thread-safe: a scheduler
is one thread.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError
from presage.features.input_profiles import STATES, TEXT, TOKENS
from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.forecasting.adapters import PROJECTED, LengthAdapter, NextAgentAdapter
from presage.serving_hooks.forecasting.circuit_breaker import Budget, CircuitBreaker, Refused
from presage.serving_hooks.forecasting.fallback_chain import FallbackChain, ForecastState
from presage.serving_hooks.forecasting.live import (
    NO_MODEL,
    NO_STEP,
    NOT_AWAITED,
    LiveForecast,
    LiveLengths,
    Projection,
)
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.workflows.identity import Key, scoped, shared, short, tenant_of
from presage.serving_hooks.workflows.table import EndReason


class Forecaster:
    """Holds the predictors and the state of every running workflow.

    Args:
        predictor: fitted; without one there is the back-off, and without that every event is answered with "none".
        version: of the predictor in the registry, handed on with each forecast.
        lengths: says how many output tokens are left; None leaves that to the back-off.
        lengths_version: of that predictor.
        back_off: counts that learn from the events, and answer where a predictor does not; None for no such answers.
        served_model, state_layer: whose hidden states the engine taps; see `NextAgentAdapter`.
        max_workflows: states kept; the one longest without an event is dropped first. A dropped workflow that goes on
            is recognised by its step number, where the caller gives one, and gets no forecast; without step numbers
            it would look like one that begins.
        budget: what each predictor may cost before it is switched off.
        monitor: told every event, and says where counts are to answer in the place of a predictor.
        inputs: where what comes with events is counted; None counts from 0.
        clock: seconds, rising.

    Attributes:
        counts: forecasts by source, and reasons why the model did not answer.
        counts_of_lengths: the same of the tokens left.
        states: hidden states that came after their step had begun: "used", or why not.
        inputs: events by what came with them: "steps" that began, and of these with "tokens", "text" or "states".
        awaits_states: prefill states come after their step has begun, by `on_prefill_state`; costs a copy of a
            workflow's state while a step waits for its own.
        dropped: workflows that had to make room.
        breakers: of each predictor, by its kind.
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
        if max_workflows < 1:
            raise ConfigurationError(f"max_workflows is {max_workflows}; give 1 or more")
        self.predictor, self.version, self.max_workflows = predictor, version, max_workflows
        self.lengths = lengths
        self.counts: Counter[str] = Counter()
        self.counts_of_lengths: Counter[str] = Counter()
        self.states: Counter[str] = Counter()
        self.inputs: Counter[str] = Counter() if inputs is None else inputs
        self.awaits_states = False
        self.dropped = 0
        breakers = [
            CircuitBreaker(kind if number is None else f"{kind} version {number}", budget or Budget(), clock)
            for kind, number in (("next-agent", version), ("remaining-length", lengths_version))
        ]
        self.breakers = dict(zip(("next-agent", "remaining-length"), breakers, strict=True))
        self._nobody = predictor is None and lengths is None and back_off is None
        self._chain = FallbackChain(
            NextAgentAdapter(predictor, version, served_model, state_layer) if predictor is not None else None,
            LengthAdapter(lengths, lengths_version) if lengths is not None else None,
            back_off,
            breakers[0],
            breakers[1],
            monitor,
        )
        self.monitor = monitor
        self._workflows: OrderedDict[Key, ForecastState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workflows)

    def follows(self, workflow_type: str, workflow_id: str) -> bool:
        """Whether it holds a state of this workflow."""
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
        """A step has read its prompt: what comes after it?

        Args:
            workflow_type: the application.
            workflow_id: one run of it.
            agent: of the step.
            step: number of the step in its workflow, from 0, if the caller knows it.
            input_tokens: size of the prompt.
            input_text: the prompt, for predictors that read text.
            system_prompt: the part of it that the agent always says, likewise.
            model: that serves it.
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
        return self._answered(PREFILL, partial(self._begun, workflow_type, workflow_id, step, given))

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
        """The step that began last in this workflow has produced its last token: what comes after it?

        The tokens left are those said when the step began, less what it has produced. `projected` is the completion
        state as `projections` makes it, float32 [c], in the place of `completion_state`.
        """
        given = {
            "output_tokens": output_tokens,
            "output_text": output_text,
            "completion_state": completion_state,
            PROJECTED: projected,
        }
        return self._answered(COMPLETION, partial(self._completed, workflow_type, workflow_id, given))

    @property
    def projections(self) -> dict[Moment, Projection]:
        """W and b by moment for a worker that projects hidden states; empty where none of the served model are read.

        Captured states are rounded to float16 before they are projected, as traces keep them.
        """
        return self._chain.projections

    def on_prefill_state(
        self, workflow_type: str, workflow_id: str, projected: NDArray[np.float32], of: LiveForecast
    ) -> LiveForecast | None:
        """The prefill state of a step has come, after the step began: its forecast once more, now with the state.

        The numbers are those of `on_prefill` with the state. An event is counted once, so this counts in `states`
        alone.

        Args:
            workflow_type: as `on_prefill` had it.
            workflow_id: as `on_prefill` had it.
            projected: the state as `projections` makes it, float32 [p].
            of: what `on_prefill` answered for this step.

        Returns:
            None where the state comes too late, or cannot be used: what was answered before goes on to hold.
        """
        try:
            key = short(workflow_type), short(workflow_id)
            running = self._heard(key)
            if running is None or running.awaited is None or running.awaited.answered is not of:
                self.states[NOT_AWAITED] += 1
                return None
            live = self._chain.with_state(key[0], running, running.awaited, projected)
        except Exception as error:
            self.states[type(error).__name__] += 1
            return None
        if isinstance(running.agents, Refused):
            self.states[running.agents.reason] += 1
            return None
        self.states["used"] += 1
        self.inputs[STATES] += 1
        if self.monitor is not None and self._chain.claimed is not None:
            self.monitor.again(*key, self._chain.claimed)
        return live

    def close(self, workflow_type: str, workflow_id: str, reason: EndReason = EndReason.FINISHED) -> None:
        """The workflow has ended; its state goes. Closing an unknown one is no error.

        Online counts learn the end of finished and of expired workflows; the monitor only that of finished ones.
        """
        try:
            key = short(workflow_type), short(workflow_id)
            if self.monitor is not None:
                self.monitor.ended(*key, reason)
            running = self._workflows.pop(key, None)
            if running is not None and reason is not EndReason.ABORTED:
                self._chain.ended(key[0], running)
        except Exception as error:
            self.counts[type(error).__name__] += 1

    def reset(self) -> None:
        """Switches predictors on again; workflows that went on without one get forecasts of it no more."""
        for breaker in self.breakers.values():
            breaker.reset()

    def _heard(self, key: Key) -> ForecastState | None:
        """The state of that workflow, which is now the last to be dropped."""
        running = self._workflows.get(key)
        if running is not None:
            self._workflows.move_to_end(key)
        return running

    def _answered(self, moment: Moment, event: Callable[[], LiveForecast | str]) -> LiveForecast:
        """The event's forecast, counted; none where the event cannot be one, or our code fails."""
        try:
            live = event()
        except Exception as error:
            live = type(error).__name__  # its message might repeat what the request says
        if isinstance(live, str):
            live = self._chain.nothing(moment, live)
        parts: tuple[tuple[Counter[str], LiveForecast | LiveLengths], ...] = (
            (self.counts, live),
            (self.counts_of_lengths, live.remaining),
        )
        for counts, part in parts:
            counts[part.source] += 1
            if part.reason is not None:
                counts[part.reason] += 1
        return live

    def _begun(
        self, workflow_type: str, workflow_id: str, step: int | None, given: Mapping[str, Any]
    ) -> LiveForecast | str:
        if self._nobody:
            return NO_MODEL
        key = shared(workflow_type), short(workflow_id)
        running = self._heard(key)
        if running is None:
            running = self._chain.open(workflow_type, shared(scoped(tenant_of(workflow_id), workflow_type)))
            self._workflows[key] = running
            if len(self._workflows) > self.max_workflows:
                self._workflows.popitem(last=False)
                self.dropped += 1
        if step is not None and step != running.steps:
            running.miss(step)
        running.steps, running.within = running.steps + 1, True
        try:
            live = self._chain.begun(key[0], running, given, self.awaits_states)
        except Exception:
            running.miss(running.steps)  # one state may have moved, and another not
            raise
        if self.monitor is not None:
            self.monitor.begun(*key, given["agent"], self._chain.claimed or live, step)
        return live

    def _completed(self, workflow_type: str, workflow_id: str, given: Mapping[str, Any]) -> LiveForecast | str:
        if self._nobody:
            return NO_MODEL
        key = short(workflow_type), short(workflow_id)
        running = self._heard(key)
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
    """Forecasters of one version of the models after the other, asked as one.

    A workflow keeps the version it began with, since one predictor's state of a running workflow means nothing to
    another. So a version stays, with its breakers and its own monitor, for as long as workflows run that began with it,
    and new workflows begin with the latest. Where versions are replaced faster than workflows end, the oldest are let
    go: to the latest, their workflows look like workflows of which steps were missed.

    Hidden states arrive projected for the latest version; the older ones do without them.

    Args:
        first: forecaster of the version that is there.

    Attributes:
        latest: of the version that new workflows begin with.
    """

    def __init__(self, first: Forecaster) -> None:
        self.latest = first
        self._older: list[Forecaster] = []

    @property
    def under_older(self) -> int:
        """Workflows that go on with a version before the latest."""
        return sum(map(len, self._older))

    def take_over(self, forecaster: Forecaster) -> None:
        """Workflows begin with this one from now on. Whether it awaits states is to be said anew."""
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
        """Of the latest."""
        return self.latest.projections

    def await_states(self) -> None:
        """Prefill states come after `on_prefill` from now on."""
        self.latest.awaits_states = True

    def _of(self, workflow_type: str, workflow_id: str) -> Forecaster:
        for older in self._older:
            if older.follows(workflow_type, workflow_id):
                return older
        return self.latest
