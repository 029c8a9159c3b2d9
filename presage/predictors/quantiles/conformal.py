"""Conformal calibration of quantiles by workflow type.

The score of a row is its residual in units of the predicted scale, on log tokens: (y − location) / scale. The shift of
quantile q is the ⌈n q (m + 1) / m⌉-th smallest score of n calibration rows. With m = n this is split conformal
prediction for independent rows (Romano, Patterson & Candès, "Conformalized quantile regression", NeurIPS 2019,
one-sided). Rows of one task are not independent, only tasks are exchangeable. With m the number of tasks the rank is
that of hierarchical conformal prediction, which covers a row of a new task with probability q, whatever the correlation
(Lee, Barber & Willett, "Distribution-free inference with hierarchical data", 2023; Dunn, Wasserman & Ramdas,
"Distribution-free prediction sets for two-layer hierarchical models", JASA 2022) but gives no finite .99 quantile below
99 tasks. Here m is in between: the number of independent rows as good as these n, which is n over the design effect of
their coverage (Kish, "Survey sampling", 1965). So coverage is q up to the error of m. Rows, not tasks, weigh equally,
because coverage is measured by step.

Most scores come from models of other folds, which err more than the final model (between split conformal and CV+:
Barber et al., "Predictive inference with the jackknife+", Annals of Statistics 2021). Quantiles tend to over-cover
slightly.

- A type has its own shift (Mondrian: Vovk, "Conditional validity of inductive conformal predictors", 2012), shrunk
  towards that of all types as far as this covers the type's rows as it should, within two standard errors over tasks.
  An upper shift is never shrunk below the own one, which would under-cover the type.
- If fewer than ROWS_BEYOND independent rows can lie beyond an upper quantile, the larger of the own shift and that of
  all types is used.
- A workflow type below the floor is marked as not calibrated. Its upper shifts are the largest of its own, of those of
  all types together, and of those of every type that reaches the floor. An unknown type gets the largest score.
- An unknown agent is an input profile of its own: the scores are those of all rows as if their agents were unknown. So
  is an unknown type with a known agent: its upper shifts are the largest of the known types read as if unknown.

MAPIE has neither groups with a floor nor one-sided bounds with a scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from presage.predictors.common.artefact import Tensors

ROWS_BEYOND: Final = 10
"""Expected independent rows of a type beyond an upper quantile, below which its own shift may only widen it."""
_SHARES: Final = (0.0, 0.25, 0.5, 0.75)
"""Candidate shares of the way from the shift of all types to the own one, ascending; 1 is used if none covers."""
_ERRORS: Final = 2.0
"""Standard errors over tasks within which the coverage of a workflow type counts as met."""
UNKNOWN: Final = 2.0
"""Added to the widest upper shift if all types together are below the floor, in units of the scale."""
EXACT: Final = 0.05
"""Scores up to which every error is nothing: the target follows from the inputs, and is no wider for few rows."""


_NO_PROFILES: Final = slice(0, 0)


@dataclass(frozen=True, eq=False)
class Conformal(Tensors):
    """Shifts of Q quantiles for T workflow types under each of L input profiles.

    Attributes:
        shifts: float32 [L, T + 1, Q], the last row for unknown types.
        rows: int32 [T + 1], number of calibration rows of each type.
        calibrated: bool [T + 1], whether that number reaches the floor.
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
        typeless: slice = _NO_PROFILES,
    ) -> Self:
        """Fit from scores float64 [L, n, Q] of calibration rows and their types, int32 [n]; T is `types`.

        `task`, integer [n], is equal for rows of one task, which are correlated; None treats rows as independent.
        `typeless` are the profiles under which the type of a row is not read.
        """
        floor = max(floor, least_rows(max(quantiles)))
        counts = np.bincount(workflow_type, minlength=types + 1)[: types + 1]
        calibrated = counts >= floor
        calibrated[types] = False
        of_task = np.arange(len(workflow_type)) if task is None else np.unique(task, return_inverse=True)[1]
        shifts = np.stack(
            [
                _shifts(profile_scores, workflow_type, of_task, calibrated, counts, quantiles, floor)
                for profile_scores in scores
            ]
        )
        if calibrated.any():
            upper = np.array(quantiles) > 0.5
            widest = shifts[typeless][:, calibrated].max(axis=1)
            shifts[typeless, -1] = np.where(upper, widest, shifts[typeless, -1])
        return cls(shifts.astype(np.float32), counts.astype(np.int32), calibrated)

    def apply(
        self,
        location: NDArray[np.float32],
        scale: NDArray[np.float32],
        profile: NDArray[np.int64],
        workflow_type: NDArray[np.int32],
    ) -> NDArray[np.float32]:
        """Calibrated quantiles of log tokens, float32 [n, Q], from locations [n, Q] and scales [n]."""
        return np.asarray(location + scale[:, None] * self.shifts[profile, workflow_type], np.float32)


def least_rows(quantile: float) -> int:
    """Rows below which ⌈(n + 1) q⌉ exceeds n, so that no score is high enough for this quantile."""
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
    every, _ = _shift(scores, task, quantiles)
    levels = np.array(quantiles)
    upper = levels > 0.5
    # If all types together are below the floor, even the largest score is weak evidence.
    doubt = UNKNOWN if len(scores) < floor and np.abs(scores).max(initial=0.0) > EXACT else 0.0
    widest = np.concatenate([every[None], scores]).max(axis=0) + doubt
    shifts = np.tile(np.where(upper, widest, every), (len(counts), 1))
    rare = ~calibrated & (counts > 0)
    rare[-1] = False  # rows of unknown types are no evidence for another unknown type
    for kind in np.flatnonzero(calibrated | rare) if len(scores) >= floor else ():
        mine = workflow_type == kind
        inside, of_task = scores[mine], np.unique(task[mine], return_inverse=True)[1]
        own, independent = _shift(inside, of_task, quantiles)
        shrunk = _shrunk(own, every, inside, of_task, levels)
        scarce = rare[kind] | (independent * (1.0 - levels) < ROWS_BEYOND)
        shifts[kind] = np.where(upper, np.maximum(own, np.where(scarce, every, shrunk)), shrunk)
    widest_known = np.where(upper, shifts[calibrated].max(axis=0, initial=-np.inf), -np.inf)
    shifts[rare] = np.maximum(shifts[rare], widest_known)
    return shifts


def _shrunk(
    own: NDArray[np.float64],
    every: NDArray[np.float64],
    scores: NDArray[np.float64],
    task: NDArray[np.int64],
    levels: NDArray[np.float64],
) -> NDArray[np.float64]:
    """A type's own shifts, shrunk towards those of all types as far as its coverage permits, float64 [Q]."""
    shifts = own
    for share in reversed(_SHARES):
        moved = every + share * (own - every)
        covered, error = _coverage(scores, moved, task)
        shifts = np.where(np.abs(covered - levels) <= _ERRORS * error, moved, shifts)
    return shifts


def _coverage(
    scores: NDArray[np.float64], shifts: NDArray[np.float64], task: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Share of n scores within each shift, and its standard error over tasks, both float64 [Q]."""
    within = (scores <= shifts).astype(np.float64)
    covered = within.mean(axis=0)
    sums = np.zeros((int(task.max()) + 1, within.shape[1]))
    np.add.at(sums, task, within - covered)
    return covered, np.sqrt(np.square(sums).sum(axis=0)) / len(within)


def _shift(
    scores: NDArray[np.float64], task: NDArray[np.int64], quantiles: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The shift of each quantile, at most the largest score, and the number of independent rows, both float64 [Q].

    0 without scores.
    """
    levels, rows = np.array(quantiles), len(scores)
    if not rows:
        return np.zeros(len(levels)), np.zeros(len(levels))
    ordered = np.sort(scores, axis=0)

    def smallest(independent: float | NDArray[np.float64]) -> NDArray[np.float64]:
        rank = np.ceil(rows * levels * (1.0 + 1.0 / independent) - 1e-9).astype(int)
        return np.asarray(ordered[np.clip(rank, 1, rows) - 1, np.arange(len(levels))])

    covered, error = _coverage(scores, smallest(rows), task)
    least = rows**2 / np.square(np.bincount(task)).sum()  # all rows of a task equal
    variance = np.maximum(covered * (1.0 - covered), 1e-12)
    independent = np.clip(variance / np.maximum(np.square(error), variance / rows), least, rows)
    return smallest(independent), independent
