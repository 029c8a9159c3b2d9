"""The call graph: which agent follows which, how often, estimated from training traces."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from presage.features.prefixes import Prefixes


def transition_counts(prefixes: Prefixes) -> NDArray[np.int64]:
    """How often outcome j came right after agent i, int64 [V+1, V+1]; row V is the unknown agent, column V is END.

    A step whose next one is not known (the trace was cut) counts nowhere.
    """
    size = prefixes.vocabulary.outcomes
    following = prefixes.outcomes[:, 0]
    known = (following >= 0) & (following < size)
    counts = np.zeros((size, size), np.int64)
    np.add.at(counts, (prefixes.agent[known], following[known]), 1)
    return counts


def transition_matrix(prefixes: Prefixes) -> NDArray[np.float32]:
    """A: the row-normalised forward transition matrix between agents, float32 [V+1, V+1] (PBKV, appendix B).

    Row and column V belong to the unknown agent and are zero: END is no agent and receives no message.
    """
    counts = transition_counts(prefixes).astype(np.float32)
    counts[:, -1] = 0.0
    counts[-1, :] = 0.0
    total = counts.sum(axis=1, keepdims=True)
    matrix: NDArray[np.float32] = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
    return matrix
