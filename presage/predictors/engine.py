"""A fitted model unfolded for serving: flat float32 arrays that compiled code reads.

An artefact is small (half precision, bytes, counts); an `Engine` is what it unfolds to. It is built once when a model
is loaded and never changes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.predictors.boosting import TreeEnsemble
from presage.predictors.network_weights import NetworkWeights
from presage.predictors.ngram import NgramTable


class Engine(NamedTuple):
    """A named tuple, since that is what compiled code takes whole.

    Attributes:
        weights, starts: the packed network (`NetworkWeights.pack`).
        nodes: int32 [n, 2], the trees of both moments: (feature, child), or (-1, leaf).
        thresholds: float32 [n].
        roots: int32 [trees]; those of moment m lie from root_starts[m] to root_starts[m + 1], int64 [3].
        leaves: float32 [rows, K (V+1)]; base: float32 [2, K (V+1)].
        keys, values, rows: the n-gram's table (`NgramTable`); log_rows: the logarithms of `rows`.
        shares: float32 [2, 3, K], how much network, trees and n-gram are believed at each moment and horizon.
        evidence: int32 [T+1, V+1], training steps of an agent in a workflow type, 0 for the unknown.
        enough: below so much evidence the n-gram answers alone.
        agents: V; prefill: p, completion: c, the widths of the projected states.
    """

    weights: NDArray[np.float32]
    starts: NDArray[np.int64]
    nodes: NDArray[np.int32]
    thresholds: NDArray[np.float32]
    roots: NDArray[np.int32]
    root_starts: NDArray[np.int64]
    leaves: NDArray[np.float32]
    base: NDArray[np.float32]
    keys: NDArray[np.uint64]
    values: NDArray[np.int32]
    rows: NDArray[np.float32]
    log_rows: NDArray[np.float32]
    shares: NDArray[np.float32]
    evidence: NDArray[np.int32]
    enough: int
    agents: int
    prefill: int
    completion: int


def build_engine(
    network: NetworkWeights,
    trees: tuple[TreeEnsemble, TreeEnsemble],
    ngram: NgramTable,
    shares: NDArray[np.float32],
    evidence: NDArray[np.int32],
    enough: int,
    widths: tuple[int, int],
) -> Engine:
    """Unfolds the parts of a model: `trees` at prefill and at completion, `widths` p and c, the rest as in `Engine`."""
    weights, starts = network.pack()
    first, second = trees
    node_shift, leaf_shift = len(first.feature), len(first.leaves)
    shifted = second.child + np.where(second.feature >= 0, node_shift, leaf_shift)
    feature = np.concatenate([first.feature, second.feature])
    return Engine(
        weights=weights,
        starts=starts,
        nodes=np.stack([feature, np.concatenate([first.child, shifted])], axis=1).astype(np.int32),
        thresholds=np.concatenate([first.threshold, second.threshold]),
        roots=np.concatenate([first.roots, second.roots + node_shift]).astype(np.int32),
        root_starts=np.cumsum([0, len(first.roots), len(second.roots)]).astype(np.int64),
        leaves=np.concatenate([tree.leaves.astype(np.float32) * tree.scale for tree in trees]),
        base=np.stack([first.base, second.base]),
        keys=ngram.keys,
        values=ngram.values,
        rows=ngram.rows,
        log_rows=np.log(ngram.rows),
        shares=np.ascontiguousarray(shares, np.float32),
        evidence=np.ascontiguousarray(evidence, np.int32),
        enough=enough,
        agents=evidence.shape[1] - 1,
        prefill=widths[0],
        completion=widths[1],
    )
