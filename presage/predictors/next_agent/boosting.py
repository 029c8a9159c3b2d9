"""Boosted oblivious trees with vector leaves: one tree changes the logits of every outcome at every horizon.

Multi-class boosting grows a tree for each class and horizon: 1,500 walks for five outcomes at three horizons. With
vector leaves a hundred or so are enough (benchmarks/real_traces.py compares both), few enough for a scheduler. All
nodes of a level compare the same input (Prokhorenkova et al., "CatBoost", NeurIPS 2018): the leaf of a row is a handful
of independent comparisons. For the search of splits the gradients are projected to a few random directions (Iosipoi and
Vakhrushev, "SketchBoost", NeurIPS 2022); leaf values use all of them.

The loss is the cross-entropy of each horizon's softmax over unmasked labels, with the diagonal Hessian p (1 − p) of
multi-class boosting (Friedman 2001).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.predictors.common.probabilities import cross_entropy, softmax

MOST_DEPTH: Final = 16
"""Greatest depth; a tree has 2^depth leaves."""

ENOUGH_TREES: Final = 128
"""Trees are shallow enough for so many to fit: 37 deep ones were worse than 150 shallow ones."""

UNREACHED: Final = np.finfo(np.float32).max
"""Threshold of the unused levels of a tree that ended early: no input is so large."""


@dataclass(frozen=True)
class BoostingConfig:
    """How trees are grown.

    Attributes:
        rounds: most trees; early stopping by the validation loss.
        learning_rate: shrinkage of each tree.
        depth: most comparisons from root to leaf; fewer where many outcomes leave room for too few such trees.
        columns: share of the states open to each tree, beside all other inputs.
        rows: share of the positions that each tree is grown on.
        l2: penalty on leaf values.
        min_rows: least positions on a side of a split.
        bins: bins of an input, at most 256.
        directions: random projections of the gradients for the search of splits.
        patience: rounds without a better validation loss before growing stops.
        leaf_cells: most numbers in all leaf vectors together, a byte each in the artefact; the limit with many agents.
        fewest_leaves: leaves permitted with any number of outcomes.
    """

    rounds: int = 256
    learning_rate: float = 0.2
    depth: int = 6
    columns: float = 0.25
    rows: float = 0.8
    l2: float = 3.0
    min_rows: int = 8
    bins: int = 64
    directions: int = 6
    patience: int = 20
    leaf_cells: int = 480_000
    fewest_leaves: int = 2400


@dataclass(frozen=True)
class TreeEnsemble:
    """Oblivious trees as arrays: all nodes of a level compare the same input with the same threshold.

    Attributes:
        feature: int16 [trees, depth], input compared at each level.
        threshold: float32 [trees, depth]; an input at or above it sets bit `level` of the leaf's number.
        leaves: int8 [trees, 2^depth, K (V+1)], in units of `scale`.
        scale: float32 [K (V+1)].
        base: float32 [K (V+1)], logits before the first tree.
    """

    feature: NDArray[np.int16]
    threshold: NDArray[np.float32]
    leaves: NDArray[np.int8]
    scale: NDArray[np.float32]
    base: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.feature)

    @property
    def depth(self) -> int:
        """Comparisons a tree."""
        return int(self.feature.shape[1])

    def logits(self, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Sum of the trees, float32 [n, K (V+1)], from input vectors float32 [n, F]."""
        return _walk(inputs, self.feature, self.threshold, self.leaves, self.scale, self.base)

    def first(self, most: int) -> TreeEnsemble:
        """At most so many trees, the first ones: they do the most."""
        feature, threshold, leaves = self.feature[:most], self.threshold[:most], self.leaves[:most]
        return TreeEnsemble(feature, threshold, leaves, self.scale, self.base)

    def and_then(self, more: TreeEnsemble) -> TreeEnsemble:
        """The trees of both, of one depth; leaves are rounded anew only where those of `more` are larger."""
        scale = np.maximum(self.scale, more.scale)
        leaves = [np.round(trees.leaves * (trees.scale / scale)).astype(np.int8) for trees in (self, more)]
        feature, threshold = (
            np.concatenate([getattr(trees, name) for trees in (self, more)]) for name in ("feature", "threshold")
        )
        return TreeEnsemble(feature, threshold, np.concatenate(leaves), scale, self.base + more.base)

    def check(self, inputs: int, outputs: int) -> None:
        """Raise ValueError unless every tree compares some of `inputs` numbers and has leaves of `outputs` numbers."""
        trees, depth = self.feature.shape if self.feature.ndim == 2 else (-1, -1)
        sound = (
            0 <= depth <= MOST_DEPTH
            and self.threshold.shape == (trees, depth)
            and self.leaves.shape == (trees, 2**depth, outputs)
            and self.scale.shape == self.base.shape == (outputs,)
            and bool(np.all((self.feature >= 0) & (self.feature < inputs)))
        )
        if not sound:
            raise ValueError(f"trees do not lead from {inputs} inputs to leaves of {outputs} numbers")

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """Arrays of an artefact by name."""
        return dict(vars(self))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]]) -> TreeEnsemble:
        """Inverse of `to_tensors`."""
        return cls(**dict(tensors))


def fit_trees(
    inputs: NDArray[np.float32],
    outcomes: NDArray[np.int32],
    validation_inputs: NDArray[np.float32],
    validation_outcomes: NDArray[np.int32],
    outcome_count: int,
    config: BoostingConfig,
    seed: int,
    *,
    always: Sequence[int] | None = None,
    drawn: Sequence[int] = (),
    most: int | None = None,
    start: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
    rounds: int | None = None,
    depth: int | None = None,
) -> TreeEnsemble:
    """Grow trees on input vectors and labels.

    Args:
        inputs: float32 [n, F]; validation_inputs: float32 [m, F].
        outcomes: int32 [n, K], labels outside 0..V are masked; validation_outcomes: int32 [m, K].
        outcome_count: V + 1.
        config: settings.
        seed: of all random draws.
        always: inputs open to every tree; None for all.
        drawn: inputs of which a share (`config.columns`) is open to a tree.
        most: most trees; None for `tree_limits`.
        start: logits that the trees add to, float32 [n, K (V+1)] and [m, K (V+1)]; None: the share of each outcome,
            the base of the ensemble.
        rounds: number of trees (at most `most`); None: early stopping on the validation rows.
        depth: of the trees; None for `tree_limits`.
    """
    rng = np.random.default_rng(seed)
    count, horizon = outcomes.shape
    target, weight = _targets(outcomes, outcome_count)
    share = (target.sum(axis=0) + 0.5) / (target.sum(axis=(0, 2))[:, None] + 0.5 * outcome_count)
    base = np.log(share).astype(np.float32).reshape(-1) * np.float32(start is None)
    width = len(base)
    edges = [_edges(column, config.bins) for column in inputs.T]
    binned, held_out = _binned(inputs, edges), _binned(validation_inputs, edges)
    varies = np.array([len(e) > 0 for e in edges])
    open_inputs = np.arange(inputs.shape[1]) if always is None else np.asarray(always, np.int64)
    open_inputs, drawn_inputs = (i[varies[i]].astype(np.int32) for i in (open_inputs, np.asarray(drawn, np.int64)))
    first, first_held_out = start or (np.tile(base, (count, 1)), np.tile(base, (len(validation_inputs), 1)))
    logits, held_out_logits = first.copy(), first_held_out.copy()
    usual, limit = tree_limits(width, config)
    depth = usual if depth is None else depth
    limit = min(limit, limit if most is None else most)
    if not len(open_inputs) + len(drawn_inputs) or not count:
        limit = 0
    trees: list[tuple[NDArray[np.int16], NDArray[np.uint8], NDArray[np.float32]]] = []
    best, kept = _loss(held_out_logits, validation_outcomes, outcome_count) if start is not None else np.inf, 0
    for grown in range(1, min(limit, limit if rounds is None else rounds) + 1):
        p = softmax(logits.reshape(count, horizon, outcome_count))
        gradient = ((p - target) * weight).reshape(count, -1)
        hessian = (np.maximum(p * (1.0 - p), 1e-3) * weight).reshape(count, -1)
        directions = (
            rng.standard_normal((width, config.directions), dtype=np.float32) / np.float32(config.directions) ** 0.5
        )
        sample = np.flatnonzero(rng.random(count) < config.rows).astype(np.int32)
        # One line of memory a row: its sketched gradient, its weight, and 1 to count it.
        packed = np.column_stack([gradient @ directions, hessian.mean(axis=1), np.ones(count, np.float32)])
        feature, cut, leaf = _grow(
            binned,
            sample,
            _choose(open_inputs, drawn_inputs, config.columns, rng),
            packed,
            depth,
            config.bins,
            np.float32(config.l2 / width),
            config.min_rows,
        )
        values = _leaf_values(leaf, sample, gradient, hessian, 2**depth, np.float32(config.l2))
        values *= np.float32(-config.learning_rate)
        logits += values[leaf]
        trees.append((feature, cut, values))
        if rounds is not None:
            kept = grown
            continue
        held_out_logits += values[_leaf_of(held_out, feature, cut)]
        loss = _loss(held_out_logits, validation_outcomes, outcome_count)
        if loss < best:
            best, kept = loss, grown
        elif grown - kept >= config.patience:
            break
    return _ensemble(trees[:kept], edges, base, depth)


def tree_limits(width: int, config: BoostingConfig) -> tuple[int, int]:
    """Depth and greatest number of the trees, for leaves of `width` = K (V+1) numbers."""
    room = max(config.leaf_cells // width, config.fewest_leaves)
    depth = int(np.clip(np.log2(max(room / ENOUGH_TREES, 1)), 1, config.depth))
    return depth, min(room // 2**depth, config.rounds)


def _loss(logits: NDArray[np.float32], outcomes: NDArray[np.int32], outcome_count: int) -> float:
    return cross_entropy(softmax(logits.reshape(*outcomes.shape, outcome_count)), outcomes)


def _choose(
    always: NDArray[np.int32], drawn: NDArray[np.int32], share: float, rng: np.random.Generator
) -> NDArray[np.int32]:
    """Inputs open to one tree, in order; at least one."""
    some = np.sort(rng.permutation(drawn)[: round(share * len(drawn))])
    chosen = np.concatenate([always, some])
    return chosen if len(chosen) else drawn[:1]


def _targets(outcomes: NDArray[np.int32], outcome_count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Labels one-hot, float32 [n, K, V+1], and 1 where a label counts, float32 [n, K, 1]."""
    counts = (outcomes >= 0) & (outcomes < outcome_count)
    target = np.zeros((*outcomes.shape, outcome_count), np.float32)
    row, k = np.nonzero(counts)
    target[row, k, outcomes[row, k]] = 1.0
    return target, counts[:, :, None].astype(np.float32)


def _edges(column: NDArray[np.float32], bins: int) -> NDArray[np.float32]:
    """At most bins − 1 cuts of an input: values of the data above the smallest."""
    distinct = np.unique(column)
    if len(distinct) <= bins:
        return distinct[1:]
    return np.unique(np.quantile(column, np.linspace(0, 1, bins + 1)[1:-1], method="nearest").astype(np.float32))


def _binned(inputs: NDArray[np.float32], edges: list[NDArray[np.float32]]) -> NDArray[np.uint8]:
    """Bin of each value, uint8 [F, n]: the number of edges at or below it."""
    out = np.empty(inputs.shape[::-1], np.uint8)
    for column, edge in enumerate(edges):
        out[column] = np.searchsorted(edge, inputs[:, column], side="right")
    return out


@njit(cache=True, nogil=True)
def _grow(
    binned: NDArray[np.uint8],
    sample: NDArray[np.int32],
    features: NDArray[np.int32],
    packed: NDArray[np.float32],
    depth: int,
    bins: int,
    l2: np.float32,
    min_rows: int,
) -> tuple[NDArray[np.int16], NDArray[np.uint8], NDArray[np.int32]]:
    """Split level by level, every leaf at once, for the largest Σ_leaves Σ_s G_s² / (H + l2) of sketched gradients.

    A leaf counts as unsplit where a split leaves fewer than `min_rows` on one side.

    Returns:
        Compared input (−1: the tree ended before) and bin of each level, and the leaf of each row, int32 [n].
    """
    width = packed.shape[1]
    size = width - 2
    feature, cut = np.full(depth, -1, np.int16), np.zeros(depth, np.uint8)
    leaf = np.zeros(binned.shape[1], np.int32)
    histograms = np.zeros((len(features), 2 ** max(depth - 1, 0), bins, width), np.float32)
    part = np.empty((max(histograms.shape[1] // 2, 1), bins, width), np.float32)
    listed = sample  # rows of the smaller leaf of each split; the larger one is what the leaf before it leaves over
    smaller = np.zeros(1, np.int32)
    for level in range(depth):
        count = 2**level
        best, best_input, best_bin = 0.0, -1, 0
        for j in range(len(features)):
            column, histogram = binned[features[j]], histograms[j]
            if level == 0:
                _count(histogram, column, leaf, listed, packed, 1)
            else:
                part[: count // 2] = 0.0
                _count(part, column, leaf, listed, packed, count // 2)
                for node in range(count // 2):
                    other = node + count // 2
                    for b in range(bins):
                        for s in range(width):
                            little = part[node, b, s]
                            rest = histogram[node, b, s] - little
                            histogram[node, b, s] = rest if smaller[node] == other else little
                            histogram[other, b, s] = little if smaller[node] == other else rest
            gained, where = _best_cut(histogram[:count], size, l2, min_rows)
            if gained > best:
                best, best_input, best_bin = gained, features[j], where
        if best_input < 0:
            break
        feature[level], cut[level] = best_input, best_bin
        column = binned[best_input]
        for i in range(len(leaf)):
            leaf[i] += (column[i] > best_bin) << level
        rows = np.zeros(2 * count, np.int32)
        for i in sample:
            rows[leaf[i]] += 1
        smaller = np.empty(count, np.int32)
        for node in range(count):
            smaller[node] = node if rows[node] < rows[node + count] else node + count
        chosen = np.empty(len(sample), np.int32)
        kept = 0
        for i in sample:
            if smaller[leaf[i] & (count - 1)] == leaf[i]:
                chosen[kept] = i
                kept += 1
        listed = chosen[:kept]
    return feature, cut, leaf


@njit(cache=True, nogil=True, inline="always")
def _count(
    histogram: NDArray[np.float32],
    column: NDArray[np.uint8],
    leaf: NDArray[np.int32],
    rows: NDArray[np.int32],
    packed: NDArray[np.float32],
    leaves: int,
) -> None:
    """Add rows to the histogram of one input, float32 [leaves, bins, width], at the leaf's number modulo `leaves`."""
    for i in rows:
        cell, row = histogram[leaf[i] & (leaves - 1), column[i]], packed[i]
        for s in range(len(row)):
            cell[s] += row[s]


@njit(cache=True, nogil=True)
def _best_cut(histogram: NDArray[np.float32], size: int, l2: np.float32, min_rows: int) -> tuple[float, int]:
    """Gain of the best cut of one input over no split, or 0, and its bin; histogram [leaves, bins, size + 2]."""
    bins = histogram.shape[1]
    gain = np.zeros(bins - 1, np.float64)
    total, left = np.empty(size + 2, np.float32), np.empty(size + 2, np.float32)
    before = 0.0
    for node in range(len(histogram)):
        total[:] = 0.0
        for b in range(bins):
            total += histogram[node, b]
        unsplit = np.float32(0.0)
        for s in range(size):
            unsplit += total[s] * total[s]
        unsplit /= total[size] + l2
        before += unsplit
        left[:] = 0.0
        current = unsplit
        for b in range(bins - 1):
            cell = histogram[node, b]
            if cell[size + 1] > 0.0:
                for s in range(size + 2):
                    left[s] += cell[s]
                current = unsplit
                if left[size + 1] >= min_rows and total[size + 1] - left[size + 1] >= min_rows:
                    below, above = np.float32(0.0), np.float32(0.0)
                    for s in range(size):
                        below += left[s] * left[s]
                        above += (total[s] - left[s]) * (total[s] - left[s])
                    current = below / (left[size] + l2) + above / (total[size] - left[size] + l2)
            gain[b] += current
    where = int(gain.argmax())
    least = before * 1e-5 + 1e-6  # rounding is no gain
    return (gain[where] - before, where) if gain[where] - before > least else (0.0, 0)


@njit(cache=True, nogil=True)
def _leaf_values(
    leaf: NDArray[np.int32],
    sample: NDArray[np.int32],
    gradient: NDArray[np.float32],
    hessian: NDArray[np.float32],
    leaves: int,
    l2: np.float32,
) -> NDArray[np.float32]:
    """Newton step of every leaf and output, Σg / (Σh + l2), float32 [leaves, K (V+1)]."""
    top = np.zeros((leaves, gradient.shape[1]), np.float32)
    bottom = np.full((leaves, gradient.shape[1]), l2, np.float32)
    for i in sample:
        top[leaf[i]] += gradient[i]
        bottom[leaf[i]] += hessian[i]
    return top / bottom


@njit(cache=True, nogil=True)
def _walk(
    inputs: NDArray[np.float32],
    feature: NDArray[np.int16],
    threshold: NDArray[np.float32],
    leaves: NDArray[np.int8],
    scale: NDArray[np.float32],
    base: NDArray[np.float32],
) -> NDArray[np.float32]:
    out = np.empty((len(inputs), len(base)), np.float32)
    total = np.empty(len(base), np.int32)
    for row in range(len(inputs)):
        total[:] = 0
        for tree in range(len(feature)):
            leaf = 0
            for level in range(feature.shape[1]):
                leaf += (inputs[row, feature[tree, level]] >= threshold[tree, level]) << level
            for j in range(len(base)):
                total[j] += leaves[tree, leaf, j]
        for j in range(len(base)):
            out[row, j] = base[j] + scale[j] * total[j]
    return out


def _leaf_of(binned: NDArray[np.uint8], feature: NDArray[np.int16], cut: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The leaf of each row, int64 [n]."""
    leaf = np.zeros(binned.shape[1], np.int64)
    for level in np.flatnonzero(feature >= 0):
        leaf += (binned[feature[level]] > cut[level]).astype(np.int64) << level
    return leaf


def _ensemble(
    trees: list[tuple[NDArray[np.int16], NDArray[np.uint8], NDArray[np.float32]]],
    edges: list[NDArray[np.float32]],
    base: NDArray[np.float32],
    depth: int,
) -> TreeEnsemble:
    """Trees as one ensemble, bins as thresholds, leaves as bytes."""
    values = np.array([values for _, _, values in trees], np.float32).reshape(len(trees), 2**depth, len(base))
    scale = np.maximum(np.abs(values).max(axis=(0, 1), initial=0.0) / 127.0, 1e-12).astype(np.float32)
    feature = np.array([feature for feature, _, _ in trees], np.int16).reshape(len(trees), depth)
    threshold = np.full(feature.shape, UNREACHED, np.float32)
    for tree, level in np.argwhere(feature >= 0):
        threshold[tree, level] = edges[feature[tree, level]][trees[tree][1][level]]
    return TreeEnsemble(np.maximum(feature, 0), threshold, np.round(values / scale).astype(np.int8), scale, base)
