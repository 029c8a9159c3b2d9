"""Arithmetic on forecasts: softmax, cross-entropy over the labels that count."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.floating)

FLOOR = 1e-9
"""Smallest probability a logarithm is taken of."""


def softmax(logits: NDArray[Number]) -> NDArray[Number]:
    """Softmax over the last axis, in the type given."""
    # Outcomes first while it is worked on: NumPy reduces over a short last axis four times as slowly.
    rows = np.ascontiguousarray(np.moveaxis(logits, -1, 0))
    rows = np.exp(rows - rows.max(axis=0))
    rows /= rows.sum(axis=0)
    return np.ascontiguousarray(np.moveaxis(rows, 0, -1))


def label_probability(
    probabilities: NDArray[np.floating], outcomes: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Probability given to each label, float64 [n, K], and which labels count: those among the V+1 outcomes."""
    counts = (outcomes >= 0) & (outcomes < probabilities.shape[-1])
    index = np.where(counts, outcomes, 0)[..., None]
    return np.take_along_axis(probabilities, index, axis=-1)[..., 0].astype(np.float64), counts


def cross_entropy(probabilities: NDArray[np.floating], outcomes: NDArray[np.int32]) -> float:
    """Mean negative log-likelihood in nats over all positions and horizons that count; 0 where none does."""
    given, counts = label_probability(probabilities, outcomes)
    return float(-np.log(np.maximum(given[counts], FLOOR)).mean()) if counts.any() else 0.0
