"""Forecasts of return times for running workflows, one event at a time.

A forecast equals that of `ReturnTimePredictor.forecast` on the steps so far, as far as an engine knows them. Events
raise no exceptions: without a model, with too little evidence and during a drift alarm online counts forecast; if they
have too little data, the forecast has source "none" and a reason. Not thread-safe.

A workflow keeps the model that it began with. Only the call of the model runs under the circuit breaker; the state of a
workflow is updated before it, so a failed forecast costs no later one.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from presage.features.return_times import BegunStep, ReturnWorkflow, Row, milliseconds
from presage.predictors.common.forecast import Source
from presage.predictors.return_time.predictor import ReturnForecast, ReturnTimePredictor
from presage.serving_hooks.forecasting.adapters import checked_quantiles
from presage.serving_hooks.forecasting.circuit_breaker import Budget, CircuitBreaker, Refused
from presage.serving_hooks.forecasting.forecasts import LoadedPredictor
from presage.serving_hooks.forecasting.return_counts import ReturnCounts
from presage.serving_hooks.forecasting.trials import TRIAL_STEPS
from presage.serving_hooks.monitoring.live_returns import LiveReturns
from presage.serving_hooks.policies.next_use import LONGEST_S
from presage.serving_hooks.workflows import EndReason, PartState, Workflow
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import (
    DRIFTED,
    LITTLE_SEEN,
    NO_MODEL,
    NO_STEP,
    LiveReturn,
    NotAForecast,
    no_return,
    token_count,
)

MOST_FLYING: Final = 1024
"""Steps of one workflow that run at once; with more, it starts anew."""

_NONE: Final = Refused(NO_MODEL)
_NO_STEPS: Final[dict[Step, list[BegunStep | None]]] = {}
"""Shared by workflows without running steps, which are most; never written to."""


class ReturnAdapter:
    """A return-time predictor, one completed step at a time."""

    def __init__(self, predictor: ReturnTimePredictor, version: int | None) -> None:
        self.predictor, self.version = predictor, version

    def forecast(self, row: Row) -> LiveReturn:
        """The forecast after a step, given its row."""
        forecast = self.predictor.forecast_row(*row)
        quantiles, seconds = checked_quantiles(forecast.quantiles, len(self.predictor.quantiles))
        if not 0.0 <= forecast.end <= 1.0:
            raise NotAForecast("the probability of END is none")
        return LiveReturn(forecast.source, forecast.evidence, forecast.end, quantiles, seconds, self.version)


class _Model:
    """One version of the model."""

    def __init__(self, predictor: ReturnTimePredictor, version: int | None, breaker: CircuitBreaker) -> None:
        self.adapter, self.breaker = ReturnAdapter(predictor, version), breaker

    def forecast(self, row: Row) -> LiveReturn | Refused:
        return self.breaker.call(partial(self.adapter.forecast, row))


class _Away:
    """A step that has completed, until the next request: when, its finish reason, and the forecast after it."""

    __slots__ = ("at", "finish_reason", "forecast", "step")

    def __init__(self, step: Step, finish_reason: str | None, forecast: LiveReturn, at: float) -> None:
        self.step, self.finish_reason, self.forecast, self.at = step, finish_reason, forecast, at


class ReturnState(PartState):
    """What is known of the return times of one running workflow; `model` and `features` are None without a model."""

    __slots__ = ("away", "features", "flying", "latest", "model")

    def __init__(self, model: _Model | None, features: ReturnWorkflow | None) -> None:
        self.model, self.features = model, features
        self.flying = _NO_STEPS
        self.away: _Away | None = None
        self.latest = -math.inf


def _state(workflow: Workflow) -> ReturnState | None:
    return workflow.return_state if isinstance(workflow.return_state, ReturnState) else None


class ReturnTimeForecaster:
    """Forecasts return times; a `ReturnTimes` source of an engine.

    Args:
        predictor, version: the model, and its version in the registry; None leaves all forecasts to `counts`.
        drifted: whether a drift alarm of a workflow type sends its forecasts to the counts.

    Attributes:
        counts: online counts, which learn from the events.
        made: forecasts by source and reason.
        live: forecasts against returns.
        faults: invalid times and token counts, and exceptions caught, by name.
    """

    def __init__(
        self,
        predictor: ReturnTimePredictor | None = None,
        version: int | None = None,
        *,
        budget: Budget | None = None,
        drifted: Callable[[str], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts, self.live = ReturnCounts(), LiveReturns()
        self.made: Counter[tuple[Source, str | None]] = Counter()
        self.faults: Counter[str] = Counter()
        self._budget, self._drifted, self._clock = budget or Budget(), drifted, clock
        self._model: _Model | None = None
        self.take_over(predictor, version)

    @property
    def loaded(self) -> list[LoadedPredictor]:
        """The model, if there is one."""
        return [self._model.adapter.predictor] if self._model is not None else []

    @property
    def breaker(self) -> CircuitBreaker | None:
        """That of the latest model."""
        return self._model.breaker if self._model is not None else None

    def take_over(self, predictor: ReturnTimePredictor | None, version: int | None) -> None:
        """Makes this model that of new workflows; running ones keep theirs."""
        if self._model is not None and self._model.adapter.predictor is predictor:
            return
        called = "return-time" if version is None else f"return-time version {version}"
        breaker = CircuitBreaker(called, self._budget, self._clock)
        self._model = _Model(predictor, version, breaker) if predictor is not None else None

    def arrived(self, workflow: Workflow, step: Step, input_tokens: int, now: float) -> None:
        """A request of a workflow has arrived: the workflow is back."""
        try:
            self._arrived(workflow, step, input_tokens, now)
        except Exception as error:
            self._failed(workflow, error)

    def completed(
        self, workflow: Workflow, step: Step, output_tokens: int, finish_reason: str | None, now: float
    ) -> LiveReturn:
        """A step has left the engine: it has produced its last token, or was aborted."""
        try:
            live = self._completed(workflow, step, output_tokens, finish_reason, now)
        except Exception as error:
            live = no_return(self._failed(workflow, error))
        self.made[live.source, live.reason] += 1
        return live

    def answered(
        self, workflow: Workflow, step: Step, finish_reason: str | None, tools: Sequence[str] | None
    ) -> LiveReturn | None:
        """The answer of a completed step was parsed; returns the renewed forecast, None if the workflow has gone on."""
        try:
            live = self._answered(workflow, step, finish_reason, tools)
        except Exception as error:
            live = no_return(self._failed(workflow, error))
        if live is not None:
            self.made[live.source, live.reason] += 1
        return live

    def ended(self, workflow: Workflow, reason: EndReason = EndReason.FINISHED) -> None:
        """A workflow has ended; the counts learn the end of a finished one."""
        course, workflow.return_state = _state(workflow), None
        if course is not None and course.away is not None and reason is EndReason.FINISHED:
            try:
                before = course.away.step
                self.counts.ended(before.stats_key, before.agent, course.away.finish_reason)
            except Exception as error:
                self.faults[type(error).__name__] += 1

    def away(self, workflow: Workflow) -> tuple[LiveReturn, float] | None:
        """The forecast of a workflow that is away, and since when; None while it runs, or if it is unknown."""
        course = _state(workflow)
        return None if course is None or course.away is None else (course.away.forecast, course.away.at)

    def status(self) -> dict[str, Any]:
        """Forecasts against returns, and faults, for operators; plain data."""
        return {
            "workflow_types": self.live.to_dict(),
            "faults": dict(self.faults),
        }

    def _arrived(self, workflow: Workflow, step: Step, input_tokens: object, now: float) -> None:
        course = _state(workflow)
        if course is None or sum(map(len, course.flying.values())) >= MOST_FLYING:
            course = self._begin(workflow)
        now = self._time(course, now)
        if course.away is not None:
            before, seconds = course.away.step, min(now - course.away.at, LONGEST_S)
            self.live.returned(before.workflow_type, course.away.forecast, seconds)
            self.counts.returned(before.stats_key, before.agent, course.away.finish_reason, seconds)
            course.away = None
        begun = None
        if course.features is not None:
            given = {"agent": step.agent, "input_tokens": self._tokens(input_tokens)}
            begun = course.features.arrived(given, milliseconds(now))
        if course.flying is _NO_STEPS:
            course.flying = {}
        course.flying.setdefault(step, []).append(begun)

    def _completed(
        self, workflow: Workflow, step: Step, output_tokens: object, finish_reason: str | None, now: float
    ) -> LiveReturn:
        course = _state(workflow)
        begun = course.flying.get(step) if course is not None else None
        if course is None or not begun:
            return no_return(NO_STEP)
        now, first = self._time(course, now), begun.pop(0)
        if not begun:
            del course.flying[step]
            course.flying = course.flying or _NO_STEPS
        row = None
        if first is not None and course.features is not None:
            given = {"output_tokens": self._tokens(output_tokens), "finish_reason": finish_reason}
            row = course.features.completed(first, given, milliseconds(now))
        live = self._forecast(course, step, finish_reason, row)
        course.away = _Away(step, finish_reason, live, now)
        return live

    def _answered(
        self, workflow: Workflow, step: Step, finish_reason: str | None, tools: Sequence[str] | None
    ) -> LiveReturn | None:
        course = _state(workflow)
        away = course.away if course is not None else None
        if course is None or away is None or (finish_reason is None and tools is None):
            return None
        if (away.step.agent, away.step.number) != (step.agent, step.number):
            return None
        away.finish_reason = finish_reason or away.finish_reason
        row = course.features.answered(away.finish_reason, tools) if course.features is not None else None
        away.forecast = self._forecast(course, step, away.finish_reason, row)
        return away.forecast

    def _begin(self, workflow: Workflow) -> ReturnState:
        model, features = self._model, None
        if model is not None:
            features = ReturnWorkflow(model.adapter.predictor.encoder, workflow.step.workflow_type)
        workflow.return_state = begun = ReturnState(model, features)
        return begun

    def _forecast(self, course: ReturnState, step: Step, finish_reason: str | None, row: Row | None) -> LiveReturn:
        """The forecast of the model or the counts, as `Forecaster` decides between them."""
        made = course.model.forecast(row) if course.model is not None and row is not None else _NONE
        drifted = self._drifted(step.workflow_type)
        if isinstance(made, LiveReturn) and made.source == "champion" and not drifted:
            return made
        reason = made.reason if isinstance(made, Refused) else DRIFTED if drifted else LITTLE_SEEN
        counted = self.counts.forecast(step.stats_key, step.agent, finish_reason, reason)
        if counted is not None and (isinstance(made, Refused) or drifted or counted.evidence > made.evidence):
            return counted
        if isinstance(made, LiveReturn):
            return made
        return no_return(made.reason, course.model.adapter.version if course.model is not None else None)

    def _time(self, course: ReturnState, now: float) -> float:
        """The time of an event of a workflow, not before its previous one; faults are counted."""
        if not (math.isfinite(now) and now >= course.latest):
            self.faults["time"] += 1
            now = course.latest if math.isfinite(course.latest) else 0.0
        course.latest = now
        return now

    def _tokens(self, given: object) -> float | None:
        tokens = token_count(given)
        if tokens is None and given is not None:
            self.faults["tokens"] += 1
        return tokens

    def _failed(self, workflow: Workflow, error: Exception) -> str:
        """Counts an exception; the workflow starts anew, since its state may be half a step behind."""
        name = type(error).__name__  # the message might contain text of the request
        self.faults[name] += 1
        workflow.return_state = None
        return name


def try_return_times(predictor: ReturnTimePredictor, texts: Mapping[str, str]) -> None:
    """Forecasts after a few steps, of known and unknown workflow types and agents."""
    adapter, vocabulary = ReturnAdapter(predictor, None), predictor.vocabulary
    for workflow_type in (*vocabulary.workflow_types[:1], ""):
        workflow, now = ReturnWorkflow(predictor.encoder, workflow_type), 0.0
        for agent in (*vocabulary.agents[:TRIAL_STEPS], ""):
            begun = workflow.arrived({"agent": agent, "input_tokens": 1, **texts}, now)
            now += 1e3
            adapter.forecast(workflow.completed(begun, {"output_tokens": 1, "finish_reason": "stop"}, now))
            answered = workflow.answered("stop", ())
            assert answered is not None
            adapter.forecast(answered)


def waited(forecast: LiveReturn, seconds: float) -> ReturnForecast:
    """The forecast of a workflow that has been away so long; see `ReturnForecast.waited`."""
    given = dict(zip(forecast.quantiles, forecast.seconds, strict=True))
    return ReturnForecast(forecast.end, given, forecast.source, forecast.evidence, False, 0).waited(seconds)
