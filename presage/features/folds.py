"""Rows divided by task: what is learnt from one fold's tasks says nothing of its own rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

FOLDS: Final = 5


def task_folds(task: NDArray[np.int32], seed: int, folds: int = FOLDS) -> NDArray[np.int64]:
    """A fold for each row, int64 [n], 0..folds-1, the same for all rows of a task, int32 [n]; folds of like size."""
    tasks, index = np.unique(task, return_inverse=True)
    return np.asarray((np.random.default_rng(seed).permutation(len(tasks)) % folds)[index], np.int64)


def parts(fold: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The rows of each fold, and those of all others to learn from; where there is a single fold, its own."""
    for number in np.unique(fold):
        inside, others = (np.flatnonzero(rows) for rows in (fold == number, fold != number))
        yield inside, others if len(others) else inside
