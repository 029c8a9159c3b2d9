"""A state times a matrix, x @ W + b: the one definition of a projected state, in training and in serving.

The sum is float64 and rounded to float32 once, so that it has the same bits in whatever order it is taken: compiled
here, or by torch on the device of an engine's worker (`serving_hooks/vllm/tap/rows.py`). Products of a float16 state
and a float32 weight are exact in float64; what is left of its rounding moves one number of some ten million by its last
bit. Batches (`project_rows.py`) sum in float32 and agree to rounding.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.features.project_rows import TOGETHER

# Sums may be reordered, so that they run in vector registers; nothing else is relaxed.
_REORDERED: Final = {"contract", "reassoc", "nsz"}


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
