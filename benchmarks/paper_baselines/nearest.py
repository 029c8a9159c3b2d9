"""The k nearest prefixes of the training set vote (PBKV, appendix C.2: kNN with k = 5 and k = 20).

The paper does not define the distance. Here it is the Euclidean distance of the vectors of `vectors.py`: the latest
agents, each worth half the one after it, the workflow type, and the states of this step and their means so far, whose
weight is chosen on the validation part. A neighbour has one vote; one more vote is spread like the outcomes of all
training prefixes, which breaks ties and leaves no seen outcome impossible.
"""

from __future__ import annotations

from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from paper_baselines.vectors import PrefixVectors
from presage.errors import ConfigurationError
from presage.features.history import RECENT
from presage.features.moment import MOMENTS, Moment
from presage.features.prefixes import Prefixes, join
from presage.predictors.common.probabilities import cross_entropy

STATE_WEIGHTS: Final = (0.0, 0.1, 0.2, 0.4, 0.8)
"""Weights of the states beside the agents that are tried."""

COMPONENTS: Final = 16
"""Principal components of a moment's states, at most: those that vary little move no neighbour, and every search pays
for them."""


class NearestPrefixes:
    """Votes of the nearest training prefixes, for each moment and horizon among those whose outcome is known.

    Args:
        neighbours: k, how many vote; all there are where training has fewer.
        seed: of the principal components.
    """

    def __init__(self, neighbours: int, *, seed: int = 0) -> None:
        self.neighbours = neighbours
        self.seed = seed
        self.name = f"knn-{neighbours}"

    def fit(self, train: Prefixes, validation: Prefixes) -> Self:
        """Chooses the weight of the states on `validation`, then keeps the prefixes of both."""
        if self.neighbours < 1:
            raise ConfigurationError(f"neighbours is {self.neighbours}; at least 1 is wanted")
        self._vectors = PrefixVectors(COMPONENTS).fit(train, self.seed)
        both = join(train, validation)
        self.weight: dict[Moment, float] = {}
        self._votes: dict[Moment, list[_Votes]] = {}
        for moment in MOMENTS:
            losses = [self._loss(train, validation, moment, weight) for weight in STATE_WEIGHTS]
            self.weight[moment] = STATE_WEIGHTS[int(np.argmin(losses))]
            inputs = self._inputs(both, moment)
            self._votes[moment] = [
                _Votes(inputs, outcomes, both.vocabulary.outcomes, self.neighbours) for outcomes in both.outcomes.T
            ]
        return self

    def predict(self, prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        """Probabilities float32 [n, K, V+1]."""
        inputs = self._inputs(prefixes, moment)
        return np.stack([votes(inputs) for votes in self._votes[moment]], axis=1)

    def _loss(self, train: Prefixes, validation: Prefixes, moment: Moment, weight: float) -> float:
        """Of the votes one step ahead: K searches for each weight would take as long as all the rest."""
        self.weight[moment] = weight
        votes = _Votes(self._inputs(train, moment), train.outcomes[:, 0], train.vocabulary.outcomes, self.neighbours)
        return cross_entropy(votes(self._inputs(validation, moment))[:, None], validation.outcomes[:, :1])

    def _inputs(self, prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        vectors = self._vectors(prefixes, moment)
        fading = np.repeat(0.5 ** np.arange(RECENT), vectors.recent.shape[1] // RECENT)
        states = np.concatenate([vectors.state, vectors.earlier], axis=1)
        blocks = (vectors.recent * fading, vectors.workflow_type, states * self.weight[moment])
        return np.concatenate(blocks, axis=1).astype(np.float32)


class _Votes:
    """The training prefixes whose outcome at one horizon is known."""

    def __init__(self, inputs: NDArray[np.float32], outcomes: NDArray[np.int32], size: int, neighbours: int) -> None:
        from sklearn.neighbors import NearestNeighbors

        known = (outcomes >= 0) & (outcomes < size)
        self._outcomes = outcomes[known]
        self._voters = min(neighbours, len(self._outcomes))
        counts = np.bincount(self._outcomes, minlength=size) if self._voters else np.ones(size)
        self._share = (counts / counts.sum()).astype(np.float32)
        if self._voters:
            self._nearest = NearestNeighbors(n_neighbors=self._voters, algorithm="brute").fit(inputs[known])

    def __call__(self, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Probabilities float32 [n, V+1]."""
        votes = np.tile(self._share, (len(inputs), 1))
        if self._voters:
            nearest = self._nearest.kneighbors(inputs, return_distance=False)
            np.add.at(votes, (np.arange(len(inputs))[:, None], self._outcomes[nearest]), np.float32(1.0))
        return (votes / (self._voters + 1)).astype(np.float32)
