"""Calibrated probabilities from log-odds, on known and on new topics.

Platt scaling fits a line for each model (`Calibration`):

    logit p = logit(base rate) + shift + slope · (log-odds − their mean)

Slopes are regularised towards the common slope of all labels and shifts towards 0, with the weight of two hundred
labels: Platt (1999) without smoothed labels; the mean of several attempts counts as a fractional label.

Calibration on known topics does not transfer to new ones. So families of prompts are left out in turn, and the
forecasts of a router trained without them determine a formula for all models (`Widening`):

    logit p = logit(base rate) + shift + drift · distance + (slope − loss · distance) · opinion

The opinion is the difference of calibrated log-odds and those of the base rates; the distance is 0..1 (`novelty.py`).
Neither `loss` nor `slope − loss · distance` is ever negative, so opinions shrink with distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.predictors.common.artefact import Tensors
from presage.predictors.router.factors import base_rates, logit, sigmoid

PRIOR_LABELS: Final = 200.0
KNOWN_WEIGHT: Final = 0.5
"""Weight of known families, relative to 1 of those left out."""

FOLDS: Final = 3
_LEAST_GROUP: Final = 20
_NOTHING: Final = np.array([0.0, 0.0, 1.0, 0.0])
_PRIOR: Final = 20.0
"""Weight, in labels, of the prior that distance does not change opinions."""

_ROUNDS: Final = 50
_ENOUGH: Final = 1e-9

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Calibration(Tensors):
    """A line for each of M models, float64 [M] each.

    Attributes:
        base: log-odds of the base rate.
        middle: mean of the log-odds that it was fitted on.
        shift: added at the middle.
        slope: per unit of log-odds, 0 or more.
    """

    base: NDArray[np.float64]
    middle: NDArray[np.float64]
    shift: NDArray[np.float64]
    slope: NDArray[np.float64]

    @classmethod
    def fit(
        cls, logits: NDArray[np.float32], correct: NDArray[np.float32], base: NDArray[np.float64] | None = None
    ) -> Calibration:
        """Fit the lines on log-odds [n, M] of prompts the scorer was not trained on, and labels [n, M], NaN without
        one.

        `base` is base rates, float64 [M]; None: those of `correct`.
        """
        offset = logit(base_rates(correct) if base is None else base)
        middle = logits.mean(axis=0, dtype=np.float64) if len(logits) else offset
        away, labelled = logits - middle, ~np.isnan(correct)
        together = _common(away, offset, correct)
        shift, slope = np.zeros(len(offset)), np.full(len(offset), together)
        for m in range(len(offset)):
            rows = labelled[:, m]
            if rows.any():
                labels = correct[rows, m].astype(np.float64)
                x = away[rows, m]
                design, prior = np.stack([np.ones_like(x), x], axis=1), np.array([0.0, together])
                pull = 0.25 * PRIOR_LABELS * np.array([1.0, max(float((x**2).mean()), 1e-12)])
                shift[m], slope[m] = _newton(design, offset[m], labels, 1.0, prior, pull, _ENOUGH)
        return cls(offset, middle, shift, np.maximum(slope, 0.0))

    def probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Probabilities float32 [n, M] of log-odds [n, M]."""
        return sigmoid(self.base + self.opinion(logits)).astype(np.float32)

    def opinion(self, logits: NDArray[np.floating]) -> NDArray[np.float64]:
        """Calibrated log-odds minus those of the base rates, float64 [n, M], from log-odds [n, M]."""
        return np.asarray(self.shift + self.slope * (logits - self.middle), np.float64)

    def check(self, models: int) -> None:
        """Raise ValueError unless there is a line for each of M models."""
        if any(array.shape != (models,) for array in self.to_tensors().values()):
            raise ValueError(f"the calibration does not match {models} models")


def _common(away: NDArray[np.float64], offset: NDArray[np.float64], correct: NDArray[np.float32]) -> float:
    """The common slope of all labels, 0 or more; the prior is a slope of 1 with the weight of `PRIOR_LABELS`."""
    labelled = ~np.isnan(correct)
    x, labels = away[labelled], correct[labelled].astype(np.float64)
    start = np.broadcast_to(offset, away.shape)[labelled]
    weight = 0.25 * PRIOR_LABELS * float((x**2).mean()) if len(x) else 0.0
    slope = 1.0
    for _ in range(_ROUNDS if weight > 0 else 0):
        p = sigmoid(start + slope * x)
        gradient = ((labels - p) * x).sum() - weight * (slope - 1.0)
        step = float(gradient / ((p * (1 - p) * x * x).sum() + weight))
        slope += float(np.clip(step, -1.0, 1.0))
        if abs(step) < _ENOUGH:
            break
    return max(slope, 0.0)


def _newton(
    columns: Floats,
    offset: Floats | float,
    labels: Floats,
    weight: Floats | float,
    prior: Floats,
    pull: Floats,
    enough: float,
) -> Floats:
    """Coefficients of a logistic regression, pulled towards `prior` with the weights `pull`, by Newton's method."""
    coefficients = prior.copy()
    for _ in range(_ROUNDS):
        p = sigmoid(offset + columns @ coefficients)
        gradient = columns.T @ (weight * (labels - p)) - pull * (coefficients - prior)
        curvature = (columns * (weight * p * (1 - p))[:, None]).T @ columns + np.diag(pull)
        step = np.linalg.solve(curvature, gradient)
        coefficients += np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < enough:
            break
    return coefficients


@dataclass(frozen=True)
class Opinions:
    """Forecasts of a router for n prompts it was not trained on and M models.

    Attributes:
        opinion: [n, M], calibrated log-odds minus those of the base rates.
        base: [M], base rates of its training data.
        distance: [n], 0..1, from its training data.
        correct: [n, M], 0..1, NaN without a label.
    """

    opinion: Floats
    base: Floats
    distance: Floats
    correct: NDArray[np.float32]


@dataclass(frozen=True)
class Widening:
    """The coefficients of the formula in the module docstring."""

    shift: float
    drift: float
    slope: float
    loss: float

    @classmethod
    def fit(cls, left_out: Sequence[Opinions], known: Opinions) -> Widening:
        """Maximise the likelihood of the labels.

        Args:
            left_out: forecasts of each fold by a router trained without it.
            known: forecasts of held-out prompts of known families; in total they weigh half as much as `left_out`.
        """
        parts = [_flat(part, 1.0) for part in left_out]
        total = sum(len(part[0]) for part in parts)
        held = _flat(known, KNOWN_WEIGHT * total / max(int((~np.isnan(known.correct)).sum()), 1))
        opinion, offset, distance, labels, weight = (
            np.concatenate(columns_of_parts) for columns_of_parts in zip(*parts, held, strict=True)
        )
        columns = np.stack([np.ones_like(opinion), distance, opinion, -distance * opinion], axis=1)
        free = np.ones(4, np.bool_)
        coefficients = _logistic(columns, free, offset, labels, weight)
        if coefficients[3] < 0:  # opinions would grow with distance, which is chance
            free[3] = False
            coefficients = _logistic(columns, free, offset, labels, weight)
        if coefficients[2] < 0:
            free[2] = False
            coefficients = _logistic(columns, free, offset, labels, weight)
            coefficients[2] = 0.0  # probabilities stay at the base rates
        return cls(*map(float, coefficients))

    def probabilities(self, opinion: Floats, base: Floats, distance: Floats) -> NDArray[np.float32]:
        """Probabilities float32 [n, M] of opinions [n, M] at distances [n]; `base` [M]: log-odds of base rates."""
        return _widened(opinion, base, distance, self.shift, self.drift, self.slope, self.loss)

    def check(self) -> None:
        """Raise ValueError unless opinions shrink with distance."""
        if not (np.isfinite([self.shift, self.drift]).all() and self.slope >= 0 and self.loss >= 0):
            raise ValueError("the widening does not shrink opinions with distance")


def leave_out_folds(groups: Sequence[str | None]) -> NDArray[np.int64]:
    """Assign n prompts to three folds of whole families and similar size, int64 [n]; below three families, to one."""
    distinct, place, counts = np.unique([group or "" for group in groups], return_inverse=True, return_counts=True)
    load, fold = np.zeros(FOLDS, np.int64), np.zeros(len(counts), np.int64)
    if ((counts >= _LEAST_GROUP) & (distinct != "")).sum() < FOLDS:
        return np.zeros(len(place), np.int64)
    for group in np.argsort(-counts, kind="stable"):
        fold[group] = load.argmin()
        load[fold[group]] += counts[group]
    return fold[place]


@njit(cache=True)
def _widened(
    opinion: Floats, base: Floats, distance: Floats, shift: float, drift: float, slope: float, loss: float
) -> NDArray[np.float32]:
    out = np.empty(opinion.shape, np.float32)
    for i in range(len(opinion)):
        moved, holds = shift + drift * distance[i], max(slope - loss * distance[i], 0.0)
        for m in range(opinion.shape[1]):
            out[i, m] = 0.5 * (1.0 + np.tanh(0.5 * (base[m] + moved + holds * opinion[i, m])))
    return out


def _flat(opinions: Opinions, weight: float) -> tuple[Floats, ...]:
    labelled = ~np.isnan(opinions.correct)
    offset = np.broadcast_to(logit(opinions.base), labelled.shape)[labelled]
    distance = np.broadcast_to(opinions.distance[:, None], labelled.shape)[labelled]
    labels = opinions.correct[labelled].astype(np.float64)
    return opinions.opinion[labelled].astype(np.float64), offset, distance, labels, np.full(len(labels), weight)


def _logistic(columns: Floats, free: NDArray[np.bool_], offset: Floats, labels: Floats, weight: Floats) -> Floats:
    """Coefficients of a widening, float64 [4]. The prior leaves opinions unchanged; those not `free` stay at it."""
    whole = _NOTHING.copy()
    columns, prior = columns[:, free], _NOTHING[free]
    pull = _PRIOR * 0.25 * np.maximum((columns**2).mean(axis=0), 1e-12)
    whole[free] = _newton(columns, offset, labels, weight, prior, pull, 1e-8)
    return whole
