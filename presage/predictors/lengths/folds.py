"""Rows apart by task, and what is said of each row by a model that saw no row of its task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.features.lengths import LengthRows

Said = Callable[[NDArray[np.float32]], NDArray[Any]]
"""From inputs float32 [n, D] to numbers [n]."""


def folds_by_task(rows: LengthRows, folds: int, seed: int) -> NDArray[np.int64]:
    """A fold for each row, int64 [n], the same for all rows of a task."""
    tasks, index = np.unique(rows.task, return_inverse=True)
    return (np.random.default_rng(seed).permutation(len(tasks)) % folds)[index]


def parts(fold: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The rows of each fold, and those of all others to learn from; where there is a single fold, its own."""
    for number in np.unique(fold):
        inside, others = (np.flatnonzero(rows) for rows in (fold == number, fold != number))
        yield inside, others if len(others) else inside


def out_of_fold(
    learn: Callable[[NDArray[np.float32], NDArray[np.float64]], Said],
    inputs: NDArray[np.float32],
    labels: NDArray[np.float64],
    fold: NDArray[np.int64],
) -> NDArray[np.float64]:
    """What models that `learn` makes of the other folds say of each row, float64 [n].

    Args:
        learn: from inputs [m, D] and labels [m] to what is said of inputs.
        inputs: float32 [n, D].
        labels: float64 [n].
        fold: int64 [n].
    """
    said = np.empty(len(inputs))
    for inside, learning in parts(fold):
        said[inside] = learn(inputs[learning], labels[learning])(inputs[inside])
    return said
