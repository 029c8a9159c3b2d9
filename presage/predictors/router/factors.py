"""What models have in common: the matrix of labels as a few factors, the first of which is how hard a prompt is.

Whether one model solves a prompt is a noisy label; what all models say together is a better one. So the residuals of
the labels, each model's scaled to variance one, are taken apart by singular values, and a scorer learns the factors
instead of the labels. Factors that prompts do not predict cost little: each is shrunk on its own.
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
        loadings: float32 [r, M], orthonormal rows: how much each model has of each factor.
    """

    base: NDArray[np.float64]
    loadings: NDArray[np.float32]

    @classmethod
    def fit(cls, correct: NDArray[np.float32], rank: int) -> Factors:
        """Takes labels [n, M] apart, NaN where there is none, into at most `rank` factors."""
        base = base_rates(correct)
        residuals = _filled(_residuals(correct, base), np.isnan(correct), rank)
        _, _, directions = np.linalg.svd(residuals, full_matrices=False)
        kept = directions[:rank]
        sign = np.sign(kept.sum(axis=1, keepdims=True))  # a factor of which models have more is one of ease
        return cls(base, (kept * np.where(sign == 0, 1.0, sign)).astype(np.float32))

    def targets(self, correct: NDArray[np.float32]) -> NDArray[np.float32]:
        """The factors of each prompt, float32 [n, r]; what is unknown is filled with what the factors say of it."""
        residuals = _residuals(correct, self.base)
        unknown = np.isnan(correct)
        for _ in range(_ROUNDS if unknown.any() else 0):
            residuals[unknown] = (residuals @ self.loadings.T @ self.loadings)[unknown]
        return np.asarray(residuals @ self.loadings.T, np.float32)

    def again(self, correct: NDArray[np.float32]) -> Factors:
        """The same factors around the base rates of other labels."""
        return Factors(base_rates(correct), self.loadings)

    def to_logits(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Intercepts [M] and a matrix [r, M] that make log-odds of factors, to first order around the base rates."""
        spread = np.sqrt(self.base * (1.0 - self.base))
        return logit(self.base).astype(np.float32), (self.loadings / spread).astype(np.float32)


def base_rates(correct: NDArray[np.float32]) -> NDArray[np.float64]:
    """Share of prompts each model solves, float64 [M], smoothed by one solved and one unsolved; .5 without labels."""
    known = ~np.isnan(correct)
    return np.asarray((np.where(known, correct, 0.0).sum(axis=0, dtype=np.float64) + 1.0) / (known.sum(axis=0) + 2.0))


def logit(share: NDArray[np.floating]) -> NDArray[np.float64]:
    """Log-odds of shares strictly between 0 and 1."""
    return np.asarray(np.log(share) - np.log1p(-share), np.float64)


def sigmoid(log_odds: NDArray[np.floating]) -> NDArray[np.float64]:
    """Shares of log-odds, without overflow."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * log_odds.astype(np.float64))))


def _residuals(correct: NDArray[np.float32], base: NDArray[np.float64]) -> NDArray[np.float64]:
    """Labels minus base rates in units of their deviation, float64 [n, M], 0 where there is no label."""
    return np.where(np.isnan(correct), 0.0, (correct - base) / np.sqrt(base * (1.0 - base)))


def _filled(residuals: NDArray[np.float64], unknown: NDArray[np.bool_], rank: int) -> NDArray[np.float64]:
    """Residuals with what is unknown filled in by the shrunk factors of the rest (soft-impute, Mazumder et al., 2010).

    Filled with zeros alone, models that rarely answer the same prompts would seem to have nothing in common.
    """
    if not unknown.any():
        return residuals
    found = residuals.copy()
    noise = np.sqrt(len(found))  # the length of a column of pure noise of variance one
    for _ in range(_ROUNDS):
        left, size, right = np.linalg.svd(found, full_matrices=False)
        kept = np.maximum(size[:rank] - noise, 0.0)
        found[unknown] = (left[:, :rank] * kept @ right[:rank])[unknown]
    return found
