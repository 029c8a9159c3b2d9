"""Shared by the forest, the boosted trees and the ridge: inputs, an optional ridge start, and conformal calibration.

Every estimator reads the ridge prediction as one more input; if a trial shows a benefit, it is trained on the residuals
of the ridge instead of log(1 + tokens). It predicts quantile locations and a scale of each row, and conformal
calibration corrects them with out-of-fold forecasts of training rows, never with rows that chose an estimator or texts.

An out-of-fold model is out of fold from end to end: its category means and its ridge are fitted without the fold too.
(Computed out of fold row by row, they leaked the fold to the trees: coverage on new tasks ranged from .26 to .79 at the
median.) Each training row has one input profile, drawn at random; every profile is calibrated on all rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from presage.datasets.tasks import parts, task_folds
from presage.errors import TraceError
from presage.features.input_profiles import Sources
from presage.features.rows import LEARNT_PROFILES, TEXT_COLUMNS, LabelledRows, join_rows, profiles_of
from presage.predictors.common.artefact import nested, under
from presage.predictors.quantiles.conformal import Conformal
from presage.predictors.quantiles.linear import CATEGORIES, InputEncoding, LogLine, line_helps, with_line


def labels_of(rows: LabelledRows) -> tuple[LabelledRows, NDArray[np.float64]]:
    """The labelled rows, not those with lower bounds, and log(1 + tokens), float64 [m]; raises TraceError for none."""
    labelled = rows.take(rows.labelled)
    if not len(labelled):
        raise TraceError(
            f"none of {len(rows)} LLM steps has a known number of tokens to learn from ({int(rows.lower_bound.sum())} "
            "are of workflows that were cut): expected output_tokens on every LLM step of complete workflows"
        )
    return labelled, np.log1p(labelled.label.astype(np.float64))


def without_agents(rows: LabelledRows) -> LabelledRows:
    """The rows with unknown agents; their numbers stay."""
    return replace(rows, agent=np.full_like(rows.agent, len(rows.vocabulary.agents)))


def _without_types(rows: LabelledRows) -> LabelledRows:
    return replace(rows, workflow_type=np.full_like(rows.workflow_type, len(rows.vocabulary.workflow_types)))


def rising(tokens: NDArray[np.float32]) -> NDArray[np.float32]:
    """Quantiles made non-negative and non-decreasing along the last axis."""
    return np.maximum.accumulate(np.maximum(tokens, np.float32(0.0)), axis=-1)


FLOOR: Final = 100
"""Calibration rows that a workflow type needs for its own quantiles; quantiles beyond .99 need more."""
MIN_EVIDENCE: Final = 5
"""An agent or workflow type with fewer training rows gets the quantiles of an unknown one."""
ERROR_FOLDS: Final = 3
"""Folds of tasks for the out-of-fold errors that calibrate the quantiles."""
_SHARES: Final = (0.05, 0.35, 0.6)
"""Share of training rows under each of LEARNT_PROFILES: an engine supplies the second, a gateway the third."""
_MOST: Final = 25.0  # greatest predicted log of tokens, so that exp cannot overflow

Observe = Callable[[LabelledRows, Sources], LabelledRows]
"""Restricts rows to the inputs of the given sources."""

Nameless = Callable[[LabelledRows], LabelledRows]
"""Rows as if each one's agent were unknown."""

Bands = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Quantile locations of the residuals, float32 [..., Q], and scales, float32 [...]."""


class Whole(NamedTuple):
    """Training data of the final model: inputs float32 [n, D + 1], each row under one profile; targets float64 [n]."""

    inputs: NDArray[np.float32]
    above: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Fold:
    """One fold of tasks, and the other rows to train on, on which category means and ridge are fitted.

    Attributes:
        inside, learning: int64 [k] and [m], rows of the fold and its training rows.
        inputs, above: of the rows `learning`, as in `Whole`.
        shown: inputs of the rows `inside` under each profile, then as if agents were unknown, then as if workflow types
            were, float32 [3L, k, D + 1].
        left: their targets, float64 [3L, k].
        drawn: int64 [k], the profile under which other folds train on each of them.
    """

    inside: NDArray[np.int64]
    learning: NDArray[np.int64]
    inputs: NDArray[np.float32]
    above: NDArray[np.float64]
    shown: NDArray[np.float32]
    left: NDArray[np.float64]
    drawn: NDArray[np.int64]


class EncodedRows:
    """Training rows of one target, encoded once for several estimators; raises TraceError if no row has a label.

    The seed is that of the profiles, the folds and the ridge trial.
    """

    def __init__(self, train: LabelledRows, observed: Observe, nameless: Nameless, seed: int) -> None:
        self.rows, self.labels = labels_of(train)
        self.seed = seed
        self.profiles = [observed(self.rows, sources) for sources in LEARNT_PROFILES]
        self.calibrated = [*self.profiles, *map(nameless, self.profiles), *map(_without_types, self.profiles)]
        self._models = int(max(train.model.max(), 0)) + 1
        self._drawn = np.random.default_rng(seed).choice(len(LEARNT_PROFILES), len(self.rows), p=_SHARES)
        self.encoding = InputEncoding.fit(self.rows, self.labels, self._models)
        self._inputs = _sampled_inputs(self.encoding, self.profiles, self._drawn, np.arange(len(self.rows)))
        self.line = LogLine.fit(self._inputs, self.labels)

    @cached_property
    def line_helps(self) -> bool:
        """Whether a trial shows a benefit of training on the ridge's residuals."""
        return line_helps(self._inputs, self.labels, self.rows, self.seed)

    def whole(self, start: np.float32) -> Whole:
        """All rows; targets are residuals of the ridge if `start` is 1, labels if it is 0."""
        line = self.line(self._inputs)
        return Whole(with_line(self._inputs, line), self.labels - start * line)

    def folds(self, start: np.float32) -> list[Fold]:
        """The folds of tasks, with targets as of `whole`."""
        return [  # the last input is the ridge's prediction
            replace(fold, above=fold.above - start * fold.inputs[:, -1], left=fold.left - start * fold.shown[..., -1])
            for fold in self._folds
        ]

    @cached_property
    def _folds(self) -> list[Fold]:
        return [self._fold(*part) for part in parts(task_folds(self.rows.task, self.seed, ERROR_FOLDS))]

    def _fold(self, inside: NDArray[np.int64], learning: NDArray[np.int64]) -> Fold:
        """A fold with labels as targets."""
        encoding = InputEncoding.fit(self.profiles[-1].take(learning), self.labels[learning], self._models)
        inputs = _sampled_inputs(encoding, self.profiles, self._drawn, learning)
        line = LogLine.fit(inputs, self.labels[learning])
        shown = np.stack([encoding.inputs(profile.take(inside)) for profile in self.calibrated])
        return Fold(
            inside,
            learning,
            with_line(inputs, line(inputs)),
            self.labels[learning],
            with_line(shown, np.stack([line(inputs_of_profile) for inputs_of_profile in shown])),
            np.broadcast_to(self.labels[inside], shown.shape[:2]),
            self._drawn[inside],
        )


class LogEstimator(ABC):
    """Base class of estimators of a label's logarithm; create one with `fit` or `from_tensors`.

    `text_columns` are those of which one is known if a row has a text.
    """

    name: str
    parts: ClassVar[Mapping[str, Any]] = {}
    """Classes of the learnt parts beside the ridge, by name; each has `to_tensors` and `from_tensors`."""
    starts: bool = False
    """Always fit residuals of the ridge, without a trial."""
    quantiles: tuple[float, ...]
    conformal: Conformal
    evidence: NDArray[np.int32]
    largest: NDArray[np.float32] | None
    """The largest label among the calibration rows of each workflow type, float32 [T + 1], the last that of all types;
    None for artefacts of before it was kept."""
    _encoding: InputEncoding
    _line: LogLine
    _start: np.float32
    _learnt: dict[str, Any]
    """By the names of `parts`."""

    def __init__(
        self,
        seed: int = 0,
        floor: int = FLOOR,
        min_evidence: int = MIN_EVIDENCE,
        text_columns: tuple[int, ...] = TEXT_COLUMNS,
    ) -> None:
        self.seed = seed
        self.text_columns = text_columns
        self.floor = floor
        self.min_evidence = min_evidence

    def fit(
        self,
        train: LabelledRows,
        quantiles: Sequence[float],
        observed: Observe = lambda rows, _: rows,
        nameless: Nameless = without_agents,
        *,
        encoded: EncodedRows | None = None,
        more: LabelledRows | None = None,
    ) -> Self:
        """Fit on `train` and calibrate on its out-of-fold forecasts.

        Args:
            train: rows of one target; those without a label or with a lower bound only are ignored.
            quantiles: Q, ascending.
            observed, nameless: those of a `LengthEncoder`.
            encoded: from `train`, `observed`, `nameless` and the seed, if several estimators share it.
            more: refit on these rows too, which do not calibrate, keeping the earlier decision whether to fit residuals
                of the ridge.

        Raises TraceError if no training row has a label.
        """
        self.quantiles = tuple(quantiles)
        encoded_rows = encoded or EncodedRows(
            train if more is None else join_rows(train, more), observed, nameless, self.seed
        )
        rows = encoded_rows.rows
        evidence = np.zeros(encoded_rows.encoding.agents.shape, np.int32)
        np.add.at(evidence, (rows.workflow_type, rows.agent), 1)
        self._set_evidence(evidence)
        self._encoding, self._line = encoded_rows.encoding, encoded_rows.line
        if more is None:
            self._start = np.float32(self.starts or encoded_rows.line_helps)
        folds = encoded_rows.folds(self._start)
        unseen = np.empty((len(encoded_rows.calibrated), len(rows), len(self.quantiles)))
        scale = np.empty(unseen.shape[:2])
        for fold, bands in zip(folds, self._learn(folds, encoded_rows.whole(self._start)), strict=True):
            unseen[:, fold.inside] = _scores(fold.left, *bands)
            scale[:, fold.inside] = bands[1]
        # With fewer rows a fold's model splits less, so the level of its scale differs: that of the final model counts.
        final = np.stack([self._bands(encoded_rows.encoding.inputs(shown))[1] for shown in encoded_rows.calibrated])
        kind, rise = rows.workflow_type, np.log(final / scale)
        for profile, mine in enumerate(rise):
            level = np.bincount(kind, mine) / np.maximum(np.bincount(kind), 1)
            unseen[profile] /= np.exp(level)[kind, None]
        own = int(train.labelled.sum())  # those of `more` come after them
        self.conformal = Conformal.fit(
            unseen[:, :own],
            rows.workflow_type[:own],
            len(train.vocabulary.workflow_types),
            self.quantiles,
            self.floor,
            task=rows.task[:own],
            typeless=slice(2 * len(LEARNT_PROFILES), None),
        )
        self.largest = _largest(rows.label[:own], rows.workflow_type[:own], len(train.vocabulary.workflow_types))
        return self

    @property
    def numbers(self) -> int:
        """F, the number of numeric inputs of a row it was fitted on."""
        return len(self._line.weights) - CATEGORIES

    def inputs(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Encoded categories and numbers, float32 [n, CATEGORIES + F]."""
        return self._encoding.inputs(rows)

    def inputs_one(
        self, workflow_type: int, agent: int, model: int, numbers: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """The same for a single row, float32 [CATEGORIES + F]."""
        return self._encoding.one(workflow_type, agent, model, numbers)

    def predict(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Output tokens float32 [n, Q]."""
        profiles = profiles_of(rows.numbers, self.text_columns)
        return self._answer(self.inputs(rows), profiles, rows.workflow_type, rows.agent)

    def predict_one(
        self, workflow_type: int, agent: int, model: int, numbers: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """The same for a single row, float32 [Q]; numbers float32 [F]."""
        inputs = self.inputs_one(workflow_type, agent, model, numbers)
        row = profiles_of(numbers[None], self.text_columns), np.array([workflow_type]), np.array([agent])
        predicted: NDArray[np.float32] = self._answer(inputs[None], *row)[0]
        return predicted

    def _answer(
        self,
        inputs: NDArray[np.float32],
        profiles: NDArray[np.int64],
        workflow_type: NDArray[Any],
        agent: NDArray[Any],
    ) -> NDArray[np.float32]:
        location, scale = self._bands(inputs)
        group = self._group(workflow_type, agent)
        if self._calibrates_unknown:
            of_known = self._known_types[workflow_type] | ~self._known_agents[agent]
            names = np.where(self._seen[workflow_type, agent], 0, np.where(of_known, 1, 2))
            profiles = profiles + len(LEARNT_PROFILES) * names
        return rising(np.expm1(np.minimum(self.conformal.apply(location, scale, profiles, group), np.float32(_MOST))))

    def largest_of(self, rows: LabelledRows) -> NDArray[np.float32] | None:
        """The largest label among the rows that calibrated each row, float32 [n]; None in artefacts without it."""
        return None if self.largest is None else self.largest[self._group(rows.workflow_type, rows.agent)]

    def largest_one(self, workflow_type: int, agent: int) -> float | None:
        """The same for a single row."""
        return None if self.largest is None else float(self.largest[self._group(workflow_type, agent)])

    @property
    def _calibrates_unknown(self) -> bool:
        """Whether it has shifts for unknown agents, and for unknown types; before, both had the largest scores."""
        return len(self.conformal.shifts) > len(LEARNT_PROFILES)

    def _group(self, workflow_type: Any, agent: Any) -> NDArray[np.int32]:
        """The workflow types as which rows are calibrated; a rare one has the quantiles of an unknown one."""
        has_own = self._known_types[workflow_type] if self._calibrates_unknown else self._seen[workflow_type, agent]
        return np.asarray(np.where(has_own, workflow_type, self.conformal.shifts.shape[1] - 1), np.int32)

    def _bands(self, inputs: NDArray[np.float32]) -> Bands:
        """Quantile locations float32 [n, Q] and positive scales float32 [n], on log tokens."""
        line = self._line(inputs)
        above, scale = self._residual_bands(with_line(inputs, line))
        return self._start * line[:, None] + above, scale

    def _set_evidence(self, evidence: NDArray[np.int32]) -> None:
        """Store the evidence, and which agents and workflow types were seen often enough, if rarely together."""
        self.evidence = evidence
        types, agents = (evidence.sum(axis=axis) >= self.min_evidence for axis in (1, 0))
        self._known_types: NDArray[np.bool_] = types
        self._known_agents: NDArray[np.bool_] = agents
        self._seen: NDArray[np.bool_] = types[:, None] & agents

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """Tensors of the artefact."""
        return {
            **nested(
                {
                    "means": self._encoding.to_tensors(),
                    "line": self._line.to_tensors(),
                    "conformal": self.conformal.to_tensors(),
                }
            ),
            "evidence": self.evidence,
            "line/start": np.array(self._start),
            **({} if self.largest is None else {"largest": self.largest}),
            **nested({name: part.to_tensors() for name, part in self._learnt.items()}),
        }

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, NDArray[Any]],
        quantiles: Sequence[float],
        min_evidence: int = MIN_EVIDENCE,
        text_columns: tuple[int, ...] = TEXT_COLUMNS,
    ) -> Self:
        """Inverse of `to_tensors`; raises KeyError or ValueError if the tensors are not those of such an estimator."""
        estimator = cls(min_evidence=min_evidence, text_columns=text_columns)
        estimator.quantiles = tuple(quantiles)
        estimator._encoding = InputEncoding.from_tensors(under(tensors, "means/"))
        estimator._line = LogLine.from_tensors(under(tensors, "line/"))
        estimator._line.check()
        estimator.conformal = Conformal.from_tensors(under(tensors, "conformal/"))
        estimator._set_evidence(tensors["evidence"])
        if estimator.evidence.shape != estimator._encoding.agents.shape:
            raise ValueError("the evidence does not match the workflow types and agents")
        profiles = len(LEARNT_PROFILES) * (3 if estimator._calibrates_unknown else 1)
        expected = profiles, len(estimator._encoding.types), len(estimator.quantiles)
        if estimator.conformal.shifts.shape != expected:
            raise ValueError("the calibration does not match the workflow types and quantiles")
        estimator.largest = tensors.get("largest")
        if estimator.largest is not None and estimator.largest.shape != estimator.conformal.rows.shape:
            raise ValueError("the largest labels do not match the workflow types")
        estimator._start = np.float32(tensors["line/start"])
        inputs = len(estimator._line.weights) + 1
        estimator._learnt = {
            name: part.from_tensors(under(tensors, f"{name}/"), inputs) for name, part in cls.parts.items()
        }
        return estimator

    @abstractmethod
    def _learn(self, folds: Sequence[Fold], whole: Whole) -> list[Bands]:
        """Fit on all rows and on the training rows of each fold; return each fold model's bands of the rows `shown`."""

    @abstractmethod
    def _residual_bands(self, inputs: NDArray[np.float32]) -> Bands:
        """Quantile locations float32 [n, Q] relative to the start, and scales float32 [n]."""


def _sampled_inputs(
    encoding: InputEncoding, profiles: Sequence[LabelledRows], drawn: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Inputs of rows, each under its drawn profile, float32 [m, D]."""
    inputs: list[NDArray[np.float32]] = []
    place = np.empty(len(rows), np.int64)
    start = 0
    for number, profile in enumerate(profiles):
        own = np.flatnonzero(drawn[rows] == number)
        place[own] = start + np.arange(len(own))
        inputs.append(encoding.inputs(profile.take(rows[own])))
        start += len(own)
    return np.concatenate(inputs)[place]


def _largest(label: NDArray[Any], workflow_type: NDArray[np.int32], types: int) -> NDArray[np.float32]:
    """The largest label of each type and, last and for types without rows, of all, float32 [types + 1]."""
    largest = np.full(types + 1, -np.inf)
    np.maximum.at(largest, workflow_type, label)
    largest[types] = label.max()
    return np.where(np.isfinite(largest), largest, label.max()).astype(np.float32)


def _scores(labels: NDArray[np.float64], location: NDArray[Any], scale: NDArray[Any]) -> NDArray[np.float64]:
    """Residuals of the labels at each location in units of the scale, float64 [..., n, Q]."""
    return np.asarray((labels[..., None] - location) / scale[..., None], np.float64)


class RidgeQuantiles(LogEstimator):
    """The calibrated ridge alone, with a scale of 1. On few traces trees only add noise to it."""

    name = "ridge"
    starts = True

    def _learn(self, folds: Sequence[Fold], whole: Whole) -> list[Bands]:
        self._learnt = {}
        return [self._bands_of(fold.left.shape) for fold in folds]

    def _residual_bands(self, inputs: NDArray[np.float32]) -> Bands:
        return self._bands_of(inputs.shape[:-1])

    def _bands_of(self, shape: tuple[int, ...]) -> Bands:
        return np.zeros((*shape, len(self.quantiles)), np.float32), np.ones(shape, np.float32)
