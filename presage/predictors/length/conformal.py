"""Conformal calibration of quantiles, one for each workflow type.

A score says how far a label lies above the forecast, in units of its own doubt: (y − location) / scale, all on the
logarithm. The shift of a quantile q over n calibration rows is their ⌈(n + 1) q⌉-th smallest score: then a fresh row of
the same kind is covered with probability q or a little more, if rows are exchangeable and the model saw none of them
(Romano, Patterson & Candès, "Conformalized quantile regression", NeurIPS 2019, one-sided).

Two departures. Most scores are of models that learnt from other folds, while answers are those of a model of all folds:
that is in between split conformal and CV+ (Barber, Candès, Ramdas & Tibshirani, "Predictive inference with the
jackknife+", Annals of Statistics 2021), which keeps every fold's model and is promised a little less than q. Nothing is
promised here; a model of more rows errs less than those of the folds, so quantiles rather cover a little more. And rows
of one workflow resemble each other, so the error of a shift is that of fewer rows. (A rank that counts K tasks,
⌈n q (K + 1) / K⌉, made the upper quantiles too wide on real traces: left out.)

A workflow type is shifted by its own rows only as far as they call for. Its rows are of a few tasks, and its own shift
follows them: from the shift of all types together towards its own, the first is taken that covers its rows as often as
promised, to two standard errors over its tasks. (Twenty-eight workflows a type, drawn at random out of one: with every
type's own shift pinball at .9 was up to 1.6 times that of counting.)

A type's own 99th percentile of 200 rows is the second largest of them: it misses as often as it covers too much. Where
fewer than ROWS_BEYOND rows can lie beyond a quantile, the larger of a type's own shift and that of all types together
is taken, so such a type is covered a little more than promised.

Rows of a task stand and fall together: one long workflow moves a .99 quantile by itself, and a model of every fold errs
less than a fold's. So of an upper shift no more is taken than the rows call for: the smallest share of it with which
they are covered as often as promised, to one standard error over tasks. Shifts below 0, of quantiles that are too
wide, are taken whole.

A workflow type with fewer rows than the floor is marked, and its upper shifts are the largest of its own (as far as its
rows call for), of those of all types together and of those of any type that reaches the floor. An unknown type is given
the largest score there is. Both are cautious and promise nothing. MAPIE has the same arithmetic for a scikit-learn
estimator, but knows neither groups with a floor nor one-sided bounds with a scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

ROWS_BEYOND: Final = 10
"""Rows of a workflow type that should lie beyond an upper quantile before it is trusted to differ from all types'."""
_SHARES: Final = (0.0, 0.25, 0.5, 0.75)
"""Of a shift, the smallest first, that are tried before all of it is taken."""
_ERRORS: Final = 2.0
"""Standard errors, over tasks, by which a workflow type has to differ from all together to be shifted by its own."""
UNKNOWN: Final = 2.0
"""What is added to the widest upper shift below the floor, in units of the doubt."""


@dataclass(frozen=True, eq=False)
class Conformal:
    """Shifts of Q quantiles for T workflow types, under each of L profiles: what is known of a row.

    Attributes:
        shifts: float32 [L, T + 1, Q], the last row for unknown types.
        rows: int32 [T + 1], calibration rows behind each.
        calibrated: bool [T + 1], whether those reach the floor.
    """

    shifts: NDArray[np.float32]
    rows: NDArray[np.int32]
    calibrated: NDArray[np.bool_]

    @classmethod
    def fit(
        cls,
        scores: NDArray[np.float64],
        workflow_type: NDArray[np.int32],
        types: int,
        quantiles: Sequence[float],
        floor: int,
        *,
        task: NDArray[np.integer[Any]] | None = None,
    ) -> Self:
        """From scores float64 [L, n, Q] of calibration rows and their types, int32 [n]; T is `types`.

        Args:
            task: integer [n], equal for rows that stand and fall together; None: every row alone.
        """
        floor = max(floor, least_rows(max(quantiles)))
        counts = np.bincount(workflow_type, minlength=types + 1)[: types + 1]
        calibrated = counts >= floor
        calibrated[types] = False
        of_task = np.arange(len(workflow_type)) if task is None else np.unique(task, return_inverse=True)[1]
        shifts = [_shifts(of, workflow_type, of_task, calibrated, counts, quantiles, floor) for of in scores]
        if len(workflow_type):
            for of, own in zip(scores, shifts, strict=True):
                share = _needed(of, own[workflow_type], of_task, quantiles)
                own[calibrated] *= np.where(own[calibrated] > 0, share, 1.0)
        return cls(np.stack(shifts).astype(np.float32), counts.astype(np.int32), calibrated)

    def apply(
        self,
        location: NDArray[np.float32],
        scale: NDArray[np.float32],
        profile: NDArray[np.int64],
        workflow_type: NDArray[np.int32],
    ) -> NDArray[np.float32]:
        """Calibrated quantiles on the logarithm, float32 [n, Q], from locations [n, Q] and scales [n]."""
        return np.asarray(location + scale[:, None] * self.shifts[profile, workflow_type], np.float32)

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """As an artefact keeps it."""
        return {f"conformal/{name}": array for name, array in vars(self).items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]]) -> Self:
        """Inverse of `to_tensors`."""
        return cls(*(tensors[f"conformal/{name}"] for name in ("shifts", "rows", "calibrated")))


def _needed(
    scores: NDArray[np.float64],
    shifts: NDArray[np.float64],
    task: NDArray[np.int64],
    quantiles: Sequence[float],
) -> NDArray[np.float64]:
    """The share of the shifts of each quantile that the rows call for, float64 [Q]; of .5 and less all of it.

    Args:
        scores: float64 [n, Q].
        shifts: of each row's type, float64 [n, Q].
        task: int64 [n], numbered from 0.
        quantiles: Q.
    """
    levels, shares = np.array(quantiles), np.ones(len(quantiles))
    for share in reversed(_SHARES):
        covered, error = _coverage(scores, np.where(shifts > 0, share, 1.0) * shifts, task)
        shares = np.where((levels > 0.5) & (covered + error >= levels), share, shares)
    return shares


def least_rows(quantile: float) -> int:
    """Rows below which ⌈(n + 1) q⌉ exceeds n: no score is high enough to promise this quantile."""
    return math.ceil(quantile / (1.0 - quantile) - 1e-9)


def _shifts(
    scores: NDArray[np.float64],
    workflow_type: NDArray[np.int32],
    task: NDArray[np.int64],
    calibrated: NDArray[np.bool_],
    counts: NDArray[np.int64],
    quantiles: Sequence[float],
    floor: int,
) -> NDArray[np.float64]:
    """The shifts of one profile, float64 [T + 1, Q]."""
    every = _shift(scores, quantiles)
    levels = np.array(quantiles)
    upper = levels > 0.5
    # Where all types together are below the floor even the largest score says little.
    widest = np.concatenate([every[None], scores]).max(axis=0) + (UNKNOWN if len(scores) < floor else 0.0)
    shifts = np.tile(np.where(upper, widest, every), (len(counts), 1))
    rare = ~calibrated & (counts > 0)
    rare[-1] = False  # rows of unknown types say nothing of the next unknown one
    for kind in np.flatnonzero(calibrated | rare) if len(scores) >= floor else ():
        mine = workflow_type == kind
        own = _apart(scores[mine], np.unique(task[mine], return_inverse=True)[1], every, quantiles)
        scarce = upper & (rare[kind] | (counts[kind] * (1.0 - levels) < ROWS_BEYOND))
        shifts[kind] = np.where(scarce, np.maximum(own, every), own)
    widest_known = np.where(upper, shifts[calibrated].max(axis=0, initial=-np.inf), -np.inf)
    shifts[rare] = np.maximum(shifts[rare], widest_known)
    return shifts


def _apart(
    scores: NDArray[np.float64], task: NDArray[np.int64], every: NDArray[np.float64], quantiles: Sequence[float]
) -> NDArray[np.float64]:
    """A type's own shifts, no further from those of all types than its rows call for, float64 [Q]."""
    own = _shift(scores, quantiles)
    found = own.copy()
    for share in reversed(_SHARES):
        moved = every + share * (own - every)
        covered, error = _coverage(scores, moved, task)
        found = np.where(np.abs(covered - quantiles) <= _ERRORS * error, moved, found)
    return found


def _coverage(
    scores: NDArray[np.float64], shifts: NDArray[np.float64], task: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The share of n scores within each shift, and its standard error over tasks, both float64 [Q]."""
    within = (scores <= shifts).astype(np.float64)
    covered = within.mean(axis=0)
    sums = np.zeros((int(task.max()) + 1, within.shape[1]))
    np.add.at(sums, task, within - covered)
    return covered, np.sqrt(np.square(sums).sum(axis=0)) / len(within)


def _shift(scores: NDArray[np.float64], quantiles: Sequence[float]) -> NDArray[np.float64]:
    """The ⌈(n + 1) q⌉-th smallest score of each quantile, or the largest; 0 where there is none. float64 [Q]."""
    if not len(scores):
        return np.zeros(len(quantiles))
    ordered = np.sort(scores, axis=0)
    rank = np.ceil((len(scores) + 1) * np.array(quantiles) - 1e-9).astype(int)
    return np.asarray(ordered[np.clip(rank, 1, len(scores)) - 1, np.arange(len(quantiles))])
