"""Gradient-boosted length estimator: LightGBM trains location and scale, compiled code walks the trees.

One ensemble predicts the location, the median of log tokens; a second one the log of its absolute out-of-fold error.
Every quantile is location + shift · scale with a shift from conformal calibration: so an upper quantile is learnt from
every row, not only from the few beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from presage.predictors.common.threads import lightgbm_settings, lightgbm_threads, side_by_side
from presage.predictors.quantiles.estimator import Bands, Fold, LogEstimator, Whole
from presage.predictors.quantiles.trees import FlatTrees, Tree, flatten, sum_of_leaves

ROUNDS: Final = 250
DOUBT_ROUNDS: Final = 60
_LEAST_SCALE: Final = 0.05
_SETTINGS: Final = {
    "learning_rate": 0.04,
    "num_leaves": 24,
    "min_child_samples": 30,
    "bagging_fraction": 0.6,
    "bagging_freq": 1,
    "feature_fraction": 0.3,
    "lambda_l2": 3.0,
    "use_missing": False,  # inputs have no missing values, and our tree walk has no default direction
}

# A single error is weak evidence of the local error size, so the scale model is small.
_SCALE_SETTINGS: Final = {"num_leaves": 6, "min_child_samples": 150}


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Boosted trees: a prediction is the sum of the leaves that a row falls into. Leaf values are float32 [leaves]."""

    trees: FlatTrees
    value: NDArray[np.float32]

    @classmethod
    def fit(
        cls,
        inputs: NDArray[np.float32],
        labels: NDArray[np.float64],
        objective: str,
        rounds: int,
        seed: int,
        **more: int,
    ) -> Self:
        """Train this many trees on inputs float32 [n, D]."""
        import lightgbm

        common = lightgbm_settings(seed, lightgbm_threads(len(labels)))
        settings = {**_SETTINGS, **common, "objective": objective, **more}
        data = lightgbm.Dataset(inputs, labels, params={"verbosity": -1})
        return cls.of(lightgbm.train(settings, data, num_boost_round=rounds))

    @classmethod
    def of(cls, booster: Any) -> Self:
        """Convert a LightGBM booster without categorical or missing inputs."""
        trees, values = [], []
        for text in booster.model_to_string().split("\nTree=")[1:]:
            fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
            leaf = np.array(fields["leaf_value"].split(), np.float64)
            inner = len(leaf) - 1
            left, right, feature, threshold = (
                np.array(fields.get(name, "").split(), dtype)
                for name, dtype in (
                    ("left_child", np.int64),
                    ("right_child", np.int64),
                    ("split_feature", np.int64),
                    ("threshold", np.float64),
                )
            )
            # LightGBM numbers leaf l as −l − 1; here leaves follow the inner nodes.
            children = [np.where(c < 0, inner - 1 - c, c) for c in (left, right)]
            none = np.full(len(leaf), -1)
            trees.append(
                Tree(
                    np.concatenate([feature, none]),
                    np.concatenate([threshold, np.zeros(len(leaf))]),
                    *(np.concatenate([c, none]) for c in children),
                )
            )
            values.append(np.concatenate([np.zeros(inner), leaf]))
        flat, numbers = flatten(trees)
        value = np.empty(int((flat.feature < 0).sum()), np.float32)
        for number, of_node in zip(numbers, values, strict=True):
            value[number[number >= 0]] = of_node[number >= 0]
        return cls(flat, value)

    def __call__(self, inputs: NDArray[np.float32]) -> NDArray[np.float64]:
        """Predictions float64 [n]."""
        t = self.trees
        return sum_of_leaves(inputs, t.feature, t.threshold, t.child, t.roots, self.value)

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """Tensors of the artefact."""
        return {**self.trees.to_tensors(), "value": self.value}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]], inputs: int) -> Self:
        """Inverse of `to_tensors`; raises KeyError or ValueError if a tensor is missing, or a walk would leave it."""
        ensemble = cls(FlatTrees.from_tensors(tensors), tensors["value"])
        ensemble.trees.check(inputs, len(ensemble.value))
        return ensemble


class BoostedQuantiles(LogEstimator):
    """LightGBM ensembles for location and scale."""

    name = "boosted"
    parts: ClassVar = {"middle": Ensemble, "doubt": Ensemble}

    def _learn(self, folds: Sequence[Fold], whole: Whole) -> list[Bands]:
        *locations, location_of_all = side_by_side(
            lambda learning: Ensemble.fit(*learning, "l1", ROUNDS, self.seed),
            [*((fold.inputs, fold.above) for fold in folds), whole],
        )
        predicted = [
            np.stack([location(inputs) for inputs in fold.shown])
            for location, fold in zip(locations, folds, strict=True)
        ]
        error = np.empty(len(whole.above))
        for location, fold in zip(predicted, folds, strict=True):
            above = np.take_along_axis(fold.left - location, fold.drawn[None], axis=0)[0]
            error[fold.inside] = np.log(np.abs(above) + _LEAST_SCALE)
        *scales, scale_of_all = side_by_side(
            lambda learning: Ensemble.fit(learning[0], learning[1], "l2", DOUBT_ROUNDS, self.seed, **_SCALE_SETTINGS),
            [*((fold.inputs, error[fold.learning]) for fold in folds), (whole.inputs, error)],
        )
        self._learnt = {"middle": location_of_all, "doubt": scale_of_all}
        return [
            self._quantiles_of(location, np.stack([scale(inputs) for inputs in fold.shown]))
            for location, scale, fold in zip(predicted, scales, folds, strict=True)
        ]

    def _residual_bands(self, inputs: NDArray[np.float32]) -> Bands:
        return self._quantiles_of(self._learnt["middle"](inputs), self._learnt["doubt"](inputs))

    def _quantiles_of(self, location: NDArray[np.float64], log_scale: NDArray[np.float64]) -> Bands:
        repeated = np.repeat(location.astype(np.float32)[..., None], len(self.quantiles), axis=-1)
        return repeated, np.exp(log_scale).astype(np.float32)
