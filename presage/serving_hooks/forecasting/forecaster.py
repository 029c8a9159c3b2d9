"""Forecasts for running workflows, one event at a time.

The record of a workflow keeps a state for them, so an event costs one step and not the whole prefix. Forecasts equal
those of `NextAgentPredictor.forecast` and `RemainingLengthPredictor.forecast` on the steps so far. Not thread-safe.

Events raise no exceptions: if a predictor fails, or knows too little of an agent, the profile of the workflow type
forecasts in its place where it is sure (`profile_places.py`), else online counts do; if they have too little data, the
forecast has source "none" and a reason. Agents that the model does not know are found by the places that they take, or
counted (`new_agents.py`). For an agent with little evidence the model uses its own back-off; a profile
that is sure and online counts with more evidence take precedence. During a drift alarm, and while online counts
forecast better than a model or profile, they forecast whenever they have enough data; the model or profile still runs,
so that the monitor notices when it is accurate again. After a failed call a model's state of the workflow is half a
step behind, so the workflow gets no more forecasts from that model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.input_profiles import ANSWERS, STATES, TEXT, TOKENS
from presage.features.lengths import PROMPT_READ, LengthWorkflow
from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.features.served_steps import TOOLS_CALLED
from presage.predictors.common.forecast import Source
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.predictors.next_agent.predictor import Workflow as AgentWorkflow
from presage.predictors.profile.predictor import ProfilePredictor
from presage.serving_hooks.counts import ModelKind
from presage.serving_hooks.forecasting.adapters import PROJECTED, LengthAdapter, NextAgentAdapter
from presage.serving_hooks.forecasting.circuit_breaker import Budget, CircuitBreaker, Refused
from presage.serving_hooks.forecasting.forecasts import LoadedPredictor, TextModel
from presage.serving_hooks.forecasting.new_agents import Expected, NewAgents
from presage.serving_hooks.forecasting.online_counts import MOST_OPEN, OnlineCounts, WorkflowHistory
from presage.serving_hooks.forecasting.profile_places import ProfileAdapter, ProfiledWorkflow
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.monitoring.outcomes import WorkflowOutcomes, likeliest
from presage.serving_hooks.workflows import EndReason, PartState, Workflow
from presage.serving_hooks.workflows.identity import Step, shared
from presage.serving_hooks.workflows.live import (
    BESIDE,
    LITTLE_SEEN,
    MISSED_STEP,
    NO_LENGTHS,
    NO_MODEL,
    NO_STEP,
    NOT_AWAITED,
    NOTHING,
    OTHER_VERSION,
    LiveForecast,
    LiveLengths,
    Projection,
    no_lengths,
)

_NONE: Final = Refused(NO_MODEL)
_NO_NUMBERS: Final[frozenset[int]] = frozenset()
_MOST_AHEAD: Final = 16
"""Numbers by which a step may precede others that run at the same time."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """A step that has begun or completed and of which an input is still to come: its columns and the forecast so far.

    `before` is a copy of the workflow's state before that event.
    """

    before: AgentWorkflow
    step: Mapping[str, Any]
    forecast: LiveForecast


@dataclass(frozen=True, slots=True)
class EarlyForecast:
    """The forecast of a step that has arrived and not started."""

    agent: str
    number: int | None
    forecast: LiveForecast


class ForecastState(PartState):
    """The forecasting state of a running workflow.

    Attributes:
        owner: the forecaster whose predictors it belongs to.
        agents, lengths: its state in each predictor, or why there is none.
        profiled: its place on the profile of its type; None where there is none, or it is not known any more.
        expected: the agent, or END, that the profile holds most likely next; None where it was not asked, or not sure.
        steps: the number after the highest that has begun; without numbers, how many have begun.
        missing: lower numbers that have not begun yet, as steps that run at once may begin in any order.
        open: number and agent of the steps that have not completed, in the order of their starts; aborted ones stay.
        within: whether the one that began last is among them.
        latest: number, agent and prompt tokens of that one while it runs, and the forecast made as it began.
        remaining: forecast of remaining tokens when the last step began.
        called, forecast: its agents, and what was last forecast of the next one; kept only of workflow types that call
            agents which the model does not know.
        new: its agents that the model numbers by the order of their first calls, in this order; None where it does not.
        history, stats_key: what online counts will learn from it, and under which key.
        awaited: the step that began last, while its hidden state or its answer is still expected.
        early: forecasts of steps that have arrived and not started, in the order of arrival.
        outcomes: what its forecasts are judged by; None where nobody does.
    """

    __slots__ = (
        "agents", "awaited", "called", "early", "expected", "forecast", "history", "latest", "lengths", "missing",
        "new", "open", "outcomes", "owner", "profiled", "remaining", "stats_key", "steps", "within", "workflow_type",
    )  # fmt: skip

    def __init__(
        self,
        owner: Forecaster,
        step: Step,
        agents: AgentWorkflow | Refused,
        lengths: LengthWorkflow | Refused,
        profiled: ProfiledWorkflow | None,
    ) -> None:
        self.owner, self.profiled = owner, profiled
        self.workflow_type, self.stats_key = shared(step.workflow_type), shared(step.stats_key)
        self.expected: str | None = None
        self.agents, self.lengths, self.remaining = agents, lengths, NO_LENGTHS
        self.steps, self.missing, self.within = 0, _NO_NUMBERS, False
        self.open: tuple[tuple[int | None, str], ...] = ()
        self.latest: tuple[tuple[int | None, str, object], LiveForecast] | None = None
        self.called: tuple[str, ...] = ()
        self.new: tuple[str, ...] | None = None
        self.forecast: Expected | None = None
        self.history = WorkflowHistory()
        self.awaited: Awaited | None = None
        self.early: tuple[EarlyForecast, ...] = ()
        self.outcomes: WorkflowOutcomes | None = None

    def miss(self, step: int) -> None:
        """Steps before number `step` were missed: predictors no longer know the state of the workflow."""
        self.agents = self.lengths = Refused(MISSED_STEP)
        self.history.missed()
        self.awaited = self.latest = self.profiled = self.expected = self.forecast = None
        self.steps, self.missing, self.open = step, _NO_NUMBERS, ()

    def begins(self, number: int | None, agent: str) -> None:
        """A step begins. It has missed none if it is the next, or one of several that run at once, in any order.

        A number that was seen before says nothing about others: clients count each agent's steps, or none, or ask again
        for an answer that has come.
        """
        if number is None:
            self.steps += 1
        elif number in self.missing:
            self.missing -= {number}
        elif number >= self.steps:
            gone = self.missing and not self.open  # no step runs beside which the missing one could still begin
            ahead = _MOST_AHEAD - len(self.missing) if self.steps else 0
            if gone or number > self.steps + ahead:
                self.miss(number)
            self.missing |= frozenset(range(self.steps, number))
            self.steps = number + 1
        self.open, self.within = (*self.open, (number, agent))[-MOST_OPEN:], True

    def place(self, number: int | None, agent: str | None) -> int | None:
        """The place in `open` of a step that completes, the latest if neither is given; None if it does not run."""
        for place, opened in enumerate(self.open):
            if opened == (number, agent):
                return place
        return len(self.open) - 1 if self.within and number is None and agent is None else None


class Forecaster:
    """Forecasts with one version of the predictors.

    Args:
        predictor, version: of next agents, and its version in the registry; None leaves next agents to `back_off`.
        lengths, lengths_version, lengths_kind: likewise of remaining output tokens, or of context growth.
        profile, profile_version: likewise of workflow profiles, which forecast before `back_off` does.
        back_off: online counts, which learn from the events and forecast if a predictor does not; None for none.
        served_model, state_layer: whose hidden states the engine captures; see `NextAgentAdapter`.
        monitor: receives every event; during its drift alarms the counts forecast.
        inputs: counter of the inputs that come with events; None for a new one.
        text_models: artefacts of the predictors of which another process can compute what they read of texts.

    Attributes:
        counts: forecasts by kind of model, source and reason.
        states: states that arrived by `on_prefill_state` or `on_completion_state`, by the reason why one was not used;
            None if it was.
        errors: exceptions caught in `close`, by name.
        inputs: "steps" that began, and of these with "tokens", "text" or "states".
        awaits_states: whether prefill states arrive later, by `on_prefill_state`; costs a copy of a workflow's state
            while its step waits for one.
        awaits_answers: likewise of completion states, by `on_completion_state`.
        following: running workflows whose state is its own.
        dropped: whether its workflows go on with a later one.
    """

    def __init__(
        self,
        predictor: NextAgentPredictor | None,
        version: int | None = None,
        *,
        lengths: RemainingLengthPredictor | None = None,
        lengths_version: int | None = None,
        lengths_kind: ModelKind = "remaining-length",
        profile: ProfilePredictor | None = None,
        profile_version: int | None = None,
        back_off: OnlineCounts | None = None,
        served_model: str | None = None,
        state_layer: int | None = None,
        budget: Budget | None = None,
        monitor: ForecastMonitor | None = None,
        inputs: Counter[str] | None = None,
        text_models: Mapping[ModelKind, TextModel] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.predictor, self.version = predictor, version
        self.profile, self.lengths, self.text_models, self._served_model = profile, lengths, text_models, served_model
        self.counts: Counter[tuple[ModelKind, Source, str | None]] = Counter()
        self.states: Counter[str | None] = Counter()
        self.errors: Counter[str] = Counter()
        self.inputs: Counter[str] = Counter() if inputs is None else inputs
        self.awaits_states = self.awaits_answers = self.dropped = False
        self.following = 0
        self.breakers: dict[str, CircuitBreaker] = {
            kind: CircuitBreaker(kind if number is None else f"{kind} version {number}", budget or Budget(), clock)
            for kind, number in (("next-agent", version), (lengths_kind, lengths_version), ("profile", profile_version))
        }
        self._call_agents = self.breakers["next-agent"].call
        self._call_lengths, self._lengths_kind = self.breakers[lengths_kind].call, lengths_kind
        self._call_profile = self.breakers["profile"].call
        self._profile = ProfileAdapter(profile, profile_version) if profile is not None else None
        self._agents: NextAgentAdapter | None = None
        if predictor is not None:
            self._agents = NextAgentAdapter(predictor, version, served_model, state_layer)
        self._lengths = LengthAdapter(lengths, lengths_version) if lengths is not None else None
        self._back_off, self.monitor = back_off, monitor
        self._new_agents: NewAgents | None = None
        if predictor is not None and back_off is not None:
            self._new_agents = NewAgents(predictor, back_off.config)
        # The predictors' own forecast at the last event, for the monitor to judge even if counts were used instead.
        self._claimed: LiveForecast | None = None

    @property
    def loaded(self) -> list[LoadedPredictor]:
        """Its predictors."""
        return [predictor for predictor in (self.predictor, self.lengths, self.profile) if predictor is not None]

    def state(self, workflow: Workflow) -> ForecastState | None:
        """What the forecasts of a workflow go on from; None before the first."""
        return workflow.forecast_state if isinstance(workflow.forecast_state, ForecastState) else None

    def keep(self, workflow: Workflow, state: ForecastState | None) -> None:
        """Makes this its state in the record of a workflow."""
        workflow.forecast_state = state

    def on_prefill(
        self,
        workflow: Workflow,
        agent: str,
        *,
        step: int | None = None,
        input_tokens: int | None = None,
        input_text: str | None = None,
        system_prompt: str | None = None,
        model: str | None = None,
        prefill_state: NDArray[Any] | None = None,
        projected: NDArray[np.float32] | None = None,
        prompt_read: NDArray[np.float32] | None = None,
    ) -> LiveForecast:
        """Returns the forecast once a step has read its prompt.

        Args:
            workflow: the record of the workflow; of its `step`, only what names the workflow is read.
            agent: the role.
            step: its number in the workflow, from 0, if the caller knows it.
            input_tokens, model: size of the prompt, and the model that serves it.
            input_text, system_prompt: the prompt, and the agent's constant part of it, for predictors that read text.
            prefill_state: hidden state after prefill [d], for predictors that read states.
            projected: the state of the prompt, projected to float32 [p] where its text is (`text_models`), in place of
                `input_text`.
            prompt_read: likewise what the predictor of lengths reads of both prompts (`LengthEncoder.read_prompt`); the
                served model is then known too.
        """
        given = {
            "agent": agent if isinstance(agent, str) else "",  # an agent without a name is an unknown one
            "input_tokens": input_tokens,
            "input_text": input_text,
            "system_prompt": system_prompt,
            "model": model if prompt_read is None else self._served_model,
            "prefill_state": prefill_state,
            PROJECTED: projected,
            PROMPT_READ: prompt_read,
        }
        self.inputs["steps"] += 1
        if input_tokens is not None:
            self.inputs[TOKENS] += 1
        if any(part is not None for part in (input_text, system_prompt, projected, prompt_read)):
            self.inputs[TEXT] += 1
        if prefill_state is not None:
            self.inputs[STATES] += 1
        return self._forecast(PREFILL, partial(self._begun, workflow, step, given))

    def on_completion(
        self,
        workflow: Workflow,
        *,
        step: int | None = None,
        agent: str | None = None,
        output_tokens: int | None = None,
        output_text: str | None = None,
        completion_state: NDArray[Any] | None = None,
        projected: NDArray[np.float32] | None = None,
    ) -> LiveForecast:
        """Returns the forecast once a step has produced its last token.

        The step is the one with this number and agent, or the latest. If another has begun since, forecasts go on from
        the other: the output is credited, and nothing is forecast. Remaining tokens are those forecast when the step
        began, less what it has produced. `projected` is the completion state projected by `projections`, float32 [c],
        in place of `completion_state`.
        """
        given = {
            "output_tokens": output_tokens,
            "output_text": output_text,
            "completion_state": completion_state,
            PROJECTED: projected,
        }
        return self._forecast(COMPLETION, partial(self._completed, workflow, (step, agent), given))

    @property
    def projections(self) -> dict[Moment, Projection]:
        """W and b by moment, for workers that project hidden states; empty if the predictor reads none of this model.

        Captured states are rounded to float16 before they are projected, as in traces.
        """
        return self._agents.projections if self._agents is not None else {}

    def on_prefill_state(
        self, workflow: Workflow, projected: NDArray[np.float32], of: LiveForecast
    ) -> LiveForecast | None:
        """Forecasts a step again once its prefill state has arrived, projected by `projections` to float32 [p].

        `of` is the forecast that `on_prefill` returned for this step; the new one equals that of `on_prefill` with the
        state. None if the state arrives too late or cannot be used: the earlier forecast then stays valid. Only
        `states` counts it.
        """
        live = self._renewed(workflow, {PROJECTED: projected}, of, self.states)
        if live is not None:
            self.inputs[STATES] += 1
        return live

    def on_completion_state(
        self, workflow: Workflow, projected: NDArray[np.float32], of: LiveForecast
    ) -> LiveForecast | None:
        """Likewise at the completion of the workflow's latest step; `of` is the latest forecast after that step.

        The state is that of the output's text, which is known only after the last token (`text_models`).
        """
        return self._renewed(workflow, {PROJECTED: projected}, of, self.states)

    @property
    def reads_tools(self) -> bool:
        """Whether the tools that an answer calls change its forecasts."""
        return self.predictor is not None and bool(self.predictor.vocabulary.tools)

    def on_tools_called(self, workflow: Workflow, tools: Sequence[str], of: LiveForecast) -> LiveForecast | None:
        """Forecasts again once the answer of the workflow's latest step was parsed: the tools that it calls, if any.

        `of` is the latest forecast after that step; the new one equals that of `on_completion` with the tools. None if
        the workflow has gone on, or the model reads no tools.
        """
        live = self._renewed(workflow, {TOOLS_CALLED: tuple(tools)}, of, None)
        if live is not None:
            self.inputs[ANSWERS] += 1
        return live

    def on_answer_read(self, workflow: Workflow, read: NDArray[np.float32]) -> bool:
        """What the predictor of lengths reads of the output of the workflow's latest step, for its next forecast.

        As `LengthEncoder.read_answer`. Returns False if the next step has begun already, or it cannot be used.
        """
        running = self.state(workflow)
        if running is None or running.within or isinstance(running.lengths, Refused):
            return False
        done = self._call_lengths(partial(running.lengths.answered, read))
        if isinstance(done, Refused):
            running.lengths = done
        return not isinstance(done, Refused)

    def _renewed(
        self,
        workflow: Workflow,
        further: Mapping[str, Any],
        of: LiveForecast,
        counts: Counter[str | None] | None,
    ) -> LiveForecast | None:
        """The forecast `of` again, with further columns of its step; None if they cannot be used, which is counted."""
        counts = Counter() if counts is None else counts
        try:
            running = self.state(workflow)
            if running is None or running.awaited is None or running.awaited.forecast is not of:
                counts[NOT_AWAITED] += 1
                return None
            live = self._again(running, running.awaited, further)
        except Exception as error:
            counts[type(error).__name__] += 1
            return None
        if isinstance(running.agents, Refused):
            counts[running.agents.reason] += 1
            return None
        counts[None] += 1
        if self.monitor is not None and running.outcomes is not None and self._claimed is not None:
            self.monitor.again(running.outcomes, self._claimed)
        return live

    def close(self, workflow: Workflow, reason: EndReason = EndReason.FINISHED) -> None:
        """Drops the state of a workflow that has ended; an unknown workflow is ignored.

        Online counts learn from finished and expired workflows; the monitor judges ends of finished ones only.
        """
        try:
            running = self.state(workflow)
            if running is None:
                return
            self.keep(workflow, None)
            self.following -= 1
            if self.monitor is not None and running.outcomes is not None:
                self.monitor.ended(running.outcomes, reason, self._counted(running), running.expected)
            if self._back_off is not None and reason is not EndReason.ABORTED:
                if self._new_agents is not None and not running.within:
                    self._new_agents.ended(running.stats_key, running.history.recent, running.called, running.forecast)
                running.history.ended(self._back_off, running.stats_key)
        except Exception as error:
            self.errors[type(error).__name__] += 1

    def position(self, workflow: Workflow) -> dict[str, Any] | None:
        """Where a running workflow is on the profile of its type, for people; None if that is not known."""
        running = self.state(workflow)
        if self._profile is None or running is None or running.profiled is None:
            return None
        place = self._call_profile(partial(self._profile.position, running.profiled))
        return None if isinstance(place, Refused) else place

    def reset(self) -> None:
        """Closes all circuit breakers. A workflow that missed a step of a predictor gets no more of its forecasts."""
        for breaker in self.breakers.values():
            breaker.reset()

    def _forecast(self, moment: Moment, event: Callable[[], LiveForecast | str]) -> LiveForecast:
        """Returns and counts the event's forecast; of source "none" if the event is invalid or fails."""
        try:
            sources = (self._agents, self._lengths, self._profile, self._back_off)
            live = NO_MODEL if all(source is None for source in sources) else event()
        except Exception as error:
            live = type(error).__name__  # the message might contain text of the request
        if isinstance(live, str):
            live = self._nothing(moment, live)
        self.counts["next-agent", live.source, live.reason] += 1
        self.counts[self._lengths_kind, live.remaining.source, live.remaining.reason] += 1
        return live

    def _begun(self, workflow: Workflow, step: int | None, given: Mapping[str, Any]) -> LiveForecast | str:
        running = self.state(workflow) or self._opened(workflow)
        named = step, given["agent"], given["input_tokens"]
        if step is not None and running.within and running.latest is not None and running.latest[0] == named:
            return running.latest[1]  # its client has asked again, as clients do when a request is lost or too slow
        running.begins(step, given["agent"])
        counted, profiled = self._counted(running), running.expected
        try:
            live = self._at_prefill(running, given)
        except Exception:
            running.miss(running.steps)  # the predictors' states may disagree
            raise
        running.latest = named, live
        if self.monitor is not None and running.outcomes is not None:
            self.monitor.begun(running.outcomes, given["agent"], self._claimed or live, step, counted, profiled)
        return live

    def _completed(
        self, workflow: Workflow, step: tuple[int | None, str | None], given: Mapping[str, Any]
    ) -> LiveForecast | str:
        running = self.state(workflow)
        place = running.place(*step) if running is not None else None
        if running is None or place is None:
            return NO_STEP
        latest = running.within and place == len(running.open) - 1
        if latest:
            running.within, running.latest = False, None
        running.open = running.open[:place] + running.open[place + 1 :]
        try:
            if not latest:
                self._beside(running, place, given)
                return BESIDE
            live = self._at_completion(running, given)
        except Exception:
            running.miss(running.steps)
            raise
        if self.monitor is not None and running.outcomes is not None:
            self.monitor.completed(running.outcomes, self._claimed or live, given["output_tokens"])
        return live

    def _at_prefill(self, running: ForecastState, step: Mapping[str, Any]) -> LiveForecast:
        """The forecast once a step has read its prompt; `step` has the columns of the trace by name."""
        running.awaited = None
        before = None
        if self.awaits_states and not isinstance(running.agents, Refused):
            before = running.agents.copy()
        if self._profile is not None and running.profiled is not None:
            beside = len(running.open) > 1
            begun = self._call_profile(partial(self._profile.begun, running.profiled, step["agent"], beside))
            running.profiled = None if isinstance(begun, Refused) else begun
        if self._back_off is not None:
            sent = shared(step["agent"])
            if self._new_agents is not None and sent:
                step = self._renamed(self._new_agents, running, sent, step)
            running.history.begun(self._back_off, running.stats_key, sent)
        made: LiveLengths | Refused = _why_not(self._lengths, running.lengths)
        if self._lengths is not None and not isinstance(running.lengths, Refused):
            made = self._call_lengths(partial(self._lengths.prefilled, running.lengths, step))
            if isinstance(made, Refused):
                running.lengths = made
        running.remaining = self._left(running, made)
        forecast = self._next(PREFILL, running, self._prefilled(running, step), running.remaining)
        if self.monitor is not None and isinstance(made, LiveLengths) and made is not running.remaining:
            self._claimed = replace(self._claimed or forecast, remaining=made)
        if before is not None and not isinstance(running.agents, Refused):
            running.awaited = Awaited(before, step, forecast)
        return forecast

    def _renamed(self, new: NewAgents, running: ForecastState, sent: str, step: Mapping[str, Any]) -> Mapping[str, Any]:
        """The step as the model reads it: a new agent that takes the place of a known one is this one."""
        first, recent = running.steps == 1, running.history.recent
        stands_for = new.begun(running.stats_key, sent, recent, running.forecast, first=first)
        if new.follows(running.stats_key) and sent not in running.called:
            running.called = (*running.called, sent)
        return step if stands_for is None else {**step, "agent": stands_for}

    def _again(self, running: ForecastState, awaited: Awaited, further: Mapping[str, Any]) -> LiveForecast:
        """Forecasts the last event again, with further columns of its step. After the output more may come.

        Online counts and the forecast of remaining tokens stay as they are.
        """
        running.awaited = None
        if not isinstance(running.agents, Refused):
            running.agents[:] = awaited.before
        step, forecast = {**awaited.step, **further}, awaited.forecast
        if forecast.moment == PREFILL:
            live = self._prefilled(running, step)
            return self._next(PREFILL, running, live, forecast.remaining)
        live = self._finished(running, step, forecast.remaining)
        renewed = self._next(COMPLETION, running, live, forecast.remaining)
        if not isinstance(running.agents, Refused):
            running.awaited = Awaited(awaited.before, step, renewed)
        return renewed

    def _prefilled(self, running: ForecastState, step: Mapping[str, Any]) -> LiveForecast | Refused:
        """The model's forecast of next agents at prefill."""
        agents, workflow = self._agents, running.agents
        if agents is None or isinstance(workflow, Refused):
            return _why_not(agents, workflow)
        running.new = agents.called(step["agent"], running.new)
        prefilled = partial(agents.prefilled, workflow, step["agent"], running.new, step, running.remaining)
        return self._call_agents(prefilled)

    def _finished(self, running: ForecastState, step: Mapping[str, Any], left: LiveLengths) -> LiveForecast | Refused:
        """The model's forecast of next agents at completion."""
        agents, workflow = self._agents, running.agents
        if agents is None or isinstance(workflow, Refused):
            return _why_not(agents, workflow)
        return self._call_agents(partial(agents.completed, workflow, running.new, step, left))

    def _at_completion(self, running: ForecastState, step: Mapping[str, Any]) -> LiveForecast:
        """The forecast once the step has produced its last token."""
        running.awaited = None
        produced = running.history.completed(step["output_tokens"])
        if not isinstance(running.lengths, Refused):
            done = self._call_lengths(partial(running.lengths.completed, step))
            if isinstance(done, Refused):
                running.lengths = done
        left = running.remaining if produced is None else running.remaining.after(produced)
        before = None
        if (self.awaits_answers or self.reads_tools) and not isinstance(running.agents, Refused):
            before = running.agents.copy()
        forecast = self._next(COMPLETION, running, self._finished(running, step, left), left)
        if before is not None and not isinstance(running.agents, Refused):
            running.awaited = Awaited(before, step, forecast)
        return forecast

    def _beside(self, running: ForecastState, place: int, step: Mapping[str, Any]) -> None:
        """A step has completed after another began: its output counts, and forecasts go on from the other."""
        running.history.completed(step["output_tokens"], place)
        if not isinstance(running.lengths, Refused):
            done = self._call_lengths(partial(running.lengths.completed, step))
            if isinstance(done, Refused):
                running.lengths = done

    def _next(
        self,
        moment: Moment,
        running: ForecastState,
        live: LiveForecast | Refused,
        left: LiveLengths,
    ) -> LiveForecast:
        """The forecast of next agents, from the model, the profile or the counts; sets `_claimed`."""
        stands_back = self._stands_back(running.workflow_type, "next-agent")
        running.forecast = None
        if self._new_agents is not None and isinstance(live, LiveForecast):
            live, running.forecast = self._new_agents.forecast(running.stats_key, running.history.recent, live)
        self._claimed = None if isinstance(live, Refused) else live
        running.expected = None
        if isinstance(live, Refused):
            running.agents = live
        elif live.source == "champion" and stands_back is None:
            return live
        reason = live.reason if isinstance(live, Refused) else stands_back or LITTLE_SEEN
        profiled = self._profiled(moment, running, reason, left)
        if profiled is not None:
            behind = self._profile_stands_back(running)
            if behind is None:
                return profiled
            if isinstance(live, Refused):
                self._claimed, reason = profiled, behind
        recent = running.history.recent
        counted = self._back_off.next_agents(running.stats_key, recent) if self._back_off is not None else None
        if counted is not None and (isinstance(live, Refused) or stands_back or counted.evidence > live.evidence):
            return LiveForecast(
                "back-off", counted.evidence, moment, counted.probabilities, counted.agents, None, reason, left
            )
        if counted is None and profiled is not None and (isinstance(live, Refused) or live.source != "champion"):
            return profiled
        return self._nothing(moment, live.reason, left) if isinstance(live, Refused) else live

    def _opened(self, workflow: Workflow) -> ForecastState:
        """The state of a workflow whose first step begins."""
        agents, lengths, profile = self._agents, self._lengths, self._profile
        workflow_type = workflow.step.workflow_type
        profiled = self._call_profile(partial(profile.open, workflow_type)) if profile is not None else None
        running = ForecastState(
            self,
            workflow.step,
            self._call_agents(partial(agents.predictor.open, workflow_type)) if agents is not None else _NONE,
            self._call_lengths(partial(lengths.predictor.open, workflow_type)) if lengths is not None else _NONE,
            None if isinstance(profiled, Refused) else profiled,
        )
        running.new = agents.opened(workflow_type) if agents is not None else None
        running.outcomes = self.monitor.opened(running.workflow_type) if self.monitor is not None else None
        self.keep(workflow, running)
        self.following += 1
        return running

    def _profiled(self, moment: Moment, running: ForecastState, reason: str, left: LiveLengths) -> LiveForecast | None:
        """The forecast of next agents from the profile; None where it is not sure. Sets `expected`."""
        profiled = running.profiled
        if self._profile is None or profiled is None or profiled.forecast is None:
            return None
        running.expected = profiled.forecast.likeliest
        return self._profile.forecast(profiled, moment, reason, left)

    def _left(self, running: ForecastState, made: LiveLengths | Refused) -> LiveLengths:
        """The forecast of remaining tokens, from the model, the profile or the counts."""
        stands_back = self._stands_back(running.workflow_type, self._lengths_kind)
        if isinstance(made, LiveLengths) and made.source == "champion" and stands_back is None:
            return made
        reason = made.reason if isinstance(made, Refused) else stands_back or LITTLE_SEEN
        profiled, place = None, running.profiled
        if self._profile is not None and place is not None:
            profiled = self._profile.lengths(place, reason)
        if profiled is not None and place is not None:
            if stands_back is None and place.own:
                return profiled
            reason = stands_back or OTHER_VERSION
        recent, back_off = running.history.recent, self._back_off
        counted = back_off.remaining(running.stats_key, recent[-1]) if back_off is not None and recent else None
        if counted is not None and (isinstance(made, Refused) or stands_back or counted[0] > made.evidence):
            evidence, median = counted
            return LiveLengths("back-off", evidence, (0.5,), (median,), 0, None, reason)
        if isinstance(made, Refused):
            return profiled or self._no_lengths(made.reason)
        return made

    def _nothing(self, moment: Moment, reason: str, remaining: LiveLengths | None = None) -> LiveForecast:
        """A forecast of source "none"."""
        version = self._agents.version if self._agents is not None else None
        return LiveForecast("none", 0, moment, NOTHING, (), version, reason, remaining or self._no_lengths(reason))

    def _no_lengths(self, reason: str) -> LiveLengths:
        return no_lengths(reason, self._lengths.version if self._lengths is not None else None)

    def _stands_back(self, workflow_type: str, kind: ModelKind) -> str | None:
        """Why counts forecast in place of the predictor although it could; None if they do not."""
        monitor = self.monitor
        return monitor.falls_back(workflow_type, kind) if monitor is not None and monitor.stands_back else None

    def _profile_stands_back(self, running: ForecastState) -> str | None:
        """Likewise of the profile. That of another version stands back unless it leads the counts beyond doubt."""
        monitor, profiled = self.monitor, running.profiled
        prior = profiled is not None and not profiled.own
        if prior and (monitor is None or not monitor.profile_stand_back.is_ahead(running.workflow_type)):
            return OTHER_VERSION
        return (
            monitor.profile_falls_back(running.workflow_type) if monitor is not None and monitor.stands_back else None
        )

    def _counted(self, running: ForecastState) -> str | None:
        """The agent, or END, that counts hold most likely next; None where nobody compares, or of too little data."""
        if self.monitor is None or self._back_off is None or not running.history.recent:
            return None
        if self._agents is None and running.expected is None:
            return None
        counted = self._back_off.next_agents(running.stats_key, running.history.recent)
        return likeliest(counted) if counted is not None else None


def _why_not(champion: object, state: object) -> Refused:
    """Why the model cannot forecast: there is none, or it has no state of the workflow."""
    return state if champion is not None and isinstance(state, Refused) else _NONE


_MOST_OLDER: Final = 8
_MOST_EARLY: Final = 64
"""Steps of one workflow that have arrived and not started; beyond that, the oldest are forecast again."""


class VersionedForecaster:
    """The forecasters of successive model versions, with the interface of one.

    A request is ranked when it arrives, so the forecast of its step is made then (`remaining_tokens`) and kept for
    eviction, which needs it when the step starts (`on_prefill`).

    A workflow keeps the version it began with, since a predictor's state of a workflow means nothing to another
    predictor. New workflows begin with the latest version. An older version stays, with its breakers and monitor, while
    workflows of it run. Beyond `_MOST_OLDER` older versions the oldest is dropped; its workflows continue on the latest
    version as workflows with missed steps. States are projected for the latest version only.
    """

    def __init__(self, first: Forecaster) -> None:
        self.latest = first
        self._older: list[Forecaster] = []

    @property
    def loaded(self) -> list[LoadedPredictor]:
        """Those of the latest version."""
        return self.latest.loaded

    @property
    def under_older(self) -> int:
        """Running workflows of older versions."""
        return sum(older.following for older in self._older)

    def take_over(self, forecaster: Forecaster) -> None:
        """Makes `forecaster` the latest. Call `await_states` and `await_answers` again if states arrive later."""
        older = [earlier for earlier in (self.latest, *self._older) if earlier.following]
        for earlier in older[_MOST_OLDER:]:
            earlier.dropped = True
        self._older, self.latest = older[:_MOST_OLDER], forecaster

    def remaining_tokens(
        self, workflow: Workflow, step: Step, input_tokens: int, **features: NDArray[np.float32]
    ) -> float | None:
        """Output tokens of this step, which has just arrived, and of all later ones; None if unknown.

        `features` are `projected` and `prompt_read` of `Forecaster.on_prefill`, by the latest version.
        """
        forecaster = self._of(workflow)
        given: dict[str, Any] = features if forecaster is self.latest else {}
        live = forecaster.on_prefill(workflow, step.agent, step=step.number, input_tokens=input_tokens, **given)
        state = forecaster.state(workflow)
        if state is not None:
            state.early = (*state.early, EarlyForecast(step.agent, step.number, live))[-_MOST_EARLY:]
        return live.remaining.ranking

    def on_prefill(
        self,
        workflow: Workflow,
        agent: str,
        *,
        step: int | None = None,
        input_tokens: int | None = None,
        projected: NDArray[np.float32] | None = None,
        prompt_read: NDArray[np.float32] | None = None,
        **inputs: Any,
    ) -> LiveForecast:
        """The forecast made on arrival; without one, as `Forecaster.on_prefill`, which takes further inputs."""
        forecaster = self._of(workflow)
        state = forecaster.state(workflow)
        for early in state.early if state is not None else ():
            if state is not None and (early.agent, early.number) == (agent, step):
                state.early = tuple(other for other in state.early if other is not early)
                return early.forecast
        if forecaster is self.latest:
            inputs |= {"projected": projected, "prompt_read": prompt_read}
        return forecaster.on_prefill(workflow, agent, step=step, input_tokens=input_tokens, **inputs)

    def on_prefill_state(
        self, workflow: Workflow, projected: NDArray[np.float32], forecast: LiveForecast
    ) -> LiveForecast | None:
        """As `Forecaster.on_prefill_state`; None for a workflow of an older version."""
        forecaster = self._of(workflow)
        if forecaster is not self.latest:
            return None
        return forecaster.on_prefill_state(workflow, projected, forecast)

    def on_completion(
        self,
        workflow: Workflow,
        *,
        projected: NDArray[np.float32] | None = None,
        **outputs: Any,
    ) -> LiveForecast:
        """As `Forecaster.on_completion`; without its state for a workflow of an older version."""
        forecaster = self._of(workflow)
        state = projected if forecaster is self.latest else None
        return forecaster.on_completion(workflow, projected=state, **outputs)

    def on_completion_state(
        self, workflow: Workflow, projected: NDArray[np.float32], forecast: LiveForecast
    ) -> LiveForecast | None:
        """As `Forecaster.on_completion_state`; None for a workflow of an older version."""
        forecaster = self._of(workflow)
        if forecaster is not self.latest:
            return None
        return forecaster.on_completion_state(workflow, projected, forecast)

    @property
    def reads_tools(self) -> bool:
        """Whether the latest version reads the tools that answers call."""
        return self.latest.reads_tools

    def on_tools_called(self, workflow: Workflow, tools: Sequence[str], of: LiveForecast) -> LiveForecast | None:
        """As `Forecaster.on_tools_called`."""
        return self._of(workflow).on_tools_called(workflow, tools, of)

    def on_answer_read(self, workflow: Workflow, read: NDArray[np.float32]) -> bool:
        """As `Forecaster.on_answer_read`; False for a workflow of an older version."""
        forecaster = self._of(workflow)
        return forecaster is self.latest and forecaster.on_answer_read(workflow, read)

    def close(self, workflow: Workflow, reason: EndReason = EndReason.FINISHED) -> None:
        """As `Forecaster.close`."""
        forecaster = self._of(workflow)
        forecaster.close(workflow, reason)
        if forecaster is not self.latest and not forecaster.following:
            self._older.remove(forecaster)

    @property
    def projections(self) -> Mapping[Moment, Projection]:
        """Those of the latest version."""
        return self.latest.projections

    def await_states(self) -> None:
        """Expects prefill states by `on_prefill_state` from now on."""
        self.latest.awaits_states = True

    @property
    def text_models(self) -> Mapping[ModelKind, TextModel]:
        """Those of the latest version."""
        return self.latest.text_models

    def await_answers(self) -> None:
        """Expects the features of answers by `on_completion_state` from now on."""
        self.latest.awaits_answers = True

    def position(self, workflow: Workflow) -> dict[str, Any] | None:
        """As `Forecaster.position`."""
        return self._of(workflow).position(workflow)

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        monitor = self.latest.monitor
        return {
            "forecaster": self.latest.following,
            "forecaster, older versions": self.under_older,
            "monitor": monitor.following if monitor is not None else 0,
        }

    def _of(self, workflow: Workflow) -> Forecaster:
        """The forecaster that the workflow began with, while it is kept."""
        state = self.latest.state(workflow)
        if state is None:
            return self.latest
        if not state.owner.dropped:
            return state.owner
        self.latest.keep(workflow, None)
        return self.latest
