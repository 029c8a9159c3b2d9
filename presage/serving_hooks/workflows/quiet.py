"""After how long without a request a workflow has probably ended, where its client does not say so.

A workflow that has been quiet for e seconds has ended with probability

    p / (p + (1 - p) S(e))

where S(e) is the share of its type's latest returns that took longer, and p the share of steps that are a last one: at
least one in as many as the longest workflow had. It ends once that is `SURE`. So a type whose workflows return within
seconds gives its blocks and its place up within seconds, and one whose tools take minutes keeps them for minutes. The
time to live is the bound of both, and what counts until enough returns were seen.

A type whose clients end their workflows is left alone.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

SURE: Final = 0.9
"""Probability of an end from which a workflow counts as ended."""
LEAST_RETURNS: Final = 20
_LATEST: Final = 512
"""Returns kept of a type."""
_MOST_TYPES: Final = 1024


@dataclass(slots=True)
class _Returns:
    arrived: array[float] = field(default_factory=lambda: array("f"))
    ordered: array[float] = field(default_factory=lambda: array("f"))
    oldest: int = 0
    longest: int = 1
    told: bool = False

    def add(self, seconds: float) -> None:
        if len(self.arrived) < _LATEST:
            self.arrived.append(seconds)
        else:
            del self.ordered[bisect_left(self.ordered, self.arrived[self.oldest])]
            self.arrived[self.oldest] = seconds
            self.oldest = (self.oldest + 1) % _LATEST
        insort(self.ordered, seconds)


class QuietLimits:
    """The seconds without a request after which workflows end, by type with its tenant (`Step.stats_key`)."""

    def __init__(self) -> None:
        self._types: OrderedDict[str, _Returns] = OrderedDict()

    def returned(self, stats_key: str, seconds: float, steps: int) -> None:
        """A workflow has come back after so many seconds, with its step number `steps`, from 1."""
        of = self._at(stats_key)
        of.longest = max(of.longest, steps)
        of.add(seconds)

    def told(self, stats_key: str) -> None:
        """A client has ended a workflow of this type."""
        self._at(stats_key).told = True

    def seconds(self, stats_key: str) -> float:
        """The seconds after which a workflow of this type has probably ended; infinite if that is not known."""
        of = self._types.get(stats_key)
        if of is None or of.told or len(of.ordered) < LEAST_RETURNS:
            return math.inf
        last = 1 / (1 + of.longest)
        share = last / (1 - last) * (1 / SURE - 1)
        longer = math.floor(share * (len(of.ordered) + 1) - 0.5)  # S(e) of k longer ones counts as (k + ½) / (n + 1)
        return of.ordered[-1 - longer] if longer >= 0 else math.inf

    def __len__(self) -> int:
        return len(self._types)

    def _at(self, stats_key: str) -> _Returns:
        of = self._types.get(stats_key)
        if of is None:
            of = self._types[stats_key] = _Returns()
            if len(self._types) > _MOST_TYPES:
                self._types.popitem(last=False)
        else:
            self._types.move_to_end(stats_key)
        return of
