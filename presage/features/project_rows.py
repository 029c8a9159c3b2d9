"""States times a narrow matrix, x @ W + b, compiled: one state with the bits of training, or many at once.

`project_state` is the one definition of a projected state, in training and in serving. Its sum is float64 and rounded
to float32 once, so that it has the same bits in whatever order it is taken: compiled here, or by torch on the device of
an engine's worker (`serving_hooks/vllm/tap/rows.py`). Products of a float16 state and a float32 weight are exact in
float64; what is left of its rounding moves one number of some ten million by its last bit.

`project_rows` is for batches, where BLAS, made for wide results, is a fifth slower: sixteen sums, of four states and
four columns, stay in registers while a state goes by, and no state is copied first. They are float32 and agree with a
state alone to rounding.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

TOGETHER: Final = 8
"""Columns are filled up to a multiple of this."""
_SWEEP: Final = 4
"""States, and columns, a sweep of a batch takes."""

# Sums may be reordered, so that they run in vector registers; nothing else is relaxed.
_REORDERED: Final = {"contract", "reassoc", "nsz"}


def columns_of(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """W float32 [d, m] as the functions below read it: transposed, rows of zeros up to a multiple of TOGETHER."""
    size, width = weights.shape
    out = np.zeros((-(-width // TOGETHER) * TOGETHER, size), np.float32)
    out[:width] = weights.T
    return out


@njit(cache=True, fastmath=_REORDERED, error_model="numpy", nogil=True)
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


@njit(cache=True, fastmath=_REORDERED, error_model="numpy", nogil=True)
def project_state(
    state: NDArray[np.float32], columns: NDArray[np.float32], bias: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    """Writes x @ W + b to `out`; NaN for a state that holds NaN.

    Args:
        state: x, float32 [d].
        columns: `columns_of` W, float32 [≥ m, d].
        bias: b, float32 [m].
        out: float32 [m].
    """
    sums = np.empty(TOGETHER, np.float64)
    for column in range(0, len(columns), TOGETHER):
        w0, w1, w2, w3 = columns[column], columns[column + 1], columns[column + 2], columns[column + 3]
        w4, w5, w6, w7 = columns[column + 4], columns[column + 5], columns[column + 6], columns[column + 7]
        s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
        for i in range(len(state)):
            x = np.float64(state[i])
            s0, s1, s2, s3 = s0 + x * w0[i], s1 + x * w1[i], s2 + x * w2[i], s3 + x * w3[i]
            s4, s5, s6, s7 = s4 + x * w4[i], s5 + x * w5[i], s6 + x * w6[i], s7 + x * w7[i]
        sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7] = s0, s1, s2, s3, s4, s5, s6, s7
        for j in range(min(TOGETHER, len(bias) - column)):
            out[column + j] = sums[j] + bias[column + j]


@njit(cache=True, nogil=True)
def project_states(
    states: NDArray[np.float32], columns: NDArray[np.float32], bias: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    """`project_state` of every row of float32 [n, d], to float32 [n, m]."""
    for row in range(len(states)):
        project_state(states[row], columns, bias, out[row])
