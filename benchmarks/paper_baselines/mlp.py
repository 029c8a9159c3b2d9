"""Multi-layer perceptrons on the prefix as one vector, three sizes (PBKV, appendix C.2: tiny, small, deep).

The paper gives neither their sizes nor what they read. Its tiny one reaches .786/.656/.494, the figures of its
third-order Markov model (.786/.656/.490), which suggests that it read the latest agents alone; here every size reads
the whole vector of `vectors.py`, the states included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paper_baselines.neural import NeuralBaseline, NeuralConfig
from paper_baselines.vectors import PrefixVectors
from presage.features.prefixes import Prefixes

Size = Literal["tiny", "small", "deep"]

HIDDEN: Final[Mapping[Size, Sequence[int]]] = MappingProxyType(
    {"tiny": (16,), "small": (128,), "deep": (128, 128, 128)}
)
"""Units of each hidden layer."""


class Mlp(NeuralBaseline):
    """ReLU layers with dropout, and the logits of all K steps at once; the moment is an input."""

    def __init__(self, size: Size, config: NeuralConfig) -> None:
        super().__init__(f"mlp-{size}", config)
        self.size = size

    def _begin(self, train: Prefixes) -> nn.Module:
        self._vectors = PrefixVectors().fit(train, self.config.seed)
        inputs = self._columns(train)[0].shape[1]
        hidden = HIDDEN[self.size]
        return _Perceptron(inputs + 1, hidden, train.horizon, train.vocabulary.outcomes, self.config.dropout)

    def _columns(self, prefixes: Prefixes) -> Sequence[NDArray[np.generic]]:
        return [
            np.concatenate(list(vars(self._vectors(prefixes, moment)).values()), axis=1)
            for moment in self._vectors.moments
        ]


class _Perceptron(nn.Module):
    def __init__(self, inputs: int, hidden: Sequence[int], horizon: int, outcomes: int, dropout: float) -> None:
        super().__init__()
        self.horizon = horizon
        layers: list[nn.Module] = []
        for before, after in pairwise((inputs, *hidden)):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(nn.Dropout(dropout), *layers, nn.Linear(hidden[-1], horizon * outcomes))

    def forward(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """Logits at each moment, [m, K, V+1]; a vector knows nothing of the steps beside it, so padding is not read."""
        logits = []
        for moment, vector in enumerate(columns[:-1]):
            told = torch.cat([vector, vector.new_full((len(vector), 1), moment)], dim=1)
            logits.append(self.layers(told).view(len(vector), self.horizon, -1))
        return tuple(logits)
