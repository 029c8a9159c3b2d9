"""Forecasts by chance: right in shape, of no use."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from presage.features.moment import PREFILL
from presage.serving_hooks.workflows import Workflow
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import LiveForecast

AGENTS: Final = ("coder", "tester", "writer")


class Noise:
    """A source of forecasts for a scheduler, by chance."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)

    def on_prefill(self, *_: object, **__: object) -> LiveForecast:
        """Any probabilities of the agents, three steps ahead."""
        rows = self.draw.dirichlet(np.ones(len(AGENTS) + 1), size=3).astype(np.float32)
        return LiveForecast("champion", 100, PREFILL, rows, AGENTS, 1)

    on_completion = on_prefill

    def close(self, workflow: Workflow) -> None:
        """Nothing is kept."""

    def remaining_tokens(self, workflow: Workflow, step: Step, input_tokens: int) -> float | None:
        """Anything that an estimator may say, sane or not."""
        return float(self.draw.choice([0.0, 10.0, 1000.0, math.inf, math.nan, -1.0]))
