"""Online counts of return times: they forecast if there is no model, or if it has too little evidence.

They keep the latest outcomes of steps, a return after some seconds or END, by workflow type, agent and finish reason;
by workflow type and agent; by workflow type; and of everything that a tenant runs. Each quantile comes from the
narrowest of these groups with enough returns on both sides of it. The share of END in a group counts that of the next
wider one as one more outcome. Memory is bounded: the least recently used types and groups are dropped.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from presage.predictors.return_time.predictor import ReturnTimeConfig
from presage.serving_hooks.forecasting.online_counts import type_to_drop
from presage.serving_hooks.workflows.identity import shared, short, tenant_of
from presage.serving_hooks.workflows.live import LiveReturn

QUANTILES: Final = ReturnTimeConfig.quantiles
"""Those of a model's default."""

_Group = tuple[str | None, ...]
Name = TypeVar("Name")


@dataclass(frozen=True)
class ReturnCountsConfig:
    """Sizes of the counts, and the evidence that a forecast needs.

    Attributes:
        types: workflow types kept.
        groups: agents, with and without a finish reason, kept of each type.
        latest: outcomes kept of each group.
        min_evidence: returns that a group needs to be used.
    """

    types: int = 64
    groups: int = 256
    latest: int = 128
    min_evidence: int = 5


class ReturnCounts:
    """The counts of every workflow type. Types are statistics keys (`Step.stats_key`), which name the tenant."""

    def __init__(self, config: ReturnCountsConfig | None = None) -> None:
        self.config = config or ReturnCountsConfig()
        self._types: OrderedDict[str, OrderedDict[_Group, _Outcomes]] = OrderedDict()
        self._tenants: OrderedDict[str, _Outcomes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._types)

    def returned(self, stats_key: str, agent: str, finish_reason: str | None, seconds: float) -> None:
        """Counts a workflow that returned `seconds` after a step of `agent`."""
        self._add(stats_key, agent, finish_reason, seconds)

    def ended(self, stats_key: str, agent: str, finish_reason: str | None) -> None:
        """Counts a workflow that ended with a step of `agent`."""
        self._add(stats_key, agent, finish_reason, math.inf)

    def forecast(self, stats_key: str, agent: str, finish_reason: str | None, reason: str | None) -> LiveReturn | None:
        """The forecast after a step, for this reason; None if there is too little evidence."""
        kept = self._types.get(stats_key)
        of_type = [kept.get(group) for group in _groups(agent, finish_reason)] if kept is not None else []
        every_level = [
            outcomes for outcomes in (*of_type, self._tenants.get(tenant_of(stats_key))) if outcomes is not None
        ]
        levels = [outcomes for outcomes in every_level if outcomes.returns >= self.config.min_evidence]
        if not levels:
            return None
        seconds, most = [], 0.0
        for quantile in QUANTILES:
            most = max(most, _quantile(levels, quantile))
            seconds.append(most)
        end = 0.0
        for outcomes in reversed(every_level):
            end = (outcomes.ends + end) / (len(outcomes) + 1)
        of_agent = of_type[1] if of_type else None
        evidence = of_agent.returns if of_agent is not None else 0
        return LiveReturn("back-off", evidence, end, QUANTILES, tuple(seconds), None, reason)

    def _add(self, stats_key: str, agent: str, finish_reason: str | None, outcome: float) -> None:
        kept = self._types.get(stats_key)
        if kept is None:
            kept = self._types[shared(stats_key)] = OrderedDict()
            if len(self._types) > self.config.types:
                del self._types[type_to_drop(self._types)]
        self._types.move_to_end(stats_key)
        for group in _groups(agent, finish_reason):
            self._count(kept, group, outcome, self.config.groups)
        self._count(self._tenants, tenant_of(stats_key), outcome, self.config.types)

    def _count(self, table: OrderedDict[Name, _Outcomes], name: Name, outcome: float, most: int) -> None:
        outcomes = table.get(name)
        if outcomes is None:
            outcomes = table[name] = _Outcomes()
            if len(table) > most:
                table.popitem(last=False)
        table.move_to_end(name)
        outcomes.add(outcome, self.config.latest)


def _groups(agent: str, finish_reason: str | None) -> tuple[_Group, ...]:
    """The groups of a step within its type, the narrowest first."""
    name = short(agent)
    return ((name, None if finish_reason is None else short(finish_reason)), (name,), ())


class _Outcomes:
    """The latest outcomes of a group: seconds until the return, infinite for END."""

    __slots__ = ("_arrived", "_oldest", "_sorted")

    def __init__(self) -> None:
        self._arrived, self._sorted, self._oldest = array("f"), array("f"), 0

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def returns(self) -> int:
        return bisect_left(self._sorted, math.inf)

    @property
    def ends(self) -> int:
        return len(self._sorted) - self.returns

    def add(self, outcome: float, most: int) -> None:
        if len(self._arrived) < most:
            self._arrived.append(outcome)
        else:
            oldest = self._arrived[self._oldest]
            self._arrived[self._oldest] = outcome
            self._oldest = (self._oldest + 1) % most
            del self._sorted[bisect_left(self._sorted, oldest)]
        insort(self._sorted, outcome)

    def at(self, place: float) -> float:
        """The return at a place among the sorted ones, linear between two."""
        low = math.floor(place)
        high = min(low + 1, self.returns - 1)
        return self._sorted[low] + (place - low) * (self._sorted[high] - self._sorted[low])


def _quantile(levels: Sequence[_Outcomes], quantile: float) -> float:
    """A quantile from the first level with a return on both sides of it; else the nearest return of the last level."""
    place = 0.0
    for outcomes in levels:
        place = quantile * (outcomes.returns + 1) - 1
        if 0 <= place <= outcomes.returns - 1:
            return outcomes.at(place)
    return levels[-1].at(min(max(place, 0.0), levels[-1].returns - 1))
