"""What a cached block is worth: how often, and how soon, the forecasts say it will be touched.

Source: PBKV (Zheng et al.), eq. 1 and 2. With A_w(c) the agents of workflow w that touch block c, P_w^(k) the forecast
of w's k-th next step given that w gets that far, and s_w^(k) = Π_{j<k} (1 − p_w,END^(j)) the chance that it does,

    Value(c) = Σ_w A_w(c) · P_w^(1)
    Score(c) = Σ_{k=1..K} γ^(k−1) Σ_w s_w^(k) · A_w(c) · P_w^(k)

Both are linear in the agents, so a forecast is turned into a few numbers an agent once, and a group of blocks sums over
its agents. Numbers are whole multiples of 1 / UNIT: a sum that is added to and taken from a thousand times stays exact,
and does not depend on the order of the updates. Rounding costs at most half a unit for each agent of each workflow.

Where we depart. Score ties, or nearly, wherever every active block is needed for certain: with prompts that begin with
the common history all blocks of all workflows score alike, and eq. 2 cannot order them. What is left to know is when.
`moment` is eq. 2 with every term weighted by its k, so moment / score is the mean number of steps until a touch, as the
score itself weighs them, in 1..K. It is linear too, where the expectation of the first touch is not; for one possible
touch they agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Self

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


@dataclass(frozen=True, slots=True)
class Lookahead:
    """One workflow's forecast, as blocks are judged by it. All numbers in 1 / UNIT.

    Attributes:
        column: of each agent in the lists.
        value: Σ_k γ^(k−1) s^(k) P^(k) of each agent: what it adds to a score.
        moment: the same terms, each times its k.
        soon: P^(1) of each agent: what it adds to a one-step value.
        always: what every block of the workflow is worth, whoever touches it.
        always_moment: the same for the moment.
    """

    column: Mapping[str, int]
    value: list[int]
    moment: list[int]
    soon: list[int]
    always: int = 0
    always_moment: int = 0

    def worth(self, agents: Iterable[str]) -> tuple[int, int]:
        """(score, moment) this workflow adds to blocks that `agents` touch; an agent without a column adds nothing."""
        score, moment, column = self.always, self.always_moment, self.column
        for agent in agents:
            at = column.get(agent)
            if at is not None:
                score += self.value[at]
                moment += self.moment[at]
        return score, moment

    def one_step(self, agents: Iterable[str]) -> int:
        """What this workflow adds to the one-step value (eq. 1) of blocks that `agents` touch."""
        return sum(self.soon[self.column[agent]] for agent in agents if agent in self.column)

    def shared(self, rates: Mapping[str, float]) -> Self:
        """As it stands when an agent touches a block it has not touched before with the probability `rates` gives.

        A_w(c) is then 1 for the agents that have touched c and the rate for the others: the rate goes to `always`, the
        rest of the agent's worth stays its own.
        """
        value, moment = list(self.value), list(self.moment)
        always, always_moment = self.always, self.always_moment
        for agent, rate in rates.items():
            at = self.column.get(agent)
            if at is not None and rate > 0:
                part, part_moment = int(value[at] * rate), int(moment[at] * rate)
                value[at], moment[at] = value[at] - part, moment[at] - part_moment
                always, always_moment = always + part, always_moment + part_moment
        return type(self)(self.column, value, moment, self.soon, always, always_moment)


UNKNOWN: Final = Lookahead({}, [], [], [], always=UNIT, always_moment=UNIT)
"""A workflow without a forecast: each of its blocks counts as touched at the next step for certain and never again.

Zero would give up first what nobody knows anything of, which is no way to fail open. If no workflow has a forecast all
tie, and what is left is: ended workflows first, then the least recently used."""


def lookahead(probabilities: NDArray[Any], agents: tuple[str, ...], config: ScoreConfig) -> Lookahead:
    """Turns a forecast into numbers an agent.

    Args:
        probabilities: float [K, V+1], END last, row k given that the workflow reaches its k-th next step; as
            `LiveForecast` has them. One without rows, or with numbers that are not finite, is UNKNOWN.
        agents: names of the first V columns.
        config: K and γ.
    """
    rows = probabilities[: config.horizon]
    if not len(rows) or not np.isfinite(rows).all():
        return UNKNOWN
    weights, weight = [], 1.0
    for end in rows[:, -1].tolist():
        weights.append(weight)
        weight *= config.decay * (1.0 - end)
    by_step = np.array([weights, [k * weight for k, weight in enumerate(weights, start=1)]])
    value, moment = np.rint(by_step @ rows[:, :-1] * UNIT).astype(np.int64).tolist()
    soon = np.rint(rows[0, :-1] * UNIT).astype(np.int64).tolist()
    return Lookahead(_columns(agents), value, moment, soon)


@lru_cache(maxsize=16)  # a model version has one tuple of agents
def _columns(agents: tuple[str, ...]) -> Mapping[str, int]:
    return {agent: column for column, agent in enumerate(agents)}
