"""Which requests in the engine are steps of which workflows, what is forecast of them, and when they have ended.

Knows no queues and no blocks: eviction is told forecasts and ends, priority asks for remaining tokens. A source of
forecasts that raises is switched off; workflows then count as unknown, which is no worse than not asking.

Forecasts are asked for when something happens; eviction is told by `tell`, when there is time, what is the last word on
each workflow by then. A step that ends and the next that arrives so have its blocks ranked once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from presage.datasets.recording import SAID, SILENT
from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.serving_hooks.counts import FORECASTS, HIDDEN_STATES, METADATA_LEFT_OUT, EventCounts
from presage.serving_hooks.forecasting.live import LiveForecast
from presage.serving_hooks.monitoring.outcomes import OutcomeTracker
from presage.serving_hooks.policies.lifecycle import Lifecycle
from presage.serving_hooks.policies.score import UNKNOWN, Lookahead, ScoreConfig, lookahead
from presage.serving_hooks.recorder.recorder import NoRecorder
from presage.serving_hooks.vllm.explain import LastForecasts
from presage.serving_hooks.vllm.forecasts import Forecasts, ReadsStates
from presage.serving_hooks.vllm.modes import Evidence, Switch
from presage.serving_hooks.workflows.identity import Step, tenant_of, workflow_key

MOST_WORKFLOWS: Final = 100_000
"""Alive at once. Names come with requests, and a table must not grow with them: further ones are served as requests
without a workflow, and counted."""

MOST_OF_A_TENANT: Final = MOST_WORKFLOWS // 4
"""Alive at once of one tenant, where tenants are told apart: none can take all the places."""


class Retention(Protocol):
    """Who keeps blocks by forecasts."""

    def forecast(self, step: Step, lookahead: Lookahead) -> None:
        """A new forecast of the workflow that `step` belongs to."""

    def end(self, workflow: str) -> None:
        """A workflow has ended."""


class WorkflowEvents(Protocol):
    """Who writes down what is made known here; see `Observing`."""

    def forecast(self, request_id: str, live: LiveForecast) -> None: ...  # noqa: D102
    def state(self, request_id: str, moment: Moment, state: Any) -> None: ...  # noqa: D102
    def ended(self, workflow_type: str, workflow_id: str, how: str) -> None: ...  # noqa: D102


Change = Callable[[LiveForecast, str], "NDArray[np.float32]"]
"""What a forecast says once something else is known of the step it was made for, the agent among it."""

CompletionState = Callable[[str], "NDArray[np.float32] | None"]
"""The completion state of a request that has just had its last token; None if none has come."""


class Workflows:
    """Steps in the engine and workflows alive.

    Args:
        forecasts: the sources of forecasts.
        score: K and γ.
        time_to_live_s: of a workflow without requests.
        counts: forecasts by source, and failures.
        clock: seconds, rising.

    Attributes:
        ended: workflows that were said to have ended.
        retention: told forecasts and ends; None where eviction is vLLM's own.
        tapped: who is told hidden states, and where those of answers are; those of prompts come by `prefill_state`.
            None where none come.
        records: told forecasts and ends too; the steps themselves it hears from others.
        forecast_enabled: whether forecasts of next agents are requested, by `stats_key`.
        eviction_enabled: whether retention receives them, by `stats_key`; else it receives UNKNOWN.
        evidence: told what was forecast and what came; None where nobody asks.
        last: keeps the last forecasts of all, for who asks why; None where nobody does.
    """

    def __init__(
        self,
        forecasts: Forecasts,
        score: ScoreConfig,
        time_to_live_s: float,
        counts: EventCounts,
        clock: Callable[[], float],
    ) -> None:
        self.retention: Retention | None = None
        self.records: WorkflowEvents = NoRecorder()
        self.tapped: tuple[ReadsStates, CompletionState] | None = None
        self.forecast_enabled: Callable[[str], bool] = lambda stats_key: True
        self.eviction_enabled: Callable[[str], bool] = lambda stats_key: True
        self.evidence: Evidence | None = None
        self.last: LastForecasts | None = None
        self._forecasts = forecasts
        self._score = score
        self._lifecycle = Lifecycle(time_to_live_s)
        self._counts = counts
        self._clock = clock
        self._of_tenant: Counter[str] = Counter()
        self._steps: dict[str, Step] = {}
        self._names: dict[str, Step] = {}
        self._seen: dict[str, LiveForecast] = {}
        self._untold: dict[str, tuple[Step, LiveForecast | None, Change]] = {}
        self._without_state: dict[str, LiveForecast] = {}
        self._interrupted: set[str] = set()
        self.ended = 0
        self._next_agents = Switch("forecasts of next agents", counts)
        self._remaining = Switch("forecasts of remaining tokens", counts)
        self._proving = Switch("evidence of forecasts", counts)

    def __len__(self) -> int:
        return len(self._lifecycle)

    def __contains__(self, workflow: str) -> bool:
        """Whether a workflow is alive."""
        return workflow in self._lifecycle

    @property
    def expired(self) -> int:
        """Workflows that fell silent."""
        return self._lifecycle.expired

    def step(self, request_id: str) -> Step | None:
        """What a request in the engine is; None where it belongs to no workflow."""
        return self._steps.get(request_id)

    def arrives(self, request_id: str, step: Step) -> None:
        """A request that is a step of a workflow enters the engine."""
        tenant = tenant_of(step.workflow_id)
        if step.workflow not in self._lifecycle:
            if len(self._lifecycle) >= MOST_WORKFLOWS:
                self._counts.add(METADATA_LEFT_OUT, "workflows", "too many")
                return
            if tenant and self._of_tenant[tenant] >= MOST_OF_A_TENANT:
                self._counts.add(METADATA_LEFT_OUT, "workflows", "too many of one tenant")
                return
            self._of_tenant[tenant] += 1
        self._steps[request_id] = self._names[step.workflow] = step
        self._lifecycle.begin(step.workflow, self._clock())
        self._tell(step, arrived)

    def remaining_tokens(self, request_id: str, input_tokens: int) -> float | None:
        """Output tokens of a step that has just arrived and of all later ones; None if nobody knows."""
        step, source = self._steps.get(request_id), self._forecasts.remaining
        if step is None or source is None or not self._remaining.on:
            return None
        try:
            return source.remaining_tokens(step, input_tokens)
        except Exception as error:
            self._remaining.off(error)
            return None

    def begins(self, request_id: str, input_tokens: int) -> None:
        """A step is selected for the first time. Its prompt is not read yet; its hidden state may come later."""
        step, source = self._steps.get(request_id), self._forecasts.next_agents
        if step is not None and source is not None:
            self._foretell(
                request_id,
                step,
                lambda: source.on_prefill(
                    step.workflow_type, step.workflow_id, step.agent, step=step.number, input_tokens=input_tokens
                ),
            )
            self._prove(step, lambda of, made: of.begun(*_names(step), step.agent, made, step.number))

        if self.tapped is not None and step is not None and step.workflow in self._seen:
            self._without_state[request_id] = self._seen[step.workflow]

    def prefill_state(self, request_id: str, projected: NDArray[np.float32]) -> None:
        """The hidden state of a step's prompt has come: its forecast is made again."""
        step, of = self._steps.get(request_id), self._without_state.pop(request_id, None)
        if self.tapped is None or step is None or of is None or not self._next_agents.on:
            return
        try:
            forecast = self.tapped[0].on_prefill_state(step.workflow_type, step.workflow_id, projected, of)
        except Exception as error:
            self._next_agents.off(error)
            return
        self._counts.add(HIDDEN_STATES, PREFILL, "late" if forecast is None else "used")
        if forecast is not None:
            self.records.forecast(request_id, forecast)
            self._seen[step.workflow] = forecast
            self._tell(step, interrupted if request_id in self._interrupted else _as_it_is)

    def interrupted(self, request_id: str) -> None:
        """A step is preempted: it has lost its blocks, and will look for them in the cache."""
        step = self._steps.get(request_id)
        if step is not None:
            self._interrupted.add(request_id)
            self._tell(step, interrupted)

    def resumes(self, request_id: str) -> None:
        """A step that was preempted is selected again."""
        step = self._steps.get(request_id)
        if step is not None:
            self._interrupted.discard(request_id)
            self._tell(step, _as_it_is)

    def leaves(self, request_id: str, completed: bool, output_tokens: int) -> None:
        """A request leaves the engine, with its last token or without."""
        step, source = self._steps.pop(request_id, None), self._forecasts.next_agents
        if step is None:
            return
        self._interrupted.discard(request_id)
        self._lifecycle.finish(step.workflow, self._clock())
        waits = self._without_state.pop(request_id, None) is not None
        alive = step.workflow in self._lifecycle
        if completed and alive and source is not None:
            state = self._last_states(request_id, waits)
            self._foretell(
                request_id,
                step,
                lambda: source.on_completion(
                    step.workflow_type, step.workflow_id, output_tokens=output_tokens, **state
                ),
                ends=step.last,
            )
            self._prove(step, lambda of, made: of.completed(*_names(step), made))
        if step.last or not alive:
            self._over(step)  # also one that ended while this request ran: what it touched since goes too

    def end(self, workflow_type: str, workflow_id: str) -> bool:
        """Somebody says that a workflow has ended; whether it was alive."""
        step = self._names.get(workflow_key(workflow_type, workflow_id))
        if step is not None:
            self._over(step)
        return step is not None

    def requests_of(self, workflow: str) -> dict[str, Step]:
        """The steps of a workflow that are in the engine, by request. Costs O(requests)."""
        return {name: step for name, step in self._steps.items() if step.workflow == workflow}

    def tell(self) -> None:
        """Who keeps blocks is told what has been forecast since the last time, one forecast a workflow."""
        if self._untold:
            untold, self._untold = self._untold, {}
            if self.retention is not None:
                for step, forecast, change in untold.values():
                    self.retention.forecast(step, self._looked(step, forecast, change))

    def expire(self) -> None:
        """Workflows that have been silent too long have ended."""
        for workflow in self._lifecycle.expire(self._clock()):
            self._over(self._names[workflow], SILENT)

    def _last_states(self, request_id: str, waits: bool) -> dict[str, NDArray[np.float32]]:
        """The completion state, where it is had, as `on_completion` is told; counts what is missing.

        With `waits` the prefill state has never come.
        """
        if self.tapped is None:
            return {}
        if waits:
            self._counts.add(HIDDEN_STATES, PREFILL, "missing")
        state = self.tapped[1](request_id)
        self._counts.add(HIDDEN_STATES, COMPLETION, "missing" if state is None else "used")
        return {"projected": state} if state is not None else {}

    def _over(self, step: Step, how: str = SAID) -> None:
        self.records.ended(step.workflow_type, step.workflow_id, how)
        if self.evidence is not None:
            self._proving.attempt(partial(self.evidence.following.ended, *_names(step), cut=how == SILENT))
        if self._names.pop(step.workflow, None) is not None:
            self._of_tenant[tenant_of(step.workflow_id)] -= 1
        self._seen.pop(step.workflow, None)
        self._untold.pop(step.workflow, None)
        self.ended += self._lifecycle.end(step.workflow)
        if self.retention is not None:
            self.retention.end(step.workflow)
        if self._forecasts.next_agents is not None:
            silent = self._forecasts.silent if how == SILENT else None
            self._next_agents.attempt(silent or self._forecasts.next_agents.close, step.workflow_type, step.workflow_id)

    def _foretell(self, request_id: str, step: Step, ask: Callable[[], LiveForecast], ends: bool = False) -> None:
        """Asks also where the workflow ends: whoever made the forecast is to know that its last step completed."""
        self._seen.pop(step.workflow, None)
        forecast = None
        if self._next_agents.on and self.forecast_enabled(step.stats_key):
            try:
                forecast = ask()
                self.records.forecast(request_id, forecast)
                self._counts.add(FORECASTS, "next-agent", forecast.source)
                if self.last is not None:
                    self.last.add(step, forecast)
                self._seen[step.workflow] = forecast
                if forecast.moment == PREFILL:  # requests are ranked by what was said then
                    self._counts.add(FORECASTS, "remaining-length", forecast.remaining.source)
            except Exception as error:
                self._next_agents.off(error)
                forecast = None
        if not ends and self.retention is not None:
            self._untold[step.workflow] = step, forecast, _as_it_is

    def _prove(self, step: Step, tell: Callable[[OutcomeTracker, LiveForecast], object]) -> None:
        forecast = self._seen.get(step.workflow)
        if self.evidence is not None and forecast is not None:
            self._proving.attempt(self.evidence.forecast, step.stats_key, forecast)
            self._proving.attempt(tell, self.evidence.following, forecast)

    def _tell(self, step: Step, change: Change) -> None:
        forecast = self._seen.get(step.workflow)
        if forecast is not None and self.retention is not None:
            self._untold[step.workflow] = step, forecast, change

    def _looked(self, step: Step, forecast: LiveForecast | None, change: Change) -> Lookahead:
        if forecast is None or not self.eviction_enabled(step.stats_key):
            return UNKNOWN
        try:
            return lookahead(change(forecast, step.agent), forecast.agents, self._score)
        except Exception as error:
            self._next_agents.off(error)
            self._seen.pop(step.workflow, None)
            return UNKNOWN


def _names(step: Step) -> tuple[str, str]:
    """Of a workflow, to whoever learns from it."""
    return step.stats_key, step.workflow_id


def _as_it_is(forecast: LiveForecast, _: str) -> NDArray[np.float32]:
    return forecast.probabilities


def arrived(forecast: LiveForecast, agent: str) -> NDArray[np.float32]:
    """Its probabilities [K, V+1] where the next step has come, `agent`'s; as they are, if it does not name that.

    PBKV updates a workflow's forecast when a step is computed. Between that and its arrival a step can wait long, and
    just then, when the engine is full, its blocks would be judged by the chance that it comes, though it is there. So
    the first row becomes a certainty and the later ones stay as they are: they were made for the case that the workflow
    goes on.
    """
    return _first(forecast, agent, forecast.probabilities[1:])


def interrupted(forecast: LiveForecast, agent: str) -> NDArray[np.float32]:
    """The same where the step it looks ahead from, `agent`'s, is to be computed again: all others are one further."""
    return _first(forecast, agent, forecast.probabilities[:-1])


def _first(forecast: LiveForecast, agent: str, then: NDArray[np.float32]) -> NDArray[np.float32]:
    if agent not in forecast.agents:
        return forecast.probabilities
    rows = np.zeros_like(forecast.probabilities)
    rows[0, forecast.agents.index(agent)] = 1.0
    rows[1:] = then
    return rows
