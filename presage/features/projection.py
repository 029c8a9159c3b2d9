"""Projects a semantic state of any width to a few dozen numbers by a matrix for each moment, fitted on training data.

The first columns are principal components: what varies most. The others are discriminants, the leading directions of a
ridge regression from the components to the outcomes one and K steps ahead: what separates outcomes, however little it
varies. The regression overfits the rows it was fitted on, so `fit_projection` also returns the training rows projected
out of fold: each by discriminants fitted without its task. Serving uses the discriminants of all rows.

The matrix is rounded to half precision in training as well.

`project_state` is the one definition of a projected state. Its sum is float64 and rounded to float32 once, so that it
has the same bits in any order of summation: compiled here, or by torch on the device of an engine's worker
(`vllm/hidden_states/connector.py`). Products of a float16 state and a float32 weight are exact in float64; the rounding
of their sum changes the last bit of about one number in ten million.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.datasets.tasks import FOLDS, task_folds
from presage.features.moment import Moment
from presage.features.prefixes import Prefixes

PENALTIES: Final = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
MAX_AXES: Final = 128
"""Principal axes for the regression."""

PCA_ROWS: Final = 2048
"""Rows for the estimation of the principal axes."""

TOTAL_VARIANCE: Final = 25.0
"""Summed variance of the scaled components, so that one range of penalties serves any source of states."""

STILL: Final = 1e-3
"""A column of a smaller standard deviation after that scaling varies only by rounding and becomes zero."""


@dataclass(frozen=True)
class Projection:
    """A linear map of one moment's states: float16 [d, m], float32 [m] and float32 [m].

    Column scales are separate so that no entry of the matrix under- or overflows.
    """

    matrix: NDArray[np.float16]
    scale: NDArray[np.float32]
    bias: NDArray[np.float32]

    @property
    def state_size(self) -> int:
        """d."""
        return int(self.matrix.shape[0])

    @property
    def size(self) -> int:
        """m."""
        return int(self.matrix.shape[1])

    def weights(self) -> NDArray[np.float32]:
        """The scaled matrix, float32 [d, m]."""
        return np.ascontiguousarray(self.matrix.astype(np.float32) * self.scale)

    def __call__(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """States float32 [n, d] to float32 [n, m]; a row of NaN (no state) becomes zero, which is the mean state."""
        projected = np.empty((len(states), self.size), np.float32)
        project_states(np.ascontiguousarray(states, np.float32), columns_of(self.weights()), self.bias, projected)
        projected[np.isnan(states[:, 0])] = 0.0
        return projected

    def to_tensors(self) -> dict[str, NDArray[np.generic]]:
        """Arrays of an artefact by name."""
        return dict(vars(self))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[np.generic]]) -> Projection:
        """Inverse of `to_tensors`."""
        scale, bias = (tensors[name].astype(np.float32) for name in ("scale", "bias"))
        return cls(tensors["matrix"].astype(np.float16), scale, bias)


def fit_projection(
    prefixes: Prefixes, moment: Moment, *, components: int, discriminants: int, seed: int
) -> tuple[Projection, NDArray[np.float32]]:
    """Fit on every step of the prefixes that has a state at this moment.

    Keeps at most `components` principal components, and the leading `discriminants` of the regression; `seed` is of the
    random range finder and of the folds. Returns the projection, and the training rows projected out of fold, float32
    [n, m].
    """
    states = prefixes.states[moment]
    rows = np.flatnonzero(~np.isnan(states[:, 0]))
    if not len(rows):
        nothing = np.zeros(0, np.float32)
        return Projection(np.zeros((states.shape[1], 0), np.float16), nothing, nothing), np.zeros(
            (len(states), 0), np.float32
        )
    present = states if len(rows) == len(states) else states[rows]
    rng = np.random.default_rng(seed)
    mean = present.mean(axis=0)
    axes = _principal_axes(present, mean, rng)
    reduced = (present @ axes) - mean @ axes
    unit = np.float32(np.sqrt(TOTAL_VARIANCE / max(float(reduced.var(axis=0).sum()), 1e-12)))
    reduced *= unit

    targets = _targets(prefixes, rows)
    tasks = prefixes.task[prefixes.workflow[rows]]
    coefficients, out_of_fold = _ridge(reduced, prefixes, rows, targets, tasks, seed)
    # the leading right singular vectors of the fitted values: the few mixtures of outcomes that states can separate
    rotation = np.linalg.svd(reduced @ coefficients, full_matrices=False)[2][:discriminants].T
    rotation *= np.sign(rotation[np.abs(rotation).argmax(axis=0), np.arange(rotation.shape[1])])

    kept = min(components, reduced.shape[1])
    inner = np.hstack([np.eye(reduced.shape[1], kept, dtype=np.float32), coefficients @ rotation])
    spread = (reduced @ inner).std(axis=0)
    spread[spread < STILL] = np.inf
    weights = axes @ inner * (unit / spread)
    scale = np.maximum(np.abs(weights).max(axis=0), 1e-12).astype(np.float32)
    matrix = (weights / scale).astype(np.float16)
    bias = -(mean @ (matrix.astype(np.float32) * scale)).astype(np.float32)
    projection = Projection(matrix, scale, bias)

    projected = projection(states)
    projected[rows, kept:] = out_of_fold @ rotation / spread[kept:]
    return projection, projected


def _principal_axes(
    states: NDArray[np.float32], mean: NDArray[np.float32], rng: np.random.Generator
) -> NDArray[np.float32]:
    """At most MAX_AXES leading principal axes, float32 [d, q], by a randomised range finder (Halko et al. 2011)."""
    sample = states if len(states) <= PCA_ROWS else states[np.sort(rng.choice(len(states), PCA_ROWS, replace=False))]
    centred = sample - mean
    rank = min(MAX_AXES, *centred.shape)
    if centred.shape[1] <= 4 * MAX_AXES:
        covariance = centred.T @ centred
        axes = np.linalg.eigh(covariance)[1][:, ::-1][:, :rank]
    else:
        basis = centred.T @ rng.standard_normal((len(centred), min(rank + 16, len(centred))), dtype=np.float32)
        basis = centred.T @ (centred @ np.linalg.qr(basis)[0])  # one power iteration
        basis = np.linalg.qr(basis)[0]
        axes = basis @ np.linalg.svd(centred @ basis, full_matrices=False)[2][:rank].T
    return np.ascontiguousarray(axes * np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(rank)]), np.float32)


def _targets(prefixes: Prefixes, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Outcomes one and K steps ahead, one-hot and centred on the known ones, float32 [rows, 2 (V+1)]."""
    size = prefixes.vocabulary.outcomes
    blocks = []
    for k in dict.fromkeys((0, prefixes.horizon - 1)):
        outcome = prefixes.outcomes[rows, k]
        is_known = (outcome >= 0) & (outcome < size)
        block = np.zeros((len(rows), size), np.float32)
        block[np.flatnonzero(is_known), outcome[is_known]] = 1.0
        block[is_known] -= block[is_known].mean(axis=0) if is_known.any() else 0.0  # an unknown outcome pulls nowhere
        blocks.append(block)
    return np.hstack(blocks)


def _ridge(
    reduced: NDArray[np.float32],
    prefixes: Prefixes,
    rows: NDArray[np.int64],
    targets: NDArray[np.float32],
    tasks: NDArray[np.int32],
    seed: int,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Regression of the targets on states and the current agent; the agent explains what needs no state.

    Returns the coefficients of the components under the best penalty, float32 [q, t], and the part of the states in
    each row's prediction, out of fold, float32 [rows, t].
    """
    width = reduced.shape[1]
    current = np.eye(prefixes.vocabulary.outcomes, dtype=np.float32)[prefixes.agent[rows]]
    inputs = np.hstack([reduced, current]).astype(np.float64)
    labels = targets.astype(np.float64)
    fold = task_folds(tasks, seed, FOLDS)
    grams = [inputs[fold == f].T @ inputs[fold == f] for f in range(FOLDS)]
    moments = [inputs[fold == f].T @ labels[fold == f] for f in range(FOLDS)]
    gram, moment = sum(grams), sum(moments)
    best: tuple[float, NDArray[np.float64], NDArray[np.float64]] | None = None
    for penalty in PENALTIES:
        ridge = penalty * np.eye(inputs.shape[1])
        error = 0.0
        held_out = np.zeros_like(labels)
        for f in range(FOLDS):
            solution = np.linalg.solve(gram - grams[f] + ridge, moment - moments[f])
            error += float(np.square(inputs[fold == f] @ solution - labels[fold == f]).sum())
            held_out[fold == f] = reduced[fold == f] @ solution[:width]
        if best is None or error < best[0]:
            best = (error, np.linalg.solve(gram + ridge, moment)[:width], held_out)
    assert best is not None
    return best[1].astype(np.float32), best[2].astype(np.float32)


TOGETHER: Final = 8
"""The number of columns is padded to a multiple of this."""

# Sums may be reordered, so that they run in vector registers; nothing else is relaxed.
_REORDERED: Final = {"contract", "reassoc", "nsz"}


def columns_of(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """W float32 [d, m] for the functions below: transposed, with rows of zeros up to a multiple of TOGETHER."""
    size, width = weights.shape
    out = np.zeros((-(-width // TOGETHER) * TOGETHER, size), np.float32)
    out[:width] = weights.T
    return out


@njit(cache=True, fastmath=_REORDERED, error_model="numpy", nogil=True)
def project_state(
    state: NDArray[np.float32], columns: NDArray[np.float32], bias: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    """Write x @ W + b to `out`, float32 [m], from x float32 [d], `columns_of` W and b float32 [m]; NaN if x has NaN."""
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
