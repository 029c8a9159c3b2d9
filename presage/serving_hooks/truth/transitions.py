"""The call graph of a workflow type when all was well: who followed whom, and how much of a workflow that was.

A workflow is told as shares: of its transitions, from its start to its end, how many led from one agent to another. No
forecast goes into that, so it is watched while a predictor is not asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from presage.serving_hooks.truth.outcomes import END

PAIRS_KEPT: Final = 4096
PAIRS_WATCHED: Final = 64

Pair = tuple[str, str]
"""One agent and the one right after it; `END` as the first is the start of a workflow, as the second its end."""


class Transitions:
    """Counts of pairs. Bounded: of more than `PAIRS_KEPT` different ones the later are not counted."""

    def __init__(self, counts: Mapping[Pair, int] | None = None) -> None:
        self.counts: Counter[Pair] = Counter()
        self.agents: set[str] = set()
        self._watched: tuple[Pair, ...] | None = None
        self.add(counts or {})

    def add(self, transitions: Mapping[Pair, int]) -> None:
        """A workflow more."""
        self._watched = None
        for pair, count in transitions.items():
            if pair in self.counts or len(self.counts) < PAIRS_KEPT:
                self.counts[pair] += count
                self.agents.update(agent for agent in pair if agent != END)

    @property
    def watched(self) -> tuple[Pair, ...]:
        """The commonest pairs, `PAIRS_WATCHED` at most."""
        if self._watched is None:
            ranked = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
            self._watched = tuple(pair for pair, _ in ranked[:PAIRS_WATCHED])
        return self._watched

    def to_dict(self) -> list[list[Any]]:
        """[before, after, count] of each pair, as JSON values."""
        return [[before, after, count] for (before, after), count in sorted(self.counts.items())]

    @classmethod
    def from_dict(cls, data: list[list[Any]]) -> Transitions:
        """Inverse of `to_dict`."""
        return cls({(str(before), str(after)): int(count) for before, after, count in data})


def name_of(pair: Pair) -> str:
    """For people, and the same for no other pair: clients choose the names of agents, so they are quoted."""
    before, after = pair
    return f"{repr(before) if before != END else 'start'} → {repr(after) if after != END else 'end'}"
