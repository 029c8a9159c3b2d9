"""How much each component of a forecast is believed: mixture weights, found on held-out traces.

Mixing with a back-off n-gram gave the best calibration and a floor of "never worse than counting" (LIMITS.md). The
weights of one horizon and moment maximise the held-out log-likelihood of Σ_m w_m p_m: a concave problem that
expectation-maximisation solves from any interior start (Jelinek and Mercer 1980).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from presage.predictors.probabilities import FLOOR, label_probability

ITERATIONS = 200
PRIOR = 4.0
"""Positions' worth of belief in equal weights: keeps a handful of held-out steps from silencing a component."""


def fit_weights(components: Sequence[NDArray[np.float32]], outcomes: NDArray[np.int32]) -> NDArray[np.float32]:
    """Weights float32 [K, M] of M components (each float32 [n, K, V+1]) on held-out labels int32 [n, K]."""
    count, horizon = len(components), outcomes.shape[1]
    weights = np.full((horizon, count), 1.0 / count)
    given, counts = zip(*(label_probability(p, outcomes) for p in components), strict=True)
    for k in range(horizon):
        likelihood = np.stack([np.maximum(g[counts[0][:, k], k], FLOOR) for g in given], axis=1)
        for _ in range(ITERATIONS):
            share = weights[k] * likelihood
            share /= share.sum(axis=1, keepdims=True)
            weights[k] = (share.sum(axis=0) + PRIOR / count) / (len(share) + PRIOR)
    return weights.astype(np.float32)
