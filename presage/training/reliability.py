"""Whether probabilities mean what they say: what was said beside what came, in bins, with intervals.

A claim is a probability that was said of something, and what became of it: 1, 0, or a share between them where there
were several tries. Claims about one workflow, or about one prompt, go together: intervals are by bootstrap over those
groups, not over claims.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.prefixes import MASKED
from presage.predictors.bootstrap import share_ci

BINS: Final = 15
"""Equal-width bins of what was said; bin b holds b/15 up to, but not including, (b+1)/15, the last one 1 as well."""


@dataclass(frozen=True)
class ReliabilityBin:
    """One bin of confidence: `positions` forecasts, as sure as `confidence` on the mean, right at `accuracy`."""

    low: float
    high: float
    positions: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Claims:
    """n claims.

    Attributes:
        said: [n], probabilities.
        truth: [n], 0..1, what came.
        group: int64 [n], 0..G-1, the workflow or the prompt of each.
    """

    said: NDArray[np.floating]
    truth: NDArray[Any]
    group: NDArray[np.int64]

    def bins(self) -> tuple[ReliabilityBin, ...]:
        """What was said and what came by bin, empty ones left out."""
        return reliability(self.said, self.truth)

    def ci95(self, rng: np.random.Generator) -> tuple[tuple[float, float], ...]:
        """The interval of each bin's `accuracy`, in the order of `bins()`."""
        place, groups = _place(self.said), int(self.group.max(initial=-1)) + 1
        found = []
        for b in np.unique(place):
            inside = place == b
            hits = np.bincount(self.group[inside], weights=self.truth[inside], minlength=groups)
            found.append(share_ci(hits, np.bincount(self.group[inside], minlength=groups), rng))
        return tuple(found)


def claims_of_forecasts(
    probabilities: NDArray[np.floating], outcomes: NDArray[np.int32], workflow: NDArray[np.int64], k: int
) -> Claims:
    """How sure a next-agent predictor is of the likeliest outcome k steps ahead, and whether that came.

    Args:
        probabilities: [n, K, V+1].
        outcomes: int32 [n, K], as `Prefixes.outcomes`; where there is nothing to know, nothing is claimed.
        workflow: int64 [n].
        k: 1..K.
    """
    judged = outcomes[:, k - 1] != MASKED
    said = probabilities[judged, k - 1]
    return Claims(said.max(axis=1), said.argmax(axis=1) == outcomes[judged, k - 1], workflow[judged])


def claims_of_labels(probabilities: NDArray[np.floating], correct: NDArray[np.floating]) -> Claims:
    """What a router said of n prompts and M models, [n, M], beside their labels, NaN without; groups are prompts."""
    prompt, model = np.nonzero(~np.isnan(correct))
    return Claims(probabilities[prompt, model], correct[prompt, model], prompt)


def reliability(said: NDArray[np.floating], truth: NDArray[Any]) -> tuple[ReliabilityBin, ...]:
    """What was said, [n], and what came, [n] between 0 and 1, by bins of equal width; empty ones are left out."""
    place = _place(said)
    count = np.bincount(place, minlength=BINS)
    sure, hits = (np.bincount(place, weights=values, minlength=BINS) for values in (said, truth))
    return tuple(
        ReliabilityBin(b / BINS, (b + 1) / BINS, int(count[b]), float(sure[b] / count[b]), float(hits[b] / count[b]))
        for b in np.flatnonzero(count).tolist()
    )


def calibration_error(bins: Iterable[ReliabilityBin]) -> float:
    """Expected calibration error, between 0 and 1: the mean gap of what was said and what came; NaN without a bin."""
    rows = tuple(bins)
    total = sum(row.positions for row in rows)
    gap = sum(row.positions * abs(row.accuracy - row.confidence) for row in rows)
    return gap / total if total else math.nan


def _place(said: NDArray[np.floating]) -> NDArray[np.int64]:
    return np.minimum((said * BINS).astype(np.int64), BINS - 1)
