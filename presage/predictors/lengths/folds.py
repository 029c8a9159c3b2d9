"""Rows apart by task."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from presage.features.lengths import LengthRows


def folds_by_task(rows: LengthRows, folds: int, seed: int) -> NDArray[np.int64]:
    """A fold for each row, int64 [n], the same for all rows of a task."""
    tasks, index = np.unique(rows.task, return_inverse=True)
    return (np.random.default_rng(seed).permutation(len(tasks)) % folds)[index]


def parts(fold: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The rows of each fold, and those of all others to learn from; where there is a single fold, its own."""
    for number in np.unique(fold):
        inside, others = (np.flatnonzero(rows) for rows in (fold == number, fold != number))
        yield inside, others if len(others) else inside
