"""Chooses the source of a forecast: the model, else online counts, else none.

For an agent with little evidence the model uses its own back-off; online counts with more evidence take precedence.
During a drift alarm online counts forecast whenever they have enough data; the model still runs, so that the monitor
notices when it is accurate again. After a failed call a model's state of the workflow is half a step behind, so the
workflow gets no more forecasts from that model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from presage.features.lengths import LengthWorkflow
from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.predictors.next_agent.predictor import Workflow
from presage.serving_hooks.counts import ModelKind
from presage.serving_hooks.forecasting.adapters import PROJECTED, LengthAdapter, NextAgentAdapter
from presage.serving_hooks.forecasting.circuit_breaker import CircuitBreaker, Refused
from presage.serving_hooks.forecasting.live import (
    DRIFTED,
    LITTLE_SEEN,
    MISSED_STEP,
    NO_LENGTHS,
    NO_MODEL,
    NOTHING,
    LiveForecast,
    LiveLengths,
    Projection,
    no_lengths,
)
from presage.serving_hooks.forecasting.online_counts import OnlineCounts, WorkflowHistory
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.workflows.identity import shared

_NONE: Final = Refused(NO_MODEL)


@dataclass(frozen=True, slots=True)
class Awaited:
    """A step that has begun and whose hidden state is still to come: its columns and the forecast made without it.

    `before` is a copy of the workflow's state before the step.
    """

    before: Workflow
    step: Mapping[str, Any]
    forecast: LiveForecast


class ForecastState:
    """The forecasting state of a running workflow.

    Attributes:
        agents, lengths: its state in each predictor, or why there is none.
        steps, within: number of steps begun, and whether the last one has not completed yet.
        remaining: forecast of remaining tokens when the last step began.
        history, stats_key: what online counts will learn from it, and under which key.
        awaited: the step that began last, while its hidden state is still expected.
    """

    __slots__ = ("agents", "awaited", "history", "lengths", "remaining", "stats_key", "steps", "within")

    def __init__(self, agents: Workflow | Refused, lengths: LengthWorkflow | Refused, stats_key: str) -> None:
        self.stats_key = stats_key
        self.agents, self.lengths, self.remaining = agents, lengths, NO_LENGTHS
        self.steps, self.within = 0, False
        self.history = WorkflowHistory()
        self.awaited: Awaited | None = None

    def miss(self, step: int) -> None:
        """Steps before number `step` were missed: predictors no longer know the state of the workflow."""
        self.agents = self.lengths = Refused(MISSED_STEP)
        self.history.missed()
        self.awaited = None
        self.steps = step


class FallbackChain:
    """The predictors, each behind its circuit breaker, and the online counts, which learn from every event.

    Attributes:
        claimed: the predictors' own forecast at the last event, even if counts were used in its place, for the monitor
            to judge; None if they made none.
    """

    def __init__(
        self,
        agents: NextAgentAdapter | None,
        lengths: LengthAdapter | None,
        counts: OnlineCounts | None,
        agents_breaker: CircuitBreaker,
        lengths_breaker: CircuitBreaker,
        monitor: ForecastMonitor | None = None,
    ) -> None:
        self.claimed: LiveForecast | None = None
        self._monitor = monitor
        self._agents, self._lengths, self._counts = agents, lengths, counts
        self._call_agents, self._call_lengths = agents_breaker.call, lengths_breaker.call

    def open(self, workflow_type: str, stats_key: str) -> ForecastState:
        """The state of a workflow before its first step; counts keep its statistics under `stats_key`."""
        agents, lengths = self._agents, self._lengths
        return ForecastState(
            self._call_agents(partial(agents.predictor.open, workflow_type)) if agents is not None else _NONE,
            self._call_lengths(partial(lengths.predictor.open, workflow_type)) if lengths is not None else _NONE,
            stats_key,
        )

    @property
    def projections(self) -> dict[Moment, Projection]:
        """See `NextAgentAdapter.projections`."""
        return self._agents.projections if self._agents is not None else {}

    def begun(
        self, workflow_type: str, running: ForecastState, step: Mapping[str, Any], awaits_state: bool = False
    ) -> LiveForecast:
        """The forecast once a step has read its prompt; `step` has the columns of the trace by name.

        With `awaits_state`, `with_state` may be called later with the step's hidden state.
        """
        running.awaited = None
        before = running.agents.copy() if awaits_state and not isinstance(running.agents, Refused) else None
        if self._counts is not None:
            running.history.begun(self._counts, running.stats_key, shared(step["agent"]))
        made: LiveLengths | Refused = _why_not(self._lengths, running.lengths)
        if self._lengths is not None and not isinstance(running.lengths, Refused):
            made = self._call_lengths(partial(self._lengths.prefilled, running.lengths, step))
            if isinstance(made, Refused):
                running.lengths = made
        running.remaining = self._left(workflow_type, running, made)
        live: LiveForecast | Refused = _why_not(self._agents, running.agents)
        if self._agents is not None and not isinstance(running.agents, Refused):
            live = self._call_agents(
                partial(self._agents.prefilled, running.agents, step["agent"], step, running.remaining)
            )
        forecast = self._next(PREFILL, workflow_type, running, live, running.remaining)
        if self._monitor is not None and isinstance(made, LiveLengths) and made is not running.remaining:
            self.claimed = replace(self.claimed or forecast, remaining=made)
        if before is not None and not isinstance(running.agents, Refused):
            running.awaited = Awaited(before, step, forecast)
        return forecast

    def with_state(self, workflow_type: str, running: ForecastState, awaited: Awaited, projected: Any) -> LiveForecast:
        """Forecasts the step that began last again, with its projected state.

        Online counts and the forecast of remaining tokens stay as they are.
        """
        running.awaited = None
        agents, workflow = self._agents, running.agents
        live: LiveForecast | Refused = _why_not(agents, workflow)
        if agents is not None and not isinstance(workflow, Refused):
            workflow[:] = awaited.before
            step = {**awaited.step, PROJECTED: projected}
            live = self._call_agents(partial(agents.prefilled, workflow, step["agent"], step, running.remaining))
        return self._next(PREFILL, workflow_type, running, live, running.remaining)

    def completed(self, workflow_type: str, running: ForecastState, step: Mapping[str, Any]) -> LiveForecast:
        """The forecast once the step has produced its last token."""
        running.awaited = None
        produced = running.history.completed(step["output_tokens"])
        if not isinstance(running.lengths, Refused):
            done = self._call_lengths(partial(running.lengths.completed, step))
            if isinstance(done, Refused):
                running.lengths = done
        left = running.remaining if produced is None else running.remaining.after(produced)
        live: LiveForecast | Refused = _why_not(self._agents, running.agents)
        if self._agents is not None and not isinstance(running.agents, Refused):
            live = self._call_agents(partial(self._agents.completed, running.agents, step, left))
        return self._next(COMPLETION, workflow_type, running, live, left)

    def ended(self, workflow_type: str, running: ForecastState) -> None:
        """Lets the counts learn a workflow that has finished or expired."""
        if self._counts is not None:
            running.history.ended(self._counts, running.stats_key)

    def nothing(self, moment: Moment, reason: str, remaining: LiveLengths | None = None) -> LiveForecast:
        """A forecast of source "none"."""
        version = self._agents.version if self._agents is not None else None
        return LiveForecast("none", 0, moment, NOTHING, (), version, reason, remaining or self._no_lengths(reason))

    def _no_lengths(self, reason: str) -> LiveLengths:
        return no_lengths(reason, self._lengths.version if self._lengths is not None else None)

    def _next(
        self,
        moment: Moment,
        workflow_type: str,
        running: ForecastState,
        live: LiveForecast | Refused,
        left: LiveLengths,
    ) -> LiveForecast:
        """The forecast of next agents, from the model or the counts; sets `claimed`."""
        drifted = self._drifted(workflow_type, "next-agent")
        self.claimed = None if isinstance(live, Refused) else live
        if isinstance(live, Refused):
            running.agents = live
        elif live.source == "champion" and not drifted:
            return live
        recent = running.history.recent
        counted = self._counts.next_agents(running.stats_key, recent) if self._counts is not None else None
        if counted is not None and (isinstance(live, Refused) or drifted or counted.evidence > live.evidence):
            reason = live.reason if isinstance(live, Refused) else DRIFTED if drifted else LITTLE_SEEN
            return LiveForecast(
                "back-off", counted.evidence, moment, counted.probabilities, counted.agents, None, reason, left
            )
        return self.nothing(moment, live.reason, left) if isinstance(live, Refused) else live

    def _left(self, workflow_type: str, running: ForecastState, made: LiveLengths | Refused) -> LiveLengths:
        """The forecast of remaining tokens, from the model or the counts."""
        drifted = self._drifted(workflow_type, "remaining-length")
        if isinstance(made, LiveLengths) and made.source == "champion" and not drifted:
            return made
        recent = running.history.recent
        counted = self._counts.remaining(running.stats_key, recent[-1]) if self._counts is not None and recent else None
        if counted is not None and (isinstance(made, Refused) or drifted or counted[0] > made.evidence):
            evidence, median = counted
            reason = made.reason if isinstance(made, Refused) else DRIFTED if drifted else LITTLE_SEEN
            return LiveLengths("back-off", evidence, (0.5,), (median,), 0, None, reason)
        if isinstance(made, Refused):
            return self._no_lengths(made.reason)
        return made

    def _drifted(self, workflow_type: str, kind: ModelKind) -> bool:
        """Whether a drift alarm concerns forecasts of this kind."""
        monitor = self._monitor
        return monitor is not None and bool(monitor.drift.alarms) and monitor.falls_back(workflow_type, kind)


def _why_not(champion: object, state: object) -> Refused:
    """Why the model cannot forecast: there is none, or it has no state of the workflow."""
    return state if champion is not None and isinstance(state, Refused) else _NONE
