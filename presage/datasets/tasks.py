"""What a workflow was asked: the unit that never stands on both sides of a split, by name and by a short key.

A key is eight bytes of a hash, so that a model can carry which tasks it learnt from and say so when it is judged on
them, without carrying their names. Folds divide rows by task: what is learnt from one fold's tasks says nothing of its
own rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.schema.columns import dictionary_encoded


def task_of(table: pa.Table) -> pa.ChunkedArray:
    """The task of every step; a workflow without one is a task of its own."""
    own = pc.binary_join_element_wise(table["workflow_type"], table["workflow_id"], "\x1f")
    return pc.coalesce(table["task"], own)


def task_keys(table: pa.Table) -> NDArray[np.uint64]:
    """A key for the task of every step, uint64 [rows]; equal tasks have equal keys in every trace."""
    encoded = dictionary_encoded(task_of(table))
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in encoded.dictionary.to_pylist()]
    keys = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
    indices: NDArray[np.int64] = encoded.indices.to_numpy(zero_copy_only=False)
    return keys[indices]


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
