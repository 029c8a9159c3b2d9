"""What a cached block is worth: how often, and how soon, the forecasts say it will be touched.

Source: PBKV (Zheng et al.), eq. 1 and 2. With A_w(c) the agents of workflow w that touch block c, P_w^(k) the forecast
of w's k-th next step given that w gets that far, and s_w^(k) = Π_{j<k} (1 − p_w,END^(j)) the chance that it does,

    Value(c) = Σ_w A_w(c) · P_w^(1)
    Score(c) = Σ_{k=1..K} γ^(k−1) Σ_w s_w^(k) · A_w(c) · P_w^(k)

Both are linear in the agents, so a forecast gives each agent its part once, and a group of blocks sums over its agents.
Numbers are whole multiples of 1 / UNIT: a sum that is added to and taken from a thousand times stays exact,
and does not depend on the order of the updates. Rounding costs at most half a unit for each agent of each workflow.

Where we depart. Score ties, or nearly, wherever every active block is needed for certain: with prompts that begin with
the common history all blocks of all workflows score alike, and eq. 2 cannot order them. What is left to know is when.
`moment` is eq. 2 with every term weighted by its k, so moment / score is the mean number of steps until a touch, as the
score itself weighs them, in 1..K. It is linear too, where the expectation of the first touch is not; for one possible
touch they agree.

And of blocks that all agents of a workflow share, the first touch alone counts: for P_w^(k) stands the chance that the
k-th next step is the first to touch. Whoever gives such a block up pays for it once, at the next step, however many
steps come after it; eq. 2 would keep the histories of workflows that have many left before those, longer ones, that are
about to end (benchmarks/policies_replayed.py, one history for all, the truth as forecast: hit rate .655 by eq. 2, .668
so).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError

UNIT: Final = 2**20
"""A score of 1, one touch for certain at the next step, in the whole numbers of this module."""


@dataclass(frozen=True)
class ScoreConfig:
    """Settings of eq. 2.

    Attributes:
        horizon: K, steps looked ahead; a forecast of fewer is used as far as it goes.
        decay: γ, what a touch one step later counts, in (0, 1].
    """

    horizon: int = 3
    decay: float = 0.7

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ConfigurationError(f"horizon is {self.horizon}; a score looks 1 or more steps ahead")
        if not 0 < self.decay <= 1:
            raise ConfigurationError(f"decay is {self.decay}; give a number above 0 and at most 1")


_NOBODY: Final[Mapping[str, int]] = {}
NO_ROWS: Final = np.empty((0, 1), np.float32)
"""Of a forecast that says nothing."""


class Lookahead:
    """One workflow's forecast, as blocks are judged by it. All worths in 1 / UNIT.

    An agent's part is computed when it is asked for: a workflow's blocks name few of the agents there are. There is one
    of these for each workflow, so it keeps its numbers in one array, the whole ones too (exact below 2^53), and names
    in tables that all of them share.

    Args:
        column: of each agent in the rows.
        rows: P^(k), float [K, V+1]; the forecast's own, kept and not copied.
        weights: γ^(k−1) s^(k), K numbers.
        always: what every block of the workflow is worth, whoever touches it.
        rates: as `shared` has them.
    """

    __slots__ = ("_column", "_numbers", "_place", "_rows")

    def __init__(
        self,
        column: Mapping[str, int],
        rows: NDArray[Any],
        weights: Sequence[float],
        always: tuple[int, int] = (0, 0),
        rates: Mapping[str, float] | None = None,
    ) -> None:
        self._column, self._rows = column, rows
        self._place: Mapping[str, int] = _NOBODY
        own: list[int] = []  # score and moment of each agent that has a place
        if rates:
            always, own = self._share(rates, weights, always)
        # `always` first, the weights last, so that an agent's place tells where its numbers are.
        self._numbers = array("d", (*always, *own, *weights))

    @property
    def says_something(self) -> bool:
        """Whether there is a forecast behind it."""
        return len(self._rows) > 0

    @property
    def always(self) -> tuple[int, int]:
        """(score, moment) of every block of the workflow."""
        return int(self._numbers[0]), int(self._numbers[1])

    def worth(self, agents: Iterable[str]) -> tuple[int, int]:
        """(score, moment) this workflow adds to blocks that `agents` touch; an agent it does not know adds nothing."""
        numbers, place = self._numbers, self._place
        score, moment = numbers[0], numbers[1]
        for agent in agents:
            at = place.get(agent)
            if at is None:
                column = self._column.get(agent)
                if column is not None:
                    part = _part(self._rows[:, column].tolist(), self._weights)
                    score, moment = score + part[0], moment + part[1]
            else:
                score, moment = score + numbers[at + at + 2], moment + numbers[at + at + 3]
        return int(score), int(moment)

    def next_agents(self, least: float) -> list[str]:
        """Those that come next with at least this probability."""
        return [agent for agent, column in self._column.items() if float(self._rows[0, column]) >= least]

    def one_step(self, agents: Iterable[str]) -> int:
        """What this workflow adds to the one-step value (eq. 1) of blocks that `agents` touch."""
        column = self._column
        return sum(round(float(self._rows[0, column[agent]]) * UNIT) for agent in agents if agent in column)

    def shared(self, rates: Mapping[str, float]) -> Lookahead:
        """As it stands when an agent touches a block it has not touched before with the probability `rates` gives.

        A_w(c) is then 1 for the agents that have touched c and the rate for the others: that share of the agent's
        worth stays no longer its own, and `always` has what the shares of all agents come to, first touches alone.
        """
        return Lookahead(self._column, self._rows, self._weights, self.always, rates) if rates else self

    @property
    def _weights(self) -> Sequence[float]:
        return self._numbers[2 + 2 * len(self._place) :]

    def _share(
        self, rates: Mapping[str, float], weights: Sequence[float], always: tuple[int, int]
    ) -> tuple[tuple[int, int], list[int]]:
        own: list[int] = []
        rows, column = self._rows.tolist(), self._column  # all at once is faster than number by number
        touched = [0.0] * len(weights)
        for agent, rate in rates.items():
            at = column.get(agent)
            if at is None:
                own += (0, 0)
                continue
            of = [row[at] for row in rows]
            whole, whole_moment = _part(of, weights)
            own += (whole - int(whole * rate), whole_moment - int(whole_moment * rate))
            for k in range(len(touched)):
                touched[k] += of[k] * rate
        self._place = _columns(tuple(rates))
        shared, shared_moment = _part(_first(touched, [row[-1] for row in rows]), weights)
        return (always[0] + shared, always[1] + shared_moment), own


def _first(touched: list[float], ends: list[float]) -> list[float]:
    """The chance that a step is the first to touch, given that the workflow gets that far.

    Args:
        touched: the chance that each touches.
        ends: the chance that the workflow ends instead. Where it touches it does not end: of the workflows that go on
            after a step, touched / (1 − end) have touched.
    """
    first, not_yet = [], 1.0
    for chance, end in zip(touched, ends, strict=True):
        first.append(chance * not_yet)
        not_yet *= max(0.0, 1.0 - chance / (1.0 - end)) if end < 1.0 else 0.0
    return first


def _part(probabilities: list[float], weights: Sequence[float]) -> tuple[int, int]:
    """(score, moment) of an agent that comes next, and at each later step, with these probabilities."""
    score = moment = 0.0
    for k, weight in enumerate(weights):
        term = weight * probabilities[k]
        score += term
        moment += (k + 1) * term
    return round(score * UNIT), round(moment * UNIT)


UNKNOWN: Final = Lookahead({}, NO_ROWS, (), always=(UNIT, UNIT))
"""A workflow without a forecast: each of its blocks counts as touched at the next step for certain and never again.

Zero would give up first what nobody knows anything of, which is no way to fail open. If no workflow has a forecast all
tie, and what is left is: ended workflows first, then the least recently used."""


def lookahead(probabilities: NDArray[Any], agents: tuple[str, ...], config: ScoreConfig) -> Lookahead:
    """Turns a forecast into what blocks are worth.

    Args:
        probabilities: float [K, V+1], END last, row k given that the workflow reaches its k-th next step; as
            `LiveForecast` has them. One without rows, or with numbers that are not finite, is UNKNOWN.
        agents: names of the first V columns.
        config: K and γ.
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


@lru_cache(maxsize=256)  # a model version has one tuple of agents, and a workflow type one of those that share
def _columns(agents: tuple[str, ...]) -> Mapping[str, int]:
    return {agent: column for column, agent in enumerate(agents)}
