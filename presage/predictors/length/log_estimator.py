"""What the forest, the boosted trees and the ridge share: inputs, a line to start from, and conformal calibration.

A subclass reads what the line says as one more input. Where a trial shows that it helps, it learns only what the line
leaves of log(1 + tokens). It says, for a row, where each quantile lies and how much doubt there is; the calibration
makes the quantiles cover, on forecasts of training rows by models of other tasks and on rows set aside for it.

A model of other tasks is one from end to end: its means of categories and its line learnt nothing of the fold either,
and are one and the same for all rows it learns from. (Means and lines out of fold, row by row, showed trees the fold of
a row: the folds' own coverage was right, and that of fresh tasks anything from .26 to .79 at the median.)

Rows are learnt under the input profiles they will have when serving: each row under one, drawn at random, while every
profile is calibrated on all rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from presage.datasets.tasks import parts, task_folds
from presage.errors import TraceError
from presage.features.input_profiles import Sources
from presage.features.lengths import LEARNT_PROFILES, LengthRows, join_rows, profiles_of
from presage.predictors.length.conformal import Conformal
from presage.predictors.length.linear import CATEGORIES, InputEncoding, LogLine, line_helps, with_line


class LengthEstimator(Protocol):
    """Quantiles of how many tokens are left, from rows alone."""

    name: str

    def fit(self, train: LengthRows, calibration: LengthRows, quantiles: Sequence[float]) -> Self:
        """Learns from `train`; `calibration` (other tasks) makes its quantiles cover. Quantiles rise, in (0, 1)."""
        ...

    def predict(self, rows: LengthRows) -> NDArray[np.float32]:
        """Output tokens float32 [n, Q], not falling along Q, 0 or more."""
        ...


def labels_of(rows: LengthRows) -> tuple[LengthRows, NDArray[np.float64]]:
    """The rows whose label is known, and log(1 + tokens), float64 [m]. Bounds of cut workflows are no labels.

    Raises:
        TraceError: no label is known.
    """
    labelled = rows.take(rows.labelled)
    if not len(labelled):
        raise TraceError(
            f"none of {len(rows)} LLM steps has a known number of tokens to learn from ({int(rows.lower_bound.sum())} "
            "are of workflows that were cut): output_tokens is wanted on every LLM step of complete workflows"
        )
    return labelled, np.log1p(labelled.remaining.astype(np.float64))


def rising(tokens: NDArray[np.float32]) -> NDArray[np.float32]:
    """Quantiles made to neither fall along the last axis nor below 0."""
    return np.maximum.accumulate(np.maximum(tokens, np.float32(0.0)), axis=-1)


FLOOR: Final = 100
"""Rows to calibrate on a workflow type needs for quantiles of its own; quantiles beyond .99 need more."""
MIN_EVIDENCE: Final = 5
"""Training rows of an agent, and of a workflow type, below which its quantiles are those of an unknown one."""
ERROR_FOLDS: Final = 3
"""Of tasks; what models of the other folds say of a row shows how wrong a forecast is."""
_SHARES: Final = (0.05, 0.35, 0.6)
"""Share of the rows learnt under each of LEARNT_PROFILES: an engine supplies the second, a gateway the third."""
_MOST: Final = 25.0  # log of tokens: no answer is longer, and exp must not overflow

Observe = Callable[[LengthRows, Sources], LengthRows]
"""The same rows, made of some sources alone."""

Bands = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Where each quantile lies above the line, float32 [..., Q], and the doubt, float32 [...]."""


class Whole(NamedTuple):
    """All n rows to learn from: inputs float32 [n, D + 1], each under one profile, and what labels have above the line,
    float64 [n]."""

    inputs: NDArray[np.float32]
    above: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Fold:
    """Rows of one fold of tasks, and all others to learn from; means and line are those of the others.

    Attributes:
        inside, learning: int64 [k] and [m], which of the n rows.
        inputs, above: of the rows `learning`, as `Whole` has them.
        shown: inputs of the rows `inside` under each profile, float32 [L, k, D + 1].
        left: what their labels have above the line, float64 [L, k].
        drawn: int64 [k], the profile of each of them that other folds learn.
    """

    inside: NDArray[np.int64]
    learning: NDArray[np.int64]
    inputs: NDArray[np.float32]
    above: NDArray[np.float64]
    shown: NDArray[np.float32]
    left: NDArray[np.float64]
    drawn: NDArray[np.int64]


class EncodedRows:
    """Training rows as all estimators read them, encoded once.

    Args:
        train: rows of one target.
        observed: the rows made of some sources alone.
        seed: of the profiles drawn, of the folds and of the trial of the line.

    Raises:
        TraceError: no row has a label.
    """

    def __init__(self, train: LengthRows, observed: Observe, seed: int) -> None:
        self.rows, self.labels = labels_of(train)
        self.seed = seed
        self._profiles = [observed(self.rows, sources) for sources in LEARNT_PROFILES]
        self._models = int(max(train.model.max(), 0)) + 1
        self._drawn = np.random.default_rng(seed).choice(len(LEARNT_PROFILES), len(self.rows), p=_SHARES)
        self.encoding = InputEncoding.fit(self.rows, self.labels, self._models)
        self._inputs = _drawn(self.encoding, self._profiles, self._drawn, np.arange(len(self.rows)))
        self.line = LogLine.fit(self._inputs, self.labels)

    @cached_property
    def line_helps(self) -> bool:
        """Whether a trial shows that it helps to start from the line."""
        return line_helps(self._inputs, self.labels, self.rows, self.seed)

    def whole(self, start: np.float32) -> Whole:
        """All rows, for an estimator that starts from the line (1) or from nothing (0)."""
        line = self.line(self._inputs)
        return Whole(with_line(self._inputs, line), self.labels - start * line)

    def folds(self, start: np.float32) -> list[Fold]:
        """The folds of tasks, for an estimator that starts from the line (1) or from nothing (0)."""
        return [
            replace(fold, above=fold.above - start * line, left=fold.left - start * lines)
            for fold, line, lines in self._folds
        ]

    @cached_property
    def _folds(self) -> list[tuple[Fold, NDArray[np.float32], NDArray[np.float32]]]:
        """Each fold as one that starts from nothing, and its line for the rows `learning` and `inside`."""
        return [self._fold(*of) for of in parts(task_folds(self.rows.task, self.seed, ERROR_FOLDS))]

    def _fold(
        self, inside: NDArray[np.int64], learning: NDArray[np.int64]
    ) -> tuple[Fold, NDArray[np.float32], NDArray[np.float32]]:
        encoding = InputEncoding.fit(self._profiles[-1].take(learning), self.labels[learning], self._models)
        inputs = _drawn(encoding, self._profiles, self._drawn, learning)
        line = LogLine.fit(inputs, self.labels[learning])
        shown = np.stack([encoding.inputs(of.take(inside)) for of in self._profiles])
        predicted, lines = line(inputs), np.stack([line(of) for of in shown])
        labels = np.broadcast_to(self.labels[inside], lines.shape)
        fold = Fold(
            inside,
            learning,
            with_line(inputs, predicted),
            self.labels[learning],
            with_line(shown, lines),
            labels,
            self._drawn[inside],
        )
        return fold, predicted, lines


class LogEstimator(ABC):
    """A `LengthEstimator` on the logarithm. `fit` or `from_tensors` makes one that answers."""

    name: str
    starts: bool = False
    """Whether it starts from the line whatever a trial shows."""
    quantiles: tuple[float, ...]
    conformal: Conformal
    evidence: NDArray[np.int32]
    _encoding: InputEncoding
    _line: LogLine
    _start: np.float32
    _train: LengthRows
    _observed: Observe

    def __init__(self, seed: int = 0, floor: int = FLOOR, min_evidence: int = MIN_EVIDENCE) -> None:
        self.seed = seed
        self.floor = floor
        self.min_evidence = min_evidence

    def fit(
        self,
        train: LengthRows,
        calibration: LengthRows,
        quantiles: Sequence[float],
        observed: Observe = lambda rows, _: rows,
        *,
        encoded: EncodedRows | None = None,
        again: bool = False,
    ) -> Self:
        """Learns from `train`, calibrates on that out of fold and on `calibration`, which may be empty.

        Of each row it learns one profile (`LEARNT_PROFILES`), drawn at random; each profile is calibrated on all
        rows.

        Args:
            train, calibration: rows of one target; those without a label, or with a bound, teach nothing.
            quantiles: Q, rising.
            observed: the rows made of some sources alone, `LengthEncoder.observed`.
            encoded: of `train`, `observed` and the seed, where several estimators share it.
            again: it was fitted before, and whether it starts from the line stays as it is.

        Raises:
            TraceError: no training row has a label.
        """
        self.quantiles, self._train, self._observed = tuple(quantiles), train, observed
        of = encoded or EncodedRows(train, observed, self.seed)
        rows = of.rows
        self._holds(_evidence(rows))
        self._encoding, self._line = of.encoding, of.line
        if not again:
            self._start = np.float32(self.starts or of.line_helps)
        folds = of.folds(self._start)
        unseen = np.empty((len(LEARNT_PROFILES), len(rows), len(self.quantiles)))
        for fold, bands in zip(folds, self._learn(folds, of.whole(self._start)), strict=True):
            unseen[:, fold.inside] = _scores(fold.left, *bands)
        held = calibration.take(calibration.labelled)
        tokens = np.log1p(held.remaining.astype(np.float64))
        fresh = [
            _scores(tokens, *self._bands(self._encoding.inputs(observed(held, sources)))) for sources in LEARNT_PROFILES
        ]
        self.conformal = Conformal.fit(
            np.concatenate([unseen, np.stack(fresh)], axis=1),
            np.concatenate([rows.workflow_type, held.workflow_type]),
            len(train.vocabulary.workflow_types),
            self.quantiles,
            self.floor,
            task=np.concatenate([rows.task, held.task]),
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
        nothing = calibration.take(np.zeros(0, np.int64))
        self.fit(join_rows(self._train, calibration), nothing, self.quantiles, self._observed, again=True)

    def predict(self, rows: LengthRows) -> NDArray[np.float32]:
        """Output tokens float32 [n, Q]."""
        profiles = profiles_of(rows.numbers)
        return self._answer(self._encoding.inputs(rows), profiles, rows.workflow_type, rows.agent)

    def predict_one(
        self, workflow_type: int, agent: int, model: int, numbers: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """The same for a single row, float32 [Q]; numbers float32 [F]."""
        inputs = self._encoding.one(workflow_type, agent, model, numbers)
        of = profiles_of(numbers[None]), np.array([workflow_type]), np.array([agent])
        predicted: NDArray[np.float32] = self._answer(inputs[None], *of)[0]
        return predicted

    def _answer(
        self,
        inputs: NDArray[np.float32],
        profiles: NDArray[np.int64],
        workflow_type: NDArray[Any],
        agent: NDArray[Any],
    ) -> NDArray[np.float32]:
        location, scale = self._bands(inputs)
        # What was hardly seen is calibrated as an unknown workflow type: the widest.
        group = np.where(self._seen[workflow_type, agent], workflow_type, self.conformal.shifts.shape[1] - 1)
        return rising(np.expm1(np.minimum(self.conformal.apply(location, scale, profiles, group), np.float32(_MOST))))

    def _bands(self, inputs: NDArray[np.float32]) -> Bands:
        """Where each quantile lies, float32 [n, Q], and the doubt, float32 [n], above 0; on the logarithm."""
        line = self._line(inputs)
        above, scale = self._above_line(with_line(inputs, line))
        return self._start * line[:, None] + above, scale

    def _holds(self, evidence: NDArray[np.int32]) -> None:
        """Keeps the evidence, and where an agent and a workflow type were both seen, if rarely together."""
        self.evidence = evidence
        types, agents = (evidence.sum(axis=axis) >= self.min_evidence for axis in (1, 0))
        self._seen: NDArray[np.bool_] = types[:, None] & agents

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
        estimator._holds(tensors["evidence"])
        if estimator.evidence.shape != estimator._encoding.agents.shape:
            raise ValueError("the evidence is of other workflow types or agents")
        wanted = len(LEARNT_PROFILES), len(estimator._encoding.types), len(estimator.quantiles)
        if estimator.conformal.shifts.shape != wanted:
            raise ValueError("the calibration is of other workflow types or quantiles")
        estimator._start = np.float32(tensors["line/start"])
        estimator._hold(tensors, len(estimator._line.weights) + 1)
        return estimator

    @abstractmethod
    def _learn(self, folds: Sequence[Fold], whole: Whole) -> list[Bands]:
        """Learns from the whole what labels have above the line.

        Returns:
            Of each fold, what a model of its `learning` rows says of its rows `inside`, under each profile.
        """

    @abstractmethod
    def _above_line(self, inputs: NDArray[np.float32]) -> Bands:
        """Quantiles above the line, float32 [n, Q], and the doubt, float32 [n]."""

    @abstractmethod
    def _own_tensors(self) -> dict[str, NDArray[Any]]: ...

    @abstractmethod
    def _hold(self, tensors: Mapping[str, NDArray[Any]], inputs: int) -> None: ...


def _drawn(
    encoding: InputEncoding, profiles: Sequence[LengthRows], drawn: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Inputs of some rows, each under the profile that was drawn for it, float32 [m, D]."""
    inputs: list[NDArray[np.float32]] = []
    place = np.empty(len(rows), np.int64)
    start = 0
    for number, profile in enumerate(profiles):
        own = np.flatnonzero(drawn[rows] == number)
        place[own] = start + np.arange(len(own))
        inputs.append(encoding.inputs(profile.take(rows[own])))
        start += len(own)
    return np.concatenate(inputs)[place]


def _scores(labels: NDArray[np.float64], location: NDArray[Any], scale: NDArray[Any]) -> NDArray[np.float64]:
    """How far labels lie above each location, in units of the doubt, float64 [..., n, Q]."""
    return np.asarray((labels[..., None] - location) / scale[..., None], np.float64)


def _evidence(rows: LengthRows) -> NDArray[np.int32]:
    """Rows of each agent in each workflow type, int32 [T + 1, V + 1]."""
    shape = len(rows.vocabulary.workflow_types) + 1, len(rows.vocabulary.agents) + 1
    cell = np.ravel_multi_index((rows.workflow_type, rows.agent), shape)
    return np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape).astype(np.int32)


class RidgeLengths(LogEstimator):
    """The line alone, calibrated: the same doubt everywhere. Where traces are few, trees only add noise to the line."""

    name = "ridge"
    starts = True

    def _learn(self, folds: Sequence[Fold], whole: Whole) -> list[Bands]:
        return [self._no_more(fold.left) for fold in folds]

    def _above_line(self, inputs: NDArray[np.float32]) -> Bands:
        return self._no_more(inputs[:, 0])

    def _no_more(self, like: NDArray[Any]) -> Bands:
        """Nothing above the line, and a doubt of 1."""
        return np.zeros((*like.shape, len(self.quantiles)), np.float32), np.ones(like.shape, np.float32)

    def _own_tensors(self) -> dict[str, NDArray[Any]]:
        return {}

    def _hold(self, tensors: Mapping[str, NDArray[Any]], inputs: int) -> None:
        """There is nothing to hold."""
