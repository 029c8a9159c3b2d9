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
from presage.serving_hooks.forecasting.forecaster import Forecaster, VersionedForecaster
from presage.serving_hooks.forecasting.forecasts import LoadedPredictor
from presage.serving_hooks.workflows import EndReason
from presage.serving_hooks.workflows.identity import Step, unscoped
from presage.serving_hooks.workflows.live import LiveLengths


class ContextForecaster:
    """Forecasts context growth; a `Contexts` source of an engine.

    Args:
        predictor, version: the model, and its version in the registry; None forecasts nothing.
        max_workflows: states kept; the least recently active one is dropped first.
    """

    def __init__(
        self,
        predictor: ContextGrowthPredictor | None = None,
        version: int | None = None,
        *,
        budget: Budget | None = None,
        max_workflows: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget, self._max_workflows, self._clock = budget, max_workflows, clock
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

    def arrived(self, step: Step, input_tokens: int) -> LiveLengths:
        """The tokens by which the context of a workflow will exceed this prompt, which has arrived."""
        made = self._versions.on_prefill(
            step.workflow_type, step.workflow_id, step.agent, step=step.number, input_tokens=input_tokens
        )
        return made.remaining

    def completed(self, step: Step, output_tokens: int) -> LiveLengths:
        """The same less the output of the step, which has completed; source "none" beside a later step."""
        made = self._versions.on_completion(
            step.workflow_type, step.workflow_id, step=step.number, agent=step.agent, output_tokens=output_tokens
        )
        return made.remaining

    def ended(self, step: Step, reason: EndReason) -> None:
        """The workflow of this step has ended."""
        self._versions.close(step.workflow_type, step.workflow_id, reason)

    def of_type(self, stats_key: str) -> tuple[float, float] | None:
        """Mean steps of a workflow and mean tokens that a step adds, in training; None without a model."""
        return None if self._predictor is None else self._predictor.of_type(unscoped(stats_key))[:2]

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {"context states": len(self._versions.latest) + self._versions.under_older}

    def _forecaster(self, predictor: ContextGrowthPredictor | None, version: int | None) -> Forecaster:
        return Forecaster(
            None,
            lengths=predictor,
            lengths_version=version,
            lengths_kind="context-growth",
            max_workflows=self._max_workflows,
            budget=self._budget,
            clock=self._clock,
        )
