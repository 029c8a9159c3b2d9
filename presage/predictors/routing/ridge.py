"""Ridge regression on sparse rows for several targets, each at every penalty of a grid, from one pass of Lanczos.

The dual solution of penalty α is (X Xᵀ + α I)⁻¹ t. The Krylov space of X Xᵀ and t does not depend on α, so one basis
serves the whole grid (Paige and Saunders, 1982, of whom LSQR is; here with full reorthogonalisation, because a basis
of some tens of vectors is cheap). Time is that of `STEPS` products with X and Xᵀ, linear in its entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

STEPS: Final = 24
_DEPENDENT: Final = 1e-5  # of the first vector's length: nothing new is left in that direction


@dataclass(frozen=True, eq=False)
class Rows:
    """n rows of F features: some sparse, the rest dense.

    Attributes:
        sparse: scipy CSR float32 [n, T].
        dense: float32 [n, F − T].
    """

    sparse: Any
    dense: NDArray[np.float32]

    def take(self, rows: NDArray[np.bool_]) -> Rows:
        """Some of the rows, by a mask."""
        return Rows(self.sparse[rows], self.dense[rows])

    def times(self, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """X W for W [F, r], float32 [n, r]."""
        terms = self.sparse.shape[1]
        return np.asarray(self.sparse @ weights[:terms] + self.dense @ weights[terms:], np.float32)

    def transposed_times(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Xᵀ V for V [n, r], float32 [F, r]."""
        return np.concatenate([self.sparse.T @ values, self.dense.T @ values]).astype(np.float32)


@dataclass(frozen=True, eq=False)
class RidgePath:
    """The solutions of r targets at every penalty.

    Attributes:
        rows: what was learnt from.
        basis: float32 [k, n, r], orthonormal over n for each target.
        values, vectors: eigenvalues [r, k] and vectors [r, k, k] of each target's tridiagonal matrix, float64.
        lengths: float64 [r], norm of each target.
    """

    rows: Rows
    basis: NDArray[np.float32]
    values: NDArray[np.float64]
    vectors: NDArray[np.float64]
    lengths: NDArray[np.float64]

    @classmethod
    def fit(cls, rows: Rows, targets: NDArray[np.float32], steps: int = STEPS) -> RidgePath:
        """Builds the basis; targets are float32 [n, r]."""
        count, width = targets.shape
        steps = min(steps, count)
        basis = np.zeros((steps, count, width), np.float32)
        middle, beside = np.zeros((width, steps)), np.zeros((width, steps))
        lengths = np.linalg.norm(targets.astype(np.float64), axis=0)
        now = (targets / np.maximum(lengths, 1e-30)).astype(np.float32)
        for step in range(steps):
            basis[step] = now
            after = rows.times(rows.transposed_times(now))
            middle[:, step] = np.einsum("nr,nr->r", now, after, dtype=np.float64)
            for _ in range(2):  # twice is enough (Kahan)
                inside = np.einsum("knr,nr->kr", basis[: step + 1], after)
                after -= np.einsum("knr,kr->nr", basis[: step + 1], inside)
            norm = np.linalg.norm(after.astype(np.float64), axis=0)
            going = norm > _DEPENDENT * np.maximum(middle[:, 0], 1e-30)
            beside[:, step] = np.where(going, norm, 0.0)
            now = np.where(going, after / np.maximum(norm, 1e-30), 0.0).astype(np.float32)
        tridiagonal = np.zeros((width, steps, steps))
        at = np.arange(steps)
        tridiagonal[:, at, at] = middle
        tridiagonal[:, at[:-1], at[1:]] = tridiagonal[:, at[1:], at[:-1]] = beside[:, :-1]
        values, vectors = np.linalg.eigh(tridiagonal)
        return cls(rows, basis, values, vectors, lengths)

    def weights(self, penalties: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float32]:
        """Weights float32 [F, r], the solution of each target at its penalty."""
        shrunk = self.vectors[:, 0, :] / (np.maximum(self.values, 0.0) + np.asarray(penalties)[:, None])
        inside = np.einsum("rij,rj->ri", self.vectors, shrunk) * self.lengths[:, None]
        dual = np.einsum("knr,rk->nr", self.basis, inside.astype(np.float32))
        return self.rows.transposed_times(dual)
