"""What the forest and the boosted trees share: inputs, a line to start from, and conformal calibration.

A subclass reads what the line says as one more input. Where a trial shows that it helps, it learns only what the line
leaves of log(1 + tokens). It says, for a row, where each quantile lies and how much doubt there is; the calibration
makes the quantiles cover, on what models of other tasks said of training rows and on rows set aside for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from presage.features.lengths import LengthRows, join_rows
from presage.predictors.lengths.conformal import Conformal
from presage.predictors.lengths.estimator import labels_of, rising
from presage.predictors.lengths.folds import folds_by_task, out_of_fold
from presage.predictors.lengths.inputs import CATEGORIES, FOLDS, InputEncoding, fit_inputs
from presage.predictors.lengths.linear import LogLine, line_helps, with_line

FLOOR: Final = 100
"""Rows to calibrate on a workflow type needs for quantiles of its own; quantiles beyond .99 need more."""
MIN_EVIDENCE: Final = 5
"""Training rows of an agent in a workflow type below which its quantiles are those of an unknown one."""
ERROR_FOLDS: Final = 3
"""Of tasks; what models of the other folds say of a row shows how wrong a forecast is."""
_MOST: Final = 25.0  # log of tokens: no answer is longer, and exp must not overflow


class LogEstimator(ABC):
    """A `LengthEstimator` on the logarithm. `fit` or `from_tensors` makes one that answers."""

    name: str
    quantiles: tuple[float, ...]
    conformal: Conformal
    evidence: NDArray[np.int32]
    _encoding: InputEncoding
    _line: LogLine
    _start: np.float32
    _train: LengthRows

    def __init__(self, seed: int = 0, floor: int = FLOOR, min_evidence: int = MIN_EVIDENCE) -> None:
        self.seed = seed
        self.floor = floor
        self.min_evidence = min_evidence

    def fit(self, train: LengthRows, calibration: LengthRows, quantiles: Sequence[float]) -> Self:
        """Learns from `train`, calibrates on that out of fold and on `calibration`, which may be empty.

        Rows without a label, or with a bound, teach nothing.

        Raises:
            TraceError: no training row has a label.
        """
        self.quantiles, self._train = tuple(quantiles), train
        rows, labels = labels_of(train)
        models = int(max(train.model.max(), 0)) + 1
        self.evidence = _evidence(rows)
        self._encoding, inputs = fit_inputs(rows, labels, models, self.seed)
        self._line = LogLine.fit(inputs, labels)
        self._start = np.float32(line_helps(inputs, labels, rows, self.seed))
        fold = folds_by_task(rows, FOLDS, self.seed)
        line = out_of_fold(LogLine.fit, inputs, labels, fold).astype(np.float32)
        above = labels - self._start * line
        fold = folds_by_task(rows, ERROR_FOLDS, self.seed)
        unseen = _scores(above, *self._learn(with_line(inputs, line), above, fold))
        held = calibration.take(calibration.labelled)
        fresh = _scores(np.log1p(held.remaining.astype(np.float64)), *self._bands(self._encoding.inputs(held)))
        self.conformal = Conformal.fit(
            np.concatenate([unseen, fresh]),
            np.concatenate([rows.workflow_type, held.workflow_type]),
            len(train.vocabulary.workflow_types),
            self.quantiles,
            self.floor,
            np.concatenate([rows.task, held.task + rows.task.max() + 1]),
        )
        return self

    @property
    def numbers(self) -> int:
        """F, how many numbers of a row it was fitted on."""
        return len(self._line.weights) - CATEGORIES

    def learn_again(self, calibration: LengthRows) -> None:
        """Learns everything once more, from training and calibration rows together; all calibrate, out of fold.

        Trees that learnt more rows beside the old means, line and calibration did worse at every quantile.
        """
        self.fit(join_rows(self._train, calibration), calibration.take(np.zeros(0, np.int64)), self.quantiles)

    def predict(self, rows: LengthRows) -> NDArray[np.float32]:
        """Output tokens float32 [n, Q]."""
        return self._answer(self._encoding.inputs(rows), rows.workflow_type, rows.agent)

    def predict_one(
        self, workflow_type: int, agent: int, model: int, numbers: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """The same for a single row, float32 [Q]; numbers float32 [F]."""
        inputs = self._encoding.one(workflow_type, agent, model, numbers)
        said: NDArray[np.float32] = self._answer(inputs[None], np.array([workflow_type]), np.array([agent]))[0]
        return said

    def _answer(
        self, inputs: NDArray[np.float32], workflow_type: NDArray[Any], agent: NDArray[Any]
    ) -> NDArray[np.float32]:
        location, scale = self._bands(inputs)
        # What was hardly seen is calibrated as an unknown workflow type: the widest.
        known = self.evidence[workflow_type, agent] >= self.min_evidence
        group = np.where(known, workflow_type, len(self.conformal.shifts) - 1)
        return rising(np.expm1(np.minimum(self.conformal.apply(location, scale, group), np.float32(_MOST))))

    def _bands(self, inputs: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Where each quantile lies, float32 [n, Q], and the doubt, float32 [n], above 0; on the logarithm."""
        line = self._line(inputs)
        above, scale = self._above_line(with_line(inputs, line))
        return self._start * line[:, None] + above, scale

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """As an artefact keeps it."""
        return {
            **self._encoding.to_tensors(),
            **self._line.to_tensors(),
            **self.conformal.to_tensors(),
            "evidence": self.evidence,
            "line/start": np.array(self._start),
            **self._own_tensors(),
        }

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, NDArray[Any]], quantiles: Sequence[float], min_evidence: int = MIN_EVIDENCE
    ) -> Self:
        """Inverse of `to_tensors`.

        Raises:
            KeyError, ValueError: the tensors are not those of such an estimator.
        """
        estimator = cls(min_evidence=min_evidence)
        estimator.quantiles = tuple(quantiles)
        estimator._encoding = InputEncoding.from_tensors(tensors)
        estimator._line = LogLine.from_tensors(tensors)
        estimator.conformal = Conformal.from_tensors(tensors)
        estimator.evidence = tensors["evidence"]
        if estimator.evidence.shape != estimator._encoding.agents.shape:
            raise ValueError("the evidence is of other workflow types or agents")
        if estimator.conformal.shifts.shape != (len(estimator._encoding.types), len(estimator.quantiles)):
            raise ValueError("the calibration is of other workflow types or quantiles")
        estimator._start = np.float32(tensors["line/start"])
        estimator._hold(tensors, len(estimator._line.weights) + 1)
        return estimator

    @abstractmethod
    def _learn(
        self, inputs: NDArray[np.float32], above: NDArray[np.float64], fold: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Learns what labels have above the line, float64 [n].

        Returns:
            What models that did not learn from a row's fold, int64 [n], say of it, as `_above_line`.
        """

    @abstractmethod
    def _above_line(self, inputs: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Quantiles above the line, float32 [n, Q], and the doubt, float32 [n]."""

    @abstractmethod
    def _own_tensors(self) -> dict[str, NDArray[Any]]: ...

    @abstractmethod
    def _hold(self, tensors: Mapping[str, NDArray[Any]], inputs: int) -> None: ...


def _scores(labels: NDArray[np.float64], location: NDArray[Any], scale: NDArray[Any]) -> NDArray[np.float64]:
    """How far labels lie above each location, in units of the doubt, float64 [n, Q]."""
    return np.asarray((labels[:, None] - location) / scale[:, None], np.float64)


def _evidence(rows: LengthRows) -> NDArray[np.int32]:
    """Rows of each agent in each workflow type, int32 [T + 1, V + 1]."""
    shape = len(rows.vocabulary.workflow_types) + 1, len(rows.vocabulary.agents) + 1
    cell = np.ravel_multi_index((rows.workflow_type, rows.agent), shape)
    return np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape).astype(np.int32)
