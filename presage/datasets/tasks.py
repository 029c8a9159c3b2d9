"""Tasks of workflows as names, 8-byte keys and folds.

A split never divides a task. A model stores the keys of its training tasks, not their names.
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
    """The task of every step; a workflow without a task is its own task."""
    own = pc.binary_join_element_wise(table["workflow_type"], table["workflow_id"], "\x1f")
    return pc.coalesce(table["task"], own)


def task_keys(table: pa.Table) -> NDArray[np.uint64]:
    """Task key of every step, uint64 [rows], equal for equal tasks in any trace."""
    encoded = dictionary_encoded(task_of(table))
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in encoded.dictionary.to_pylist()]
    keys = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
    indices: NDArray[np.int64] = encoded.indices.to_numpy(zero_copy_only=False)
    return keys[indices]


FOLDS: Final = 5


def task_folds(task: NDArray[np.int32], seed: int, folds: int = FOLDS) -> NDArray[np.int64]:
    """A fold 0..folds-1 for each row, int64 [n], equal for rows of one task, int32 [n]; folds of similar size."""
    tasks, index = np.unique(task, return_inverse=True)
    return np.asarray((np.random.default_rng(seed).permutation(len(tasks)) % folds)[index], np.int64)


def parts(fold: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(rows of a fold, rows of all others) for each fold; a single fold is paired with its own rows."""
    for number in np.unique(fold):
        inside, others = (np.flatnonzero(rows) for rows in (fold == number, fold != number))
        yield inside, others if len(others) else inside
