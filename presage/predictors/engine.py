"""A fitted model unfolded for serving: three flat arrays that compiled code reads.

An artefact is small (half precision, bytes, counts); an `Engine` is what it unfolds to. It is built once when a model
is loaded and never changes. Three arrays, not thirty: handing an array to compiled code costs a tenth of a
microsecond. `PARTS` numbers what lies in `floats` and `numbers`; `numbers` begins with a header of scalars and the
place of each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.features.inputs import inputs_size, sums_size
from presage.predictors.boosting import TreeEnsemble
from presage.predictors.network_weights import ORDER, NetworkWeights
from presage.predictors.ngram import NgramTable

# Scalars at the head of `numbers`.
AGENTS, PREFILL, COMPLETION, HIDDEN, PREFIX, ENOUGH, DEPTH, INPUTS, SUMS, TREES_AT_PREFILL, TREES, HEADER = range(12)

# Parts of `floats`: the network's arrays in their order, then these.
FLOATS: Final = (*ORDER, "thresholds", "leaves", "base", "rows", "log_rows", "shares")
(
    RECENT_TABLE,
    KIND,
    ENCODED,
    DENSE,
    MOMENT,
    FROM_PREFIX,
    SECOND,
    SECOND_BIAS,
    HEAD,
    HEAD_BIAS,
    SKIP,
    AGENT_SKIP,
    STEP_AGENT,
    STEP_STATES,
    STEP_HIDDEN,
    STEP_HIDDEN_BIAS,
    THRESHOLDS,
    LEAVES,
    BASE,
    ROWS,
    LOG_ROWS,
    SHARES,
) = (HEADER + i for i in range(len(FLOATS)))

# Parts of `numbers`.
FEATURES, LEAF_OF, CONTEXTS, EVIDENCE = (HEADER + len(FLOATS) + i for i in range(4))
FIRST_PART: Final = HEADER + len(FLOATS) + 4


MOST_DEPTH: Final = 16
"""Trees unfold to 2^depth leaves each."""


class Engine(NamedTuple):
    """A named tuple, since that is what compiled code takes whole.

    Attributes:
        floats: float32, the parts FLOATS end to end. Trees are complete binary trees of DEPTH levels in level order:
            thresholds [trees, 2^DEPTH − 1] (infinite below a leaf that ended early: always left), leaves
            [rows, K (V+1)], base [2, K (V+1)]. N-gram rows and their logarithms [C, K, V+1]. Shares [2, 3, K]: how
            much network, trees and n-gram are believed at each moment and horizon.
        numbers: int32, the header, where each part begins, then the parts: inputs compared
            [trees, 2^DEPTH − 1], leaf rows [trees, 2^DEPTH], n-gram rows by hash slot, evidence [T+1, V+1].
        keys: uint64, the n-gram's hash table.
    """

    floats: NDArray[np.float32]
    numbers: NDArray[np.int32]
    keys: NDArray[np.uint64]


def build_engine(
    network: NetworkWeights,
    trees: tuple[TreeEnsemble, TreeEnsemble],
    ngram: NgramTable,
    shares: NDArray[np.float32],
    evidence: NDArray[np.int32],
    enough: int,
    widths: tuple[int, int],
) -> Engine:
    """Unfolds the parts of a model.

    Args:
        network: its weights.
        trees: at prefill and at completion.
        ngram: its table.
        shares: float32 [2, 3, K].
        evidence: int32 [T+1, V+1], training steps of an agent in a workflow type, 0 for the unknown.
        enough: below so much evidence of an agent the network is left out, and of a type the trees too.
        widths: p and c, of the projected states.
    """
    agents = evidence.shape[1] - 1
    depth = max(_depth(ensemble) for ensemble in trees)
    unfolded = [_complete(ensemble, depth) for ensemble in trees]
    leaf_of = [unfolded[0][2], unfolded[1][2] + len(trees[0].leaves)]
    values = [tree.leaves.astype(np.float32) * tree.scale for tree in trees]
    floats: list[NDArray[np.floating]] = [network.arrays[name] for name in ORDER]
    floats += [
        np.concatenate([threshold for _, threshold, _ in unfolded]),
        np.concatenate(values),
        np.stack([tree.base for tree in trees]),
        ngram.rows,
        np.log(ngram.rows),
        shares,
    ]
    numbers = [np.concatenate([f for f, _, _ in unfolded]), np.concatenate(leaf_of), ngram.values, evidence]
    header = np.zeros(FIRST_PART, np.int32)
    header[AGENTS], (header[PREFILL], header[COMPLETION]), header[ENOUGH] = agents, widths, enough
    header[HIDDEN], header[PREFIX], header[DEPTH] = network.hidden_size, network.prefix_size, depth
    header[INPUTS], header[SUMS] = inputs_size(agents, *widths), sums_size(*widths)
    header[TREES_AT_PREFILL], header[TREES] = len(trees[0].roots), sum(len(tree.roots) for tree in trees)
    header[HEADER : HEADER + len(FLOATS)] = _starts(floats, 0)
    header[FEATURES:FIRST_PART] = _starts(numbers, FIRST_PART)
    return Engine(
        np.concatenate([np.asarray(part, np.float32).ravel() for part in floats]),
        np.concatenate([header, *(np.asarray(part, np.int32).ravel() for part in numbers)]),
        ngram.keys,
    )


def with_shares(engine: Engine, shares: NDArray[np.float32], enough: int) -> Engine:
    """The same model with other mixture weights, float32 [2, 3, K], and another threshold of evidence."""
    floats, numbers = engine.floats.copy(), engine.numbers.copy()
    start = numbers[SHARES]
    floats[start : start + shares.size] = shares.ravel()
    numbers[ENOUGH] = enough
    return Engine(floats, numbers, engine.keys)


def _starts(parts: Sequence[NDArray[np.generic]], first: int) -> NDArray[np.int64]:
    return first + np.cumsum([0, *(part.size for part in parts[:-1])])


def _depth(trees: TreeEnsemble) -> int:
    """Comparisons on the longest way from a root to a leaf."""
    level, depth = trees.roots.astype(np.int64), 0
    while len(level := level[trees.feature[level] >= 0]):
        level = np.concatenate([trees.child[level], trees.child[level] + 1])
        depth += 1
        if depth > MOST_DEPTH:
            raise ValueError(f"trees are deeper than {MOST_DEPTH} comparisons")
    return depth


def _complete(trees: TreeEnsemble, depth: int) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
    """Every tree filled up to `depth`: inputs and thresholds [trees, 2^depth − 1], leaf rows [trees, 2^depth]."""
    node = trees.roots.astype(np.int64)[:, None]
    features, thresholds = [], []
    for _ in range(depth):
        inner = trees.feature[node] >= 0
        features.append(np.where(inner, trees.feature[node], 0))
        thresholds.append(np.where(inner, trees.threshold[node], np.inf))
        below = np.where(inner, trees.child[node], node)
        node = np.stack([below, np.where(inner, below + 1, node)], axis=2).reshape(len(node), 2 * node.shape[1])
    empty = np.zeros((len(trees.roots), 0))
    return (
        np.hstack([empty, *features]).astype(np.int32),
        np.hstack([empty, *thresholds]).astype(np.float32),
        trees.child[node].astype(np.int32) if len(trees.roots) else np.zeros((0, 2**depth), np.int32),
    )
