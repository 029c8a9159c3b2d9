"""Boosted trees whose leaves are vectors: one tree moves the logits of every outcome at every horizon at once.

A multi-class booster of the usual kind grows a tree for each class and horizon: 1,500 walks for five outcomes at
three horizons. With vector leaves a hundred walks reach the same accuracy on the real traces (docs/predictor.md), few
enough for a scheduler. XGBoost grows them (`multi_strategy="multi_output_tree"`); nothing of it is kept: an ensemble
is flat arrays, walked by `kernels.py`.

The loss is the cross-entropy of each horizon's softmax, masked labels contribute nothing. Its Hessian is taken
diagonal, p (1 − p), as multi-class boosting does (Friedman 2001).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.predictors.probabilities import cross_entropy, softmax


@dataclass(frozen=True)
class BoostingConfig:
    """How trees are grown.

    Attributes:
        rounds: trees at most; the validation loss decides how many are kept.
        learning_rate: shrinkage of each tree.
        leaves: leaves a tree at most.
        depth: comparisons from root to leaf at most.
        columns: share of the inputs each split may choose from.
        rows: share of the positions each tree is grown on.
        l2: penalty on leaf values.
        min_hessian: smallest summed Hessian of a leaf, over all outcomes.
        bins: histogram bins an input.
        patience: rounds without a better validation loss before growing stops.
    """

    rounds: int = 100
    learning_rate: float = 0.15
    leaves: int = 24
    depth: int = 6
    columns: float = 0.4
    rows: float = 0.8
    l2: float = 5.0
    min_hessian: float = 3.0
    bins: int = 64
    patience: int = 15


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

    def to_tensors(self) -> dict[str, NDArray[np.generic]]:
        """Arrays by name, as an artefact keeps them."""
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
    rounds: int | None = None,
) -> TreeEnsemble:
    """Grows trees on input vectors float32 [n, F] and labels int32 [n, K] (labels outside 0..V are masked).

    With `rounds` exactly so many trees are grown and the validation rows are not looked at.
    """
    import xgboost

    horizon = outcomes.shape[1]
    width = horizon * outcome_count
    known = (outcomes >= 0) & (outcomes < outcome_count)
    target = np.zeros((len(outcomes), horizon, outcome_count), np.float32)
    row, k = np.nonzero(known)
    target[row, k, outcomes[row, k]] = 1.0
    weight = known[:, :, None].astype(np.float32)
    share = (target.sum(axis=0) + 0.5) / (target.sum(axis=(0, 2))[:, None] + 0.5 * outcome_count)
    base = np.log(share).astype(np.float32).reshape(-1)

    def gradient(logits: NDArray[np.float32], _: object) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        p = softmax(logits.reshape(-1, horizon, outcome_count))
        hessian = np.maximum(p * (1.0 - p), 1e-3) * weight + 1e-6
        return ((p - target) * weight).reshape(-1, width), hessian.reshape(-1, width)

    def matrix(values: NDArray[np.float32]) -> Any:
        data = xgboost.DMatrix(values, label=np.zeros((len(values), width), np.float32))
        data.set_base_margin(np.tile(base, (len(values), 1)))
        return data

    booster = xgboost.Booster(
        {
            "tree_method": "hist",
            "multi_strategy": "multi_output_tree",
            "grow_policy": "lossguide",
            "max_depth": config.depth,
            "max_leaves": config.leaves,
            "eta": config.learning_rate,
            "reg_lambda": config.l2,
            "min_child_weight": config.min_hessian,
            "colsample_bynode": config.columns,
            "subsample": config.rows,
            "max_bin": config.bins,
            "seed": seed,
            "base_score": 0,
            "disable_default_eval_metric": 1,
            "verbosity": 0,
        },
        [train := matrix(inputs)],
    )
    held_out = matrix(validation_inputs)
    best, best_round = np.inf, 0
    for grown in range(rounds if rounds is not None else config.rounds):
        margin = booster.predict(train, output_margin=True, training=True).reshape(len(inputs), width)
        booster.boost(train, iteration=grown, grad=(g := gradient(margin, None))[0], hess=g[1])
        if rounds is not None:
            best_round = grown + 1
            continue
        margin = booster.predict(held_out, output_margin=True).reshape(-1, horizon, outcome_count)
        loss = cross_entropy(softmax(margin), validation_outcomes)
        if loss < best:
            best, best_round = loss, grown + 1
        elif grown + 1 - best_round >= config.patience:
            break
    return _flatten(json.loads(booster.save_raw("json").decode()), best_round, base)


def _flatten(model: Mapping[str, Any], trees: int, base: NDArray[np.float32]) -> TreeEnsemble:
    """The first `trees` trees of an XGBoost model as one ensemble; siblings are laid side by side."""
    roots: list[int] = []
    feature: list[int] = []
    threshold: list[float] = []
    child: list[int] = []
    leaves: list[NDArray[np.float32]] = []
    for tree in model["learner"]["gradient_booster"]["model"]["trees"][:trees]:
        values = np.asarray(tree["leaf_weights"], np.float32).reshape(-1, len(base))
        left, right = tree["left_children"], tree["right_children"]
        roots.append(len(feature))
        feature.append(0), threshold.append(0.0), child.append(0)
        pending = [(0, roots[-1])]  # (node of XGBoost, its place here)
        while pending:
            node, place = pending.pop()
            if left[node] < 0:
                feature[place], child[place] = -1, len(leaves)
                leaves.append(values[right[node]])  # a leaf's vector stands where its right child would
                continue
            feature[place], threshold[place] = tree["split_indices"][node], tree["split_conditions"][node]
            child[place] = len(feature)
            pending += [(left[node], len(feature)), (right[node], len(feature) + 1)]
            feature += [0, 0]
            threshold += [0.0, 0.0]
            child += [0, 0]
    stacked = np.stack(leaves) if leaves else np.zeros((0, len(base)), np.float32)
    scale = np.maximum(np.abs(stacked).max(axis=0, initial=0.0) / 127.0, 1e-12).astype(np.float32)
    return TreeEnsemble(
        roots=np.array(roots, np.int32),
        feature=np.array(feature, np.int16),
        threshold=np.array(threshold, np.float32),
        child=np.array(child, np.int32),
        leaves=np.round(stacked / scale).astype(np.int8),
        scale=scale,
        base=base,
    )
