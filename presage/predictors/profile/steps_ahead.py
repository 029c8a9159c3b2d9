"""The next K steps after a place of an automaton: its distribution over states, propagated exactly.

With m_k(s) the probabilities that the k-th step from state s is of each agent, or that the workflow ends there,

    m_1(s) = sum over moves s -> t of p(t) · agents(t), or END
    m_k(s) = sum over moves s -> t, t no END, of p(t) · m_(k-1)(t)

Each m is made once and kept, so a forecast costs K additions and no walk over the automaton.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.predictors.profile.automaton import END, Automaton, ProfilePlace

_MOST_KEPT: Final = 1024
"""Of the latest m_k(s)."""


class StepsAhead:
    """The next `horizon` steps; `agents` are the columns before END, which is the last."""

    def __init__(self, automaton: Automaton, horizon: int) -> None:
        self.horizon = horizon
        self.agents = tuple(sorted({agent for state in automaton.states for agent in state.members}))
        self._automaton = automaton
        self._column = {agent: column for column, agent in enumerate(self.agents)}
        self._reached = lru_cache(_MOST_KEPT)(self._reach)

    def after(self, place: ProfilePlace) -> NDArray[np.float32] | None:
        """float32 [K, V+1], each row given that the workflow has not ended before; None where nothing is known.

        A row that no workflow gets to is END.
        """
        if place.state is None:
            return None
        rows = np.zeros((self.horizon, len(self.agents) + 1))
        for ahead in range(self.horizon):
            rows[ahead] = self._reached(place.state, place.within, ahead)
        total = rows.sum(1, keepdims=True)
        if not total[0]:
            return None
        rows[total[:, 0] == 0, -1] = 1.0
        probabilities: NDArray[np.float32] = (rows / np.where(total > 0, total, 1.0)).astype(np.float32)
        return probabilities

    def _reach(self, state: int, within: int, further: int) -> NDArray[np.float64]:
        """m_(further+1) of a state of whose block `within` steps have begun."""
        mass = np.zeros(len(self.agents) + 1)
        for to, begun, p in self._automaton.moves(state, within):
            if further:
                if to != END:
                    mass += p * self._reached(to, begun, further - 1)
            elif to == END:
                mass[-1] += p
            else:
                for agent, share in self._automaton.states[to].agents().items():
                    mass[self._column[agent]] += p * share
        return mass
