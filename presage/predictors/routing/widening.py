"""Probabilities that draw near to the base rates the farther a prompt is from the training prompts.

Calibration on prompts of known topics says nothing of new ones. So families of prompts are left out of the training in
turn, and from what a router without them made of them is learnt how much of its opinion holds:

    logit p = logit(base rate) + shift + drift · distance + (slope − loss · distance) · opinion

The opinion is how far calibrated log-odds lie from the base rates; the distance is 0..1 (`evidence.py`). All models
share the four numbers. `slope − loss · distance` is never below 0 and `loss` is not either, so that opinions shrink.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.predictors.routing.factors import logit, sigmoid

KNOWN_WEIGHT: Final = 0.5
"""Of prompts of known families, beside 1 of those left out."""

FOLDS: Final = 3
_LEAST_GROUP: Final = 20
_ROUNDS: Final = 50
_NOTHING: Final = np.array([0.0, 0.0, 1.0, 0.0])
_PRIOR: Final = 20.0
"""Labels that "an opinion holds, whatever the distance" weighs."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Opinions:
    """What a router without them made of n prompts and M models.

    Attributes:
        opinion: [n, M], calibrated log-odds less those of the base rates.
        base: [M], base rates of what it learnt from.
        distance: [n], 0..1, of the prompts to what it learnt from.
        correct: [n, M], 0..1, NaN without a label.
    """

    opinion: Floats
    base: Floats
    distance: Floats
    correct: NDArray[np.float32]


@dataclass(frozen=True)
class Widening:
    """The four numbers of the formula above."""

    shift: float
    drift: float
    slope: float
    loss: float

    @classmethod
    def fit(cls, left_out: Sequence[Opinions], known: Opinions) -> Widening:
        """Maximises the likelihood of the labels.

        Args:
            left_out: of each fold, by a router without it.
            known: of prompts held out whose families were known; all of them weigh half as much as all left out.
        """
        parts = [_flat(part, 1.0) for part in left_out]
        total = sum(len(part[0]) for part in parts)
        held = _flat(known, KNOWN_WEIGHT * total / max(int((~np.isnan(known.correct)).sum()), 1))
        opinion, offset, distance, truth, weight = (np.concatenate(of) for of in zip(*parts, held, strict=True))
        columns = np.stack([np.ones_like(opinion), distance, opinion, -distance * opinion], axis=1)
        free = np.ones(4, np.bool_)
        found = _logistic(columns, free, offset, truth, weight)
        if found[3] < 0:  # nearer would be less sure: chance
            free[3] = False
            found = _logistic(columns, free, offset, truth, weight)
        if found[2] < 0:
            free[2] = False
            found = _logistic(columns, free, offset, truth, weight)
            found[2] = 0.0  # no opinion holds
        return cls(*map(float, found))

    def probabilities(self, opinion: Floats, base: Floats, distance: Floats) -> NDArray[np.float32]:
        """Probabilities float32 [n, M] of opinions [n, M] at distances [n]; log-odds [M] of the base rates."""
        return _widened(opinion, base, distance, self.shift, self.drift, self.slope, self.loss)

    def check(self) -> None:
        """Raises ValueError unless it is one that `fit` gives."""
        if not (np.isfinite([self.shift, self.drift]).all() and self.slope >= 0 and self.loss >= 0):
            raise ValueError("the widening does not shrink opinions with distance")


def leave_out_folds(groups: Sequence[str | None]) -> NDArray[np.int64]:
    """Which of three folds each of n prompts is in, int64 [n]: whole families each, of about one size.

    All are in fold 0 where fewer than three families are named: two cannot tell what a third would be like. (Clusters
    of one family's prompts, left out instead, made calibration worse on known and on new families.)
    """
    found, place, counts = np.unique([group or "" for group in groups], return_inverse=True, return_counts=True)
    load, fold = np.zeros(FOLDS, np.int64), np.zeros(len(counts), np.int64)
    if ((counts >= _LEAST_GROUP) & (found != "")).sum() < FOLDS:
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


def _flat(of: Opinions, weight: float) -> tuple[Floats, ...]:
    known = ~np.isnan(of.correct)
    offset = np.broadcast_to(logit(of.base), known.shape)[known]
    distance = np.broadcast_to(of.distance[:, None], known.shape)[known]
    truth = of.correct[known].astype(np.float64)
    return of.opinion[known].astype(np.float64), offset, distance, truth, np.full(len(truth), weight)


def _logistic(columns: Floats, free: NDArray[np.bool_], offset: Floats, truth: Floats, weight: Floats) -> Floats:
    """Coefficients of a logistic regression by Newton's method, drawn towards those that change nothing; what is not
    free stays there, float64 [4]."""
    whole = _NOTHING.copy()
    columns, prior = columns[:, free], _NOTHING[free]
    pull = _PRIOR * 0.25 * np.maximum((columns**2).mean(axis=0), 1e-12)
    found = prior.copy()
    for _ in range(_ROUNDS):
        p = sigmoid(offset + columns @ found)
        gradient = columns.T @ (weight * (truth - p)) - pull * (found - prior)
        curvature = (columns * (weight * p * (1 - p))[:, None]).T @ columns + np.diag(pull)
        step = np.clip(np.linalg.solve(curvature, gradient), -1.0, 1.0)
        found += step
        if np.abs(step).max() < 1e-8:
            break
    whole[free] = found
    return whole
