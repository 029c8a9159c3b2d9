"""Training on workflows of every length with torch: batches of like length, their padded view, one thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrices this small lose time to a second thread, and most of it where other programs want the cores too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def batches(lengths: NDArray[np.int64], steps: int, rng: np.random.Generator | None) -> Sequence[NDArray[np.int64]]:
    """Workflows in batches of about `steps` rows, workflows of like length together so that padding stays small."""
    key = lengths.astype(float) if rng is None else lengths * rng.uniform(0.8, 1.25, len(lengths))
    order = np.argsort(key, kind="stable")
    group = (np.cumsum(lengths[order]) - 1) // steps
    parts = [order[group == g] for g in np.unique(group)]
    return parts if rng is None else [parts[i] for i in rng.permutation(len(parts))]


def rows_and_padding(
    offsets: NDArray[np.int64], workflows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of some workflows, int64 [m], and the padded view of them, int64 [w, T]: an index of those rows, m the
    padding behind a workflow's end."""
    lengths = (offsets[1:] - offsets[:-1])[workflows]
    rows = np.concatenate([np.arange(offsets[w], offsets[w + 1]) for w in workflows])
    padded = np.full((len(workflows), int(lengths.max())), len(rows))
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.arange(len(rows))
    return rows, padded
