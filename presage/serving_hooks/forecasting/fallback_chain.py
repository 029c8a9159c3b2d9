"""Who answers an event: the model, else the counts of what was seen here, else nobody.

A model that has hardly seen an agent still answers, by its own back-off; counts that have seen more of that agent take
precedence. While a drift alarm stands for a workflow type (`monitoring/drift.py`), counts answer whenever they know
enough. The model is still asked, which is how the monitor notices that it is right again. A call that a model could not
answer leaves its state of the workflow half a step behind, so that workflow gets no more forecasts from that model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.predictors.length.predictor import LengthWorkflow
from presage.predictors.next_agent.predictor import Workflow
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
from presage.serving_hooks.monitoring.drift import Kind
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.workflows.identity import shared

_NONE: Final = Refused(NO_MODEL)


@dataclass(frozen=True, slots=True)
class Awaited:
    """A step that has begun and whose state is still to come.

    Attributes:
        before: the workflow before it, a copy.
        step: what was given of the step.
        answered: the forecast that was made without the state.
    """

    before: Workflow
    step: Mapping[str, Any]
    answered: LiveForecast


class ForecastState:
    """What is kept of a running workflow to forecast it.

    Attributes:
        agents, lengths: its state in each predictor, or why it has none any more.
        steps: how many have begun.
        within: whether the last one has not completed yet.
        said: what was said of the tokens left when the last step began.
        seen: what counts are to learn of it.
        awaited: the step that began last, as long as its state may come.
        stats_key: what counts learn of it, they learn of this workflow type.
    """

    __slots__ = ("agents", "awaited", "lengths", "said", "seen", "stats_key", "steps", "within")

    def __init__(self, agents: Workflow | Refused, lengths: LengthWorkflow | Refused, stats_key: str) -> None:
        self.stats_key = stats_key
        self.agents, self.lengths, self.said = agents, lengths, NO_LENGTHS
        self.steps, self.within = 0, False
        self.seen = WorkflowHistory()
        self.awaited: Awaited | None = None

    def miss(self, step: int) -> None:
        """Steps before number `step` went by unseen: no predictor knows any more where the workflow stands."""
        self.agents = self.lengths = Refused(MISSED_STEP)
        self.seen.missed()
        self.awaited = None
        self.steps = step


class FallbackChain:
    """The predictors, each behind its circuit breaker, and the counts.

    Args:
        agents: who comes next; None for no such predictor.
        lengths: what is left, likewise.
        counts: learn from every event; None for no such answers.
        agents_breaker, lengths_breaker: watch over the predictors.
        monitor: says which workflow types have changed; None if nobody does.

    Attributes:
        claimed: what the predictors themselves said at the event that was answered last, whoever answered it; what is
            held against what comes. The answer, where they said nothing.
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
        self._ask_agents, self._ask_lengths = agents_breaker.ask, lengths_breaker.ask

    def open(self, workflow_type: str, stats_key: str) -> ForecastState:
        """A workflow before its first step; counts learn of it, and answer for it, as of the type `stats_key`."""
        agents, lengths = self._agents, self._lengths
        return ForecastState(
            self._ask_agents(partial(agents.predictor.open, workflow_type)) if agents is not None else _NONE,
            self._ask_lengths(partial(lengths.predictor.open, workflow_type)) if lengths is not None else _NONE,
            stats_key,
        )

    @property
    def projections(self) -> dict[Moment, Projection]:
        """See `NextAgentAdapter.projections`."""
        return self._agents.projections if self._agents is not None else {}

    def begun(
        self, workflow_type: str, running: ForecastState, step: Mapping[str, Any], awaits_state: bool = False
    ) -> LiveForecast:
        """A step has read its prompt; `step` has the columns of the trace by name.

        With `awaits_state` its state may come later, by `with_state`.
        """
        running.awaited = None
        before = running.agents.copy() if awaits_state and not isinstance(running.agents, Refused) else None
        if self._counts is not None:
            running.seen.begun(self._counts, running.stats_key, shared(step["agent"]))
        said: LiveLengths | Refused = _why_not(self._lengths, running.lengths)
        if self._lengths is not None and not isinstance(running.lengths, Refused):
            said = self._ask_lengths(partial(self._lengths.prefilled, running.lengths, step))
            if isinstance(said, Refused):
                running.lengths = said
        running.said = self._left(workflow_type, running, said)
        live: LiveForecast | Refused = _why_not(self._agents, running.agents)
        if self._agents is not None and not isinstance(running.agents, Refused):
            live = self._ask_agents(partial(self._agents.prefilled, running.agents, step["agent"], step, running.said))
        answer = self._next(PREFILL, workflow_type, running, live, running.said)
        if self._monitor is not None and isinstance(said, LiveLengths) and said is not running.said:
            self.claimed = replace(self.claimed or answer, remaining=said)
        if before is not None and not isinstance(running.agents, Refused):
            running.awaited = Awaited(before, step, answer)
        return answer

    def with_state(self, workflow_type: str, running: ForecastState, awaited: Awaited, projected: Any) -> LiveForecast:
        """The step that began last once more, from where the workflow stood before it, with its projected state.

        What the counts learnt of the step, and what was said of the tokens left, stays as it is.
        """
        running.awaited = None
        agents, workflow = self._agents, running.agents
        live: LiveForecast | Refused = _why_not(agents, workflow)
        if agents is not None and not isinstance(workflow, Refused):
            workflow[:] = awaited.before
            step = {**awaited.step, PROJECTED: projected}
            live = self._ask_agents(partial(agents.prefilled, workflow, step["agent"], step, running.said))
        return self._next(PREFILL, workflow_type, running, live, running.said)

    def completed(self, workflow_type: str, running: ForecastState, step: Mapping[str, Any]) -> LiveForecast:
        """It has produced its last token."""
        running.awaited = None
        produced = running.seen.completed(step["output_tokens"])
        if not isinstance(running.lengths, Refused):
            done = self._ask_lengths(partial(running.lengths.completed, step))
            if isinstance(done, Refused):
                running.lengths = done
        left = running.said if produced is None else running.said.after(produced)
        live: LiveForecast | Refused = _why_not(self._agents, running.agents)
        if self._agents is not None and not isinstance(running.agents, Refused):
            live = self._ask_agents(partial(self._agents.completed, running.agents, step, left))
        return self._next(COMPLETION, workflow_type, running, live, left)

    def ended(self, workflow_type: str, running: ForecastState) -> None:
        """The workflow has ended, and was not cut."""
        if self._counts is not None:
            running.seen.ended(self._counts, running.stats_key)

    def nothing(self, moment: Moment, reason: str, remaining: LiveLengths | None = None) -> LiveForecast:
        """The answer where nobody can say who comes next."""
        version = self._agents.version if self._agents is not None else None
        if remaining is None:
            remaining = no_lengths(reason, self._lengths.version if self._lengths is not None else None)
        return LiveForecast("none", 0, moment, NOTHING, (), version, reason, remaining)

    def _next(
        self,
        moment: Moment,
        workflow_type: str,
        running: ForecastState,
        live: LiveForecast | Refused,
        left: LiveLengths,
    ) -> LiveForecast:
        """The better one of what the model and the counts say of the next agents, with what is left."""
        answer = self._better(moment, workflow_type, running, live, left)
        self.claimed = answer if isinstance(live, Refused) else live
        return answer

    def _better(
        self,
        moment: Moment,
        workflow_type: str,
        running: ForecastState,
        live: LiveForecast | Refused,
        left: LiveLengths,
    ) -> LiveForecast:
        changed = self._changed(workflow_type, "next-agent")
        if isinstance(live, Refused):
            running.agents = live
        elif live.source == "champion" and not changed:
            return live
        recent = running.seen.recent
        counted = self._counts.next_agents(running.stats_key, recent) if self._counts is not None else None
        if counted is not None and (isinstance(live, Refused) or changed or counted.evidence > live.evidence):
            reason = live.reason if isinstance(live, Refused) else DRIFTED if changed else LITTLE_SEEN
            return LiveForecast(
                "back-off", counted.evidence, moment, counted.probabilities, counted.agents, None, reason, left
            )
        return self.nothing(moment, live.reason, left) if isinstance(live, Refused) else live

    def _left(self, workflow_type: str, running: ForecastState, said: LiveLengths | Refused) -> LiveLengths:
        """The better one of what the model and the counts say of the tokens left."""
        changed = self._changed(workflow_type, "remaining-length")
        if isinstance(said, LiveLengths) and said.source == "champion" and not changed:
            return said
        recent = running.seen.recent
        counted = self._counts.remaining(running.stats_key, recent[-1]) if self._counts is not None and recent else None
        if counted is not None and (isinstance(said, Refused) or changed or counted[0] > said.evidence):
            evidence, median = counted
            reason = said.reason if isinstance(said, Refused) else DRIFTED if changed else LITTLE_SEEN
            return LiveLengths("back-off", evidence, (0.5,), (median,), 0, None, reason)
        if isinstance(said, Refused):
            return no_lengths(said.reason, self._lengths.version if self._lengths is not None else None)
        return said

    def _changed(self, workflow_type: str, kind: Kind) -> bool:
        """Whether an alarm speaks against this type's forecasts."""
        monitor = self._monitor
        return monitor is not None and bool(monitor.drift.alarms) and monitor.falls_back(workflow_type, kind)


def _why_not(champion: object, state: object) -> Refused:
    """Why nobody can be asked: there is no such model, or it has lost the workflow."""
    return state if champion is not None and isinstance(state, Refused) else _NONE
