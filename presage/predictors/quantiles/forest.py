"""The quantile random forest of Chimera §3.4 as flat arrays.

A prediction is a quantile of all labels in the leaves that a row falls into, with multiplicity and linear
interpolation, as quantile-forest computes it with `max_samples_leaf=None`. quantile-forest grows the trees. Compiled
code finds the leaves of a row, and a counting sort orders their labels.

Unlike in the paper, each third of the trees is trained on two thirds of the tasks: the predictions of the others for a
task calibrate the whole forest at no further cost (Gupta, Kuchibhotla & Ramdas, "Nested conformal prediction and
quantile out-of-bag ensemble methods", Pattern Recognition 2022, where bags draw rows).

A leaf stores the ranks of its labels among all distinct labels: two bytes an entry, four beyond 65,536 labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.predictors.common.threads import side_by_side
from presage.predictors.quantiles.estimator import Bands, Fold, LogEstimator, Whole
from presage.predictors.quantiles.trees import FlatTrees, Tree, find_leaves, flatten

FOLD_TREES: Final = 16
LEAF_ROWS: Final = 8
INPUT_SHARE: Final = 0.4
_BUCKETS: Final = 1024


Grown = tuple[Any, NDArray[np.int64]]
"""A scikit-learn tree (`tree_`), and the index of every row it drew."""


@dataclass(frozen=True, eq=False)
class FlatForest:
    """Trees and the labels in their leaves.

    Attributes:
        starts: int32 [leaves + 1], leaf l has the entries starts[l]:starts[l + 1].
        entries: uint16 or uint32, ranks of labels.
        values: float32 [ranks], distinct labels, rising.
    """

    trees: FlatTrees
    starts: NDArray[np.int32]
    entries: NDArray[np.unsignedinteger[Any]]
    values: NDArray[np.float32]

    @classmethod
    def of(cls, grown: Sequence[Grown], inputs: NDArray[np.float32], labels: NDArray[np.float64]) -> Self:
        """Convert scikit-learn trees with the inputs [n, D] and labels [n] of the rows they drew."""
        flat, numbers = flatten(
            [
                Tree(np.where(t.children_left < 0, -1, t.feature), t.threshold, t.children_left, t.children_right)
                for t, _ in grown
            ]
        )
        leaves = int((flat.feature < 0).sum())
        values, rank = np.unique(labels.astype(np.float32), return_inverse=True)
        # A row that a tree drew twice is in its leaf twice.
        leaf = np.concatenate(
            [number[tree.apply(inputs[rows])] for number, (tree, rows) in zip(numbers, grown, strict=True)]
        )
        entries = np.concatenate([rank[rows] for _, rows in grown])[np.argsort(leaf, kind="stable")]
        starts = np.concatenate([[0], np.cumsum(np.bincount(leaf, minlength=leaves))]).astype(np.int32)
        narrow: Any = np.uint16 if len(values) <= 2**16 else np.uint32
        return cls(flat, starts, entries.astype(narrow), values)

    @classmethod
    def joined(cls, forests: Sequence[Self]) -> Self:
        """One forest of all their trees."""
        trees = FlatTrees.joined([forest.trees for forest in forests])
        values = np.unique(np.concatenate([forest.values for forest in forests]))
        narrow: Any = np.uint16 if len(values) <= 2**16 else np.uint32
        entries = [np.searchsorted(values, forest.values)[forest.entries] for forest in forests]
        sizes = np.concatenate([[0], *(np.diff(forest.starts) for forest in forests)])
        return cls(trees, np.cumsum(sizes).astype(np.int32), np.concatenate(entries).astype(narrow), values)

    def quantiles(self, inputs: NDArray[np.float32], quantiles: Sequence[float]) -> NDArray[np.float32]:
        """Quantiles of the labels in the leaves of each row, float32 [n, Q], from inputs float32 [n, D]."""
        t = self.trees
        return _quantiles(
            inputs, t.feature, t.threshold, t.child, t.roots, self.starts, self.entries, self.values,
            np.asarray(quantiles, np.float64),
        )  # fmt: skip

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """Tensors of the artefact."""
        return {**self.trees.to_tensors(), "starts": self.starts, "entries": self.entries, "values": self.values}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]], inputs: int) -> Self:
        """Inverse of `to_tensors`; raises KeyError or ValueError if a tensor is missing, or a walk would leave it."""
        forest = cls(FlatTrees.from_tensors(tensors), *(tensors[name] for name in ("starts", "entries", "values")))
        forest.trees.check(inputs, len(forest.starts) - 1)
        sound = (
            forest.starts[0] == 0
            and bool((np.diff(forest.starts) > 0).all())
            and forest.starts[-1] == len(forest.entries)
            and int(forest.entries.max()) < len(forest.values)
        )
        if not sound:
            raise ValueError("the leaves of the forest do not hold ranks of its labels")
        return forest


class ForestQuantiles(LogEstimator):
    """Chimera's quantile random forest, trained on log tokens or on the residuals of a ridge."""

    name = "forest"
    parts: ClassVar = {"forest": FlatForest}

    def _learn(self, folds: Sequence[Fold], whole: Whole) -> list[Bands]:
        forests = side_by_side(
            lambda numbered: grow(numbered[1].inputs, numbered[1].above, self.seed + numbered[0]),
            list(enumerate(folds)),
        )
        self._learnt = {"forest": FlatForest.joined(forests)}
        return [
            _bands(np.stack([forest.quantiles(inputs, self.quantiles) for inputs in fold.shown]))
            for forest, fold in zip(forests, folds, strict=True)
        ]

    def _residual_bands(self, inputs: NDArray[np.float32]) -> Bands:
        return _bands(self._learnt["forest"].quantiles(inputs, self.quantiles))


def _bands(quantiles: NDArray[Any]) -> Bands:
    """Quantiles float32 [..., Q] as locations, and a scale of 1: the leaves already carry the spread."""
    return quantiles, np.ones(quantiles.shape[:-1], np.float32)


def grow(inputs: NDArray[np.float32], labels: NDArray[np.float64], seed: int) -> FlatForest:
    """A quantile forest of FOLD_TREES trees, on inputs [n, D] and labels [n]."""
    from quantile_forest import RandomForestQuantileRegressor

    # quantile-forest keeps one label a leaf: its table of all labels is as wide as the widest leaf, which has no bound
    # where many labels are equal. FlatForest keeps them all.
    forest = RandomForestQuantileRegressor(
        FOLD_TREES, min_samples_leaf=LEAF_ROWS, max_samples_leaf=1, max_features=INPUT_SHARE, random_state=seed
    )
    forest.fit(inputs, labels)
    drawn = zip(forest.estimators_, forest.estimators_samples_, strict=True)
    return FlatForest.of([(tree.tree_, rows) for tree, rows in drawn], inputs, labels)


@njit(cache=True, nogil=True)
def _quantiles(
    inputs: NDArray[np.float32],
    feature: NDArray[np.int16],
    threshold: NDArray[np.float32],
    child: NDArray[np.int32],
    roots: NDArray[np.int32],
    starts: NDArray[np.int32],
    entries: NDArray[np.unsignedinteger[Any]],
    values: NDArray[np.float32],
    quantiles: NDArray[np.float64],
) -> NDArray[np.float32]:
    out = np.empty((len(inputs), len(quantiles)), np.float32)
    leaves = np.empty(len(roots), np.int32)
    shift = 0  # buckets of ranks by their upper bits: enough to sort nearly all, few enough to clear each time
    while len(values) >> shift > _BUCKETS:
        shift += 1
    ends = np.empty(_BUCKETS + 2, np.int32)
    gathered = np.empty(0, np.uint32)
    for row in range(len(inputs)):
        total = 0
        ends[:] = 0
        find_leaves(inputs[row], feature, threshold, child, roots, leaves)
        for leaf in leaves:
            total += starts[leaf + 1] - starts[leaf]
            for entry in range(starts[leaf], starts[leaf + 1]):
                ends[(entries[entry] >> shift) + 1] += 1
        for bucket in range(_BUCKETS + 1):
            ends[bucket + 1] += ends[bucket]
        if total > len(gathered):
            gathered = np.empty(2 * total, np.uint32)
        for leaf in leaves:
            for entry in range(starts[leaf], starts[leaf + 1]):
                bucket = entries[entry] >> shift
                gathered[ends[bucket]] = entries[entry]
                ends[bucket] += 1  # from the bucket's start to its end
        done = -1
        for q in range(len(quantiles)):
            place = quantiles[q] * (total - 1)
            low = int(place)
            high = min(low + 1, total - 1)
            for rank in (low, high):
                bucket = gathered[rank] >> shift
                if bucket != done:  # sort the few ranks of a bucket only if a quantile needs one of them
                    _sort(gathered, ends[bucket - 1] if bucket > 0 else 0, ends[bucket])
                    done = bucket
            first, second = values[gathered[low]], values[gathered[high]]
            out[row, q] = first + (place - low) * (second - first)
    return out


@njit(cache=True, nogil=True, inline="always")
def _sort(ranks: NDArray[np.uint32], begin: int, end: int) -> None:
    """Sort ranks[begin:end] in place by insertion; the slice is short."""
    for i in range(begin + 1, end):
        rank, j = ranks[i], i
        while j > begin and ranks[j - 1] > rank:
            ranks[j] = ranks[j - 1]
            j -= 1
        ranks[j] = rank
