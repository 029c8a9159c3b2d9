"""Gradient-boosted trees on plain features, a baseline: LightGBM, one multi-class model for each horizon and moment.

On a few hundred real workflows this is the model to beat (LIMITS.md). It is kept out of serving by its latency, a walk
over 1,800 trees a forecast, and by its size.

A model sees the history of agents (`features/history.py`), the workflow type, the sizes known at its moment, and the
states known at its moment, cut to their first dimensions: trees gain little from more and their cost grows with each.
"""

from __future__ import annotations

from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from presage.features.history import RECENT, histories
from presage.features.moment import MOMENTS, PREFILL, Moment
from presage.features.prefixes import SIZES, Prefixes

_STATE_DIMS: Final = 64
_INPUT_SIZES: Final = [i for i, name in enumerate(SIZES) if name.startswith("input_")]


class BoostedTrees:
    """LightGBM with and without the semantic states.

    Args:
        use_states: without, the trees see ids and sizes alone.
        seed: of what rows and features each tree sees.
        threads: 0 for all cores; the forecasts do not depend on it.
    """

    def __init__(self, *, use_states: bool = True, seed: int = 0, threads: int = 0) -> None:
        self.use_states = use_states
        self.seed = seed
        self.threads = threads
        self.name = "boosted-trees" if use_states else "boosted-trees-ids"

    def fit(self, train: Prefixes, validation: Prefixes) -> Self:
        """Trains K models for each moment on `train`; `validation` is not read: the number of trees is fixed."""
        self._outcomes = train.vocabulary.outcomes
        self._dims: dict[Moment, int] = {
            moment: min(_STATE_DIMS, train.states[moment].shape[1]) if self.use_states and moment in train.states else 0
            for moment in MOMENTS
        }
        self._models: dict[Moment, list[tuple[NDArray[np.int64], Any]]] = {}
        for moment in MOMENTS:
            inputs = self._inputs(train, moment)
            self._models[moment] = [self._fit_horizon(inputs, train.outcomes[:, k]) for k in range(train.horizon)]
        return self

    def predict(self, prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        """Probabilities float32 [n, K, V+1]; an outcome that training never saw at a horizon has none."""
        inputs = self._inputs(prefixes, moment)
        found = np.zeros((prefixes.steps, len(self._models[moment]), self._outcomes), np.float32)
        for k, (classes, model) in enumerate(self._models[moment]):
            found[:, k, classes] = (
                1 / len(classes) if model is None else model.predict(inputs, num_threads=self.threads)
            )
        return found

    def _fit_horizon(self, inputs: NDArray[np.float32], outcomes: NDArray[np.int32]) -> tuple[NDArray[np.int64], Any]:
        """The outcomes seen at this horizon, and a LightGBM model over them, or None where they are equally likely:
        there is one, or none was seen and any may come."""
        import lightgbm

        rows = np.flatnonzero((outcomes >= 0) & (outcomes < self._outcomes))
        classes, labels = np.unique(outcomes[rows], return_inverse=True)
        if not len(classes):
            return np.arange(self._outcomes), None
        if len(classes) == 1:
            return classes.astype(np.int64), None
        settings = {
            "objective": "multiclass",
            "num_class": len(classes),
            "learning_rate": 0.08,
            "num_leaves": 15,
            "min_child_samples": 10,
            # Not LightGBM's defaults of 0.001 and 0: with outcomes that came a few times only its leaves run away, and
            # on two of five real traces all forecasts were lost (accuracy .28 instead of .69, NLL 20).
            "min_sum_hessian_in_leaf": 1.0,
            "lambda_l2": 1.0,
            "bagging_fraction": 0.8,
            "bagging_freq": 1,
            "feature_fraction": 0.5,
            "seed": self.seed,
            "deterministic": True,
            "force_row_wise": True,  # LightGBM otherwise times both ways and picks one: not the same on every run
            "num_threads": self.threads,
            "verbosity": -1,
        }
        categorical = [*range(RECENT), inputs.shape[1] - 1]
        data = lightgbm.Dataset(inputs[rows], labels, categorical_feature=categorical, params={"verbosity": -1})
        return classes.astype(np.int64), lightgbm.train(settings, data, num_boost_round=100)

    def _inputs(self, prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        """What is known of each step at this moment, float32 [n, F]; the workflow type is the last column."""
        known_sizes = _INPUT_SIZES if moment == PREFILL else list(range(len(SIZES)))
        history = histories(prefixes.agent, prefixes.offsets, len(prefixes.vocabulary.agents))
        history[:, :RECENT] += 1  # before the start is a category of its own; LightGBM would take -1 for missing
        columns = [history, prefixes.sizes[:, known_sizes]]
        for at in MOMENTS[: MOMENTS.index(moment) + 1]:  # in the order of time
            states = prefixes.states.get(at)
            missing = np.full((prefixes.steps, self._dims[at]), np.nan, np.float32)
            columns.append(missing if states is None else states[:, : self._dims[at]])
        columns.append(prefixes.workflow_type[prefixes.workflow, None].astype(np.float32))
        return np.concatenate(columns, axis=1)
