"""What the order of agents so far says, as numbers: the one definition, compiled, for training and serving.

A history is a small float32 vector that moves one step at a time. `begin` and `advance` are the only writers; serving
calls them once a step, training calls the same code in a loop over whole workflows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

RECENT: Final = 5
"""How many of the latest agents a history names."""

NEVER: Final = 99.0
"""Steps since an agent that was not called yet, and the cap for one that was."""

LONGEST: Final = 1e4


def history_size(agents: int) -> int:
    """Length R of a history over V agents: latest agents, counts, steps since, position, run length."""
    return RECENT + 2 * (agents + 1) + 2


@njit(cache=True, inline="always")
def begin(history: NDArray[np.float32], agents: int) -> None:
    """Writes the empty history, float32 [R]: no agent yet (-1), counts 0, steps since NEVER, position -1, run 0."""
    for i in range(RECENT):
        history[i] = -1.0
    for i in range(agents + 1):
        history[RECENT + i] = 0.0
        history[RECENT + agents + 1 + i] = NEVER
    history[RECENT + 2 * (agents + 1)] = -1.0
    history[RECENT + 2 * (agents + 1) + 1] = 0.0


@njit(cache=True, inline="always")
def advance(history: NDArray[np.float32], agent: int, agents: int) -> None:
    """Moves the history by one step of `agent` (0..V, V: unknown)."""
    position = RECENT + 2 * (agents + 1)
    run = position + 1
    history[run] = min(history[run] + 1.0, LONGEST) if history[0] == agent else 1.0
    for i in range(RECENT - 1, 0, -1):
        history[i] = history[i - 1]
    history[0] = agent
    history[RECENT + agent] = min(history[RECENT + agent] + 1.0, LONGEST)
    since = RECENT + agents + 1
    for i in range(agents + 1):
        history[since + i] = min(history[since + i] + 1.0, NEVER)
    history[since + agent] = 0.0
    history[position] = min(history[position] + 1.0, LONGEST)


@njit(cache=True)
def histories(agent: NDArray[np.int32], offsets: NDArray[np.int64], agents: int) -> NDArray[np.float32]:
    """The history at every step of every workflow, float32 [n, R]."""
    size = RECENT + 2 * (agents + 1) + 2
    out = np.empty((len(agent), size), np.float32)
    for w in range(len(offsets) - 1):
        for row in range(offsets[w], offsets[w + 1]):
            if row == offsets[w]:
                begin(out[row], agents)
            else:
                out[row] = out[row - 1]
            advance(out[row], agent[row], agents)
    return out
