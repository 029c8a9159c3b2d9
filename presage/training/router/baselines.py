"""Baselines of routers: base rates of the models, one text classifier per model, and nearest neighbours.

All are fitted on the whole training part and pick the model with the highest probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from presage.features.prompt_terms import PromptTerms
from presage.predictors.router.factors import base_rates


class Routes(Protocol):
    """A predictor or a baseline."""

    def probabilities(self, prompts: Sequence[str]) -> NDArray[np.float32]:
        """Probability that each of M models solves each of n prompts, float32 [n, M]."""

    def picks(self, probabilities: NDArray[np.float32]) -> NDArray[np.int64]:
        """Index of the picked model for each prompt, int64 [n]."""


class _Likeliest:
    """Pick the model with the highest probability; ties go to the first."""

    def picks(self, probabilities: NDArray[np.float32]) -> NDArray[np.int64]:
        return np.asarray(probabilities.argmax(axis=1), np.int64)


class BaseRate(_Likeliest):
    """Each model's share of solved training prompts, whatever the prompt: picks the best single model of training."""

    name: ClassVar[str] = "base-rate"

    base: NDArray[np.float64]

    def fit(self, prompts: Sequence[str], correct: NDArray[np.float32]) -> Self:
        """Counts."""
        self.base = base_rates(correct)
        return self

    def probabilities(self, prompts: Sequence[str]) -> NDArray[np.float32]:
        """The base rates, repeated for each prompt."""
        return np.tile(self.base.astype(np.float32), (len(prompts), 1))


class TfidfLogistic(_Likeliest):
    """scikit-learn's TfidfVectorizer and one LogisticRegression per model, with default settings."""

    name: ClassVar[str] = "tfidf-logistic"

    def fit(self, prompts: Sequence[str], correct: NDArray[np.float32]) -> Self:
        """Fit; labels of .5 or more count as solved, and a model with a single class keeps its base rate."""
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression

        self._base = base_rates(correct)
        self._vectorizer = TfidfVectorizer()
        rows = self._vectorizer.fit_transform(prompts)
        self._heads: list[Any] = []
        for labels in correct.T:
            labelled = ~np.isnan(labels)
            solved = labels[labelled] >= 0.5
            both = solved.any() and not solved.all()
            self._heads.append(LogisticRegression(max_iter=1000).fit(rows[labelled], solved) if both else None)
        return self

    def probabilities(self, prompts: Sequence[str]) -> NDArray[np.float32]:
        """As fitted."""
        rows = self._vectorizer.transform(prompts)
        probabilities = np.tile(self._base.astype(np.float32), (len(prompts), 1))
        for m, head in enumerate(self._heads):
            if head is not None:
                probabilities[:, m] = head.predict_proba(rows)[:, 1]
        return probabilities


class Nearest(_Likeliest):
    """Mean label of the nearest training prompts by TF-IDF terms, shrunk towards the base rate."""

    name: ClassVar[str] = "knn"

    neighbours: Final = 40
    prior_labels: Final = 10.0
    chunk: Final = 500

    def fit(self, prompts: Sequence[str], correct: NDArray[np.float32]) -> Self:
        """Store all training prompts."""
        self._base, self._terms, self._correct = base_rates(correct), PromptTerms.fit(prompts), correct
        self._rows = self._terms.transform(prompts)
        return self

    def probabilities(self, prompts: Sequence[str]) -> NDArray[np.float32]:
        """Cosine similarity; neighbours without a label for a model are ignored for it."""
        rows, probabilities = self._terms.transform(prompts), np.empty((len(prompts), len(self._base)), np.float32)
        count = min(self.neighbours, len(self._correct))
        for start in range(0, len(prompts), self.chunk):
            alike = (rows[start : start + self.chunk] @ self._rows.T).toarray()
            labels = self._correct[np.argpartition(-alike, count - 1, axis=1)[:, :count]]  # [rows, count, M]
            labelled = ~np.isnan(labels)
            total = np.where(labelled, labels, 0.0).sum(axis=1) + self.prior_labels * self._base
            probabilities[start : start + self.chunk] = total / (labelled.sum(axis=1) + self.prior_labels)
        return probabilities


BASELINES: Final[Mapping[str, type[BaseRate | TfidfLogistic | Nearest]]] = MappingProxyType(
    {BaseRate.name: BaseRate, TfidfLogistic.name: TfidfLogistic, Nearest.name: Nearest}
)
