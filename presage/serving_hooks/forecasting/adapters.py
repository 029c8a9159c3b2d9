"""Adapters of the predictors for the forecasters: one event of one workflow, and a checked forecast.

Policies compute with forecasts, so each is checked: the probabilities of every horizon sum to 1, tokens and seconds are
finite and do not fall with the quantile. An invalid forecast raises; the circuit breaker around the call catches it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.errors import InputError
from presage.features.lengths import LengthWorkflow
from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.features.served_steps import TOOLS_CALLED
from presage.features.states import StateSource
from presage.predictors.common.steps import log_tokens
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.next_agent.predictor import NextAgentPredictor, Workflow
from presage.serving_hooks.workflows.live import (
    LAYER_LEFT_OUT,
    STATES_LEFT_OUT,
    LiveForecast,
    LiveLengths,
    NotAForecast,
    Projection,
)

PROJECTED: Final = "projected"
"""A step's column for its hidden state, float32 [p], projected by the worker that computed it."""

_OFF_BY: Final = 1e-3
"""How far probabilities may be from summing to 1: float32, over thousands of agents."""


@njit(cache=True)
def _distributions(out: NDArray[np.float32]) -> bool:
    """Whether every row is a distribution."""
    for row in out:
        total = 0.0
        for share in row:
            if not share >= 0.0:
                return False
            total += share
        if not abs(total - 1.0) < _OFF_BY:
            return False
    return True


def check_distributions(rows: NDArray[np.float32]) -> None:
    """Raises NotAForecast unless every row is a distribution."""
    if not _distributions(rows):
        raise NotAForecast("the probabilities are no distributions")


def warm() -> None:
    """Compiles `_distributions` once in a process; takes most of a second and holds the interpreter lock."""
    _distributions(np.ones((1, 1), np.float32))


class NextAgentAdapter:
    """A next-agent predictor, one event at a time.

    Args:
        served_model, state_layer: the model that the engine serves, None if unknown, and the layer that it captures,
            None for the states after the final norm. A predictor trained on hidden states of another model or layer
            ignores those of the engine, and each forecast gives this as its reason.
    """

    def __init__(
        self,
        predictor: NextAgentPredictor,
        version: int | None,
        served_model: str | None = None,
        state_layer: int | None = None,
    ) -> None:
        self.predictor, self.version = predictor, version
        self._reason = _left_out(predictor.source, served_model, state_layer)
        self._states = self._reason is None

    @property
    def projections(self) -> dict[Moment, Projection]:
        """W and b by moment for captured hidden states; empty if the predictor reads none of this model and layer."""
        source = self.predictor.source
        if source.kind != "captured" or not self._states:
            return {}
        projections = {moment: self.predictor.projection(moment) for moment in source.sizes}
        return {moment: projection for moment, projection in projections.items() if projection is not None}

    def opened(self, workflow_type: str) -> tuple[str, ...] | None:
        """The new agents of a workflow that begins: none so far, or None where the model does not number them."""
        return () if self.predictor.vocabulary.numbers(workflow_type) else None

    def called(self, agent: str, new: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """The new agents of a workflow, in their order, that called `new` before and calls this agent."""
        return self.predictor.vocabulary.call(agent, new)[1]

    def prefilled(
        self, workflow: Workflow, agent: str, new: tuple[str, ...] | None, step: Mapping[str, Any], left: LiveLengths
    ) -> LiveForecast:
        """The forecast once a step has read its prompt.

        Args:
            agent, new: of the step, and the new agents of its workflow, itself included (`called`).
            left: becomes its remaining tokens.
        """
        out = self._buffer()
        tokens = log_tokens(step, "input")
        index = self.predictor.vocabulary.call(agent, new)[0]
        evidence = self.predictor.prefilled(workflow, index, tokens, self._state(step, PREFILL), out)
        return self._checked(workflow, new, PREFILL, evidence, out, left)

    def completed(
        self, workflow: Workflow, new: tuple[str, ...] | None, step: Mapping[str, Any], left: LiveLengths
    ) -> LiveForecast:
        """The forecast once the step has produced its last token; arguments as in `prefilled`."""
        out = self._buffer()
        tokens = log_tokens(step, "output")
        state = self._state(step, COMPLETION)
        evidence = self.predictor.completed(workflow, tokens, state, out, step.get(TOOLS_CALLED))
        return self._checked(workflow, new, COMPLETION, evidence, out, left)

    def _buffer(self) -> NDArray[np.float32]:
        return np.full((self.predictor.horizon, self.predictor.vocabulary.outcomes), np.nan, np.float32)

    def _state(self, step: Mapping[str, Any], moment: Moment) -> NDArray[np.float32]:
        projected = step.get(PROJECTED)
        if not self._states:
            return self.predictor.project(moment, None)
        if projected is None:
            return self.predictor.project(moment, self.predictor.source.of_step(step, moment))
        wanted = self.predictor.projection(moment)
        if wanted is None:
            return self.predictor.project(moment, None)
        row = np.asarray(projected)  # checked here, since kernels check no widths
        if row.dtype != np.float32 or row.shape != wanted[1].shape or not np.isfinite(row).all():
            raise InputError(
                f"a projected state at {moment} is not {len(wanted[1])} finite numbers of float32; use the projection "
                "of this predictor"
            )
        return np.ascontiguousarray(row)

    def _checked(
        self,
        workflow: Workflow,
        new: tuple[str, ...] | None,
        moment: Moment,
        evidence: int,
        out: NDArray[np.float32],
        left: LiveLengths,
    ) -> LiveForecast:
        agents = self.predictor.vocabulary.called_by(new)
        if out.shape[1] != len(agents) + 1:
            raise NotAForecast("the probabilities are no distributions")
        check_distributions(out)
        source = self.predictor.standing(workflow, evidence)
        return LiveForecast(source, evidence, moment, out, agents, self.version, self._reason, left)


def _left_out(source: StateSource, served_model: str | None, state_layer: int | None) -> str | None:
    """Why the predictor ignores hidden states of this engine; None if it reads them or the model is unknown."""
    if source.kind != "captured" or served_model is None:
        return None
    if source.served_model not in (None, served_model):
        return STATES_LEFT_OUT
    return None if source.layer == state_layer else LAYER_LEFT_OUT


class LengthAdapter:
    """A remaining-length predictor, one event at a time."""

    def __init__(self, predictor: RemainingLengthPredictor, version: int | None) -> None:
        self.predictor, self.version = predictor, version

    def prefilled(self, workflow: LengthWorkflow, step: Mapping[str, Any]) -> LiveLengths:
        """The forecast once a step has read its prompt; `step` names its agent."""
        forecast = self.predictor.begun(workflow, step)
        quantiles, tokens = checked_quantiles(forecast.quantiles, len(self.predictor.quantiles))
        return LiveLengths(forecast.source, forecast.evidence, quantiles, tokens, self.predictor.ranks, self.version)


def checked_quantiles(found: Mapping[float, float], wanted: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The levels of a forecast and its numbers; raises NotAForecast if these are no quantiles, or not `wanted` many."""
    quantiles, numbers = tuple(found), tuple(found.values())
    if len(numbers) != wanted or not all(0 <= number < math.inf for number in numbers):
        raise NotAForecast("there is not one finite number for each quantile")
    if any(low > high for low, high in pairwise(numbers)):
        raise NotAForecast("the numbers fall as quantiles rise")
    return quantiles, numbers
