"""Forecasts by chance: right in shape, of no use."""

import math

import numpy as np

from presage.features.moment import PREFILL
from presage.serving_hooks.forecasting.live import LiveForecast
from presage.serving_hooks.workflows.identity import Step

AGENTS = ("coder", "tester", "writer")


class Noise:
    """Forecasts by chance."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)

    def on_prefill(self, *_: object, **__: object) -> LiveForecast:
        rows = self.draw.dirichlet(np.ones(len(AGENTS) + 1), size=3).astype(np.float32)
        return LiveForecast("champion", 100, PREFILL, rows, AGENTS, 1)

    on_completion = on_prefill

    def close(self, workflow_type: str, workflow_id: str) -> None:
        pass

    def remaining_tokens(self, step: Step, input_tokens: int) -> float | None:
        return self.draw.choice([0.0, 10.0, 1000.0, math.inf, math.nan, -1.0])
