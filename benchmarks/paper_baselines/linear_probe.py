"""A linear probe: multinomial logistic regression on the current agent and the states of the step (PBKV, appendix C.2).

The paper's reads the post-norm prefill state alone. A state need not say which agent it belongs to, and serving knows
that for nothing, so the current agent and the workflow type stand beside it; at completion the completion state does
too. A regression for each moment and horizon; its penalty is chosen on the validation part.
"""

from __future__ import annotations

from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from paper_baselines.vectors import PrefixVectors
from presage.features.moment import MOMENTS, Moment
from presage.features.prefixes import Prefixes, join
from presage.predictors.common.probabilities import cross_entropy

PENALTIES: Final = (0.03, 0.3, 3.0)
"""Inverse strengths of the L2 penalty, C of scikit-learn, that are tried."""

_ITERATIONS: Final = 300


class LinearProbe:
    """scikit-learn's `LogisticRegression`; an outcome that training never saw at a horizon has no probability."""

    name = "linear-probe"

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    def fit(self, train: Prefixes, validation: Prefixes) -> Self:
        """Chooses each penalty on `validation`, then learns from both."""
        self._vectors = PrefixVectors().fit(train, self.seed)
        both = join(train, validation)
        self._models: dict[Moment, list[_Probe]] = {}
        for moment in MOMENTS:
            inputs, held, everything = (self._inputs(part, moment) for part in (train, validation, both))
            self._models[moment] = []
            for k in range(train.horizon):
                seen, asked = train.outcomes[:, k], validation.outcomes[:, k : k + 1]
                size = train.vocabulary.outcomes
                losses = [
                    cross_entropy(_Probe(inputs, seen, size, penalty)(held)[:, None], asked) for penalty in PENALTIES
                ]
                best = PENALTIES[int(np.argmin(losses))]
                self._models[moment].append(_Probe(everything, both.outcomes[:, k], size, best))
        return self

    def predict(self, prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        """Probabilities float32 [n, K, V+1]."""
        inputs = self._inputs(prefixes, moment)
        return np.stack([model(inputs) for model in self._models[moment]], axis=1)

    def _inputs(self, prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        vectors = self._vectors(prefixes, moment)
        current = vectors.recent[:, : prefixes.vocabulary.unknown + 1]
        return np.concatenate([current, vectors.workflow_type, vectors.state], axis=1)


class _Probe:
    """One horizon at one moment: inputs float32 [n, F] to probabilities float32 [n, V+1]."""

    def __init__(self, inputs: NDArray[np.float32], outcomes: NDArray[np.int32], size: int, penalty: float) -> None:
        from sklearn.linear_model import LogisticRegression

        self._size = size
        known = (outcomes >= 0) & (outcomes < size)
        self._classes = np.unique(outcomes[known]) if known.any() else np.arange(size)  # nothing known: any may come
        self._model: Any = None
        if known.any() and len(self._classes) > 1:
            self._model = LogisticRegression(C=penalty, max_iter=_ITERATIONS).fit(inputs[known], outcomes[known])

    def __call__(self, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        found = np.zeros((len(inputs), self._size), np.float32)
        found[:, self._classes] = 1 / len(self._classes) if self._model is None else self._model.predict_proba(inputs)
        return found
