"""How much each component of a forecast is believed: weights of a log-linear mixture, found on held-out traces.

p ∝ Π_m p_m^w_m, for each horizon and moment (Genest and Zidek 1986: the logarithmic pool). The linear mixture
Σ_m w_m p_m, which LIMITS' measurements used, is too unsure of itself when its parts are each well calibrated (Ranjan
and Gneiting 2010 prove that it must be); the logarithmic one may sharpen, since its weights need not sum to one, and
costs one softmax instead of one a component. With weights (0, 0, 1) it is the n-gram, so "never worse than counting"
stays within reach of the fit, and a component that misleads on held-out traces gets weight 0: it is switched off.

Finding the weights is convex: multinomial logistic regression with one coefficient a component.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from presage.predictors.probabilities import FLOOR, softmax

PRIOR_STRENGTH: Final = 50.0
"""Pull towards the prior weights, in nats a squared unit: a few held-out workflows cannot silence a component."""


def fit_weights(
    components: Sequence[NDArray[np.float32]], outcomes: NDArray[np.int32], prior: Sequence[float]
) -> NDArray[np.float32]:
    """Weights float32 [M, K], none negative, of M components (each float32 [n, K, V+1]) on labels int32 [n, K].

    `prior` holds the M weights that are returned where no label counts; a component whose prior is 0 is left out.
    """
    start = np.asarray(prior, float)
    bounds = [(0.0, None if weight > 0 else 0.0) for weight in start]
    weights = np.empty((len(components), outcomes.shape[1]), np.float32)
    for k in range(outcomes.shape[1]):
        rows = np.flatnonzero((outcomes[:, k] >= 0) & (outcomes[:, k] < components[0].shape[2]))
        logarithms = np.stack([np.log(np.maximum(p[rows, k].astype(float), FLOOR)) for p in components])
        labels = (np.arange(len(rows)), outcomes[rows, k])

        def loss(w: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            p = softmax(np.tensordot(w, logarithms, 1))  # noqa: B023  (called within this turn of the loop)
            value = -np.log(np.maximum(p[labels], FLOOR)).sum()  # noqa: B023
            expected = (p * logarithms).sum(axis=(1, 2))  # noqa: B023
            gradient = expected - logarithms[:, *labels].sum(axis=1)  # noqa: B023
            away = w - start
            return float(value + PRIOR_STRENGTH * away @ away / 2), gradient + PRIOR_STRENGTH * away

        found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds)
        weights[:, k] = found.x
    return weights
