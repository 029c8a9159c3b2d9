"""Semantic states for the baselines: principal components, fitted on the training prefixes, for each moment.

The paper passes the hidden state as it is. With a thousand workflows that is thousands of inputs beside thousands of
labels, and the comparison would be one of regularisers. Unlike in `presage/features/projection.py`, no label
influences these components.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from presage.features.moment import Moment
from presage.features.prefixes import Prefixes
from presage.features.projection import Projection

COMPONENTS: Final = 64
"""Principal components of a moment's states, at most, unless a family asks for fewer."""

DAMPING: Final = 0.1
"""Added to the variance of each component before it is divided by it, as a share of the largest: what varies much gets
a spread near 1, what hardly varies is not blown up to that of the others."""


def reduce_states(train: Prefixes, seed: int, components: int = COMPONENTS) -> dict[Moment, Projection]:
    """Principal components at each moment where training has states; `seed` is that of the randomised decomposition."""
    from sklearn.decomposition import PCA

    projections: dict[Moment, Projection] = {}
    for moment, states in train.states.items():
        present = states[~np.isnan(states[:, 0])]
        if len(present) < 2:
            continue
        pca = PCA(min(components, *present.shape), random_state=seed).fit(present)
        variance = pca.explained_variance_
        axes = (pca.components_ / np.sqrt(variance + DAMPING * max(float(variance[0]), 1e-12))[:, None]).T
        scale = np.maximum(np.abs(axes).max(axis=0), 1e-12).astype(np.float32)
        matrix = (axes / scale).astype(np.float16)
        bias = -(pca.mean_ @ (matrix.astype(np.float32) * scale)).astype(np.float32)
        projections[moment] = Projection(matrix, scale, bias)
    return projections
