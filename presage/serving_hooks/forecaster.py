"""Forecasts for running workflows, one event at a time: the engine tells what happens, the forecast is the answer.

One state is kept a workflow, so an event costs one step and not the whole prefix. The numbers are those of
`NextAgentPredictor.forecast` on the steps so far, bit by bit; a test holds that.

Fails open: whatever goes wrong, the answer is a forecast of source "none" with a reason, and the reason is counted.
Nothing is raised, since the request behind the event must not suffer. Not thread-safe: a scheduler is one thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.predictors.forecast import Source
from presage.predictors.next_agent import NextAgentPredictor, Workflow
from presage.predictors.steps import log_sizes

NO_MODEL: Final = "no model"
NO_STEP: Final = "completion of a step that never began here, or has completed"
MISSED_STEP: Final = "an earlier step was missed"


@dataclass(frozen=True, slots=True)
class LiveForecast:
    """What a policy reads, without a dictionary an agent.

    Attributes:
        source: as `Forecast.source`; with "none" there are no probabilities.
        evidence: training steps of this agent in this workflow type.
        moment: of the step it was made at.
        probabilities: float32 [K, V+1], END last; [0, 0] with source "none".
        agents: names of the first V columns.
        version: of the model.
        reason: why there is none.
    """

    source: Source
    evidence: int
    moment: Moment
    probabilities: NDArray[np.float32]
    agents: tuple[str, ...]
    version: int | None
    reason: str | None = None

    @property
    def end(self) -> NDArray[np.float32]:
        """Probability of END at each horizon, float32 [K]."""
        return self.probabilities[:, -1]


@dataclass(slots=True)
class _Running:
    """A workflow under way.

    `steps` counts those begun, `within` says whether the last one has not completed yet. Once `lost` holds a reason
    the workflow gets no forecast any more.
    """

    workflow: Workflow | None
    steps: int = 0
    within: bool = False
    lost: str | None = None


class Forecaster:
    """Holds a predictor and the state of every running workflow.

    Args:
        predictor: fitted; None answers every event with "none".
        version: of the predictor in the registry, handed on with each forecast.
        max_workflows: states kept; the one longest without an event is dropped first. A dropped workflow that goes on
            is recognised by its step number, where the caller gives one, and gets no forecast; without step numbers
            it would look like one that begins.

    Attributes:
        counts: forecasts by source, and reasons why there was none.
    """

    def __init__(
        self, predictor: NextAgentPredictor | None, version: int | None = None, *, max_workflows: int = 100_000
    ) -> None:
        self.predictor = predictor
        self.version = version
        self.max_workflows = max_workflows
        self.counts: Counter[str] = Counter()
        self._running: OrderedDict[tuple[str, str], _Running] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running)

    def on_prefill(
        self,
        workflow_type: str,
        workflow_id: str,
        agent: str,
        *,
        step: int | None = None,
        input_tokens: int | None = None,
        input_text: str | None = None,
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
            prefill_state: hidden state after prefill [d], for predictors that read states.
        """
        predictor, key = self.predictor, (workflow_type, workflow_id)
        if predictor is None:
            return self._none(PREFILL, NO_MODEL)
        try:
            running = self._open(predictor, key)
            if running.lost is None and step is not None and step != running.steps:
                running.lost, running.workflow = MISSED_STEP, None
            if running.workflow is None:
                return self._none(PREFILL, running.lost or MISSED_STEP)
            running.steps, running.within = running.steps + 1, True
            seen = {"input_tokens": input_tokens, "input_text": input_text, "prefill_state": prefill_state}
            tokens, chars = log_sizes(seen, "input")
            state = predictor.project(PREFILL, predictor.source.of_step(seen, PREFILL))
            out = self._room(predictor)
            known = predictor.vocabulary.agent(agent)
            evidence = predictor.prefilled(running.workflow, known, tokens, chars, state, out)
            return self._answer(predictor, PREFILL, evidence, out)
        except Exception as error:
            return self._failed(key, PREFILL, error)

    def on_completion(
        self,
        workflow_type: str,
        workflow_id: str,
        *,
        output_tokens: int | None = None,
        output_text: str | None = None,
        completion_state: NDArray[Any] | None = None,
    ) -> LiveForecast:
        """The step that began last in this workflow has produced its last token: what comes after it?"""
        predictor, key = self.predictor, (workflow_type, workflow_id)
        if predictor is None:
            return self._none(COMPLETION, NO_MODEL)
        try:
            running = self._running.get(key)
            if running is None:
                return self._none(COMPLETION, NO_STEP)
            self._running.move_to_end(key)
            if running.workflow is None:
                return self._none(COMPLETION, running.lost or MISSED_STEP)
            if not running.within:
                return self._none(COMPLETION, NO_STEP)
            running.within = False
            seen = {"output_tokens": output_tokens, "output_text": output_text, "completion_state": completion_state}
            tokens, chars = log_sizes(seen, "output")
            state = predictor.project(COMPLETION, predictor.source.of_step(seen, COMPLETION))
            out = self._room(predictor)
            evidence = predictor.completed(running.workflow, tokens, chars, state, out)
            return self._answer(predictor, COMPLETION, evidence, out)
        except Exception as error:
            return self._failed(key, COMPLETION, error)

    def close(self, workflow_type: str, workflow_id: str) -> None:
        """The workflow has ended; its state goes. Closing one that is not there is no error."""
        self._running.pop((workflow_type, workflow_id), None)

    def _open(self, predictor: NextAgentPredictor, key: tuple[str, str]) -> _Running:
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = _Running(predictor.open(key[0]))
            while len(self._running) > self.max_workflows:
                self._running.popitem(last=False)
        self._running.move_to_end(key)
        return running

    def _room(self, predictor: NextAgentPredictor) -> NDArray[np.float32]:
        return np.empty((predictor.horizon, predictor.vocabulary.outcomes), np.float32)

    def _answer(
        self, predictor: NextAgentPredictor, moment: Moment, evidence: int, out: NDArray[np.float32]
    ) -> LiveForecast:
        source: Source = "back-off" if evidence < predictor.config.min_evidence else "champion"
        self.counts[source] += 1
        return LiveForecast(source, evidence, moment, out, predictor.vocabulary.agents, self.version)

    def _failed(self, key: tuple[str, str], moment: Moment, error: Exception) -> LiveForecast:
        """After an error the state may be half a step ahead: the workflow gets no forecast any more."""
        reason = type(error).__name__  # its message might repeat what the request says
        with suppress(TypeError):  # ids that cannot be hashed have no state
            if key in self._running:
                self._running[key].lost, self._running[key].workflow = reason, None
        return self._none(moment, reason)

    def _none(self, moment: Moment, reason: str) -> LiveForecast:
        self.counts["none"] += 1
        self.counts[reason] += 1
        return LiveForecast("none", 0, moment, _NOTHING, (), self.version, reason)


_NOTHING: Final = np.empty((0, 0), np.float32)
