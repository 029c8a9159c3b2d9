"""Common factors of the models' labels; the first is how easy a prompt is.

One model's label is a noisy measure of a prompt; the labels of all models together are a better one. So label
residuals, scaled to unit variance for each model, are factorised by SVD, and a scorer is trained on the factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_ROUNDS: Final = 20


@dataclass(frozen=True, eq=False)
class Factors:
    """r factors of the labels of M models.

    Attributes:
        base: float64 [M], share of prompts each model solves, smoothed by one solved and one unsolved prompt.
        loadings: float32 [r, M], orthonormal rows: the weight of each factor in each model.
    """

    base: NDArray[np.float64]
    loadings: NDArray[np.float32]

    @classmethod
    def fit(cls, correct: NDArray[np.float32], rank: int) -> Factors:
        """Factorise labels [n, M], NaN if missing, into at most `rank` factors."""
        base = base_rates(correct)
        residuals = _filled(_residuals(correct, base), np.isnan(correct), rank)
        _, _, directions = np.linalg.svd(residuals, full_matrices=False)
        kept = directions[:rank]
        sign = np.sign(kept.sum(axis=1, keepdims=True))  # higher means easier
        return cls(base, (kept * np.where(sign == 0, 1.0, sign)).astype(np.float32))

    def targets(self, correct: NDArray[np.float32]) -> NDArray[np.float32]:
        """The factors of each prompt, float32 [n, r]; missing labels are imputed from the factors."""
        residuals = _residuals(correct, self.base)
        unknown = np.isnan(correct)
        for _ in range(_ROUNDS if unknown.any() else 0):
            residuals[unknown] = (residuals @ self.loadings.T @ self.loadings)[unknown]
        return np.asarray(residuals @ self.loadings.T, np.float32)

    def again(self, correct: NDArray[np.float32]) -> Factors:
        """The same factors around the base rates of other labels."""
        return Factors(base_rates(correct), self.loadings)

    def to_logits(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Intercepts [M] and a matrix [r, M] that map factors to log-odds, to first order around the base rates."""
        spread = np.sqrt(self.base * (1.0 - self.base))
        return logit(self.base).astype(np.float32), (self.loadings / spread).astype(np.float32)


def base_rates(correct: NDArray[np.float32]) -> NDArray[np.float64]:
    """Share of prompts each model solves, float64 [M], smoothed by one solved and one unsolved; .5 without labels."""
    labelled = ~np.isnan(correct)
    return np.asarray(
        (np.where(labelled, correct, 0.0).sum(axis=0, dtype=np.float64) + 1.0) / (labelled.sum(axis=0) + 2.0)
    )


def logit(share: NDArray[np.floating]) -> NDArray[np.float64]:
    """Log-odds of shares strictly between 0 and 1."""
    return np.asarray(np.log(share) - np.log1p(-share), np.float64)


def sigmoid(log_odds: NDArray[np.floating]) -> NDArray[np.float64]:
    """Shares of log-odds, without overflow."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * log_odds.astype(np.float64))))


def _residuals(correct: NDArray[np.float32], base: NDArray[np.float64]) -> NDArray[np.float64]:
    """Labels minus base rates in units of their standard deviation, float64 [n, M], 0 without a label."""
    return np.where(np.isnan(correct), 0.0, (correct - base) / np.sqrt(base * (1.0 - base)))


def _filled(residuals: NDArray[np.float64], unknown: NDArray[np.bool_], rank: int) -> NDArray[np.float64]:
    """Residuals with missing ones imputed by the shrunk factors of the rest (soft-impute, Mazumder et al., 2010).

    With zeros instead, models that rarely answer the same prompts would appear uncorrelated.
    """
    if not unknown.any():
        return residuals
    filled = residuals.copy()
    noise = np.sqrt(len(filled))  # norm of a column of unit-variance noise
    for _ in range(_ROUNDS):
        left, size, right = np.linalg.svd(filled, full_matrices=False)
        kept = np.maximum(size[:rank] - noise, 0.0)
        filled[unknown] = (left[:, :rank] * kept @ right[:rank])[unknown]
    return filled
