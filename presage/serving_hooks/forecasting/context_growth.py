"""Forecasts of how far the contexts of running workflows grow: what admission counts a workflow by.

A forecast of context growth is one of lengths with another label, so a `Forecaster` without a next-agent model makes
it: the state of a workflow, its versions and the circuit breaker are the same. Counts of the engine's own workflows
(`policies/workload.py`) stand behind it; they start from what the model's training saw of each workflow type.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from presage.predictors.length.context import ContextGrowthPredictor
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.forecasting.forecaster import Forecaster, ForecastState, VersionedForecaster
from presage.serving_hooks.forecasting.forecasts import LoadedPredictor
from presage.serving_hooks.workflows import EndReason, Workflow
from presage.serving_hooks.workflows.identity import Step, unscoped
from presage.serving_hooks.workflows.live import LiveLengths


class _GrowthForecaster(Forecaster):
    """Beside a forecaster of next agents, which keeps its state in the same records."""

    def state(self, workflow: Workflow) -> ForecastState | None:
        return workflow.context_state if isinstance(workflow.context_state, ForecastState) else None

    def keep(self, workflow: Workflow, state: ForecastState | None) -> None:
        workflow.context_state = state


class ContextForecaster:
    """Forecasts context growth; a `Contexts` source of an engine.

    Args:
        predictor, version: the model, and its version in the registry; None forecasts nothing.
    """

    def __init__(
        self,
        predictor: ContextGrowthPredictor | None = None,
        version: int | None = None,
        *,
        budget: Budget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget, self._clock = budget, clock
        self._predictor = predictor
        self._versions = VersionedForecaster(self._forecaster(predictor, version))

    @property
    def loaded(self) -> list[LoadedPredictor]:
        """The model, if there is one."""
        return self._versions.loaded

    def take_over(self, predictor: ContextGrowthPredictor | None, version: int | None) -> None:
        """Makes this model that of new workflows; running ones keep theirs."""
        if predictor is not self._predictor:
            self._predictor = predictor
            self._versions.take_over(self._forecaster(predictor, version))

    def arrived(self, workflow: Workflow, step: Step, input_tokens: int) -> LiveLengths:
        """The tokens by which the context of a workflow will exceed this prompt, which has arrived."""
        made = self._versions.on_prefill(workflow, step.agent, step=step.number, input_tokens=input_tokens)
        return made.remaining

    def completed(self, workflow: Workflow, step: Step, output_tokens: int) -> LiveLengths:
        """The same less the output of the step, which has completed; source "none" beside a later step."""
        made = self._versions.on_completion(workflow, step=step.number, agent=step.agent, output_tokens=output_tokens)
        return made.remaining

    def ended(self, workflow: Workflow, reason: EndReason) -> None:
        """A workflow has ended."""
        self._versions.close(workflow, reason)

    def of_type(self, stats_key: str) -> tuple[float, float] | None:
        """Mean steps of a workflow and mean tokens that a step adds, in training; None without a model."""
        return None if self._predictor is None else self._predictor.of_type(unscoped(stats_key))[:2]

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {"context states": self._versions.latest.following + self._versions.under_older}

    def _forecaster(self, predictor: ContextGrowthPredictor | None, version: int | None) -> Forecaster:
        return _GrowthForecaster(
            None,
            lengths=predictor,
            lengths_version=version,
            lengths_kind="context-growth",
            budget=self._budget,
            clock=self._clock,
        )
