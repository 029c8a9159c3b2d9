"""The linear head: ridge regression of the common factors of all models on terms and form of a prompt.

Models agree on which prompts are hard, so the targets are factors of the labels (`factors.py`), each with its own
penalty, chosen on held-out prompts; factors that prompts do not predict are dropped. A sentence encoder may add
features. One prompt and many use the same arithmetic, without BLAS, so they agree bit by bit (except for an encoder).

The regression (`RidgePath`) solves several targets at every penalty of a grid in one pass of Lanczos. The dual solution
of penalty α is (X Xᵀ + α I)⁻¹ t. The Krylov space of X Xᵀ and t does not depend on α, so one basis serves the whole
grid (as in LSQR: Paige and Saunders, 1982; here with full reorthogonalisation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from presage.errors import ArtefactError
from presage.features.prompt_terms import FORM_SIZE, PromptTerms, prompt_form
from presage.features.text_encoder import TextEncoder
from presage.predictors.common.artefact import under
from presage.predictors.router.factors import Factors

STEPS: Final = 24
_DEPENDENT: Final = 1e-5  # relative to the first vector: a shorter one is linearly dependent


@dataclass(frozen=True, eq=False)
class Rows:
    """n rows of F features: T sparse (scipy CSR float32 [n, T]), the others dense (float32 [n, F − T])."""

    sparse: Any
    dense: NDArray[np.float32]

    def take(self, rows: NDArray[np.bool_]) -> Rows:
        """The rows of a mask."""
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
        """Build the basis for targets float32 [n, r]."""
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
        diagonal = np.arange(steps)
        tridiagonal[:, diagonal, diagonal] = middle
        tridiagonal[:, diagonal[:-1], diagonal[1:]] = tridiagonal[:, diagonal[1:], diagonal[:-1]] = beside[:, :-1]
        values, vectors = np.linalg.eigh(tridiagonal)
        return cls(rows, basis, values, vectors, lengths)

    def weights(self, penalties: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float32]:
        """Weights float32 [F, r], the solution of each target at its penalty."""
        shrunk = self.vectors[:, 0, :] / (np.maximum(self.values, 0.0) + np.asarray(penalties)[:, None])
        inside = np.einsum("rij,rj->ri", self.vectors, shrunk) * self.lengths[:, None]
        dual = np.einsum("knr,rk->nr", self.basis, inside.astype(np.float32))
        return self.rows.transposed_times(dual)


RANK: Final = 12
PENALTIES: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)

_FEW_STEPS: Final = 10  # of Lanczos, for heads that are only evaluated

_TERMS_SHARE: Final = np.float32(0.5**0.5)  # words and strings weigh the same, together 1
_FORM_SHARE: Final = np.float32((0.05 / FORM_SIZE) ** 0.5)
_FARTHEST: Final = 4.0  # standard deviations, so that an unusual form does not outweigh all words


@dataclass(frozen=True, eq=False)
class PromptRows:
    """The F features of a prompt: T of terms, the rest of its form and, if any, of a sentence encoder.

    `middle` and `scale`, float32 [15], are mean and deviation of the form of training prompts.
    """

    terms: PromptTerms
    middle: NDArray[np.float32]
    scale: NDArray[np.float32]
    encoder: TextEncoder | None

    @classmethod
    def fit(cls, prompts: Sequence[str], encoder: TextEncoder | None) -> PromptRows:
        """Choose terms; raises InputError if no two prompts share one."""
        shape = prompt_form(prompts)
        spread = shape.std(axis=0)
        return cls(PromptTerms.fit(prompts), shape.mean(axis=0), np.where(spread > 1e-6, spread, 1.0), encoder)

    def rows(self, prompts: Sequence[str]) -> Rows:
        """The features of n prompts."""
        return Rows(self.terms.transform(prompts) * _TERMS_SHARE, self.dense(prompts))

    def dense(self, prompts: Sequence[str]) -> NDArray[np.float32]:
        """Form, and embeddings of unit length, float32 [n, F − T]."""
        away = np.clip((prompt_form(prompts) - self.middle) / self.scale, -_FARTHEST, _FARTHEST) * _FORM_SHARE
        if self.encoder is None:
            return np.asarray(away, np.float32)
        embedded = self.encoder.encode_one(prompts[0])[None] if len(prompts) == 1 else self.encoder.encode(prompts)
        length = np.linalg.norm(embedded, axis=1, keepdims=True)
        return np.concatenate([away, embedded / np.maximum(length, 1e-12)], axis=1).astype(np.float32)


@dataclass(frozen=True, eq=False)
class LinearScorer:
    """A fitted linear head for M models.

    Attributes:
        penalties: float64 [r], of each factor.
        predictable: bool [r], factors that the features predict; the others are left out.
        weights: float32 [F, r].
    """

    name: ClassVar[str] = "linear"

    inputs: PromptRows
    factors: Factors
    penalties: NDArray[np.float64]
    predictable: NDArray[np.bool_]
    weights: NDArray[np.float32]

    @classmethod
    def fit(
        cls,
        prompts: Sequence[str],
        correct: NDArray[np.float32],
        tuning: Sequence[str],
        tuning_correct: NDArray[np.float32],
        folds: NDArray[np.int64],
        *,
        rank: int,
        encoder: TextEncoder | None,
    ) -> tuple[LinearScorer, NDArray[np.float64]]:
        """Fit on `prompts`; choose the penalties on `tuning`, other prompts.

        Args:
            prompts: n texts; tuning: other texts.
            correct: float32 [n, M], 0..1, NaN without a label; tuning_correct: of the other texts.
            folds: int64 [n], the fold of each prompt.
            rank: greatest number of factors.
            encoder: adds features.

        Returns:
            The head, and out-of-fold log-odds minus the intercepts, float64 [n, M], from heads with the same factors
            and penalties; 0 if all prompts are in one fold.

        Raises:
            InputError: no two prompts share a term.
        """
        inputs, factors = PromptRows.fit(prompts, encoder), Factors.fit(correct, rank)
        rows = inputs.rows(prompts)
        path = RidgePath.fit(rows, factors.targets(correct))
        held, targets = inputs.rows(tuning), factors.targets(tuning_correct)
        width = targets.shape[1]
        lost = np.stack([((targets - held.times(path.weights(np.full(width, p)))) ** 2).sum(axis=0) for p in PENALTIES])
        predictable = lost.min(axis=0) < (targets**2).sum(axis=0)
        penalties = np.asarray(PENALTIES)[lost.argmin(axis=0)]
        head = cls(inputs, factors, penalties, predictable, path.weights(penalties) * predictable)
        away = np.zeros(correct.shape)
        for fold in np.unique(folds) if folds.any() else ():
            apart = folds == fold
            others = factors.again(correct[~apart])
            rest = RidgePath.fit(rows.take(~apart), others.targets(correct[~apart]), _FEW_STEPS)
            away[apart] = rows.take(apart).times(rest.weights(penalties) * predictable) @ others.to_logits()[1]
        return head, away

    def learn_again(self, prompts: Sequence[str], correct: NDArray[np.float32]) -> LinearScorer:
        """Fit again on other prompts, with the same factors and penalties."""
        inputs, factors = PromptRows.fit(prompts, self.inputs.encoder), self.factors.again(correct)
        path = RidgePath.fit(inputs.rows(prompts), factors.targets(correct))
        return replace(self, inputs=inputs, factors=factors, weights=path.weights(self.penalties) * self.predictable)

    def logits(self, prompts: Sequence[str]) -> NDArray[np.float32]:
        """Log-odds float32 [n, M]."""
        intercepts, into = self.factors.to_logits()
        dense = self.inputs.dense(prompts) if len(prompts) else np.zeros((0, 0), np.float32)
        log_odds = np.empty((len(prompts), len(intercepts)), np.float32)
        terms = self.inputs.terms.size
        for i, prompt in enumerate(prompts):
            places, weights = self.inputs.terms.transform_one(prompt)
            factors = np.add.reduce(self.weights[places] * (weights * _TERMS_SHARE)[:, None], axis=0)
            factors += np.add.reduce(self.weights[terms:] * dense[i][:, None], axis=0)
            log_odds[i] = intercepts + np.add.reduce(into * factors[:, None], axis=0)
        return log_odds

    def to_config(self) -> dict[str, Any]:
        """Name and digest of the encoder, if any; it is not part of the artefact."""
        encoder = self.inputs.encoder
        return {"encoder": None if encoder is None else {"name": encoder.name, "digest": encoder.digest}}

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """The fitted arrays."""
        return {
            **{f"terms.{name}": array for name, array in self.inputs.terms.to_tensors().items()},
            "form.middle": self.inputs.middle,
            "form.scale": self.inputs.scale.astype(np.float32),
            "base": self.factors.base,
            "loadings": self.factors.loadings,
            "penalties": self.penalties,
            "told": self.predictable,
            "weights": self.weights,
        }

    @classmethod
    def from_artefact(cls, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], folder: Path) -> Self:
        """Inverse of `to_config` and `to_tensors`; the encoder is loaded by name, and its digest must match."""
        terms = PromptTerms.from_tensors(under(tensors, "terms."))
        encoder = _same_encoder(config["encoder"], folder)
        inputs = PromptRows(terms, tensors["form.middle"], tensors["form.scale"], encoder)
        factors = Factors(tensors["base"], tensors["loadings"])
        features = terms.size + FORM_SIZE + (encoder.size if encoder is not None else 0)
        rank, models = factors.loadings.shape
        if tensors["weights"].shape != (features, rank) or factors.base.shape != (models,):
            raise ValueError("the weights do not match the features and factors")
        if not ((factors.base > 0) & (factors.base < 1)).all():
            raise ValueError("a base rate is not between 0 and 1")
        return cls(inputs, factors, tensors["penalties"], tensors["told"], tensors["weights"])


def _same_encoder(kept: Mapping[str, str] | None, folder: Path) -> TextEncoder | None:
    if kept is None:
        return None
    encoder = TextEncoder.load(kept["name"])
    if encoder.digest != kept["digest"]:
        raise ArtefactError(
            f"{folder}: trained with another version of the text encoder {kept['name']} ({kept['digest'][:19]}…; "
            f"there is {encoder.digest[:19]}…): restore that version, or train anew"
        )
    return encoder
