"""Which agent followed which in a workflow type when all was well, and how surprising another workflow is beside it.

Counts of one step, smoothed by Witten–Bell as those of `backoff.py` are: with N outcomes counted after agent a, T of
them distinct, and P(b) counted over all agents, itself smoothed with the uniform distribution over what is known and
one name more,

    P(b | a) = (count(a, b) + T · P(b)) / (N + T)

The surprise of a workflow is the mean of −log P over its transitions, from its start to its end, each at most
`MOST_NATS`, and given as a share of that. It hangs on no forecast, so it goes on while a predictor is not asked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from math import log
from typing import Any, Final

from presage.serving_hooks.truth.outcomes import END

MOST_NATS: Final = 5.0
"""A transition of probability .0067 or less: bounded, so that a bet on it is bounded."""

PAIRS_KEPT: Final = 4096


class Transitions:
    """Counts of who came right after whom, (before, after); `END` before is the start of a workflow, after its end.

    Bounded: of more than `PAIRS_KEPT` different pairs the later ones are not counted.
    """

    def __init__(self, counts: Mapping[tuple[str, str], int] | None = None) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._after: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._all: Counter[str] = Counter()
        self._surprise: dict[tuple[str, str], float] = {}
        self.add(counts or {})

    @property
    def agents(self) -> frozenset[str]:
        """Those seen."""
        return frozenset(self._all) - {END}

    def add(self, transitions: Mapping[tuple[str, str], int]) -> None:
        """A workflow more."""
        for pair, count in transitions.items():
            if pair in self.counts or len(self.counts) < PAIRS_KEPT:
                self.counts[pair] += count
                self._after[pair[0]][pair[1]] += count
                self._all[pair[1]] += count
        self._surprise.clear()

    def probability(self, before: str, after: str) -> float:
        """P(after | before); above 0 for every name."""
        known = len(self._all)
        rest = 1.0 / (known + 1)
        over_all = (self._all.get(after, 0) + known * rest) / (self._all.total() + known) if known else rest
        following = self._after.get(before)
        if not following:
            return over_all
        return (following.get(after, 0) + len(following) * over_all) / (following.total() + len(following))

    def surprise(self, transitions: Mapping[tuple[str, str], int]) -> float | None:
        """Of a workflow, 0 to 1; None where it shows no transition."""
        total = sum(transitions.values())
        if not total:
            return None
        return sum(count * self._of(pair) for pair, count in transitions.items()) / total

    def to_dict(self) -> list[list[Any]]:
        """[before, after, count] of each pair, as JSON values."""
        return [[before, after, count] for (before, after), count in sorted(self.counts.items())]

    @classmethod
    def from_dict(cls, data: list[list[Any]]) -> Transitions:
        """Inverse of `to_dict`."""
        return cls({(str(before), str(after)): int(count) for before, after, count in data})

    def _of(self, pair: tuple[str, str]) -> float:
        found = self._surprise.get(pair)
        if found is None:
            found = min(-log(self.probability(*pair)), MOST_NATS) / MOST_NATS
            if len(self._surprise) < PAIRS_KEPT:
                self._surprise[pair] = found
        return found
