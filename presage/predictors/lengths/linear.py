"""A ridge on the logarithm of lengths: what trees read, what they may start from, and alone a baseline.

Lengths often multiply (a model writes so many times more, a prompt of twice the size asks for so much more), so their
logarithm adds up, and a line reaches prompts between and beyond those that trees can tell apart. On a known law
a forest gains by starting from it, on real traces it lost by that and gained by reading it as one more input. So trees
always read it, out of fold, and a quick trial on tasks held out decides on the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from presage.features.lengths import PROMPT, LengthRows
from presage.features.progress import PROGRESS
from presage.predictors.lengths.inputs import CATEGORIES, FOLDS, MISSING, folds_by_task

_INDICES: Final = slice(3, CATEGORIES)  # the bare numbers of categories mean nothing to a line
_COUNTS: Final = slice(CATEGORIES, CATEGORIES + len(PROMPT) + len(PROGRESS))
_ALPHA: Final = 3.0
_TRIAL_FOLDS: Final = 4
_TRIAL_ROUNDS: Final = 60
_TRIAL: Final = {
    "objective": "l1",
    "learning_rate": 0.1,
    "num_leaves": 24,
    "min_child_samples": 30,
    "feature_fraction": 0.3,
    "deterministic": True,
    "force_row_wise": True,  # LightGBM otherwise times both ways and picks one: not the same on every run
    "verbosity": -1,
}


@dataclass(frozen=True, eq=False)
class LogLine:
    """log(1 + tokens) as a weighted sum.

    Attributes:
        weights: float32 [D], for inputs with counts as log(1 + x) and 0 where a number is missing.
        bounds: float32 [3], what is added, and the least and the most the line may say.
    """

    weights: NDArray[np.float32]
    bounds: NDArray[np.float32]

    @classmethod
    def fit(cls, inputs: NDArray[np.float32], labels: NDArray[np.float64]) -> Self:
        """Fits on inputs float32 [n, D] of `InputEncoding` and labels float64 [n]."""
        from sklearn.linear_model import Ridge

        smooth = _smooth(inputs).astype(np.float64)
        spread = smooth.std(axis=0)
        spread[spread < 1e-9] = np.inf  # a constant says nothing
        ridge = Ridge(alpha=_ALPHA).fit(smooth / spread, labels)
        bounds = [float(ridge.intercept_), labels.min(), labels.max()]
        return cls((ridge.coef_ / spread).astype(np.float32), np.array(bounds, np.float32))

    def __call__(self, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """log(1 + tokens) float32 [n]; one input is summed as it is among many."""
        base, least, most = self.bounds
        # einsum and not BLAS, whose sums depend on how many rows it is given
        said = np.einsum("nd,d->n", _smooth(inputs), self.weights) + base
        return np.asarray(np.clip(said, least, most), np.float32)

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """As an artefact keeps it."""
        return {"line/weights": self.weights, "line/bounds": self.bounds}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]]) -> Self:
        """Inverse of `to_tensors`."""
        return cls(tensors["line/weights"], tensors["line/bounds"])


def line_helps(inputs: NDArray[np.float32], labels: NDArray[np.float64], rows: LengthRows, seed: int) -> bool:
    """Whether a few boosted trees do better from a line than from nothing, on a quarter of the tasks."""
    import lightgbm

    held = folds_by_task(rows, _TRIAL_FOLDS, seed) == 0
    if held.all() or not held.any():
        return False
    line = LogLine.fit(inputs[~held], labels[~held])(inputs)
    errors = []
    for base in (np.zeros_like(line), line):
        data = lightgbm.Dataset(inputs[~held], (labels - base)[~held], params={"verbosity": -1})
        trees = lightgbm.train({**_TRIAL, "seed": seed}, data, num_boost_round=_TRIAL_ROUNDS)
        errors.append(np.abs(trees.predict(inputs[held]) + base[held] - labels[held]).mean())
    return bool(errors[1] < errors[0])


def out_of_fold(
    inputs: NDArray[np.float32], labels: NDArray[np.float64], rows: LengthRows, seed: int
) -> NDArray[np.float32]:
    """What a line fitted on other tasks says of each row, float32 [n]; of a single task, its own."""
    fold = folds_by_task(rows, FOLDS, seed)
    said = np.empty(len(inputs), np.float32)
    for number in np.unique(fold):
        inside, others = fold == number, fold != number
        learning = others if others.any() else inside
        said[inside] = LogLine.fit(inputs[learning], labels[learning])(inputs[inside])
    return said


def with_line(inputs: NDArray[np.float32], said: NDArray[np.float32]) -> NDArray[np.float32]:
    """Inputs [n, D] and what the line says of them [n], as float32 [n, D + 1]."""
    return np.concatenate([inputs, said[:, None]], axis=1, dtype=np.float32)


def _smooth(inputs: NDArray[np.float32]) -> NDArray[np.float32]:
    smooth = inputs.copy()
    smooth[smooth == MISSING] = 0.0
    smooth[:, _INDICES] = 0.0
    smooth[:, _COUNTS] = np.log1p(smooth[:, _COUNTS])
    return smooth
