"""From log-odds to probabilities that come true as often as they say: Platt scaling, a line a model.

    logit p = logit(base rate) + shift + slope · (log-odds − their mean)

The slopes of models are drawn towards the slope of all labels together, and the shifts towards 0, by as much as two
hundred labels weigh: a model with few labels is calibrated as the others are. Platt (1999) with the labels as they are;
the mean of several tries counts as that share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.predictors.routing.factors import base_rates, logit, sigmoid

PRIOR_LABELS: Final = 200.0

_ROUNDS: Final = 50
_ENOUGH: Final = 1e-9
_TENSORS: Final = ("base", "middle", "shift", "slope")


@dataclass(frozen=True, eq=False)
class Calibration:
    """A line for each of M models, float64 [M] each.

    Attributes:
        base: log-odds of the base rate.
        middle: mean of the log-odds that it was fitted on.
        shift: added at the middle.
        slope: of a unit of log-odds, 0 or more.
    """

    base: NDArray[np.float64]
    middle: NDArray[np.float64]
    shift: NDArray[np.float64]
    slope: NDArray[np.float64]

    @classmethod
    def fit(
        cls, logits: NDArray[np.float32], correct: NDArray[np.float32], base: NDArray[np.float64] | None = None
    ) -> Calibration:
        """Fits the lines.

        Args:
            logits: [n, M], of prompts the scorer did not learn from.
            correct: [n, M], 0..1, NaN without a label.
            base: float64 [M], base rates between 0 and 1 of more labels than these; None takes those of `correct`.
        """
        offset = logit(base_rates(correct) if base is None else base)
        middle = logits.mean(axis=0, dtype=np.float64) if len(logits) else offset
        away, known = logits - middle, ~np.isnan(correct)
        together = _common(away, offset, correct)
        shift, slope = np.zeros(len(offset)), np.full(len(offset), together)
        for m in range(len(offset)):
            rows = known[:, m]
            if rows.any():
                truth = correct[rows, m].astype(np.float64)
                shift[m], slope[m] = _line(away[rows, m], offset[m], truth, together)
        return cls(offset, middle, shift, np.maximum(slope, 0.0))

    def probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Probabilities float32 [n, M] of log-odds [n, M]."""
        return sigmoid(self.base + self.opinion(logits)).astype(np.float32)

    def opinion(self, logits: NDArray[np.floating]) -> NDArray[np.float64]:
        """How far calibrated log-odds of log-odds [n, M] lie from those of the base rates, float64 [n, M]."""
        return np.asarray(self.shift + self.slope * (logits - self.middle), np.float64)

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """As an artefact keeps it."""
        return {name: getattr(self, name) for name in _TENSORS}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]], models: int) -> Calibration:
        """Inverse of `to_tensors`; raises LookupError or ValueError where a part is missing or of other models."""
        found = {name: tensors[name] for name in _TENSORS}
        if any(array.shape != (models,) for array in found.values()):
            raise ValueError(f"the calibration is not of {models} models")
        return cls(**found)


def _common(away: NDArray[np.float64], offset: NDArray[np.float64], correct: NDArray[np.float32]) -> float:
    """One slope for all labels, 0 or more; a slope of 1 weighs `PRIOR_LABELS`."""
    known = ~np.isnan(correct)
    x, truth = away[known], correct[known].astype(np.float64)
    start = np.broadcast_to(offset, away.shape)[known]
    weight = 0.25 * PRIOR_LABELS * float((x**2).mean()) if len(x) else 0.0
    slope = 1.0
    for _ in range(_ROUNDS if weight > 0 else 0):
        p = sigmoid(start + slope * x)
        gradient = ((truth - p) * x).sum() - weight * (slope - 1.0)
        step = float(gradient / ((p * (1 - p) * x * x).sum() + weight))
        slope += float(np.clip(step, -1.0, 1.0))
        if abs(step) < _ENOUGH:
            break
    return max(slope, 0.0)


def _line(x: NDArray[np.float64], offset: float, truth: NDArray[np.float64], slope: float) -> tuple[float, float]:
    """Shift and slope of one model by Newton's method."""
    weight = 0.25 * PRIOR_LABELS * np.array([1.0, max(float((x**2).mean()), 1e-12)])
    design = np.stack([np.ones_like(x), x], axis=1)
    start = np.array([0.0, slope])
    found = start.copy()
    for _ in range(_ROUNDS):
        p = sigmoid(offset + design @ found)
        gradient = design.T @ (truth - p) - weight * (found - start)
        curvature = (design * (p * (1 - p))[:, None]).T @ design + np.diag(weight)
        step = np.linalg.solve(curvature, gradient)
        found += np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < _ENOUGH:
            break
    return float(found[0]), float(found[1])
