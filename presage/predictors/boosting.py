"""Boosted trees whose leaves are vectors: one tree moves the logits of every outcome at every horizon at once.

A multi-class booster of the usual kind grows a tree for each class and horizon: 1,500 walks for five outcomes at
three horizons. With vector leaves a hundred or so are enough (benchmarks/real_traces.py has both side by side), few
enough for a scheduler. Searching splits over every output is what makes such trees slow to grow; here the gradients
are first projected to a few random directions (Iosipoi and Vakhrushev, "SketchBoost", NeurIPS 2022), and only leaf
values use all of them.

The loss is the cross-entropy of each horizon's softmax, masked labels contribute nothing. Its Hessian is taken
diagonal, p (1 − p), as multi-class boosting does (Friedman 2001).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.predictors.probabilities import cross_entropy, softmax


@dataclass(frozen=True)
class BoostingConfig:
    """How trees are grown.

    Attributes:
        rounds: trees at most; the validation loss decides how many are kept.
        learning_rate: shrinkage of each tree.
        depth: comparisons from root to leaf at most.
        columns: share of the states each tree may choose from, beside all that is not a state.
        rows: share of the positions each tree is grown on.
        l2: penalty on leaf values.
        min_rows: positions a side of a split needs.
        bins: values an input is told apart by, at most 256.
        directions: random directions the gradients are projected to for the search of splits.
        patience: rounds without a better validation loss before growing stops.
        leaf_cells: numbers in all leaf vectors together at most, a byte each in the artefact; with many agents it is
            this that ends growing.
        fewest_leaves: leaves granted however many outcomes there are: with hundreds of agents an artefact outgrows what
            thirty need, since a handful of trees is worth little.
    """

    rounds: int = 160
    learning_rate: float = 0.12
    depth: int = 6
    columns: float = 0.25
    rows: float = 0.8
    l2: float = 3.0
    min_rows: int = 8
    bins: int = 64
    directions: int = 6
    patience: int = 20
    leaf_cells: int = 220_000
    fewest_leaves: int = 2400


@dataclass(frozen=True)
class TreeEnsemble:
    """Trees as arrays. A node is a comparison, or a leaf (feature −1).

    Attributes:
        roots: int32 [trees], node where each tree starts.
        feature: int16 [nodes], input compared; −1 at a leaf.
        threshold: float32 [nodes]; smaller goes to `child`, the rest to `child + 1`.
        child: int32 [nodes]; at a leaf the row of `leaves`.
        leaves: int8 [rows, K (V+1)], in units of `scale`.
        scale: float32 [K (V+1)].
        base: float32 [K (V+1)], logits before the first tree.
    """

    roots: NDArray[np.int32]
    feature: NDArray[np.int16]
    threshold: NDArray[np.float32]
    child: NDArray[np.int32]
    leaves: NDArray[np.int8]
    scale: NDArray[np.float32]
    base: NDArray[np.float32]

    def check(self, inputs: int, outputs: int) -> None:
        """Raises ValueError unless every walk over `inputs` numbers ends in a leaf of `outputs`."""
        nodes, rows, inner = len(self.feature), len(self.leaves), self.feature >= 0
        own = np.arange(nodes)
        sound = (
            all(array.shape == (nodes,) for array in (self.threshold, self.child))
            and self.leaves.shape == (rows, outputs)
            and self.scale.shape == self.base.shape == (outputs,)
            and bool(np.all((self.roots >= 0) & (self.roots < nodes)))
            and bool(np.all((self.feature >= -1) & (self.feature < inputs)))
            and bool(np.all((self.child[inner] > own[inner]) & (self.child[inner] < nodes - 1)))  # no way back
            and bool(np.all((self.child[~inner] >= 0) & (self.child[~inner] < rows)))
        )
        if not sound:
            raise ValueError(f"trees of {nodes} nodes do not lead from {inputs} inputs to leaves of {outputs} numbers")

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """Arrays by name, as an artefact keeps them."""
        return dict(vars(self))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]]) -> TreeEnsemble:
        """Inverse of `to_tensors`."""
        return cls(**dict(tensors))


@dataclass(frozen=True)
class _Tree:
    """A complete binary tree in level order: split input (−1: leaf) and bin [2^(depth+1) − 1], leaf vectors by node."""

    feature: NDArray[np.int16]
    cut: NDArray[np.uint8]
    values: NDArray[np.float32]


def fit_trees(
    inputs: NDArray[np.float32],
    outcomes: NDArray[np.int32],
    validation_inputs: NDArray[np.float32],
    validation_outcomes: NDArray[np.int32],
    outcome_count: int,
    config: BoostingConfig,
    seed: int,
    *,
    always: int = 0,
    rounds: int | None = None,
) -> TreeEnsemble:
    """Grows trees on input vectors float32 [n, F] and labels int32 [n, K] (labels outside 0..V are masked).

    The first `always` inputs are open to every tree, a share of the others is drawn for each. With `rounds` so many
    trees are grown (fewer only where `leaf_cells` ends it) and the validation rows are not looked at.
    """
    rng = np.random.default_rng(seed)
    count, horizon = outcomes.shape
    target, weight = _targets(outcomes, outcome_count)
    share = (target.sum(axis=0) + 0.5) / (target.sum(axis=(0, 2))[:, None] + 0.5 * outcome_count)
    base = np.log(share).astype(np.float32).reshape(-1)
    edges = [_edges(column, config.bins) for column in inputs.T]
    binned, held_out = _binned(inputs, edges), _binned(validation_inputs, edges)
    useful = np.flatnonzero([len(e) > 0 for e in edges]).astype(np.int32)
    logits = np.tile(base, (count, 1))
    held_out_logits = np.tile(base, (len(held_out), 1))
    trees: list[_Tree] = []
    best, kept, cells = np.inf, 0, 0
    for grown in range(1, (config.rounds if rounds is None else rounds) + 1):
        p = softmax(logits.reshape(count, horizon, outcome_count))
        gradient = ((p - target) * weight).reshape(count, -1)
        hessian = (np.maximum(p * (1.0 - p), 1e-3) * weight).reshape(count, -1)
        width = gradient.shape[1]
        directions = (
            rng.standard_normal((width, config.directions), dtype=np.float32) / np.float32(config.directions) ** 0.5
        )
        sample = np.flatnonzero(rng.random(count) < config.rows).astype(np.int32)
        chosen = _choose(useful, always, config.columns, rng)
        feature, cut, node = _grow(
            binned,
            sample,
            chosen,
            gradient @ directions,
            hessian.mean(axis=1),
            config.depth,
            config.bins,
            np.float32(config.l2 / width),
            config.min_rows,
        )
        values = _leaf_values(node, sample, gradient, hessian, len(feature), np.float32(config.l2))
        values *= np.float32(-config.learning_rate)
        cells += width * (int((feature >= 0).sum()) + 1)
        if cells > max(config.leaf_cells, config.fewest_leaves * width):
            break
        logits += values[node]
        trees.append(_Tree(feature, cut, values))
        if rounds is not None:
            kept = grown
            continue
        held_out_logits += values[_descend(held_out, feature, cut)]
        loss = cross_entropy(softmax(held_out_logits.reshape(-1, horizon, outcome_count)), validation_outcomes)
        if loss < best:
            best, kept = loss, grown
        elif grown - kept >= config.patience:
            break
    return _flatten(trees[:kept], edges, base)


def _choose(useful: NDArray[np.int32], always: int, share: float, rng: np.random.Generator) -> NDArray[np.int32]:
    """Inputs one tree may split on, in order."""
    others = useful[useful >= always]
    drawn = rng.permutation(others)[: round(share * len(others))]
    chosen = np.concatenate([useful[useful < always], np.sort(drawn)])
    return chosen if len(chosen) else useful[:1]


def _targets(outcomes: NDArray[np.int32], outcome_count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Labels one-hot, float32 [n, K, V+1], and 1 where a label counts, float32 [n, K, 1]."""
    known = (outcomes >= 0) & (outcomes < outcome_count)
    target = np.zeros((*outcomes.shape, outcome_count), np.float32)
    row, k = np.nonzero(known)
    target[row, k, outcomes[row, k]] = 1.0
    return target, known[:, :, None].astype(np.float32)


def _edges(column: NDArray[np.float32], bins: int) -> NDArray[np.float32]:
    """Where an input is cut, at most bins − 1 values, each met in the data and larger than its smallest."""
    distinct = np.unique(column)
    if len(distinct) <= bins:
        return distinct[1:]
    return np.unique(np.quantile(column, np.linspace(0, 1, bins + 1)[1:-1], method="nearest").astype(np.float32))


def _binned(inputs: NDArray[np.float32], edges: list[NDArray[np.float32]]) -> NDArray[np.uint8]:
    """How many edges each value reaches, uint8 [n, F]: a value is at or past edge j when its bin exceeds j."""
    out = np.empty(inputs.shape, np.uint8)
    for column, edge in enumerate(edges):
        out[:, column] = np.searchsorted(edge, inputs[:, column], side="right")
    return out


@njit(cache=True, nogil=True)
def _grow(
    binned: NDArray[np.uint8],
    sample: NDArray[np.int32],
    features: NDArray[np.int32],
    sketch: NDArray[np.float32],
    weight: NDArray[np.float32],
    depth: int,
    bins: int,
    l2: np.float32,
    min_rows: int,
) -> tuple[NDArray[np.int16], NDArray[np.uint8], NDArray[np.int32]]:
    """Splits level by level for the largest Σ_s G_s² / (H + l2) of the sketched gradients.

    Returns:
        Split input and bin of each node in level order, and the leaf each row of `binned` falls into, int32 [n].
    """
    size = sketch.shape[1]
    feature = np.full(2 ** (depth + 1) - 1, -1, np.int16)
    cut = np.zeros(2 ** (depth + 1) - 1, np.uint8)
    node_of = np.zeros(len(binned), np.int32)
    for level in range(depth):
        first, count = 2**level - 1, 2**level
        histogram = np.zeros((count, len(features), bins, size + 2), np.float32)
        for i in sample:
            node = node_of[i] - first
            if node < 0:
                continue
            for j in range(len(features)):
                cell = histogram[node, j, binned[i, features[j]]]
                for s in range(size):
                    cell[s] += sketch[i, s]
                cell[size] += weight[i]
                cell[size + 1] += 1.0
        split = False
        for node in range(count):
            total = np.zeros(size + 2, np.float32)
            for b in range(bins):
                total += histogram[node, 0, b]
            if total[size + 1] < 2 * min_rows:
                continue
            whole = np.float32(0.0)
            for s in range(size):
                whole += total[s] * total[s]
            best = whole / (total[size] + l2) * np.float32(1.00001) + np.float32(1e-6)
            left = np.empty(size + 2, np.float32)
            for j in range(len(features)):
                left[:] = 0.0
                for b in range(bins - 1):
                    cell = histogram[node, j, b]
                    if cell[size + 1] == 0.0:
                        continue
                    for s in range(size + 2):
                        left[s] += cell[s]
                    if left[size + 1] < min_rows:
                        continue
                    if total[size + 1] - left[size + 1] < min_rows:
                        break
                    below, above = np.float32(0.0), np.float32(0.0)
                    for s in range(size):
                        below += left[s] * left[s]
                        above += (total[s] - left[s]) * (total[s] - left[s])
                    gain = below / (left[size] + l2) + above / (total[size] - left[size] + l2)
                    if gain > best:
                        best = gain
                        feature[first + node] = features[j]
                        cut[first + node] = b
                        split = True
        if not split:
            break
        for i in range(len(binned)):
            node = node_of[i]
            if node >= first and feature[node] >= 0:
                node_of[i] = 2 * node + 1 + (binned[i, feature[node]] > cut[node])
    return feature, cut, node_of


@njit(cache=True, nogil=True)
def _leaf_values(
    node: NDArray[np.int32],
    sample: NDArray[np.int32],
    gradient: NDArray[np.float32],
    hessian: NDArray[np.float32],
    nodes: int,
    l2: np.float32,
) -> NDArray[np.float32]:
    """Newton step of every leaf and output, Σg / (Σh + l2), float32 [nodes, K (V+1)]."""
    top = np.zeros((nodes, gradient.shape[1]), np.float32)
    bottom = np.full((nodes, gradient.shape[1]), l2, np.float32)
    for i in sample:
        top[node[i]] += gradient[i]
        bottom[node[i]] += hessian[i]
    return top / bottom


@njit(cache=True, nogil=True)
def _descend(binned: NDArray[np.uint8], feature: NDArray[np.int16], cut: NDArray[np.uint8]) -> NDArray[np.int32]:
    """The leaf each row falls into, int32 [n]."""
    out = np.empty(len(binned), np.int32)
    for i in range(len(binned)):
        node = 0
        while feature[node] >= 0:
            node = 2 * node + 1 + (binned[i, feature[node]] > cut[node])
        out[i] = node
    return out


def _flatten(trees: list[_Tree], edges: list[NDArray[np.float32]], base: NDArray[np.float32]) -> TreeEnsemble:
    """Level-order trees as one ensemble without their unused nodes."""
    roots: list[int] = []
    nodes: list[tuple[int, float, int]] = []  # (feature, threshold, child or leaf)
    leaves: list[NDArray[np.float32]] = []
    for tree in trees:
        roots.append(len(nodes))
        nodes.append((-1, 0.0, 0))
        pending = [(0, roots[-1])]  # (node of the tree, its place here)
        while pending:
            node, place = pending.pop()
            feature = int(tree.feature[node])
            if feature < 0:
                nodes[place] = (-1, 0.0, len(leaves))
                leaves.append(tree.values[node])
                continue
            nodes[place] = (feature, float(edges[feature][tree.cut[node]]), len(nodes))
            pending += [(2 * node + 1, len(nodes)), (2 * node + 2, len(nodes) + 1)]
            nodes += [(-1, 0.0, 0)] * 2
    stacked = np.stack(leaves) if leaves else np.zeros((0, len(base)), np.float32)
    scale = np.maximum(np.abs(stacked).max(axis=0, initial=0.0) / 127.0, 1e-12).astype(np.float32)
    features, thresholds, children = zip(*nodes, strict=True) if nodes else ((), (), ())
    return TreeEnsemble(
        roots=np.array(roots, np.int32),
        feature=np.array(features, np.int16),
        threshold=np.array(thresholds, np.float32),
        child=np.array(children, np.int32),
        leaves=np.round(stacked / scale).astype(np.int8),
        scale=scale,
        base=base,
    )
