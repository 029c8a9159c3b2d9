"""Softmax, cross-entropy of masked labels, reliability bins, and expected calibration error."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.floating)

FLOOR = 1e-9
"""Probabilities are clipped to this before taking logarithms."""


def softmax(logits: NDArray[Number]) -> NDArray[Number]:
    """Softmax over the last axis, in the type given."""
    # Outcomes on the first axis: NumPy is four times slower at reducing a short last axis.
    rows = np.ascontiguousarray(np.moveaxis(logits, -1, 0))
    rows = np.exp(rows - rows.max(axis=0))
    rows /= rows.sum(axis=0)
    return np.ascontiguousarray(np.moveaxis(rows, 0, -1))


_SHIFTED: Final = 10.0
"""Labels that the shares of `outcome_shift` are believed as much as."""
_SCALINGS: Final = 20


def outcome_shift(logits: NDArray[np.float32], outcomes: NDArray[np.int32]) -> NDArray[np.float32]:
    """What to add to logits [n, K, O] so that the mean forecast of each outcome is its share of the labels [n, K].

    float32 [K, O], by iterative scaling; few labels shift little. Labels outside 0..O-1 do not count.
    """
    shift = np.zeros(logits.shape[1:], np.float32)
    for k in range(len(shift)):
        rows = np.flatnonzero((outcomes[:, k] >= 0) & (outcomes[:, k] < logits.shape[2]))
        came = np.bincount(outcomes[rows, k], minlength=logits.shape[2])
        before = softmax(logits[rows, k]).sum(axis=0)
        wanted = (came + _SHIFTED * before / max(len(rows), 1)) * len(rows) / (len(rows) + _SHIFTED)
        for _ in range(_SCALINGS):
            p = softmax(logits[rows, k] + shift[k]).sum(axis=0)
            shift[k] += np.log(np.maximum(wanted, FLOOR) / np.maximum(p, FLOOR))
    return shift


def label_probability(
    probabilities: NDArray[np.floating], outcomes: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Probability of each label, float64 [n, K], and a mask of the labels among the V+1 outcomes."""
    counts = (outcomes >= 0) & (outcomes < probabilities.shape[-1])
    index = np.where(counts, outcomes, 0)[..., None]
    return np.take_along_axis(probabilities, index, axis=-1)[..., 0].astype(np.float64), counts


def cross_entropy(probabilities: NDArray[np.floating], outcomes: NDArray[np.int32]) -> float:
    """Mean negative log-likelihood in nats over all unmasked positions and horizons; 0 without any."""
    given, counts = label_probability(probabilities, outcomes)
    return float(-np.log(np.maximum(given[counts], FLOOR)).mean()) if counts.any() else 0.0


BINS: Final = 15
"""Equal-width confidence bins; bin b covers [b/15, (b+1)/15), the last bin also 1."""


@dataclass(frozen=True)
class ReliabilityBin:
    """One confidence bin: `positions` forecasts with mean confidence `confidence` and accuracy `accuracy`."""

    low: float
    high: float
    positions: int
    confidence: float
    accuracy: float


def filled_bins(positions: NDArray[Any], sure: NDArray[Any], hits: NDArray[Any]) -> tuple[ReliabilityBin, ...]:
    """The non-empty of B even bins, from each bin's forecasts, sum of their confidences and correct ones, [B] each."""
    size = len(positions)
    return tuple(
        ReliabilityBin(b / size, (b + 1) / size, int(count), float(sure[b] / count), float(hits[b] / count))
        for b, count in enumerate(positions)
        if count
    )


def reliability(predicted: NDArray[np.floating], truth: NDArray[Any]) -> tuple[ReliabilityBin, ...]:
    """Predicted probabilities [n] and outcomes [n] between 0 and 1, in bins of equal width; empty bins are left out."""
    place = bin_of(predicted)
    count = np.bincount(place, minlength=BINS)
    sure, hits = (np.bincount(place, weights=values, minlength=BINS) for values in (predicted, truth))
    return filled_bins(count, sure, hits)


def bin_of(predicted: NDArray[np.floating]) -> NDArray[np.int64]:
    """The bin of each probability, 0..B-1."""
    return np.minimum((predicted * BINS).astype(np.int64), BINS - 1)


def calibration_error(bins: Iterable[ReliabilityBin]) -> float:
    """Expected calibration error of one horizon, between 0 and 1: the mean gap of confidence and accuracy."""
    rows = tuple(bins)
    total = sum(row.positions for row in rows)
    gap = sum(row.positions * abs(row.accuracy - row.confidence) for row in rows)
    return gap / total if total else math.nan
