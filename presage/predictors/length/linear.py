"""Rows as one matrix of numbers without gaps, and a ridge over it on the logarithm of lengths.

A category (workflow type with agent; model) becomes the mean log(1 + tokens) of its training rows, drawn towards what
is common to all by `PRIOR_ROWS` rows. A category that training never saw is as usual as all are. Means are those of all
rows that are learnt from, a row's own label among them. Out of fold they would differ from fold to fold, against the
labels of the fold: trees read the fold from them, and with it what its tasks have in common, which serving turns into a
shift of every forecast (`log_estimator.py`).

Lengths often multiply (a model writes so many times more, a prompt of twice the size asks for so much more), so their
logarithm adds up, and a line reaches prompts between and beyond those that trees can separate. On a synthetic process
a forest gains by starting from it. So trees always read it, and a quick trial on tasks held out decides on the start.
Alone it is a baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.datasets.tasks import task_folds
from presage.features.history import PROGRESS
from presage.features.lengths import PROMPT, LengthRows
from presage.predictors.common.threads import lightgbm_threads

MISSING: Final = np.float32(-2.0)
"""Stands for a number that is not known: below all counts and all numbers of a sketch."""
PRIOR_ROWS: Final = 20.0
CATEGORIES: Final = 6


@dataclass(frozen=True, eq=False)
class InputEncoding:
    """Fitted means of T workflow types, V agents and M models.

    Attributes:
        agents: float32 [T + 1, V + 1], of each agent in each workflow type.
        types: float32 [T + 1].
        models: float32 [M + 2], what a model's rows have above their workflow type and agent.
    """

    agents: NDArray[np.float32]
    types: NDArray[np.float32]
    models: NDArray[np.float32]

    @classmethod
    def fit(cls, rows: LengthRows, labels: NDArray[np.float64], models: int) -> InputEncoding:
        """Means of labelled rows; `labels` float64 [n], `models` is M."""
        shape = len(rows.vocabulary.workflow_types) + 1, len(rows.vocabulary.agents) + 1
        common = labels.mean()
        types = _means(rows.workflow_type, labels, np.full(shape[0], common))
        cell = rows.workflow_type * shape[1] + rows.agent
        agents = _means(cell, labels, np.repeat(types, shape[1]))
        above = _means(rows.model, labels - agents[cell], np.zeros(models + 2))
        return cls(*(a.astype(np.float32) for a in (agents.reshape(shape), types, above)))

    def categories(
        self, workflow_type: NDArray[np.int32], agent: NDArray[np.int32], model: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """float32 [n, CATEGORIES]."""
        known = np.minimum(model, len(self.models) - 1)
        return np.stack(
            [
                self.agents[workflow_type, agent],
                self.types[workflow_type],
                self.models[known],
                workflow_type,
                agent,
                known,
            ],
            axis=1,
            dtype=np.float32,
        )

    def inputs(self, rows: LengthRows) -> NDArray[np.float32]:
        """float32 [n, CATEGORIES + F], finite."""
        return _joined(self.categories(rows.workflow_type, rows.agent, rows.model), rows.numbers)

    def one(self, workflow_type: int, agent: int, model: int, numbers: NDArray[np.float32]) -> NDArray[np.float32]:
        """The same for a single row, float32 [CATEGORIES + F]."""
        out = np.empty(CATEGORIES + len(numbers), np.float32)
        model = min(model, len(self.models) - 1)
        out[:CATEGORIES] = (
            self.agents[workflow_type, agent],
            self.types[workflow_type],
            self.models[model],
            workflow_type,
            agent,
            model,
        )
        out[CATEGORIES:] = numbers
        out[np.isnan(out)] = MISSING
        return out

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """As an artefact keeps it."""
        return {"means/agents": self.agents, "means/types": self.types, "means/models": self.models}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]]) -> InputEncoding:
        """Inverse of `to_tensors`."""
        return cls(tensors["means/agents"], tensors["means/types"], tensors["means/models"])


def _means(index: NDArray[np.int32], labels: NDArray[np.float64], prior: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of each category, float64 of the shape of `prior`, with PRIOR_ROWS rows of the prior among its own."""
    counts = np.bincount(index, minlength=len(prior))
    sums = np.bincount(index, weights=labels, minlength=len(prior))
    return np.asarray((sums + PRIOR_ROWS * prior) / (counts + PRIOR_ROWS))


def _joined(categories: NDArray[np.float32], numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    joined = np.concatenate([categories, numbers], axis=1, dtype=np.float32)
    joined[np.isnan(joined)] = MISSING
    return joined


_INDICES: Final = 3
"""From here to CATEGORIES stand the bare numbers of categories: they mean nothing to a line."""
_COUNTS: Final = CATEGORIES + len(PROMPT) + len(PROGRESS)
"""From CATEGORIES to here stand counts."""
_ALPHA: Final = 3.0
_TRIAL_FOLDS: Final = 4
_TRIAL_ROUNDS: Final = 60
_TRIAL_ROWS: Final = 5_000
"""Rows a trial learns from at most; more of them change which candidate is better only where none is by much."""
_TRIAL: Final = {
    "objective": "quantile",
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
        weights: float32 [D], for inputs with counts as log(1 + x).
        usual: float32 [D], the mean of each of those: in the place of a number that is missing.
        bounds: float32 [3], what is added, and the least and the most the line may say.
    """

    weights: NDArray[np.float32]
    usual: NDArray[np.float32]
    bounds: NDArray[np.float32]

    @classmethod
    def fit(cls, inputs: NDArray[np.float32], labels: NDArray[np.float64]) -> Self:
        """Fits on inputs float32 [n, D] of `InputEncoding` and labels float64 [n]."""
        from sklearn.linear_model import Ridge

        known = inputs != MISSING
        smooth = _smooth(inputs, np.zeros(inputs.shape[1], np.float32)).astype(np.float64)
        usual = (smooth.sum(axis=0) / np.maximum(known.sum(axis=0), 1)).astype(np.float32)
        smooth = np.where(known, smooth, usual)
        spread = smooth.std(axis=0)
        spread[spread < 1e-9] = np.inf  # a constant says nothing
        ridge = Ridge(alpha=_ALPHA).fit(smooth / spread, labels)
        bounds = [float(ridge.intercept_), labels.min(), labels.max()]
        return cls((ridge.coef_ / spread).astype(np.float32), usual, np.array(bounds, np.float32))

    def __call__(self, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """log(1 + tokens) float32 [n]; one input is summed as it is among many."""
        return _predict(inputs, self.weights, self.usual, self.bounds)

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """As an artefact keeps it."""
        return {"line/weights": self.weights, "line/usual": self.usual, "line/bounds": self.bounds}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]]) -> Self:
        """Inverse of `to_tensors`.

        Raises:
            KeyError, ValueError: a tensor is missing or of another shape: compiled code walks them unchecked.
        """
        line = cls(tensors["line/weights"], tensors["line/usual"], tensors["line/bounds"])
        if line.weights.ndim != 1 or line.usual.shape != line.weights.shape or line.bounds.shape != (3,):
            raise ValueError("weights, usual numbers and bounds of the line are not [D], [D] and [3]")
        return line


def line_helps(inputs: NDArray[np.float32], labels: NDArray[np.float64], rows: LengthRows, seed: int) -> bool:
    """Whether a few boosted trees do better from a line than from nothing, on a quarter of the tasks."""
    held = task_folds(rows.task, seed, _TRIAL_FOLDS) == 0
    if held.all() or not held.any():
        return False
    line = LogLine.fit(inputs[~held], labels[~held])(inputs)
    plain, above = trials(inputs, [(labels, 0.5), (labels - line, 0.5)], ~held, held, seed)
    return bool(above.mean() < plain.mean())


def trials(
    inputs: NDArray[np.float32],
    wanted: Sequence[tuple[NDArray[np.float64], float]],
    learning: NDArray[np.bool_],
    judged: NDArray[np.bool_],
    seed: int,
) -> list[NDArray[np.float64]]:
    """Pinball losses of a few boosted trees on the rows `judged`, learnt from the rows `learning`.

    Args:
        inputs: float32 [n, D].
        wanted: of each trial the labels, float64 [n], and the quantile.
        learning, judged: bool [n].
        seed: of the rows and of the trees.

    Returns:
        Of each trial, float64 [m].
    """
    import lightgbm

    drawn = np.flatnonzero(learning)
    if len(drawn) > _TRIAL_ROWS:
        drawn = np.sort(np.random.default_rng(seed).choice(drawn, _TRIAL_ROWS, replace=False))
    threads = lightgbm_threads(len(drawn))
    data = lightgbm.Dataset(inputs[drawn], params={"verbosity": -1})
    shown, losses = inputs[judged], []
    for labels, quantile in wanted:
        data.set_label(labels[drawn])
        settings = {**_TRIAL, "alpha": quantile, "seed": seed, "num_threads": threads}
        trees = lightgbm.train(settings, data, num_boost_round=_TRIAL_ROUNDS)
        above = labels[judged] - np.asarray(trees.predict(shown, num_threads=threads), np.float64)
        losses.append(np.maximum(quantile * above, (quantile - 1.0) * above))
    return losses


def with_line(inputs: NDArray[np.float32], predicted: NDArray[np.float32]) -> NDArray[np.float32]:
    """Inputs [..., D] and what the line says of them [...], as float32 [..., D + 1]."""
    return np.concatenate([inputs, predicted[..., None]], axis=-1, dtype=np.float32)


@njit(cache=True, nogil=True)
def _smooth(inputs: NDArray[np.float32], usual: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the line adds up, float32 [n, D]."""
    smooth = np.empty_like(inputs)
    for row in range(len(inputs)):
        for at in range(inputs.shape[1]):
            x = inputs[row, at]
            if _INDICES <= at < CATEGORIES:
                x = np.float32(0.0)
            elif x == MISSING:
                x = usual[at]
            elif CATEGORIES <= at < _COUNTS:
                x = np.log1p(x)
            smooth[row, at] = x
    return smooth


@njit(cache=True, nogil=True)
def _predict(
    inputs: NDArray[np.float32],
    weights: NDArray[np.float32],
    usual: NDArray[np.float32],
    bounds: NDArray[np.float32],
) -> NDArray[np.float32]:
    # a loop and not BLAS, whose sums depend on how many rows it is given
    smooth = _smooth(inputs, usual)
    out = np.empty(len(inputs), np.float32)
    for row in range(len(inputs)):
        total = np.float64(bounds[0])
        for at in range(len(weights)):
            total += smooth[row, at] * weights[at]
        out[row] = min(max(total, bounds[1]), bounds[2])
    return out
