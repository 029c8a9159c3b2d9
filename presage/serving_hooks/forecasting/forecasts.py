"""Protocols for forecast sources. `Forecaster` is a `NextAgents`; an oracle is another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from sys import intern
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from presage.datasets.schema.names import NO_NAMES, NameMapping
from presage.features.agent_names import AgentNames, Name, recognised_as
from presage.features.moment import Moment
from presage.features.vocabulary import Vocabulary
from presage.serving_hooks.counts import EVENTS, EventCounts, ModelKind
from presage.serving_hooks.status import ModelStatus
from presage.serving_hooks.workflows import EndReason, Workflow
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import LiveForecast, LiveLengths, LiveReturn, Projection

RECOGNISED: Final = "agents recognised by their system prompts"
"""The event that is counted for each step of a renamed agent."""


class LoadedPredictor(Protocol):
    """A predictor that a source asks, as far as it tells how agents are called."""

    @property
    def names(self) -> NameMapping: ...  # noqa: D102

    @property
    def vocabulary(self) -> Vocabulary: ...  # noqa: D102

    agent_names: AgentNames | None


class NextAgents(Protocol):
    """Forecasts the next agents of a workflow, given its record; see `Forecaster`."""

    def on_prefill(  # noqa: D102
        self,
        workflow: Workflow,
        agent: str,
        *,
        step: int | None = None,
        input_tokens: int | None = None,
    ) -> LiveForecast: ...

    def on_completion(  # noqa: D102
        self,
        workflow: Workflow,
        *,
        step: int | None = None,
        agent: str | None = None,
        output_tokens: int | None = None,
    ) -> LiveForecast: ...

    def close(self, workflow: Workflow) -> None:
        """The workflow has ended. A `close` with a third parameter `reason` also receives why, an `EndReason`."""


@runtime_checkable
class ReadsStates(Protocol):
    """A next-agent source that reads hidden states of the served model; see `Forecaster`.

    Its `on_completion` also takes the completion state, `projected`.
    """

    @property
    def projections(self) -> Mapping[Moment, Projection]:
        """W and b by moment; empty where no states are read."""

    def await_states(self) -> None:
        """Prefill states come after `on_prefill` from now on."""

    def on_prefill_state(  # noqa: D102
        self, workflow: Workflow, projected: NDArray[np.float32], of: LiveForecast
    ) -> LiveForecast | None: ...


@dataclass(frozen=True)
class TextModel:
    """The artefact of a predictor that reads sketches of texts, for the process that has the texts.

    Attributes:
        widths: numbers of its features of texts, by moment.
    """

    folder: Path
    digest: str
    widths: Mapping[Moment, int]


@runtime_checkable
class ReadsTexts(Protocol):
    """A next-agent source that reads texts as features that another process computes; see `Forecaster`.

    Its `on_prefill`, and `remaining_tokens` if it has that, also take the features of the prompt: `projected` those of
    a next-agent predictor, `prompt_read` those of a remaining-length predictor.
    """

    @property
    def text_models(self) -> Mapping[ModelKind, TextModel]:
        """The predictors that compute features; empty if no texts are read."""

    def await_answers(self) -> None:
        """The features of answers come after `on_completion` from now on."""

    def on_completion_state(  # noqa: D102
        self, workflow: Workflow, projected: NDArray[np.float32], of: LiveForecast
    ) -> LiveForecast | None: ...

    def on_answer_read(self, workflow: Workflow, read: NDArray[np.float32]) -> bool:  # noqa: D102
        ...


@runtime_checkable
class ReadsTools(Protocol):
    """A next-agent source that reads which tools an answer calls; see `Forecaster`."""

    @property
    def reads_tools(self) -> bool:
        """Whether it does now; it may change with the model."""

    def on_tools_called(  # noqa: D102
        self, workflow: Workflow, tools: Sequence[str], of: LiveForecast
    ) -> LiveForecast | None: ...


@runtime_checkable
class ReadsProfiles(Protocol):
    """A next-agent source that follows workflows on the profiles of their types; see `Forecaster`."""

    def position(self, workflow: Workflow) -> dict[str, Any] | None: ...  # noqa: D102


def position(source: NextAgents | None, workflow: Workflow) -> dict[str, Any] | None:
    """Where a running workflow is on the profile of its type, for people; None if the source does not know."""
    return source.position(workflow) if isinstance(source, ReadsProfiles) else None


class RemainingTokens(Protocol):
    """Forecasts the remaining output tokens of a workflow."""

    def remaining_tokens(self, workflow: Workflow, step: Step, input_tokens: int) -> float | None:
        """Output tokens of an arriving step and all later ones; None if unknown."""


class Contexts(Protocol):
    """Forecasts how far the contexts of workflows grow; see `ContextForecaster`."""

    def arrived(self, workflow: Workflow, step: Step, input_tokens: int) -> LiveLengths:
        """The tokens by which the context of a workflow will exceed this prompt, which has arrived."""

    def completed(self, workflow: Workflow, step: Step, output_tokens: int) -> LiveLengths:
        """The same less the output of the step, which has completed; source "none" if that is not known."""

    def ended(self, workflow: Workflow, reason: EndReason) -> None:
        """A workflow has ended."""

    def of_type(self, stats_key: str) -> tuple[float, float] | None:
        """Mean steps of a workflow and mean tokens that a step adds, from earlier traces; None if unknown."""


class ReturnTimes(Protocol):
    """Forecasts when workflows come back; see `ReturnTimeForecaster`. Times are seconds of the engine's clock."""

    def arrived(self, workflow: Workflow, step: Step, input_tokens: int, now: float) -> None:
        """A request of a workflow has arrived: the workflow is back."""

    def completed(
        self, workflow: Workflow, step: Step, output_tokens: int, finish_reason: str | None, now: float
    ) -> LiveReturn:
        """A step has left the engine: it has produced its last token, or was aborted. The engine's finish reason."""

    def answered(
        self, workflow: Workflow, step: Step, finish_reason: str | None, tools: Sequence[str] | None
    ) -> LiveReturn | None:
        """The answer of a completed step was parsed: the API's finish reason, and the tools it calls, None if unknown.

        Returns the renewed forecast; None if the workflow has gone on, or is unknown.
        """

    def away(self, workflow: Workflow) -> tuple[LiveReturn, float] | None:
        """The forecast of a workflow that is away, and since when; None while it runs, or if it is unknown."""

    def ended(self, workflow: Workflow, reason: EndReason = EndReason.FINISHED) -> None:
        """A workflow has ended."""


class Upkeep(Protocol):
    """Keeps models up to date while an engine runs. Its methods are called by the engine's thread."""

    def start(self) -> None:
        """The engine has started."""

    def renew(self) -> bool:
        """Swaps in newer models between two iterations; returns whether there were any."""

    def status(self) -> Mapping[str, Any]:
        """Entries of the engine's status, for operators."""

    def close(self) -> None:
        """The engine shuts down."""


@dataclass(frozen=True)
class Forecasts:
    """Every source of forecasts.

    Attributes:
        medians: median remaining output tokens at the start of a workflow, by type; for requests without a forecast.
        models: the model of each kind, for operators; may change while the engine runs.
    """

    next_agents: NextAgents | None = None
    remaining: RemainingTokens | None = None
    medians: Mapping[str, float] = field(default_factory=dict)
    models: Mapping[str, ModelStatus | str] = field(default_factory=dict)
    upkeep: Upkeep | None = None
    returns: ReturnTimes | None = None
    contexts: Contexts | None = None

    @property
    def names(self) -> NameMapping:
        """How the names of requests are folded: as those that all models learnt from were; not at all if these differ,
        which leaves it to each model."""
        mappings = {predictor.names for predictor in self._loaded()}
        return mappings.pop() if len(mappings) == 1 else NO_NAMES

    @property
    def agent_names(self) -> AgentNames | None:
        """What the models call agents, by system prompt: those of the first model whose training traces had any."""
        return next((predictor.agent_names for predictor in self._loaded() if predictor.agent_names is not None), None)

    def recognised(self, step: Step, found: Name | None, counts: EventCounts) -> Step:
        """The step under the name that the models know its agent by, if a release renamed it; `Step.sent` stays.

        Args:
            found: what the models call the agent with its system prompt.
        """
        if found is None:
            return step
        agent = recognised_as(step.sent, found, [predictor.vocabulary for predictor in self._loaded()])
        if agent is None:
            return step
        counts.add(EVENTS, RECOGNISED)
        return replace(step, agent=intern(agent))

    def _loaded(self) -> list[LoadedPredictor]:
        sources = (self.next_agents, self.returns, self.contexts)
        return [predictor for source in sources for predictor in getattr(source, "loaded", ())]
