"""Encoded input rows without missing values, and a ridge on log tokens.

A category (workflow type with agent; model) is encoded as the mean log(1 + tokens) of its training rows, shrunk towards
its parent group by `PRIOR_ROWS` rows. The means include the row's own label: out-of-fold means would differ between
folds, inversely to the labels of the fold, and trees would infer the fold from them (`estimator.py`).

Lengths are often multiplicative (by model, by prompt size), so a linear model of their logarithm fits, also where trees
cannot separate prompts. Its prediction is an input of the trees; a quick trial on held-out tasks decides whether they
train on its residuals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.datasets.tasks import task_folds
from presage.features.history import PROGRESS
from presage.features.rows import PROMPT, LabelledRows
from presage.predictors.common.artefact import Tensors
from presage.predictors.common.threads import lightgbm_settings, lightgbm_threads

MISSING: Final = np.float32(-2.0)
"""Encodes a missing number; it lies below all counts and all sketch components."""
PRIOR_ROWS: Final = 20.0
CATEGORIES: Final = 6


@dataclass(frozen=True, eq=False)
class InputEncoding(Tensors):
    """Target means of T workflow types, V agents and M models.

    Attributes:
        agents: float32 [T + 1, V + 1], of each agent in each workflow type.
        types: float32 [T + 1].
        models: float32 [M + 2], mean residual of a model's rows given workflow type and agent.
    """

    agents: NDArray[np.float32]
    types: NDArray[np.float32]
    models: NDArray[np.float32]

    @classmethod
    def fit(cls, rows: LabelledRows, labels: NDArray[np.float64], models: int) -> InputEncoding:
        """Fit the means of labelled rows; `labels` float64 [n], `models` is M."""
        shape = len(rows.vocabulary.workflow_types) + 1, len(rows.vocabulary.agents) + 1
        common = labels.mean()
        types = _means(rows.workflow_type, labels, np.full(shape[0], common))
        cell = rows.workflow_type * shape[1] + rows.agent
        agents = _means(cell, labels, np.repeat(types, shape[1]))
        above = _means(rows.model, labels - agents[cell], np.zeros(models + 2))
        return cls(*(a.astype(np.float32) for a in (agents.reshape(shape), types, above)))

    def inputs(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Encoded categories and numbers, float32 [n, CATEGORIES + F], finite."""
        model = np.minimum(rows.model, len(self.models) - 1)
        means = self.agents[rows.workflow_type, rows.agent], self.types[rows.workflow_type], self.models[model]
        categories = np.stack([*means, rows.workflow_type, rows.agent, model], axis=1, dtype=np.float32)
        joined = np.concatenate([categories, rows.numbers], axis=1, dtype=np.float32)
        joined[np.isnan(joined)] = MISSING
        return joined

    def one(self, workflow_type: int, agent: int, model: int, numbers: NDArray[np.float32]) -> NDArray[np.float32]:
        """The same for a single row, float32 [CATEGORIES + F]."""
        out = np.empty(CATEGORIES + len(numbers), np.float32)
        model = min(model, len(self.models) - 1)
        means = self.agents[workflow_type, agent], self.types[workflow_type], self.models[model]
        out[:CATEGORIES] = (*means, workflow_type, agent, model)
        out[CATEGORIES:] = numbers
        out[np.isnan(out)] = MISSING
        return out


def _means(index: NDArray[np.int32], labels: NDArray[np.float64], prior: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of each category, shrunk towards `prior` with the weight of PRIOR_ROWS rows; float64, shape of `prior`."""
    counts = np.bincount(index, minlength=len(prior))
    sums = np.bincount(index, weights=labels, minlength=len(prior))
    return np.asarray((sums + PRIOR_ROWS * prior) / (counts + PRIOR_ROWS))


_INDICES: Final = 3
"""Columns from here to CATEGORIES are category indices, which a linear model ignores."""
_COUNTS: Final = CATEGORIES + len(PROMPT) + len(PROGRESS)
"""Columns from CATEGORIES to here are counts."""
_ALPHA: Final = 3.0
_TRIAL_FOLDS: Final = 4
_TRIAL_ROUNDS: Final = 60
_TRIAL_ROWS: Final = 5_000
"""Most training rows of a trial; more rows change the outcome only where candidates are close."""
_TRIAL: Final = {
    "objective": "quantile",
    "learning_rate": 0.1,
    "num_leaves": 24,
    "min_child_samples": 30,
    "feature_fraction": 0.3,
}


@dataclass(frozen=True, eq=False)
class LogLine(Tensors):
    """Linear model of log(1 + tokens) on inputs with counts as log(1 + x).

    Attributes:
        usual: float32 [D], mean of each transformed input; replaces missing numbers.
        bounds: float32 [3], the intercept, and the least and the greatest prediction.
    """

    weights: NDArray[np.float32]
    usual: NDArray[np.float32]
    bounds: NDArray[np.float32]

    @classmethod
    def fit(cls, inputs: NDArray[np.float32], labels: NDArray[np.float64]) -> Self:
        """Fit on inputs float32 [n, D] of `InputEncoding` and labels float64 [n]."""
        from sklearn.linear_model import Ridge

        present = inputs != MISSING
        smooth = _smooth(inputs, np.zeros(inputs.shape[1], np.float32)).astype(np.float64)
        usual = (smooth.sum(axis=0) / np.maximum(present.sum(axis=0), 1)).astype(np.float32)
        smooth = np.where(present, smooth, usual)
        spread = smooth.std(axis=0)
        spread[spread < 1e-9] = np.inf  # a constant input gets no weight
        ridge = Ridge(alpha=_ALPHA).fit(smooth / spread, labels)
        bounds = [float(ridge.intercept_), labels.min(), labels.max()]
        return cls((ridge.coef_ / spread).astype(np.float32), usual, np.array(bounds, np.float32))

    def __call__(self, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Predicted log(1 + tokens), float32 [n]; a row's prediction does not depend on the rows beside it."""
        return _predict(inputs, self.weights, self.usual, self.bounds)

    def check(self) -> None:
        """Raise ValueError unless the shapes match; compiled code does not check them."""
        if self.weights.ndim != 1 or self.usual.shape != self.weights.shape or self.bounds.shape != (3,):
            raise ValueError("shapes of line weights, means and bounds are not [D], [D] and [3]")


def line_helps(inputs: NDArray[np.float32], labels: NDArray[np.float64], rows: LabelledRows, seed: int) -> bool:
    """Whether a few boosted trees improve by training on the ridge's residuals, on a quarter of the tasks."""
    held = task_folds(rows.task, seed, _TRIAL_FOLDS) == 0
    if held.all() or not held.any():
        return False
    line = LogLine.fit(inputs[~held], labels[~held])(inputs)
    plain, above = trials(inputs, [(labels, 0.5), (labels - line, 0.5)], ~held, held, seed)
    return bool(above.mean() < plain.mean())


def trials(
    inputs: NDArray[np.float32],
    targets: Sequence[tuple[NDArray[np.float64], float]],
    learning: NDArray[np.bool_],
    judged: NDArray[np.bool_],
    seed: int,
) -> list[NDArray[np.float64]]:
    """Pinball losses of a few boosted trees on the rows `judged`, float64 [m] each, trained on the rows `learning`.

    Each target is labels, float64 [n], and a quantile.
    """
    import lightgbm

    drawn = np.flatnonzero(learning)
    if len(drawn) > _TRIAL_ROWS:
        drawn = np.sort(np.random.default_rng(seed).choice(drawn, _TRIAL_ROWS, replace=False))
    threads = lightgbm_threads(len(drawn))
    data = lightgbm.Dataset(inputs[drawn], params={"verbosity": -1})
    shown, losses = inputs[judged], []
    for labels, quantile in targets:
        data.set_label(labels[drawn])
        settings = {**_TRIAL, **lightgbm_settings(seed, threads), "alpha": quantile}
        trees = lightgbm.train(settings, data, num_boost_round=_TRIAL_ROUNDS)
        above = labels[judged] - np.asarray(trees.predict(shown, num_threads=threads), np.float64)
        losses.append(np.maximum(quantile * above, (quantile - 1.0) * above))
    return losses


def with_line(inputs: NDArray[np.float32], predicted: NDArray[np.float32]) -> NDArray[np.float32]:
    """Inputs [..., D] with the ridge's predictions [...] appended, float32 [..., D + 1]."""
    return np.concatenate([inputs, predicted[..., None]], axis=-1, dtype=np.float32)


@njit(cache=True, nogil=True)
def _smooth(inputs: NDArray[np.float32], usual: NDArray[np.float32]) -> NDArray[np.float32]:
    """Inputs as the ridge sums them, float32 [n, D]."""
    smooth = np.empty_like(inputs)
    for row in range(len(inputs)):
        for column in range(inputs.shape[1]):
            x = inputs[row, column]
            if _INDICES <= column < CATEGORIES:
                x = np.float32(0.0)
            elif x == MISSING:
                x = usual[column]
            elif CATEGORIES <= column < _COUNTS:
                x = np.log1p(x)
            smooth[row, column] = x
    return smooth


@njit(cache=True, nogil=True)
def _predict(
    inputs: NDArray[np.float32],
    weights: NDArray[np.float32],
    usual: NDArray[np.float32],
    bounds: NDArray[np.float32],
) -> NDArray[np.float32]:
    # A loop instead of BLAS, whose sums depend on the number of rows.
    smooth = _smooth(inputs, usual)
    out = np.empty(len(inputs), np.float32)
    for row in range(len(inputs)):
        total = np.float64(bounds[0])
        for column in range(len(weights)):
            total += smooth[row, column] * weights[column]
        out[row] = min(max(total, bounds[1]), bounds[2])
    return out
