"""Forecasts from the registry's models: what the engine does if nothing else is said.

`models:/next-agent@champion` says who comes next, for eviction; `models:/remaining-length@champion`, where there is
one, how many tokens are left, for priority. Where neither is there, or the registry is down, counts learnt online
answer after a while, and vLLM's own order until then.

A request is ranked when it arrives, before it is selected. So the forecast of its step is made then, and kept for
eviction, which asks for it when the step begins. Prompts are not read: a predictor of lengths that sketches them
answers from the rest.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError, RegistryError
from presage.features.moment import Moment
from presage.registry.connect import DATABASE_FILE, Registry
from presage.serving_hooks.backoff import OnlineCounts
from presage.serving_hooks.forecaster import Forecaster
from presage.serving_hooks.live import LiveForecast, Projection
from presage.serving_hooks.sources import Held, Predictors, resolve_predictors
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.forecasts import Forecasts
from presage.serving_hooks.vllm.metadata import Step
from presage.serving_hooks.vllm.where import open_existing, where
from presage.serving_hooks.vllm.workflows import MOST_WORKFLOWS

_MOST_EARLY: Final = 64
"""Steps of one workflow that have arrived and not begun; of more, the oldest are asked for anew."""

NO_REGISTRY: Final = (
    f"no registry: neither the setting presage.registry nor MLFLOW_TRACKING_URI names one, and the working directory "
    f"holds no {DATABASE_FILE}"
)

_log = logging.getLogger(__name__)


class AskedOnArrival:
    """A forecaster that both policies ask: the one on arrival, the other when the step begins."""

    def __init__(self, forecaster: Forecaster) -> None:
        self._forecaster = forecaster
        self._early: dict[tuple[str, str], dict[tuple[str, int | None], LiveForecast]] = {}

    def remaining_tokens(self, step: Step, input_tokens: int) -> float | None:
        """Output tokens of this step and all later ones, when it arrives; None if nobody knows."""
        live = self._forecaster.on_prefill(
            step.workflow_type, step.workflow_id, step.agent, step=step.number, input_tokens=input_tokens
        )
        early = self._early.setdefault((step.workflow_type, step.workflow_id), {})
        early[step.agent, step.number] = live
        if len(early) > _MOST_EARLY:
            del early[next(iter(early))]
        return live.remaining.ranking

    def on_prefill(
        self,
        workflow_type: str,
        workflow_id: str,
        agent: str,
        *,
        step: int | None = None,
        input_tokens: int | None = None,
    ) -> LiveForecast:
        """What was said on arrival; asked anew where priority is vLLM's own."""
        kept = self._early.get((workflow_type, workflow_id))
        early = kept.pop((agent, step), None) if kept is not None else None
        if not kept:
            self._early.pop((workflow_type, workflow_id), None)  # an empty table a workflow would be a great deal
        if early is not None:
            return early
        return self._forecaster.on_prefill(workflow_type, workflow_id, agent, step=step, input_tokens=input_tokens)

    @property
    def projections(self) -> Mapping[Moment, Projection]:
        """How hidden states are projected, by moment; empty where none are read."""
        return self._forecaster.projections

    def await_states(self) -> None:
        """Prefill states come after `on_prefill` from now on."""
        self._forecaster.awaits_states = True

    def on_prefill_state(
        self, workflow_type: str, workflow_id: str, projected: NDArray[np.float32], of: LiveForecast
    ) -> LiveForecast | None:
        """The prefill state of a step has come; see `Forecaster.on_prefill_state`."""
        return self._forecaster.on_prefill_state(workflow_type, workflow_id, projected, of)

    def on_completion(
        self,
        workflow_type: str,
        workflow_id: str,
        *,
        output_tokens: int | None = None,
        projected: NDArray[np.float32] | None = None,
    ) -> LiveForecast:
        """The step that began last has produced its last token; `projected` is its completion state."""
        return self._forecaster.on_completion(
            workflow_type, workflow_id, output_tokens=output_tokens, projected=projected
        )

    def close(self, workflow_type: str, workflow_id: str) -> None:
        """The workflow has ended."""
        self._early.pop((workflow_type, workflow_id), None)
        self._forecaster.close(workflow_type, workflow_id)


def champions(config: PresageConfig, served_model: str | None = None) -> Forecasts:
    """The models that the settings name, by default the registry's champions, and counts learnt online behind them.

    Raises nothing for a registry that is down or a model that is not there: the engine serves without.

    Args:
        config: names models and registry.
        served_model: what the engine serves; hidden states belong to one model.
    """
    found = predictors(config)
    forecaster = Forecaster(
        found.next_agent.predictor,
        found.next_agent.version,
        lengths=found.remaining_length.predictor,
        lengths_version=found.remaining_length.version,
        back_off=OnlineCounts(),
        served_model=served_model,
        # The hooks say when a workflow has ended, by their own time to live and their own bound.
        max_workflows=MOST_WORKFLOWS,
        time_to_live_s=math.inf,
        budget=config.forecast_budget(),
    )
    asked = AskedOnArrival(forecaster)
    parts: dict[str, Held[Any]] = {"next-agent": found.next_agent, "remaining-length": found.remaining_length}
    models = {kind: told(held) for kind, held in parts.items()}
    for kind, held in parts.items():
        if held.predictor is not None:
            _log.info("%s: %s", kind, models[kind])
    return Forecasts(next_agents=asked, remaining=asked, models=models)


def predictors(config: PresageConfig) -> Predictors:
    """The models that the settings name, each with the reason where there is none. Says to the log what is missing."""
    uri = where(config.registry)
    registry: Registry | None = None
    without = NO_REGISTRY
    if uri is not None:
        try:
            registry = open_existing(uri)
        except Exception as error:
            without = str(error) if isinstance(error, PresageError) else f"{uri}: {type(error).__name__}"

    def opened() -> Registry:
        if registry is None:
            raise RegistryError(without)
        return registry

    wanted = config.next_agent, config.remaining_length
    # Without a registry nobody is asked, or the log would say it once a model.
    asked = [None if registry is None and name is not None and name.startswith("models:") else name for name in wanted]
    if asked != [*wanted]:
        _log.warning("%s; forecasts come from counts of what is seen here, once there are enough", without.rstrip("."))
    found = resolve_predictors(opened, next_agent=asked[0], remaining_length=asked[1])
    if asked[0] != wanted[0]:
        found = replace(found, next_agent=Held(None, wanted[0], reason=without))
    if asked[1] != wanted[1]:
        found = replace(found, remaining_length=Held(None, wanted[1], reason=without))
    return found


def told(held: Held[Any]) -> str:
    """What became of one model, in a sentence."""
    if held.predictor is None:
        return f"none: {held.reason}"
    return str(held.reference) if held.version is None else f"{held.reference}, version {held.version}"
