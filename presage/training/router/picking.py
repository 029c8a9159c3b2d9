"""What picking a model for each prompt is worth, next to always taking one, to chance, and to knowing the answers.

Judged on the prompts that have a label of every model: of others nobody knows what another pick would have made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.predictors.bootstrap import ratio_ci
from presage.training.metrics import RESAMPLES
from presage.training.router.metrics import Floats, ends, number


@dataclass(frozen=True)
class PickFigures:
    """What was measured on the n' prompts with every label; NaN where there are none.

    Attributes:
        picked_accuracy: mean label of the models picked.
        picked_ci95: by bootstrap over prompts.
        best_single: of the model that is best on these very prompts, which nobody knows beforehand.
        best_single_model: its name.
        gain_ci95: of `picked_accuracy` minus `best_single`, paired.
        random: of a model picked by chance.
        oracle: of the best model for each prompt; with many models inflated by chance.
        shares: of the prompts each model was picked for, by name.
        prompts: n'.
        hits: float64 [n'], label of the model picked.
    """

    picked_accuracy: float
    picked_ci95: tuple[float, float]
    best_single: float
    best_single_model: str | None
    gain_ci95: tuple[float, float]
    random: float
    oracle: float
    shares: Mapping[str, float]
    prompts: int
    hits: Floats

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, null where nothing was judged."""
        return {
            "picked_accuracy": number(self.picked_accuracy),
            "picked_accuracy_ci95": ends(self.picked_ci95),
            "best_single": number(self.best_single),
            "best_single_model": self.best_single_model,
            "gain_over_best_single_ci95": ends(self.gain_ci95),
            "random": number(self.random),
            "oracle": number(self.oracle),
            "picked_shares": dict(self.shares),
            "prompts_with_every_label": self.prompts,
        }


def judged_prompts(correct: NDArray[np.floating]) -> NDArray[np.bool_]:
    """The prompts with a label of every model, bool [n]."""
    return np.asarray(~np.isnan(correct).any(axis=1), np.bool_)


def measure_picks(
    picks: NDArray[np.int64],
    correct: NDArray[np.floating],
    models: Sequence[str],
    seed: int,
    resamples: int = RESAMPLES,
) -> PickFigures:
    """Judges the models picked for n prompts.

    Args:
        picks: int64 [n], 0..M-1.
        correct: [n, M], 0..1, NaN without a label.
        models: M names.
        seed: of the bootstrap; the same seed draws the same prompts.
        resamples: how often; 0 leaves intervals out.
    """
    whole = judged_prompts(correct)
    truth, taken = correct[whole].astype(np.float64), picks[whole]
    if not len(truth):
        unknown = (math.nan, math.nan)
        return PickFigures(math.nan, unknown, math.nan, None, unknown, math.nan, math.nan, {}, 0, np.zeros(0))
    hits = np.take_along_axis(truth, taken[:, None], axis=1)[:, 0]
    best = int(truth.mean(axis=0).argmax())
    return PickFigures(
        picked_accuracy=float(hits.mean()),
        picked_ci95=mean_ci(hits, seed, resamples),
        best_single=float(truth[:, best].mean()),
        best_single_model=models[best],
        gain_ci95=mean_ci(hits - truth[:, best], seed, resamples),
        random=float(truth.mean()),
        oracle=float(truth.max(axis=1).mean()),
        shares={name: float((taken == m).mean()) for m, name in enumerate(models)},
        prompts=len(truth),
        hits=hits,
    )


def mean_ci(values: Floats, seed: int, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 95 % interval of a mean over prompts."""
    if not resamples or not len(values):
        return math.nan, math.nan
    return ratio_ci(values, np.ones(len(values)), np.random.default_rng(seed), resamples)
