"""Which model to pick: the likeliest, unless the difference is no more than noise.

The highest of many estimates is too high, most of all where models are alike: picking it may be worse than always
picking the model that is best on the whole. So for picking, log-odds are drawn towards those of the base rates, by a
trust between 0 (always the best single model) and 1 (the probabilities as they are). It is the one whose gain over the
best single model on calibration prompts is surest; where no gain is sure, it is 0. Chimera (§3.6) guards against the
same with a margin of confidence that a user has to find.

The probabilities themselves are left alone.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.predictors.routing.factors import logit

TRUSTS: Final = tuple(round(0.1 * tenth, 1) for tenth in range(11))
SURE: Final = 1.645
"""Standard errors that a gain has to lie above 0: 95 %, one-sided."""

_EDGE: Final = 1e-7


def pick(probabilities: NDArray[np.float32], base: NDArray[np.float64], trust: float) -> NDArray[np.int64]:
    """The model to take for each of n prompts, int64 [n]; of equals the first.

    Args:
        probabilities: [n, M].
        base: float64 [M], base rates, strictly between 0 and 1.
        trust: 0..1.
    """
    centre = logit(base)
    said = logit(np.clip(probabilities.astype(np.float64), _EDGE, 1.0 - _EDGE))
    return np.asarray((centre + trust * (said - centre)).argmax(axis=1), np.int64)


def learn_trust(probabilities: NDArray[np.float32], correct: NDArray[np.float32], base: NDArray[np.float64]) -> float:
    """The trust whose gain over the best single model is surest, on n prompts; those without every label are left out.

    Args:
        probabilities: [n, M].
        correct: [n, M], 0..1, NaN without a label.
        base: float64 [M], base rates; their highest is the best single model.
    """
    whole = ~np.isnan(correct).any(axis=1)
    if whole.sum() < 2:
        return 0.0
    said, truth = probabilities[whole], correct[whole].astype(np.float64)
    alone = truth[:, int(base.argmax())]
    surest, found = 0.0, 0.0
    for trust in TRUSTS[1:]:
        gain = np.take_along_axis(truth, pick(said, base, trust)[:, None], axis=1)[:, 0] - alone
        least = float(gain.mean() - SURE * gain.std(ddof=1) / np.sqrt(len(gain)))
        if least > surest:
            surest, found = least, trust
    return found
