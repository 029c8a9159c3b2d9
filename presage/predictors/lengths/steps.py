"""What such steps usually leave: quantiles of this agent at this step of this workflow type, calibrated.

The baseline "median-per-step" as an estimator: where what is left depends on nothing else, reading more does harm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.lengths import PROMPT
from presage.features.progress import PROGRESS
from presage.predictors.lengths.inputs import CATEGORIES
from presage.predictors.lengths.log_estimator import Bands, Fold, LogEstimator, Whole

LEAST_ROWS: Final = 5
_KEYS: Final = (3, 4, CATEGORIES + len(PROMPT) + PROGRESS.index("step"))
"""Columns of the inputs: workflow type, agent, steps before."""
_ANY: Final = -1
Table = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Groups int32 [G, 3], the widest first, _ANY for whatever it is, and their quantiles float32 [G, Q]."""


class StepLengths(LogEstimator):
    """Quantiles of the narrowest group with rows enough; the same doubt everywhere."""

    name = "steps"
    starts = False

    def _learn(self, folds: Sequence[Fold], whole: Whole) -> list[Bands]:
        self._hold_table(self._table(whole.inputs, whole.above))
        said = []
        for fold in folds:
            known = _by_group(self._table(fold.inputs, fold.above))
            said.append(_bands(np.stack([_look_up(known, of, len(self.quantiles)) for of in fold.shown])))
        return said

    def _table(self, inputs: NDArray[np.float32], labels: NDArray[np.float64]) -> Table:
        keys = inputs[:, _KEYS].astype(np.int32)
        groups, quantiles = [], []
        for width in range(len(_KEYS) + 1):
            of = keys.copy()
            of[:, width:] = _ANY
            found, index, counts = np.unique(of, axis=0, return_inverse=True, return_counts=True)
            parts = np.split(labels[np.argsort(index.reshape(-1), kind="stable")], np.cumsum(counts)[:-1])
            for key, part in zip(found, parts, strict=True):
                if len(part) >= LEAST_ROWS or not width:
                    groups.append(key)
                    quantiles.append(np.quantile(part, self.quantiles))
        return np.array(groups, np.int32), np.array(quantiles, np.float32)

    def _above_line(self, inputs: NDArray[np.float32]) -> Bands:
        return _bands(_look_up(self._known, inputs, len(self.quantiles)))

    def _hold_table(self, table: Table) -> None:
        self._groups, self._quantiles = table
        self._known = _by_group(table)

    def _own_tensors(self) -> dict[str, NDArray[Any]]:
        return {"steps/groups": self._groups, "steps/quantiles": self._quantiles}

    def _hold(self, tensors: Mapping[str, NDArray[Any]], inputs: int) -> None:
        groups, quantiles = tensors["steps/groups"], tensors["steps/quantiles"]
        if groups.ndim != 2 or groups.shape[1] != len(_KEYS) or quantiles.shape != (len(groups), len(self.quantiles)):
            raise ValueError("groups and quantiles of steps are not [G, 3] and [G, Q]")
        if not len(groups) or (groups[0] != _ANY).any():
            raise ValueError("the first group of steps is not that of all")
        self._hold_table((groups, quantiles))


def _by_group(table: Table) -> dict[tuple[int, ...], NDArray[np.float32]]:
    return dict(zip(map(tuple, table[0].tolist()), table[1], strict=True))


def _look_up(
    known: Mapping[tuple[int, ...], NDArray[np.float32]], inputs: NDArray[np.float32], size: int
) -> NDArray[np.float32]:
    """float32 [n, Q]."""
    found = np.empty((len(inputs), size), np.float32)
    for row, (kind, agent, step) in enumerate(inputs[:, _KEYS].astype(np.int32).tolist()):
        narrow = (kind, agent, step), (kind, agent, _ANY), (kind, _ANY, _ANY), (_ANY,) * 3
        found[row] = next(known[key] for key in narrow if key in known)
    return found


def _bands(location: NDArray[np.float32]) -> Bands:
    return location, np.ones(location.shape[:-1], np.float32)
