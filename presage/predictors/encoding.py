"""A history as a network likes it: logarithms and thresholds instead of raw counts. One definition, compiled."""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.features.history import RECENT

LOGARITHM: Final = np.log1p(np.arange(256, dtype=np.float32))
"""log(1 + x) of a count, 255 at most. A table, since a logarithm costs more than a row of the network."""


def encoding_size(agents: int) -> int:
    """E: two numbers an agent (and the unknown one), one for the position, four for the run."""
    return 2 * (agents + 1) + 5


@njit(cache=True)
def encode(inputs: NDArray[np.float32], out: NDArray[np.float32], agents: int) -> None:
    """Writes the encoding of an input vector's history to `out`, float32 [E]."""
    width = agents + 1
    for i in range(width):
        out[i] = LOGARITHM[min(int(inputs[RECENT + i]), 255)]
        out[width + i] = np.float32(1.0) / (np.float32(1.0) + inputs[RECENT + width + i])
    out[2 * width] = LOGARITHM[min(int(inputs[RECENT + 2 * width]), 255)]
    run = int(inputs[RECENT + 2 * width + 1])
    out[2 * width + 1] = LOGARITHM[min(run, 255)]
    for i in range(3):
        out[2 * width + 2 + i] = np.float32(1.0) if run >= i + 2 else np.float32(0.0)


@njit(cache=True)
def encode_all(inputs: NDArray[np.float32], agents: int) -> NDArray[np.float32]:
    """The encoding of every row of float32 [n, F], float32 [n, E]."""
    out = np.zeros((len(inputs), 2 * (agents + 1) + 5), np.float32)
    for row in range(len(inputs)):
        encode(inputs[row], out[row], agents)
    return out
