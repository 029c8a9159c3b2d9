"""Decision trees as flat arrays, walked by compiled code; shared by the forest and the boosted trees.

A node compares one input with a threshold: if the input is at most the threshold, the walk goes to the left child, else
to the right one, which follows it in the array. Inputs have no missing values. Libraries compare a float32 input with a
float64 threshold; the largest float32 that does not exceed the threshold decides the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.predictors.common.artefact import Tensors


@dataclass(frozen=True, eq=False)
class Tree:
    """One tree in the layout of its library, arrays [nodes], the root first.

    Attributes:
        feature: input compared, negative in a leaf.
        left, right: children; undefined in a leaf.
    """

    feature: NDArray[np.int64]
    threshold: NDArray[np.float64]
    left: NDArray[np.int64]
    right: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class FlatTrees(Tensors):
    """Several trees in one array of nodes.

    Attributes:
        feature: int16 [nodes], −1 in a leaf.
        threshold: float32 [nodes], 0 in a leaf.
        child: int32 [nodes], the left child (the right one follows it); in a leaf, its index among all leaves.
        roots: int32 [trees].
    """

    feature: NDArray[np.int16]
    threshold: NDArray[np.float32]
    child: NDArray[np.int32]
    roots: NDArray[np.int32]

    @classmethod
    def joined(cls, several: Sequence[FlatTrees]) -> FlatTrees:
        """Join trees into one array; leaves are renumbered consecutively."""
        nodes = leaves = 0
        child, roots = [], []
        for trees in several:
            inner = trees.feature >= 0
            child.append(trees.child + np.where(inner, nodes, leaves).astype(np.int32))
            roots.append(trees.roots + np.int32(nodes))
            nodes, leaves = nodes + len(inner), leaves + int((~inner).sum())
        feature, threshold = (
            np.concatenate([getattr(trees, name) for trees in several]) for name in ("feature", "threshold")
        )
        return cls(feature, threshold, np.concatenate(child), np.concatenate(roots))

    def check(self, inputs: int, leaves: int) -> None:
        """Raise ValueError unless every walk over `inputs` numbers ends in one of `leaves` leaves."""
        nodes = len(self.feature)
        inner = self.feature >= 0
        node = np.arange(nodes)
        sound = (
            self.threshold.shape == self.child.shape == (nodes,)
            and bool((self.feature < inputs).all())
            and bool(((self.roots >= 0) & (self.roots < nodes)).all())
            # children follow their parent, so that a walk cannot loop
            and bool((self.child[inner] > node[inner]).all() and (self.child[inner] < nodes - 1).all())
            and bool(((self.child[~inner] >= 0) & (self.child[~inner] < leaves)).all())
        )
        if not sound:
            raise ValueError(f"trees do not lead from {inputs} inputs to {leaves} leaves")


def flatten(trees: Sequence[Tree]) -> tuple[FlatTrees, list[NDArray[np.int64]]]:
    """Trees as one array, and for each tree the leaf index of each original node, int64 [nodes], −1 for inner nodes."""
    feature: list[NDArray[np.int16]] = []
    threshold: list[NDArray[np.float32]] = []
    child: list[NDArray[np.int32]] = []
    numbers: list[NDArray[np.int64]] = []
    roots, leaves = [], 0
    start = 0
    for tree in trees:
        order = _breadth_first(tree)  # so that siblings are adjacent
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        inner = tree.feature[order] >= 0
        number = np.full(len(order), -1, np.int64)
        number[order[~inner]] = leaves + np.arange((~inner).sum())
        feature.append(np.where(inner, tree.feature[order], -1).astype(np.int16))
        threshold.append(np.where(inner, not_above(tree.threshold[order]), 0.0).astype(np.float32))
        children = np.where(inner, place[np.where(inner, tree.left[order], 0)] + start, number[order])
        child.append(children.astype(np.int32))
        numbers.append(number)
        roots.append(start)
        leaves += int((~inner).sum())
        start += len(order)
    flat = FlatTrees(
        np.concatenate(feature), np.concatenate(threshold), np.concatenate(child), np.array(roots, np.int32)
    )
    return flat, numbers


def not_above(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """The largest float32 that does not exceed each value."""
    near = values.astype(np.float32)
    return np.where(near.astype(np.float64) > values, np.nextafter(near, np.float32(-np.inf)), near)


def _breadth_first(tree: Tree) -> NDArray[np.int64]:
    level, levels = np.zeros(1, np.int64), []
    while len(level):
        levels.append(level)
        inner = level[tree.feature[level] >= 0]
        level = np.stack([tree.left[inner], tree.right[inner]], axis=1).reshape(-1)
    return np.concatenate(levels)


@njit(cache=True, nogil=True, inline="always")
def find_leaves(
    x: NDArray[np.float32],
    feature: NDArray[np.int16],
    threshold: NDArray[np.float32],
    child: NDArray[np.int32],
    roots: NDArray[np.int32],
    out: NDArray[np.int32],
) -> None:
    """The leaf index of inputs float32 [F] in every tree, int32 [trees].

    Four trees are walked side by side, so that the memory latency of one overlaps with the others.
    """
    trees = len(roots)
    for first in range(0, trees, 4):
        a = roots[first]
        b = roots[min(first + 1, trees - 1)]
        c = roots[min(first + 2, trees - 1)]
        d = roots[min(first + 3, trees - 1)]
        while True:
            feature_a, feature_b, feature_c, feature_d = feature[a], feature[b], feature[c], feature[d]
            if feature_a < 0 and feature_b < 0 and feature_c < 0 and feature_d < 0:
                break
            a = child[a] + (x[feature_a] > threshold[a]) if feature_a >= 0 else a
            b = child[b] + (x[feature_b] > threshold[b]) if feature_b >= 0 else b
            c = child[c] + (x[feature_c] > threshold[c]) if feature_c >= 0 else c
            d = child[d] + (x[feature_d] > threshold[d]) if feature_d >= 0 else d
        out[first] = child[a]
        if first + 1 < trees:
            out[first + 1] = child[b]
        if first + 2 < trees:
            out[first + 2] = child[c]
        if first + 3 < trees:
            out[first + 3] = child[d]


@njit(cache=True, nogil=True)
def sum_of_leaves(
    inputs: NDArray[np.float32],
    feature: NDArray[np.int16],
    threshold: NDArray[np.float32],
    child: NDArray[np.int32],
    roots: NDArray[np.int32],
    value: NDArray[np.float32],
) -> NDArray[np.float64]:
    """Predictions of boosted trees for inputs float32 [n, F], float64 [n]; leaf values are float32 [leaves]."""
    out = np.zeros(len(inputs))
    leaves = np.empty(len(roots), np.int32)
    for row in range(len(inputs)):
        find_leaves(inputs[row], feature, threshold, child, roots, leaves)
        for leaf in leaves:
            out[row] += value[leaf]
    return out
