"""Have means of bounded numbers a workflow gone past their limits? Watched for ever, at a stated rate of false alarms.

Betting (Waudby-Smith & Ramdas, 2024, §4): of numbers x in [0, 1] whose mean, given the past, is at most the limit m,

    e_t = 1 + λ (x_t − m),   0 ≤ λ < 1/m

has a mean of at most 1, whatever else their distribution is; for a mean of at least m the same with m − x and
λ < 1/(1 − m). A change may come at any workflow, so the bets that start at each of them are added up (the
Shiryaev–Roberts e-detector of Shin, Ramdas & Rinaldo, 2022, §3):

    R_t = (R_{t−1} + 1) · e_t,   R_0 = 0

As long as nothing has changed, R_t grows by at most 1 a workflow on the mean, so up to any n workflows R_t + (n − t) is
a supermartingale that starts at n and is never negative: by Ville's inequality R reaches c among the first n workflows
with a probability of at most n / c. No number of workflows is needed for that, nor a normal distribution. What is
needed is that one workflow does not tell of the next: traffic that comes in spells of hard and of easy workflows is a
change to it.

λ is not known in advance, nor which figure will change: the mean of R over a grid of λ, and any weighted mean over
figures, keeps to the same bound. What that costs is the logarithm of their number: 1.8 nats for the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Side = Literal["above", "below"]
"""Where a mean must not go."""

SHARES: Final = (0.9, 0.5, 0.25, 0.125, 0.0625, 0.03125)
"""Bets, as shares of the boldest one that cannot lose everything."""

_NARROWEST: Final = 1e-3
"""A limit of 0 would allow bets without bound; a wider one alarms less."""
_MOST: Final = 1e200


class Detectors:
    """Watches D figures.

    Args:
        limits: m of each, D numbers between 0 and 1.
        sides: where the mean of each must not go, D of them.
    """

    def __init__(self, limits: Sequence[float], sides: Sequence[Side]) -> None:
        above = np.array([side == "above" for side in sides], bool)
        given = np.array(limits, np.float64)
        self._limits = np.where(above, np.maximum(given, _NARROWEST), np.minimum(given, 1.0 - _NARROWEST))
        self._signs = np.where(above, 1.0, -1.0)
        boldest = 1.0 / np.where(above, self._limits, 1.0 - self._limits)
        self._bets = boldest[:, None] * np.array(SHARES)
        self._sums = np.zeros_like(self._bets)

    @property
    def evidence(self) -> NDArray[np.float64]:
        """R of each, float64 [D]: at most the number of workflows on the mean, as long as nothing has changed."""
        evidence: NDArray[np.float64] = self._sums.mean(axis=1)
        return evidence

    def add(self, values: NDArray[np.float64]) -> None:
        """A workflow's numbers, float64 [D], between 0 and 1; NaN where it has none: that bet is not made."""
        gains = self._signs * (values - self._limits)
        there = np.isfinite(gains)
        sums = (self._sums[there] + 1.0) * (1.0 + self._bets[there] * gains[there, None])
        self._sums[there] = np.minimum(sums, _MOST)
