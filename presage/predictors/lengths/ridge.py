"""The line alone, calibrated: where traces are few, or what is left depends on little, trees only add noise to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.predictors.lengths.log_estimator import Bands, Fold, LogEstimator, Whole


class RidgeLengths(LogEstimator):
    """The same doubt everywhere: quantiles are the line's and so much more."""

    name = "ridge"
    starts = True

    def _learn(self, folds: Sequence[Fold], whole: Whole) -> list[Bands]:
        return [self._no_more(fold.left) for fold in folds]

    def _above_line(self, inputs: NDArray[np.float32]) -> Bands:
        return self._no_more(inputs[:, 0])

    def _no_more(self, like: NDArray[Any]) -> Bands:
        """Nothing above the line, and a doubt of 1."""
        return np.zeros((*like.shape, len(self.quantiles)), np.float32), np.ones(like.shape, np.float32)

    def _own_tensors(self) -> dict[str, NDArray[Any]]:
        return {}

    def _hold(self, tensors: Mapping[str, NDArray[Any]], inputs: int) -> None:
        """There is nothing to hold."""
