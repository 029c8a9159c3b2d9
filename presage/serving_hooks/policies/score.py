"""What a forecast of next agents expects of cached blocks: which steps touch them, how often and when first.

Source: PBKV (Zheng et al.), eq. 1 and 2. With A_w(c) the agents of workflow w that touch block c, P_w^(k) the forecast
of w's k-th next step given that w gets that far, and s_w^(k) = Π_{j<k} (1 − p_w,END^(j)) the probability that it does,

    Value(c) = Σ_w A_w(c) · P_w^(1)
    Score(c) = Σ_{k=1..K} γ^(k−1) Σ_w s_w^(k) · A_w(c) · P_w^(k)

Both are linear in the agents. Numbers are whole multiples of 1 / UNIT: a sum stays exact over thousands of updates and
does not depend on their order.

Ours ranks by the first touch (`Lookahead.first_use`): evicting a block costs one recomputation, however many steps
would read it afterwards. There A_w(c) is a probability, learnt while serving (`eviction.Sharing`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

UNIT: Final = 2**20
"""A score of 1, one certain touch at the next step, as an integer."""


@dataclass(frozen=True)
class ScoreConfig:
    """Settings of the look ahead.

    Attributes:
        horizon: K, steps ahead; a shorter forecast is used as it is.
        decay: γ of eq. 2, the discount of a touch for each step later, in (0, 1].
    """

    horizon: int = 3
    decay: float = 0.7


NO_ROWS: Final = np.empty((0, 1), np.float32)
"""The rows of an empty forecast."""


STALE: Final = "\0"
"""Marks the name of an agent that touched a block before its latest step, but not in it; no name holds it."""


class TouchRates(NamedTuple):
    """How likely a step of an agent touches a block: one that its latest step touched, one that only earlier ones did,
    and one that none did."""

    latest: float
    earlier: float
    other: float


_NOTABLE: Final = 0.02
"""Change of a rate from which expected uses are computed again: they are rounded to powers of √2 anyway."""


class LearntRates(dict[str, TouchRates]):
    """Rates by agent, which change as steps are seen.

    Attributes:
        changes: how often one has changed by more than `_NOTABLE`, so that what was computed of them is stale.
    """

    __slots__ = ("_noted", "changes")

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0
        self._noted: dict[str, TouchRates] = {}

    def learn(self, agent: str, rates: TouchRates) -> None:
        """Sets the rates of an agent."""
        self[agent] = rates
        noted = self._noted.get(agent)
        if noted is None or max(abs(a - b) for a, b in zip(rates, noted, strict=True)) > _NOTABLE:
            self._noted[agent] = rates
            self.changes += 1


NO_RATES: Final = LearntRates()
"""Of agents of which nothing is learnt; never written to."""


class FirstUse(NamedTuple):
    """The first touch of a block within the horizon, given that the workflow returns.

    Attributes:
        probability: that there is one.
        step: its expected number, from 1 for the next step; 1 if there is none.
    """

    probability: float
    step: float


NO_USE: Final = FirstUse(0.0, 1.0)
NEXT_STEP: Final = FirstUse(1.0, 1.0)
LEFT_OUT: Final = FirstUse(0.5, 1.0)
"""Without a forecast, of a block that the latest steps of all its agents left out."""


class Lookahead:
    """One workflow's forecast of the agents of its next steps.

    Args:
        column: the column of each agent; shared by all forecasts of a model.
        rows: P^(k), float [K, V+1], END last; not copied.
        weights: γ^(k−1) s^(k), K numbers.
        rates: agents without rates touch the blocks that they have touched before, and no others.
    """

    __slots__ = ("_column", "_rates", "_rows", "_shared", "_weights")

    def __init__(
        self,
        column: Mapping[str, int],
        rows: NDArray[Any],
        weights: Sequence[float],
        rates: LearntRates = NO_RATES,
    ) -> None:
        self._column, self._rows, self._weights = column, rows, array("d", weights)
        self._rates = rates
        self._shared: array[float] | None = None

    @property
    def changes(self) -> int:
        """Changes of the learnt rates, see `LearntRates`."""
        return self._rates.changes

    @property
    def has_forecast(self) -> bool:
        """Whether it was made from a forecast, unlike `UNKNOWN`."""
        return len(self._rows) > 0

    @property
    def end(self) -> float:
        """The probability that the workflow ends before its next step; 0 without a forecast."""
        return float(self._rows[0, -1]) if self.has_forecast else 0.0

    def score(self, agents: Iterable[str]) -> int:
        """Eq. 2 for this workflow and blocks that `agents` have touched, in 1 / UNIT; `UNIT` without a forecast."""
        if self is UNKNOWN:
            return UNIT
        total = 0
        for agent in agents:
            column = self._column.get(agent)
            if column is not None:
                chances = self._rows[:, column].tolist()
                total += round(
                    sum(weight * chance for weight, chance in zip(self._weights, chances, strict=True)) * UNIT
                )
        return total

    def first_use(self, agents: Iterable[str]) -> FirstUse:
        """The first touch of a block that `agents` have touched, STALE ones not in their latest step.

        Without a forecast the next step touches it, unless the latest ones left it out.
        """
        if self is UNKNOWN:
            return LEFT_OUT if all(agent.endswith(STALE) for agent in agents) else NEXT_STEP
        if self._shared is None:
            self._shared = self._by_others()
        touched = self._shared[:]
        for agent in agents:
            earlier = agent.endswith(STALE)
            name = agent.removesuffix(STALE)
            column = self._column.get(name)
            if column is not None:
                rate = self._rates.get(name)
                more = 1.0 if rate is None else (rate.earlier if earlier else rate.latest) - rate.other
                for k, chance in enumerate(self._rows[:, column].tolist()):
                    touched[k] += chance * more
        reached, used, steps = 1.0, 0.0, 0.0
        for k, (chance, end) in enumerate(zip(touched, self._rows[:, -1].tolist(), strict=True)):
            if k == 0:  # the return time knows whether the workflow returns
                chance, end = (chance / (1.0 - end), 0.0) if end < 1.0 else (0.0, 1.0)
            first = reached * min(max(chance, 0.0), 1.0)
            used += first
            steps += (k + 1) * first
            reached = max(0.0, reached * (1.0 - end) - first)
        return FirstUse(min(used, 1.0), steps / used) if used > 0 else NO_USE

    def _by_others(self) -> array[float]:
        """Touches at each step by agents that have not touched a block before."""
        touched = array("d", bytes(8 * len(self._weights)))
        for agent, rate in self._rates.items():
            column = self._column.get(agent)
            if column is not None and rate.other:
                for k, chance in enumerate(self._rows[:, column].tolist()):
                    touched[k] += chance * rate.other
        return touched

    def next_agents(self, least: float) -> list[str]:
        """The agents of the next step with at least the probability `least`."""
        return [agent for agent, column in self._column.items() if float(self._rows[0, column]) >= least]

    def one_step(self, agents: Iterable[str]) -> int:
        """What this workflow adds to the one-step value (eq. 1) of blocks that `agents` touch."""
        column = self._column
        return sum(round(float(self._rows[0, column[agent]]) * UNIT) for agent in agents if agent in column)

    def with_rates(self, rates: LearntRates) -> Lookahead:
        """This forecast with learnt probabilities of touches."""
        return Lookahead(self._column, self._rows, self._weights, rates) if rates and self.has_forecast else self


UNKNOWN: Final = Lookahead({}, NO_ROWS, ())
"""A workflow without a forecast: each of its blocks counts as touched once, at the next step.

A score of 0 would evict blocks of unknown workflows first, which would not fail open."""


def lookahead(probabilities: NDArray[Any], agents: tuple[str, ...], config: ScoreConfig) -> Lookahead:
    """Prepares a forecast for scoring blocks.

    Args:
        probabilities: float [K, V+1], END last, row k given that the workflow reaches its k-th next step. Without
            rows, or with numbers that are not finite, the result is UNKNOWN.
        agents: names of the first V columns.
    """
    rows = probabilities[: config.horizon] if len(probabilities) > config.horizon else probabilities
    if not len(rows):
        return UNKNOWN
    numbers = rows.tolist()
    if not math.isfinite(sum(map(sum, numbers))):
        return UNKNOWN
    weights, weight = [], 1.0
    for row in numbers:
        weights.append(weight)
        weight *= config.decay * (1.0 - row[-1])
    return Lookahead(_columns(agents), rows, weights)


@lru_cache(maxsize=256)  # one tuple of agents per model version
def _columns(agents: tuple[str, ...]) -> Mapping[str, int]:
    return {agent: column for column, agent in enumerate(agents)}
