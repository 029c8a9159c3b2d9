"""Ranks of requests, also of those of which nothing is forecast: unknown is never first.

A name that was never seen gets the worst rank, so nobody gains by making one up. A name without a forecast gets the
median of those that are known. A forecast of counts that is below the median counts as far as there is evidence of it:
the few workflows that have ended first are the short ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from typing import Final, Literal

from presage.serving_hooks.workflows.live import LiveLengths

LATEST: Final = 256
"""Forecasts that median and worst rank are of."""
MOST_NAMES: Final = 10_000
LEAST_SEEN: Final = 5
"""Answers, or training steps, of an agent of a workflow type from which on its name is known."""
PRIOR: Final = 20
"""Steps of evidence that weigh as much as the median."""

Name = tuple[str, str]
"""Workflow type with its tenant, and agent."""
RankSource = Literal["forecast", "little evidence", "nothing forecast", "never seen"]


class KnownRanks:
    """The ranks of the latest forecasts, and the names that were served."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []
        self._answers: OrderedDict[Name, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def median(self) -> float | None:
        """The rank in the middle; None while no forecast was made."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else None

    def answered(self, name: Name) -> None:
        """A step of this name was answered."""
        self._answers[name] = self._answers.pop(name, 0) + 1
        if len(self._answers) > MOST_NAMES:
            self._answers.popitem(last=False)

    def rank(self, name: Name, left: LiveLengths | None) -> tuple[float | None, RankSource]:
        """The rank of a request, by the forecast of its workflow's remaining tokens, and what it is made of.

        None while no forecast was made for anybody: then all are in order of arrival.
        """
        forecast = None if left is None else left.ranking
        evidence = 0 if left is None else left.evidence
        trusted = left is not None and left.source in ("champion", "profile")
        seen = trusted or max(evidence, self._answers.get(name, 0)) >= LEAST_SEEN
        median = self.median
        if forecast is None or not math.isfinite(forecast):
            if median is None:
                return None, "nothing forecast"
            return (median, "nothing forecast") if seen else (self._sorted[-1], "never seen")
        if not seen:
            return max([forecast, *self._sorted[-1:]]), "never seen"
        self._add(forecast)
        if trusted or median is None or forecast >= median:
            return forecast, "forecast"
        counted = (evidence * forecast + PRIOR * median) / (evidence + PRIOR)
        return counted, "forecast" if evidence >= PRIOR else "little evidence"

    def _add(self, rank: float) -> None:
        self._latest.append(rank)
        insort(self._sorted, rank)
        if len(self._latest) > LATEST:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]


def shrunk(end: float, evidence: int) -> float:
    """A probability from counts, as sure as so many of them can be (Krichevsky and Trofimov, 1981)."""
    return (evidence * end + 0.5) / (evidence + 1)
