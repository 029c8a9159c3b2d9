"""Rows as one matrix of numbers without gaps, for trees: categories as what is usual of them.

A category (workflow type with agent; model) becomes the mean log(1 + tokens) of its training rows, drawn towards what
is common to all by `PRIOR_ROWS` rows. A category that training never saw is as usual as all are. Means are those of all
rows that are learnt from, a row's own label among them. Out of fold they would differ from fold to fold, against the
labels of the fold: trees read the fold from them, and with it what its tasks have in common, which serving turns into a
shift of every forecast (`log_estimator.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.lengths import LengthRows

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
