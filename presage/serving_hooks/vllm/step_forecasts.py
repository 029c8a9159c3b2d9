"""Requests the forecasts of running steps and passes them to eviction.

A forecast of next agents is made when a step starts, completes or gets its hidden state; one of the return time when a
step completes, and again when its answer was parsed; one of context growth when a step arrives and completes. Eviction
receives the latest forecasts of each workflow at `flush`, while the model runs: if one step completes and the next
arrives, blocks are ranked only once. While there are enough free blocks that no workflow uses, it receives none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import COMPLETION, PREFILL
from presage.serving_hooks.counts import FORECASTS, HIDDEN_STATES, EventCounts
from presage.serving_hooks.explain import LastForecasts
from presage.serving_hooks.forecasting.forecasts import Forecasts, ReadsStates, ReadsTools
from presage.serving_hooks.listeners import Found, Listener
from presage.serving_hooks.modes import Mode, Modes, Switch
from presage.serving_hooks.policies.next_use import READY, ReturnCurve, StepPace, paced
from presage.serving_hooks.policies.score import UNKNOWN, Lookahead, ScoreConfig, lookahead
from presage.serving_hooks.vllm.engine import EngineRequest
from presage.serving_hooks.vllm.step_texts import PROJECTED, PROMPT_READ, RequestTexts, TextOf
from presage.serving_hooks.workflows import (
    CompletedForecast,
    EndReason,
    Hold,
    PendingForecast,
    RunningStep,
    Workflow,
    WorkflowForecasts,
    WorkflowTable,
)
from presage.serving_hooks.workflows.choices import LeftStep
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import LiveForecast, LiveLengths, LiveReturn


class Retention(Protocol):
    """Keeps blocks by forecasts."""

    @property
    def pressed(self) -> bool:
        """Whether it needs forecasts at each `flush`; else it calls `pass_on` when it does."""

    def forecast(
        self, step: Step, lookahead: Lookahead, curve: ReturnCurve | None, since: float, step_s: float
    ) -> None:
        """New forecasts of the workflow that `step` belongs to; see `FreeOrder.forecast`."""


_ARRIVED: Final = slice(1, None)
"""The rows of a forecast that follow its first once the next step has arrived.

PBKV updates a forecast when a step is computed, but in a full engine a step may wait long before that. So the
first row becomes certain. The later rows stay, since they are conditional on the workflow continuing."""

_PREEMPTED: Final = slice(-1)
"""Those once a step must be computed again: it comes first, all others one step later."""

_HOLD: Final = (0.1, 0.5, 0.9, 0.99)
"""Shares of a hold's bound, and how likely the hold is no longer than that: uniform."""

_FIRST_STEP_S: Final = 10.0
"""Seconds from step to step before any was measured; the same for all workflows."""

_FEW: Final = 64
"""Workflows that may be pending in vain."""

CompletionState = Callable[[str], "NDArray[np.float32] | None"]
"""The completion state of a request that has just produced its last token; None if there is none."""


class StepForecasts(Listener[EngineRequest]):
    """The forecasts of running steps.

    Args:
        switch: of what all policies but priority build on.
        texts: the features of texts that reach the engine.
        record: records each forecast, by request id; None records nothing.
        last: keeps recent forecasts for `explain`; None keeps none.

    Attributes:
        sources: of the forecasts.
        retention: receives forecasts; None while eviction is vLLM's own.
        state_source: the forecast source that reads hidden states, and where completion states come from; prefill
            states come by `prefill_state`. None while no states are read.
    """

    def __init__(
        self,
        table: WorkflowTable,
        forecasts: Forecasts,
        score: ScoreConfig,
        counts: EventCounts,
        modes: Modes,
        clock: Callable[[], float],
        *,
        switch: Switch | None = None,
        texts: RequestTexts | None = None,
        record: Callable[[str, LiveForecast], object] | None = None,
        last: LastForecasts | None = None,
    ) -> None:
        self.switch = switch or Switch("bookkeeping of workflows", counts)
        retry = self.switch.retry
        self.texts = texts or RequestTexts(forecasts, counts, wanted=False)
        self.sources = forecasts
        self.retention: Retention | None = None
        self.state_source: tuple[ReadsStates, CompletionState] | None = None
        remaining: object = forecasts.remaining
        self._same_source = remaining is forecasts.next_agents
        self._table, self._next_agents, self._remaining = table, forecasts.next_agents, forecasts.remaining
        self._tools_source = self._next_agents if isinstance(self._next_agents, ReadsTools) else None
        self._returns, self._pace, self._clock = forecasts.returns, StepPace(), clock
        self._score, self._counts, self._modes = score, counts, modes
        self._record, self._last = record, last
        self._pending: list[Workflow] = []
        self._contexts = forecasts.contexts
        self._contexts_switch = Switch("forecasts of contexts", counts, retry=retry)
        self._next_agents_switch = Switch("forecasts of next agents", counts, retry=retry)
        self._remaining_switch = Switch("forecasts of remaining tokens", counts, retry=retry)
        self._returns_switch = Switch("forecasts of return times", counts, retry=retry)
        self.sources_switches = (
            self._contexts_switch,
            self._next_agents_switch,
            self._remaining_switch,
            self._returns_switch,
        )
        close = self._next_agents.close if self._next_agents is not None else None
        self._takes_reason = close is not None and "reason" in inspect.signature(close).parameters

    def request_arrived(self, request: EngineRequest, step: RunningStep | None) -> None:
        """A step has arrived: it is ranked, and its workflow is back."""
        if step is None:
            return
        if step.opens:
            self._arrived(step, request.num_prompt_tokens)
        key = step.step.stats_key
        if self._modes.of("priority", key) or self._modes.of("admission", key):
            step.remaining_tokens = self._remaining_tokens(request, step)

    def _arrived(self, running: RunningStep, input_tokens: int) -> None:
        step, now, forecasts = running.step, self._clock(), running.workflow.forecasts
        if forecasts.arrived_at is not None:
            self._pace.observe(step.stats_key, now - forecasts.arrived_at)
        forecasts.arrived_at = now
        if self._returns is not None:
            self._returns_switch.attempt(self._returns.arrived, running.workflow, step, input_tokens, now)
        if self._contexts is not None and self._modes.of("admission", step.stats_key) is not Mode.OFF:
            growth = self._contexts_switch.attempt(self._contexts.arrived, running.workflow, step, input_tokens)
            self._grows(forecasts, growth)
            if growth is not None:
                self._counts.add(FORECASTS, "context-growth", growth.source)
        self._change(running.workflow, step, _ARRIVED, READY)

    def _remaining_tokens(self, request: EngineRequest, running: RunningStep) -> float | None:
        """Output tokens of a step that has just arrived and of all later ones; None if unknown."""
        if self._remaining is None:
            return None
        ranking = self._table.choices.ranking(running.request_id)
        if ranking is not None:
            return ranking[0]
        given: dict[str, Any] = dict(self.texts.arrived(request)) if self._same_source else {}
        make = partial(self._remaining.remaining_tokens, **given)
        lengths = self._remaining_switch.attempt(make, running.workflow, running.step, request.num_prompt_tokens)
        self._table.choices.ranked(running.request_id, lengths)
        return lengths

    def request_scheduled(self, request: EngineRequest, step: RunningStep | None, found: Found) -> None:
        """A step is scheduled for the first time. Its prompt is not read yet; its hidden state may come later."""
        given: dict[str, Any] = dict(self.texts.started(request))
        if step is None or not self._table.choices.begins(request.request_id):
            return
        named, forecasts, source = step.step, step.workflow.forecasts, self._next_agents
        forecasts.started, forecasts.curve, forecasts.since = request.request_id, None, self._clock()
        if source is None:
            self._change(step.workflow, named, None)
            return
        given |= {"step": named.number, "input_tokens": request.num_prompt_tokens}
        make = partial(source.on_prefill, step.workflow, named.agent, **given)
        forecasts.unanswered = forecasts.calling = None
        self._forecast(step, request.request_id, make)
        if self.state_source is not None:
            step.awaits_state = forecasts.next_agents

    def prefill_state(self, request_id: str, projected: NDArray[np.float32]) -> None:
        """Renews the forecast of a step with its prefill state."""
        running = self._table.step(request_id)
        made = running.awaits_state if running is not None else None
        if self.state_source is None or running is None or made is None or not self._next_agents_switch.on:
            return
        running.awaits_state = None
        step, forecasts = running.step, running.workflow.forecasts
        forecast = self._next_agents_switch.attempt(
            self.state_source[0].on_prefill_state, running.workflow, projected, made
        )
        if not self._next_agents_switch.on:
            return
        self._counts.add(HIDDEN_STATES, PREFILL, "late" if forecast is None else "used")
        if forecast is not None:
            if self._record is not None:
                self._record(request_id, forecast)
            forecasts.next_agents = forecast
            self._change(running.workflow, step, _PREEMPTED if running.preempted else None)

    def request_preempted(self, step: RunningStep) -> None:
        """A step is preempted: the next step to be computed is certain."""
        step.preempted = True
        self._change(step.workflow, step.step, _PREEMPTED, READY)

    def request_resumed(self, step: RunningStep) -> None:
        """A preempted step is scheduled again."""
        step.preempted = False
        forecasts = step.workflow.forecasts
        forecasts.curve, forecasts.since = None, self._clock()
        self._change(step.workflow, step.step, None)

    def request_finished(self, request: EngineRequest, step: RunningStep | None, left: LeftStep | None) -> None:
        """A step leaves the engine."""
        if step is not None and left is not None:
            self._finished(step, left)

    def _finished(self, running: RunningStep, left: LeftStep) -> None:
        step, workflow, source = running.step, running.workflow, self._next_agents
        request_id, completed, output_tokens, finish_reason = left
        forecasts = workflow.forecasts
        forecasts.curve, forecasts.since = None, self._clock()
        if self._returns is not None:
            now = self._clock()
            outcome = output_tokens, finish_reason, now
            made = self._returns_switch.attempt(self._returns.completed, workflow, step, *outcome)
            self._returning(forecasts, made, now)
        if self._contexts is not None and completed:
            growth = self._contexts_switch.attempt(self._contexts.completed, workflow, step, output_tokens)
            if growth is not None and growth.tokens:  # else that of a later step stays
                self._grows(forecasts, growth)
        beside = forecasts.started != request_id  # another step has started since
        if completed and source is not None:
            of = partial(source.on_completion, workflow, step=step.number)
            make = partial(of, agent=step.agent, output_tokens=output_tokens)
        if completed and source is not None and beside:
            self._next_agents_switch.attempt(make)
        elif completed and source is not None:
            state = self._completion_state(request_id, running.awaits_state is not None)
            self._forecast(running, request_id, partial(make, **state), ends=step.last)
            latest = forecasts.next_agents
            if self.texts.source is not None and latest is not None:
                forecasts.unanswered = CompletedForecast(request_id, latest)
            if self._tools_source is not None and self._tools_source.reads_tools and latest is not None:
                forecasts.calling = CompletedForecast(request_id, latest)
        elif not step.last:
            self._change(workflow, step, None)

    def answer_parsed(self, workflow: Workflow, finish_reason: str | None, tools: Sequence[str] | None) -> None:
        """The answer of the latest step of a workflow was parsed: its finish reason and the tools that it calls."""
        if workflow.requests:
            return
        step = workflow.step
        if tools is not None:
            self._tools_called(workflow, tools)
        if self._returns is None:
            return
        made = self._returns_switch.attempt(self._returns.answered, workflow, step, finish_reason, tools)
        if made is not None:
            self._returning(workflow.forecasts, made, workflow.forecasts.since)
            self._change(workflow, step, None)

    def _tools_called(self, workflow: Workflow, tools: Sequence[str]) -> None:
        """Renews the forecast after a step with the tools that its answer calls."""
        step, made = workflow.step, workflow.forecasts.calling
        if self._tools_source is None or made is None or not self._next_agents_switch.on:
            return
        of = self._tools_source.on_tools_called
        forecast = self._next_agents_switch.attempt(of, workflow, tools, made.forecast)
        if forecast is not None:
            self._renew(workflow, made.request_id, forecast)
            self._change(workflow, step, None)

    def _renew(self, workflow: Workflow, request_id: str, forecast: LiveForecast) -> None:
        if self._record is not None:
            self._record(request_id, forecast)
        if self._last is not None:
            self._last.add(workflow.step, forecast)
        forecasts = workflow.forecasts
        forecasts.next_agents = forecast
        completed = CompletedForecast(request_id, forecast)
        if forecasts.unanswered is not None:
            forecasts.unanswered = completed
        if forecasts.calling is not None:
            forecasts.calling = completed

    def answer_text(self, workflow: Workflow | None, sent: object) -> None:
        """The features of the answer of a workflow's latest step, as they were sent; None: of an earlier step."""
        self.texts.answered(sent, partial(self._answer_read, workflow) if workflow is not None else None)

    def _answer_read(self, workflow: Workflow, text: TextOf) -> set[str]:
        """The keys of the features of an answer that are used.

        Those of the next-agent predictor renew the step's forecast; those of lengths wait for the next step.
        """
        made, workflow.forecasts.unanswered = workflow.forecasts.unanswered, None
        source = self.texts.source
        if source is None or made is None or not self._next_agents_switch.on:
            return set()
        attempt, used = self._next_agents_switch.attempt, set()
        read, projected = text.get(PROMPT_READ), text.get(PROJECTED)
        if read is not None and attempt(source.on_answer_read, workflow, read):
            used.add(PROMPT_READ)
        if projected is None:
            return used
        forecast = attempt(source.on_completion_state, workflow, projected, made.forecast)
        if forecast is None:
            return used
        self._renew(workflow, made.request_id, forecast)
        if not workflow.requests:  # else its next step has arrived, which the blocks are ranked by
            self._change(workflow, workflow.step, None)
        return used | {PROJECTED}

    def earlier(self, stats_key: str) -> tuple[float, float] | None:
        """Mean steps and growth of a workflow type in the traces of the context-growth model; None without a model."""
        return self._contexts_switch.attempt(self._contexts.of_type, stats_key) if self._contexts is not None else None

    def returning(self, workflow: str) -> tuple[ReturnCurve, float] | None:
        """When a workflow is expected, and since when; None while a step of it is computed, or without a forecast."""
        running = self._table.get(workflow)
        if running is None or running.forecasts.curve is None:
            return None
        return running.forecasts.curve, running.forecasts.since

    def held(self, workflow: Workflow, most_s: float | None) -> None:
        """Admission holds a workflow for at most so long, or admits it (None); its blocks are needed after the hold.

        Without this, retention would keep the blocks of held workflows, as their requests have arrived, and evict those
        of the workflows that run.
        """
        forecasts = workflow.forecasts
        if most_s is not None:
            forecasts.hold = Hold(ReturnCurve(_HOLD, [part * most_s for part in _HOLD]), self._clock())
        elif forecasts.hold is None:
            return
        else:
            forecasts.hold = None
        if self._table.get(workflow.key) is workflow:  # else it has ended
            change = _ARRIVED if workflow.requests else None
            self._change(workflow, workflow.step, change if forecasts.pending is None else forecasts.pending.rows)

    def flush(self) -> None:
        """Passes forecasts on if retention needs them; between two iterations, or while the model runs."""
        if self._pending and (self.retention is None or self.retention.pressed):
            self.pass_on()
        elif len(self._pending) > _FEW + 2 * len(self._table):  # ended workflows
            self._pending = [workflow for workflow in self._pending if workflow.forecasts.pending is not None]

    def pass_on(self) -> None:
        """Passes the latest forecast of each workflow to retention, if it is new since the last call."""
        pending, self._pending = self._pending, []
        for workflow in pending:
            passed, workflow.forecasts.pending = workflow.forecasts.pending, None
            if self.retention is not None and passed is not None:
                self._pass_on(self.retention, workflow.forecasts, passed)

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {
            "forecasts pending": sum(workflow.forecasts.pending is not None for workflow in self._pending),
            **getattr(self._next_agents, "debug_state", dict)(),
            **getattr(self._contexts, "debug_state", dict)(),
        }

    def workflow_ended(self, workflow: Workflow, reason: EndReason) -> None:
        """A workflow has ended."""
        workflow.forecasts.pending = None
        if self._returns is not None:
            self._returns_switch.attempt(self._returns.ended, workflow, reason)
        if self._contexts is not None:
            self._contexts_switch.attempt(self._contexts.ended, workflow, reason)
        if self._next_agents is not None:
            why = (reason,) if self._takes_reason else ()
            self._next_agents_switch.attempt(self._next_agents.close, workflow, *why)

    def _completion_state(self, request_id: str, prefill_missing: bool) -> dict[str, NDArray[np.float32]]:
        """The completion state, if there is one, as an argument of `on_completion`; counts missing states."""
        if self.state_source is None:
            return {}
        if prefill_missing:
            self._counts.add(HIDDEN_STATES, PREFILL, "missing")
        state = self.state_source[1](request_id)
        self._counts.add(HIDDEN_STATES, COMPLETION, "missing" if state is None else "used")
        return {"projected": state} if state is not None else {}

    def _forecast(
        self, running: RunningStep, request_id: str, make: Callable[[], LiveForecast], ends: bool = False
    ) -> None:
        """Makes a forecast; retention does not receive that of the completion of the last step (`ends`)."""
        step, workflow, forecast = running.step, running.workflow, None
        workflow.forecasts.next_agents = None
        mode_of, key = self._modes.of, step.stats_key
        # Priority and admission go by remaining tokens, whose forecasts need every step.
        if mode_of("eviction", key) or mode_of("priority", key) or mode_of("admission", key):
            forecast = self._next_agents_switch.attempt(self._make, request_id, running, make)
        if not ends and self.retention is not None:
            self._passes(workflow, step, forecast, None)

    def _make(self, request_id: str, running: RunningStep, make: Callable[[], LiveForecast]) -> LiveForecast:
        forecast = make()
        if self._record is not None:
            self._record(request_id, forecast)
        self._counts.add(FORECASTS, "next-agent", forecast.source)
        if self._last is not None:
            self._last.add(running.step, forecast)
        running.workflow.forecasts.next_agents = forecast
        if forecast.moment == PREFILL:  # requests are ranked by this one
            self._counts.add(FORECASTS, "remaining-length", forecast.remaining.source)
        return forecast

    def _change(self, workflow: Workflow, step: Step, change: slice | None, curve: ReturnCurve | None = None) -> None:
        forecasts = workflow.forecasts
        if curve is not None:
            forecasts.curve, forecasts.since = curve, self._clock()
        if self.retention is not None and (forecasts.next_agents is not None or self._returns is not None):
            self._passes(workflow, step, forecasts.next_agents, change)

    def _passes(self, workflow: Workflow, step: Step, forecast: LiveForecast | None, change: slice | None) -> None:
        """Retention receives this forecast when it needs it, unless another comes before."""
        if workflow.forecasts.pending is None:
            self._pending.append(workflow)
        workflow.forecasts.pending = PendingForecast(step, forecast, change)

    def _returning(self, known: WorkflowForecasts, made: LiveReturn | None, since: float) -> None:
        """A forecast of the return time, if one was made."""
        if made is not None:
            self._counts.add(FORECASTS, "return-time", made.source)
        if made is not None and made.quantiles:
            known.curve, known.since = ReturnCurve(made.quantiles, made.seconds, made.end), since

    @staticmethod
    def _grows(known: WorkflowForecasts, growth: LiveLengths | None) -> None:
        """A forecast of context growth, if one was made; without, an earlier one no longer holds."""
        known.growth = growth if growth is not None and growth.tokens else None

    def _pass_on(self, retention: Retention, known: WorkflowForecasts, pending: PendingForecast) -> None:
        step, lookahead = pending.step, self._lookahead(known, pending)
        curve, since = known.hold or (known.curve, known.since)
        step_s = self._pace.step_s(step.stats_key) or _FIRST_STEP_S
        if not self._eviction_acts_on(step) or (lookahead is UNKNOWN and self._returns is None):
            curve = None  # nothing is forecast: blocks are kept as vLLM keeps them
        elif curve is None and lookahead is not UNKNOWN:
            curve = paced(step_s, lookahead.end)
        retention.forecast(step, lookahead, curve, since, step_s)

    def _eviction_acts_on(self, step: Step) -> bool:
        # In shadow the block order receives all forecasts; when it acts, only those of types for which it is on.
        return self._modes.whole["eviction"] is not Mode.ON or self._modes.of("eviction", step.stats_key) is Mode.ON

    def _lookahead(self, known: WorkflowForecasts, pending: PendingForecast) -> Lookahead:
        step, forecast, rows = pending
        if forecast is None or not self._eviction_acts_on(step):
            return UNKNOWN
        try:
            return lookahead(_rows(forecast, step.agent, rows), forecast.agents, self._score)
        except Exception as error:
            self._next_agents_switch.off(error)
            known.next_agents = None
            return UNKNOWN


def _rows(forecast: LiveForecast, agent: str, change: slice | None) -> NDArray[np.float32]:
    """Probabilities [K, V+1] after a change to the step of `agent`; as forecast if the forecast does not know it."""
    if change is None or agent not in forecast.agents:
        return forecast.probabilities
    rows = np.zeros_like(forecast.probabilities)
    rows[0, forecast.agents.index(agent)] = 1.0
    rows[1:] = forecast.probabilities[change]
    return rows
