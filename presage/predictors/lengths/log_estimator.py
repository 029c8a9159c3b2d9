"""What the forest and the boosted trees share: inputs, a line to start from, and conformal calibration.

A subclass reads what the line says as one more input. Where a trial shows that it helps, it learns only what the line
leaves of log(1 + tokens). It says, for a row, where each quantile lies and how much doubt there is; the
calibration makes the quantiles cover.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from presage.features.lengths import LengthRows
from presage.predictors.lengths.conformal import Conformal
from presage.predictors.lengths.estimator import labels_of, rising
from presage.predictors.lengths.inputs import InputEncoding, fit_inputs
from presage.predictors.lengths.linear import LogLine, line_helps, out_of_fold, with_line

FLOOR: Final = 100
"""Calibration rows a workflow type needs for quantiles of its own; quantiles beyond .99 need more."""
MIN_EVIDENCE: Final = 5
"""Training rows of an agent in a workflow type below which its quantiles are those of an unknown one."""
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

    def __init__(self, seed: int = 0, floor: int = FLOOR, min_evidence: int = MIN_EVIDENCE) -> None:
        self.seed = seed
        self.floor = floor
        self.min_evidence = min_evidence

    def fit(self, train: LengthRows, calibration: LengthRows, quantiles: Sequence[float]) -> Self:
        """Learns from `train`, calibrates on `calibration`; rows without a label, or with a bound, teach nothing.

        Raises:
            TraceError: no training row has a label.
        """
        self.quantiles = tuple(quantiles)
        rows, labels = labels_of(train)
        models = int(max(train.model.max(), 0)) + 1
        self.evidence = _evidence(rows)
        self._encoding, inputs = fit_inputs(rows, labels, models, self.seed)
        self._line = LogLine.fit(inputs, labels)
        self._start = np.float32(line_helps(inputs, labels, rows, self.seed))
        self._inputs, self._labels = with_line(inputs, out_of_fold(inputs, labels, rows, self.seed)), labels
        self._learn(self._inputs, labels - self._start * self._line(inputs), rows)
        held = calibration.take(calibration.labelled)
        location, scale = self._bands(self._encoding.inputs(held))
        above = np.log1p(held.remaining.astype(np.float64))[:, None] - location
        scores = np.asarray(above / scale[:, None], np.float64)
        types = len(train.vocabulary.workflow_types)
        self.conformal = Conformal.fit(scores, held.workflow_type, types, self.quantiles, self.floor, held.task)
        return self

    def learn_again(self, calibration: LengthRows) -> None:
        """Learns the trees once more, on the calibration rows too; the calibration stays that of the first time.

        More rows make trees better, not worse, so quantiles that covered still do, if anything by a little more.
        """
        held = calibration.take(calibration.labelled)
        # These rows had no part in the means of categories: they are out of fold as they are.
        more = self._encoding.inputs(held)
        inputs = np.concatenate([self._inputs, with_line(more, self._line(more))])
        labels = np.concatenate([self._labels, np.log1p(held.remaining.astype(np.float64))])
        self._learn_again(inputs, labels - self._start * self._line(inputs[:, :-1]))
        self.evidence = self.evidence + _evidence(held)

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
    def _learn(self, inputs: NDArray[np.float32], above: NDArray[np.float64], rows: LengthRows) -> None:
        """Learns what labels have above the line, float64 [n]."""

    @abstractmethod
    def _learn_again(self, inputs: NDArray[np.float32], above: NDArray[np.float64]) -> None:
        """Learns where quantiles lie on more rows; the doubt stays comparable to that of the calibration."""

    @abstractmethod
    def _above_line(self, inputs: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Quantiles above the line, float32 [n, Q], and the doubt, float32 [n]."""

    @abstractmethod
    def _own_tensors(self) -> dict[str, NDArray[Any]]: ...

    @abstractmethod
    def _hold(self, tensors: Mapping[str, NDArray[Any]], inputs: int) -> None: ...


def _evidence(rows: LengthRows) -> NDArray[np.int32]:
    """Rows of each agent in each workflow type, int32 [T + 1, V + 1]."""
    shape = len(rows.vocabulary.workflow_types) + 1, len(rows.vocabulary.agents) + 1
    cell = np.ravel_multi_index((rows.workflow_type, rows.agent), shape)
    return np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape).astype(np.int32)
