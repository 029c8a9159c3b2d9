"""Many wide states times one narrow matrix, compiled: what BLAS, made for wide results, is a fifth slower at.

Sixteen sums, of four states and four columns, stay in registers while a state goes by: no state is copied first. They
are float32, for batches, which agree with a state alone (`project_state.py`) to rounding.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

TOGETHER: Final = 8
"""Columns are filled up to a multiple of this."""
_SWEEP: Final = 4
"""States, and columns, a sweep takes."""


def columns_of(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """W float32 [d, m] as `project_rows` reads it: transposed, rows of zeros up to a multiple of TOGETHER."""
    size, width = weights.shape
    out = np.zeros((-(-width // TOGETHER) * TOGETHER, size), np.float32)
    out[:width] = weights.T
    return out


# Sums may be reordered here, so that they run in vector registers; nothing else is relaxed.
@njit(cache=True, fastmath={"contract", "reassoc", "nsz"}, error_model="numpy", nogil=True)
def project_rows(
    states: NDArray[np.float32], columns: NDArray[np.float32], bias: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    """Writes x @ W + b for every state to `out`.

    Args:
        states: float32 [B, d], contiguous.
        columns: `columns_of` W, float32 [≥ m, d].
        bias: b, float32 [m].
        out: float32 [B, m].
    """
    last = len(states) - 1
    width = len(bias)
    sums = np.empty((_SWEEP, _SWEEP), np.float32)
    for row in range(0, len(states), _SWEEP):
        # Past the end the last state is taken again; what comes of it is not kept.
        x0, x1, x2, x3 = states[row], states[min(row + 1, last)], states[min(row + 2, last)], states[min(row + 3, last)]
        for column in range(0, len(columns), _SWEEP):
            w0, w1, w2, w3 = columns[column], columns[column + 1], columns[column + 2], columns[column + 3]
            s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = np.float32(0.0)
            s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = np.float32(0.0)
            for i in range(len(x0)):
                a, b, c, d = x0[i], x1[i], x2[i], x3[i]
                p, q, r, s = w0[i], w1[i], w2[i], w3[i]
                s00, s01, s02, s03 = s00 + a * p, s01 + a * q, s02 + a * r, s03 + a * s
                s10, s11, s12, s13 = s10 + b * p, s11 + b * q, s12 + b * r, s13 + b * s
                s20, s21, s22, s23 = s20 + c * p, s21 + c * q, s22 + c * r, s23 + c * s
                s30, s31, s32, s33 = s30 + d * p, s31 + d * q, s32 + d * r, s33 + d * s
            sums[0, 0], sums[0, 1], sums[0, 2], sums[0, 3] = s00, s01, s02, s03
            sums[1, 0], sums[1, 1], sums[1, 2], sums[1, 3] = s10, s11, s12, s13
            sums[2, 0], sums[2, 1], sums[2, 2], sums[2, 3] = s20, s21, s22, s23
            sums[3, 0], sums[3, 1], sums[3, 2], sums[3, 3] = s30, s31, s32, s33
            for i in range(min(_SWEEP, len(states) - row)):
                for j in range(min(_SWEEP, width - column)):
                    out[row + i, column + j] = sums[i, j] + bias[column + j]
