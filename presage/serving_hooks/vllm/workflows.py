"""Which requests in the engine are steps of which workflows, what is forecast of them, and when they have ended.

Knows no queues and no blocks: eviction is told forecasts and ends, priority asks for remaining tokens. A source of
forecasts that raises is switched off; workflows then count as unknown, which is no worse than not asking.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from presage.serving_hooks.forecaster import LiveForecast
from presage.serving_hooks.policies.lifecycle import Lifecycle
from presage.serving_hooks.policies.score import UNKNOWN, Lookahead, ScoreConfig, lookahead
from presage.serving_hooks.vllm.forecasts import Forecasts, ReadsStates
from presage.serving_hooks.vllm.known_steps import arrived, interrupted
from presage.serving_hooks.vllm.metadata import Step, workflow_key
from presage.serving_hooks.vllm.switch import Switch

MOST_WORKFLOWS: Final = 100_000
"""Alive at once. Names come with requests, and a table must not grow with them: further ones are served as requests
without a workflow, and counted."""


class Retention(Protocol):
    """Who keeps blocks by forecasts."""

    def forecast(self, step: Step, lookahead: Lookahead) -> None:
        """A new forecast of the workflow that `step` belongs to."""

    def end(self, workflow: str) -> None:
        """A workflow has ended."""


CompletionState = Callable[[str], "NDArray[np.float32] | None"]
"""The completion state of a request that has just had its last token; None if none has come."""


class Workflows:
    """Steps in the engine and workflows alive.

    Args:
        forecasts: who foretells.
        score: K and γ.
        time_to_live_s: of a workflow without requests.
        counts: forecasts by source, and failures.
        clock: seconds, rising.

    Attributes:
        retention: told forecasts and ends; None where eviction is vLLM's own.
    """

    def __init__(
        self,
        forecasts: Forecasts,
        score: ScoreConfig,
        time_to_live_s: float,
        counts: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self.retention: Retention | None = None
        self._forecasts = forecasts
        self._score = score
        self._lifecycle = Lifecycle(time_to_live_s)
        self._counts = counts
        self._clock = clock
        self._steps: dict[str, Step] = {}
        self._names: dict[str, Step] = {}
        self._seen: dict[str, LiveForecast] = {}
        self._tapped: tuple[ReadsStates, CompletionState] | None = None
        self._without_state: dict[str, LiveForecast] = {}
        self._interrupted: set[str] = set()
        self._next_agents = Switch("forecasts of next agents", counts)
        self._remaining = Switch("forecasts of remaining tokens", counts)

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
        if step.workflow not in self._lifecycle and len(self._lifecycle) >= MOST_WORKFLOWS:
            self._counts["workflows: too many"] += 1
            return
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

    def tap(self, source: ReadsStates, completion: CompletionState) -> None:
        """Hidden states of steps come from now on: of prompts by `prefill_state`, of answers from `completion`."""
        self._tapped = source, completion

    def begins(self, request_id: str, input_tokens: int) -> None:
        """A step is selected for the first time. Its prompt is not read yet; its hidden state may come later."""
        step, source = self._steps.get(request_id), self._forecasts.next_agents
        if step is not None and source is not None:
            self._foretell(
                step,
                lambda: source.on_prefill(
                    step.workflow_type, step.workflow_id, step.agent, step=step.number, input_tokens=input_tokens
                ),
            )

        if self._tapped is not None and step is not None and step.workflow in self._seen:
            self._without_state[request_id] = self._seen[step.workflow]

    def prefill_state(self, request_id: str, projected: NDArray[np.float32]) -> None:
        """The hidden state of a step's prompt has come: its forecast is made again."""
        step, of = self._steps.get(request_id), self._without_state.pop(request_id, None)
        if self._tapped is None or step is None or of is None or not self._next_agents.on:
            return
        try:
            forecast = self._tapped[0].on_prefill_state(step.workflow_type, step.workflow_id, projected, of)
        except Exception as error:
            self._next_agents.off(error)
            return
        self._counts["prefill states: late" if forecast is None else "prefill states: used"] += 1
        if forecast is not None:
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
        if step.last or step.workflow not in self._lifecycle:
            self._over(step)  # also one that ended while this request ran: what it touched since goes too
        elif completed and source is not None:
            state = self._last_states(request_id, waits)
            self._foretell(
                step,
                lambda: source.on_completion(
                    step.workflow_type, step.workflow_id, output_tokens=output_tokens, **state
                ),
            )

    def end(self, workflow_type: str, workflow_id: str) -> bool:
        """Somebody says that a workflow has ended; whether it was alive."""
        step = self._names.get(workflow_key(workflow_type, workflow_id))
        if step is not None:
            self._over(step)
        return step is not None

    def expire(self) -> None:
        """Workflows that have been silent too long have ended."""
        for workflow in self._lifecycle.expire(self._clock()):
            self._over(self._names[workflow])

    def _last_states(self, request_id: str, waits: bool) -> dict[str, NDArray[np.float32]]:
        """The completion state, where it is had, as `on_completion` is told; counts what is missing.

        With `waits` the prefill state has never come.
        """
        if self._tapped is None:
            return {}
        if waits:
            self._counts["prefill states: missing"] += 1
        state = self._tapped[1](request_id)
        self._counts["completion states: missing" if state is None else "completion states: used"] += 1
        return {"projected": state} if state is not None else {}

    def _over(self, step: Step) -> None:
        self._names.pop(step.workflow, None)
        self._seen.pop(step.workflow, None)
        self._lifecycle.end(step.workflow)
        if self.retention is not None:
            self.retention.end(step.workflow)
        if self._forecasts.next_agents is not None:
            self._next_agents.attempt(self._forecasts.next_agents.close, step.workflow_type, step.workflow_id)

    def _foretell(self, step: Step, ask: Callable[[], LiveForecast]) -> None:
        if self.retention is None and self._forecasts.remaining is None:
            return  # whoever says how much is left must hear of steps too
        self._seen.pop(step.workflow, None)
        seen = UNKNOWN
        if self._next_agents.on:
            try:
                forecast = ask()
                self._counts[f"forecast: {forecast.source}"] += 1
                seen = self._looked(forecast)
                self._seen[step.workflow] = forecast
            except Exception as error:
                self._next_agents.off(error)
        if self.retention is not None:
            self.retention.forecast(step, seen)

    def _tell(self, step: Step, change: Callable[[LiveForecast, str], LiveForecast]) -> None:
        forecast = self._seen.get(step.workflow)
        if forecast is not None and self.retention is not None:
            self.retention.forecast(step, self._looked(change(forecast, step.agent)))

    def _looked(self, forecast: LiveForecast) -> Lookahead:
        return lookahead(forecast.probabilities, forecast.agents, self._score)


def _as_it_is(forecast: LiveForecast, _: str) -> LiveForecast:
    return forecast
