"""Has the mean of a bounded number a workflow gone past its limit? Watched for ever, at a stated rate of false alarms.

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

λ is not known in advance: R is the mean over a grid of them, for which all of the above holds too. The grid costs at
most log(6) = 1.8 nats of evidence.
"""

from __future__ import annotations

from typing import Final

from presage.serving_hooks.truth.promoted import Side

SHARES: Final = (0.9, 0.5, 0.25, 0.125, 0.0625, 0.03125)
"""Bets, as shares of the boldest one that cannot lose everything."""

_NARROWEST: Final = 1e-3
"""A limit of 0 would allow bets without bound; a wider one alarms less."""
_MOST: Final = 1e300


class Detector:
    """Watches one figure.

    Args:
        limit: m, between 0 and 1.
        side: where the mean must not go.
    """

    __slots__ = ("_bets", "_limit", "_sign", "_sums")

    def __init__(self, limit: float, side: Side) -> None:
        above = side == "above"
        self._limit = max(limit, _NARROWEST) if above else min(limit, 1.0 - _NARROWEST)
        self._sign = 1.0 if above else -1.0
        worst = self._limit if above else 1.0 - self._limit
        self._bets = [share / worst for share in SHARES]
        self._sums = [0.0] * len(SHARES)

    @property
    def evidence(self) -> float:
        """R: at most the number of workflows on the mean, as long as nothing has changed."""
        return sum(self._sums) / len(self._sums)

    def add(self, value: float) -> None:
        """A workflow's number, between 0 and 1."""
        gain = self._sign * (value - self._limit)
        self._sums = [
            min((total + 1.0) * (1.0 + bet * gain), _MOST) for total, bet in zip(self._sums, self._bets, strict=True)
        ]
