"""What every next-agent estimator offers, ours and the baselines alike: prefixes in, probabilities out."""

from __future__ import annotations

from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import Moment
from presage.features.prefixes import Prefixes


class NextAgentEstimator(Protocol):
    """Fits on training prefixes and forecasts the next K outcomes of any prefixes over the same vocabulary."""

    name: str

    def fit(self, train: Prefixes, validation: Prefixes) -> Self:
        """Learns from `train`; `validation` (other tasks) serves early stopping and the choice of weights."""
        ...

    def predict(self, prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        """Probabilities float32 [n, K, V+1] of each outcome 1..K steps ahead, at this moment of every step."""
        ...
