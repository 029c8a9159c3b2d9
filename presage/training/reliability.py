"""Whether probabilities mean what they say: what was said beside what came, in bins, with intervals.

A claim is a probability that was said of something, and what became of it: 1, 0, or a share between them where there
were several tries. Claims about one workflow, or about one prompt, go together: intervals are by bootstrap over those
groups, not over claims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.features.prefixes import MASKED
from presage.predictors.bootstrap import share_ci
from presage.predictors.reliability import BINS, ReliabilityBin, filled_bins


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
    return filled_bins(count, sure, hits)


def _place(said: NDArray[np.floating]) -> NDArray[np.int64]:
    return np.minimum((said * BINS).astype(np.int64), BINS - 1)
