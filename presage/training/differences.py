"""Is one predictor better than another, or did it meet easier workflows? Paired differences of accuracy.

Both are judged on the same positions, and a resample draws the same workflows for both, so what is hard for both
cancels. One draw of workflows serves all pairs: sixteen baselines cost little more than one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from presage.predictors.bootstrap import ratio_cis
from presage.training.metrics import RESAMPLES, Figures


@dataclass(frozen=True)
class Difference:
    """Accuracy of one minus accuracy of the other, K numbers each; NaN where nothing was judged.

    Attributes:
        difference: between −1 and 1, positive where the first is better.
        ci95: its paired interval; where it holds 0, neither is shown to be better.
    """

    difference: tuple[float, ...]
    ci95: tuple[tuple[float, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, null where nothing was judged."""
        return {
            "difference": [None if math.isnan(value) else value for value in self.difference],
            "ci95": [[None if math.isnan(end) else end for end in ends] for ends in self.ci95],
        }


def differences(
    pairs: Mapping[str, tuple[Figures, Figures]], seed: int, resamples: int = RESAMPLES
) -> dict[str, Difference]:
    """The difference of each pair, first minus second; all pairs are of the same W workflows and K steps ahead."""
    if not pairs:
        return {}
    gains = [ours.correct - theirs.correct for ours, theirs in pairs.values()]
    positions = [ours.positions for ours, _ in pairs.values()]
    above, below = np.concatenate(gains, axis=1), np.concatenate(positions, axis=1)  # [W, pairs·K]
    ends = ratio_cis(above, below, np.random.default_rng(seed), resamples)
    total = below.sum(axis=0)
    gain = np.divide(above.sum(axis=0), total, out=np.full(len(total), np.nan), where=total > 0).tolist()
    horizon = gains[0].shape[1]
    slices: Sequence[slice] = [slice(i * horizon, (i + 1) * horizon) for i in range(len(pairs))]
    return {name: Difference(tuple(gain[of]), tuple(ends[of])) for name, of in zip(pairs, slices, strict=True)}
