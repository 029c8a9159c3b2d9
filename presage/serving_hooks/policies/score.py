"""Scores of cached blocks: how often, and how soon, forecasts expect a touch.

Source: PBKV (Zheng et al.), eq. 1 and 2. With A_w(c) the agents of workflow w that touch block c, P_w^(k) the forecast
of w's k-th next step given that w gets that far, and s_w^(k) = Π_{j<k} (1 − p_w,END^(j)) the probability that it does,

    Value(c) = Σ_w A_w(c) · P_w^(1)
    Score(c) = Σ_{k=1..K} γ^(k−1) Σ_w s_w^(k) · A_w(c) · P_w^(k)

Both are linear in the agents, so each agent's part is computed once per forecast, and a group of blocks sums over its
agents. Numbers are whole multiples of 1 / UNIT: a sum stays exact over thousands of updates and does not depend on
their order. Rounding costs at most half a unit for each agent of each workflow.

Two departures from the paper. With prompts that begin with the common history, all blocks of all workflows score alike
and only the time of the touch differs. `moment` is eq. 2 with every term weighted by its k, so moment / score is the
mean number of steps until a touch, weighted as in the score, in 1..K. It is linear too, unlike the expected time of the
first touch; for a single possible touch both agree.

For blocks that all agents of a workflow share, only the first touch counts: the probability that the k-th next step is
the first to touch replaces P_w^(k), since evicting such a block costs one recomputation, however many steps follow.
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

UNIT: Final = 2**20
"""A score of 1, one certain touch at the next step, as an integer."""


@dataclass(frozen=True)
class ScoreConfig:
    """Settings of eq. 2.

    Attributes:
        horizon: K, steps ahead; a shorter forecast is used as it is.
        decay: γ, the discount of a touch for each step later, in (0, 1].
    """

    horizon: int = 3
    decay: float = 0.7


_NO_PLACES: Final[Mapping[str, int]] = {}
NO_ROWS: Final = np.empty((0, 1), np.float32)
"""The rows of an empty forecast."""


class Lookahead:
    """One workflow's forecast as scores of blocks, in 1 / UNIT.

    An agent's part is computed on demand, since a workflow's blocks name few of all agents. To save memory, as each
    workflow has one, it keeps all numbers in one float array (integers are exact below 2^53) and shares name tables.

    Args:
        rows: P^(k), float [K, V+1]; not copied.
        weights: γ^(k−1) s^(k), K numbers.
        always: (score, moment) of every block of the workflow, whichever agents touch it.
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
        self._place: Mapping[str, int] = _NO_PLACES
        own: list[int] = []  # score and moment of each agent in `rates`
        if rates:
            always, own = self._split_rates(rates, weights, always)
        # `always` first, weights last: the numbers of the agent at place p are at 2 p + 2 and 2 p + 3.
        self._numbers = array("d", (*always, *own, *weights))

    @property
    def has_forecast(self) -> bool:
        """Whether it was made from a forecast, unlike `UNKNOWN`."""
        return len(self._rows) > 0

    @property
    def always(self) -> tuple[int, int]:
        """(score, moment) of every block of the workflow."""
        return int(self._numbers[0]), int(self._numbers[1])

    def worth(self, agents: Iterable[str]) -> tuple[int, int]:
        """(score, moment) that this workflow adds to blocks that `agents` touch; unknown agents add nothing."""
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
        """The agents of the next step with at least the probability `least`."""
        return [agent for agent, column in self._column.items() if float(self._rows[0, column]) >= least]

    def one_step(self, agents: Iterable[str]) -> int:
        """What this workflow adds to the one-step value (eq. 1) of blocks that `agents` touch."""
        column = self._column
        return sum(round(float(self._rows[0, column[agent]]) * UNIT) for agent in agents if agent in column)

    def shared(self, rates: Mapping[str, float]) -> Lookahead:
        """This forecast if agents also touch new blocks, with the probabilities `rates`.

        A_w(c) is then 1 for the agents that have touched c and the rate for the others: `always` gains the rates' share
        of all agents, counting first touches only, and each agent's own part loses it.
        """
        return Lookahead(self._column, self._rows, self._weights, self.always, rates) if rates else self

    @property
    def _weights(self) -> Sequence[float]:
        return self._numbers[2 + 2 * len(self._place) :]

    def _split_rates(
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
    """The probability that each step is the first to touch, given that the workflow gets that far.

    A step that touches is no end, so of the workflows that continue after it, touched / (1 − end) have touched.
    """
    first, not_yet = [], 1.0
    for chance, end in zip(touched, ends, strict=True):
        first.append(chance * not_yet)
        not_yet *= max(0.0, 1.0 - chance / (1.0 - end)) if end < 1.0 else 0.0
    return first


def _part(probabilities: list[float], weights: Sequence[float]) -> tuple[int, int]:
    """(score, moment) of an agent with these probabilities at the next K steps."""
    score = moment = 0.0
    for k, weight in enumerate(weights):
        term = weight * probabilities[k]
        score += term
        moment += (k + 1) * term
    return round(score * UNIT), round(moment * UNIT)


UNKNOWN: Final = Lookahead({}, NO_ROWS, (), always=(UNIT, UNIT))
"""A workflow without a forecast: each of its blocks counts as touched once, at the next step.

A score of 0 would evict blocks of unknown workflows first, which would not fail open."""


def lookahead(probabilities: NDArray[Any], agents: tuple[str, ...], config: ScoreConfig) -> Lookahead:
    """Turns a forecast into scores of blocks.

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


@lru_cache(maxsize=256)  # one tuple of agents per model version, one of `rates` per workflow type
def _columns(agents: tuple[str, ...]) -> Mapping[str, int]:
    return {agent: column for column, agent in enumerate(agents)}
