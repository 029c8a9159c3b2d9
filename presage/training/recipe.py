"""How a predictor is trained, kept so that a study can train it again with one thing changed.

A study trains as `train-predictor` does, through the same function: what it finds holds for the model that is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from presage.features.states import SKETCH, States
from presage.predictors.parts import NextAgentConfig
from presage.training.next_agent import NextAgentTraining, train

Share = Callable[[str, float], None]
"""Told what is being done and the share of the whole that is done, 0 to 1."""


@dataclass(frozen=True)
class Recipe:
    """Everything `train` wants to know but the traces and the baselines; the fields mean what they mean there."""

    config: NextAgentConfig = field(default_factory=NextAgentConfig)
    horizon: int = 3
    seed: int = 0
    states: States = "auto"
    text_encoder: str = SKETCH

    def train(
        self, table: pa.Table, test: pa.Table, baselines: Sequence[str], tell: Callable[[str], None]
    ) -> NextAgentTraining:
        """Trains on `table` and judges on `test`, with a word on each thing that begins."""
        return train(
            table,
            test,
            self.config,
            horizon=self.horizon,
            seed=self.seed,
            states=self.states,
            text_encoder=self.text_encoder,
            baselines=baselines,
            name="presage",
            progress=lambda doing, _: tell(doing),
        )
