"""The context-growth predictor: quantiles of the tokens by which the context of a workflow will exceed its prompt.

Ours: remaining lengths with a second label. The context of a step is its prompt and its output, and a forecast counts
from the prompt of the step that begins, so that the model need not learn how large that is. With the target
"final-context" it is the growth to the largest context that is still to come, which admission counts a workflow by;
with "next-context" that to the next step.

Contexts end at the window of a model, which the logarithm of a growth does not know. So no forecast exceeds the largest
context of the workflow type in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.features.rows import PROMPT_COLUMN, LabelledRows, join_rows
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.quantiles.choice import QuantileConfig

KIND: Final = "context-growth"


class TypeContexts(NamedTuple):
    """Of a workflow type in training: mean steps of a workflow and tokens that a step adds, and the largest context."""

    steps: float
    growth: float
    largest: float


@dataclass(frozen=True)
class ContextGrowthConfig(QuantileConfig):
    """Settings of a context-growth predictor; a low quantile too, since admission counts by the mean."""

    quantiles: tuple[float, ...] = (0.1, 0.5, 0.9, 0.99)


class ContextGrowthPredictor(RemainingLengthPredictor):
    """Forecasts the growth of contexts; create one with `fit` or `load`."""

    kind = KIND
    settings = ContextGrowthConfig
    _types: NDArray[np.float64]
    """`TypeContexts` of each workflow type and of all, float64 [T + 1, 3]."""

    def of_type(self, workflow_type: str) -> TypeContexts:
        """What training saw of a workflow type; of all, if it never saw the type."""
        return TypeContexts(*self._types[self.vocabulary.workflow_type(workflow_type)].tolist())

    def predict(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Tokens float32 [n, Q], not decreasing along Q."""
        most = self._most(rows.workflow_type, rows.numbers[:, PROMPT_COLUMN])
        return np.minimum(super().predict(rows), most[:, None])

    def predict_one(
        self, workflow_type: int, agent: int, model: int, numbers: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """The same for a single row, float32 [Q]; numbers float32 [F]."""
        tokens = super().predict_one(workflow_type, agent, model, numbers)
        return np.minimum(tokens, self._most(np.array([workflow_type]), numbers[PROMPT_COLUMN : PROMPT_COLUMN + 1]))

    def _most(self, workflow_type: NDArray[Any], prompts: NDArray[np.float32]) -> NDArray[np.float32]:
        """The most tokens by which contexts of these types can exceed the prompts, NaN where unknown, float32 [n]."""
        largest = self._types[workflow_type, 2] - np.nan_to_num(prompts)
        return np.asarray(np.maximum(largest, 0.0), np.float32)

    def _learn(self, train: LabelledRows, selection: LabelledRows) -> None:
        self._types = _types(join_rows(train, selection))

    def _tensors(self) -> dict[str, dict[str, NDArray[Any]]]:
        return {**super()._tensors(), "contexts": {"types": self._types}}

    def _take(self, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
        super()._take(config, tensors)
        self._types = tensors["contexts/types"].astype(np.float64)
        if self._types.shape != (len(self.vocabulary.workflow_types) + 1, 3) or not (self._types >= 0).all():
            raise ValueError("the contexts are not three numbers of each workflow type, 0 or more")


def _types(rows: LabelledRows) -> NDArray[np.float64]:
    """`TypeContexts` by workflow type and of all, float64 [T + 1, 3]; a type without known ones has those of all.

    Workflows that were cut count for the growth; for the steps only if all were.
    """
    _, first, workflow, steps = np.unique(rows.workflow, return_index=True, return_inverse=True, return_counts=True)
    prompts = rows.numbers[:, PROMPT_COLUMN].astype(np.float64)
    most, cut = np.full(len(first), -np.inf), np.zeros(len(first), bool)
    np.fmax.at(most, workflow, prompts)
    np.logical_or.at(cut, workflow, rows.lower_bound)
    grown, types = np.maximum(most - prompts[first], 0.0), rows.workflow_type[first]

    def means(amount: NDArray[Any], number: NDArray[Any], is_known: NDArray[np.bool_]) -> NDArray[np.float64]:
        of_types = len(rows.vocabulary.workflow_types) + 1
        above, below = (np.bincount(types[is_known], values[is_known], of_types) for values in (amount, number))
        above[-1], below[-1] = above.sum(), below.sum()
        none = below == 0
        above[none], below[none] = above[-1], below[-1]
        return np.asarray(above / np.maximum(below, 1.0))

    whole = means(steps, np.ones(len(first)), cut if cut.all() else ~cut)
    largest = np.zeros(len(whole))
    np.fmax.at(largest, rows.workflow_type, prompts + rows.label)
    largest = np.where(largest > 0, largest, largest.max())
    return np.stack([whole, means(grown, steps - 1, np.isfinite(grown)), largest], axis=1)
