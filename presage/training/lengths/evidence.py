"""What a report of lengths wants to know beyond the figures of one training, at the price of another.

A predictor that holds a next-agent model is trained once more without it: whether knowing who is called next was worth
its cost is a question of these traces, and nothing else answers it. Without such a model there is no more to find out.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from presage.predictors.remaining_length import RemainingLengthConfig
from presage.training.lengths.evaluate import difference
from presage.training.lengths.train import LengthTraining, train_lengths
from presage.training.training import Progress


def further_evidence(
    training: LengthTraining,
    table: pa.Table,
    test: pa.Table | None,
    config: RemainingLengthConfig,
    seed: int,
    progress: Progress,
) -> dict[str, Any]:
    """Figures to add to the metrics of `training`, which was made of these traces with this configuration and seed.

    Returns:
        JSON values: "without_next_agent", null for a predictor that holds none, else "figures", those of the same
        training without it, and "difference", with minus without; below 0 the model helps.
    """
    if training.predictor.encoder.ahead is None:
        return {"without_next_agent": None}
    plain = train_lengths(
        table,
        test,
        config,
        target=training.predictor.target,
        seed=seed,
        baselines=(),
        progress=lambda doing, share: progress(f"without the next-agent model: {doing}", share),
    )
    gain = difference(training.evaluation.figures, plain.evaluation.figures, seed)
    return {
        "without_next_agent": {
            "figures": plain.evaluation.figures.to_dict(),
            "difference": gain.to_dict(plain.evaluation.figures.quantiles),
        }
    }
