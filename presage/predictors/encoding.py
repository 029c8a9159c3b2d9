"""A history as a network likes it: logarithms and thresholds instead of raw counts. One definition, compiled."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.features.history import RECENT


def encoding_size(agents: int) -> int:
    """E: two numbers an agent (and the unknown one), one for the position, four for the run."""
    return 2 * (agents + 1) + 5


@njit(cache=True)
def encode(inputs: NDArray[np.float32], out: NDArray[np.float32], agents: int) -> None:
    """Writes the encoding of an input vector's history to `out`, float32 [E]."""
    width = agents + 1
    for i in range(width):
        out[i] = np.log1p(inputs[RECENT + i])
        out[width + i] = np.float32(1.0) / (np.float32(1.0) + inputs[RECENT + width + i])
    out[2 * width] = np.log1p(inputs[RECENT + 2 * width])
    run = inputs[RECENT + 2 * width + 1]
    out[2 * width + 1] = np.log1p(run)
    for i in range(3):
        out[2 * width + 2 + i] = np.float32(1.0) if run >= i + 2 else np.float32(0.0)


@njit(cache=True)
def encode_all(inputs: NDArray[np.float32], agents: int) -> NDArray[np.float32]:
    """The encoding of every row of float32 [n, F], float32 [n, E]."""
    out = np.zeros((len(inputs), 2 * (agents + 1) + 5), np.float32)
    for row in range(len(inputs)):
        encode(inputs[row], out[row], agents)
    return out
