"""Forecasts from the registry's champions: `"forecasts": "presage.serving_hooks.vllm.registered:champions"`.

`models:/next-agent@champion` says who comes next, for eviction; `models:/remaining-length@champion`, where there is
one, how many tokens are left, for priority. Where neither is there, or the registry is down, counts learnt online
answer after a while, and vLLM's own order until then.

A request is ranked when it arrives, before it is selected. So the forecast of its step is made then, and kept for
eviction, which asks for it when the step begins. Prompts are not read: a predictor of lengths that sketches them
answers from the rest.
"""

from __future__ import annotations

import math
import os
from typing import Final

from presage.registry.connect import Registry, open_registry
from presage.serving_hooks.backoff import OnlineCounts
from presage.serving_hooks.forecaster import Forecaster
from presage.serving_hooks.guard import HANG_S, Budget
from presage.serving_hooks.live import LiveForecast
from presage.serving_hooks.sources import resolve_predictors
from presage.serving_hooks.vllm.forecasts import Forecasts
from presage.serving_hooks.vllm.metadata import Step
from presage.serving_hooks.vllm.workflows import MOST_WORKFLOWS

_MOST_EARLY: Final = 64
"""Steps of one workflow that have arrived and not begun; of more, the oldest are asked for anew."""


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
        early = self._early.get((workflow_type, workflow_id), {}).pop((agent, step), None)
        if early is not None:
            return early
        return self._forecaster.on_prefill(workflow_type, workflow_id, agent, step=step, input_tokens=input_tokens)

    def on_completion(self, workflow_type: str, workflow_id: str, *, output_tokens: int | None = None) -> LiveForecast:
        """The step that began last has produced its last token."""
        return self._forecaster.on_completion(workflow_type, workflow_id, output_tokens=output_tokens)

    def close(self, workflow_type: str, workflow_id: str) -> None:
        """The workflow has ended."""
        self._early.pop((workflow_type, workflow_id), None)
        self._forecaster.close(workflow_type, workflow_id)


def champions() -> Forecasts:
    """The champions of the registry that `MLFLOW_TRACKING_URI` names; without it, of the working directory."""

    def registry() -> Registry:
        return open_registry(os.environ.get("MLFLOW_TRACKING_URI"))

    found = resolve_predictors(registry, remaining_length="models:/remaining-length@champion")
    forecaster = Forecaster(
        found.next_agent.predictor,
        found.next_agent.version,
        lengths=found.remaining_length.predictor,
        lengths_version=found.remaining_length.version,
        back_off=OnlineCounts(),
        # They have been tried: nothing is left to compile, so the first calls are waited for no longer than others.
        budget=Budget(first_hang_s=HANG_S),
        # The hooks say when a workflow has ended, by their own time to live and their own bound.
        max_workflows=MOST_WORKFLOWS,
        time_to_live_s=math.inf,
    )
    asked = AskedOnArrival(forecaster)
    return Forecasts(next_agents=asked, remaining=asked)
