"""Forecasts for the workflows of retry_loops.py: none, learned from similar workflows, or an oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from retry_loops import AGENTS, TYPE, Planned, Style, draw, traced

from presage.datasets.schema import conform
from presage.datasets.schema.validate import validate
from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.predictors.next_agent.boosting import BoostingConfig
from presage.predictors.next_agent.network_weights import NetworkConfig
from presage.predictors.next_agent.parts import NextAgentConfig
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.registry.connect import Registry
from presage.serving_hooks.forecasting.forecaster import Forecaster, VersionedForecaster
from presage.serving_hooks.forecasting.live import LiveForecast
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.forecasting.sources import resolve_predictors
from presage.serving_hooks.vllm.forecasts import Forecasts
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler
from presage.serving_hooks.workflows.identity import Step
from presage.training.next_agent.train import train

HORIZON = 3
TRAINING, ELSEWHERE = 400, 1_000_000
"""Workflows a predictor learns from, and the seed they are drawn by."""


class Oracle:
    """An oracle: knows the next agents and the remaining tokens that were drawn."""

    def __init__(self, workflows: Mapping[str, Sequence[Planned]]) -> None:
        self._workflows = workflows
        self._at: dict[str, int] = {}

    def on_prefill(
        self,
        workflow_type: str,
        workflow_id: str,
        agent: str,
        *,
        step: int | None = None,
        input_tokens: int | None = None,
    ) -> LiveForecast:
        """The forecast at the start of a step."""
        self._at[workflow_id] = step or 0
        return self._ahead(PREFILL, workflow_id)

    def on_completion(self, workflow_type: str, workflow_id: str, *, output_tokens: int | None = None) -> LiveForecast:
        """The forecast after the output."""
        return self._ahead(COMPLETION, workflow_id)

    def close(self, workflow_type: str, workflow_id: str) -> None:
        """Forgets the workflow."""
        self._at.pop(workflow_id, None)

    def remaining_tokens(self, step: Step, input_tokens: int) -> float:
        """Of this step and all later ones."""
        return float(sum(planned.answer for planned in self._workflows[step.workflow_id][step.number or 0 :]))

    def _ahead(self, moment: Moment, workflow_id: str) -> LiveForecast:
        rows = np.zeros((HORIZON, len(AGENTS) + 1), np.float32)
        steps, at = self._workflows[workflow_id], self._at[workflow_id]
        for row, place in zip(rows, range(at + 1, at + 1 + HORIZON), strict=True):
            row[AGENTS.index(steps[place].agent) if place < len(steps) else -1] = 1.0
        return LiveForecast("champion", 1, moment, rows, AGENTS, None)


def learn(style: Style, folder: Path) -> NextAgentPredictor:
    """Trains a small predictor on other workflows; loads and validates it as an engine does at start."""
    table = validate(conform(pa.Table.from_pylist(traced(draw(TRAINING, ELSEWHERE), style)), "drawn"), "drawn")
    config = NextAgentConfig(network=NetworkConfig(epochs=10), boosting=BoostingConfig(rounds=20))
    train(table, None, config, horizon=HORIZON, baselines=("markov-1",), name=TYPE).save(folder)
    found = resolve_predictors(_no_registry, next_agent=str(folder)).next_agent
    if found.predictor is None:
        raise RuntimeError(found.reason)
    return found.predictor


def _no_registry() -> Registry:
    raise AssertionError("a folder needs no registry")


def told(kind: str, workflows: Mapping[str, Sequence[Planned]], predictor: NextAgentPredictor | None) -> Forecasts:
    """The forecasts of one kind: none, learned or oracle."""
    if kind == "none":
        return Forecasts()
    if kind == "oracle":
        oracle = Oracle(workflows)
        return Forecasts(oracle, oracle)
    asked = VersionedForecaster(Forecaster(predictor, back_off=OnlineCounts()))
    return Forecasts(asked, asked)


def hooked(forecasts: Forecasts) -> type[Any]:
    """A scheduler with these forecasts."""
    return type("Told", (SyncWorkflowScheduler,), {"forecasts": lambda self, config: forecasts})
