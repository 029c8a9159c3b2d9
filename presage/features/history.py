"""How a workflow has run so far, as numbers at each of its steps: one definition, compiled, for training and serving.

A history is a float32 vector of the agents so far and their order. PROGRESS is how far the workflow has come, from what
is known before a step produces its output. Steps are LLM steps (`served_steps.py`).

Serving calls `begin`, `advance`, `begin_progress`, `advance_progress` and `produce` once a step; training calls them
in a loop over whole workflows. Nothing else writes a history or progress.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

RECENT: Final = 5
"""Number of latest agents in a history."""

NEVER: Final = 99.0
"""Steps since an agent that has not been called, and the maximum for one that has."""

LONGEST: Final = 1e4


def history_size(agents: int) -> int:
    """Length R of a history over V agents: latest agents, counts, steps since, position, run length."""
    return RECENT + 2 * (agents + 1) + 2


@njit(cache=True, inline="always")
def begin(history: NDArray[np.float32], agents: int) -> None:
    """Write the empty history, float32 [R]: no agent (-1), counts 0, steps since NEVER, position -1, run 0."""
    for i in range(RECENT):
        history[i] = -1.0
    for i in range(agents + 1):
        history[RECENT + i] = 0.0
        history[RECENT + agents + 1 + i] = NEVER
    history[RECENT + 2 * (agents + 1)] = -1.0
    history[RECENT + 2 * (agents + 1) + 1] = 0.0


@njit(cache=True, inline="always")
def advance(history: NDArray[np.float32], agent: int, agents: int) -> None:
    """Advance the history by a step of `agent` (0..V, V: unknown)."""
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


PROGRESS: Final = ("step", "agents_so_far", "run", "calls", "produced_tokens", "previous_output_tokens")
"""Earlier steps; different agents so far, this one included; calls of this agent in a row and in all; output tokens of
the earlier steps (where known) and of the last of them (NaN: unknown)."""

NAMED: Final = 4
"""The first columns of PROGRESS do not depend on tokens."""

COUNTERS: Final = 6
_STEPS, _DIFFERENT, _RUN, _LAST, _PRODUCED, _PREVIOUS = range(COUNTERS)


@njit(cache=True, inline="always")
def begin_progress(calls: NDArray[np.int64], counters: NDArray[np.float64]) -> None:
    """Write the progress before the first step: `calls` int64 [V+1], `counters` float64 [COUNTERS]."""
    calls[:] = 0
    counters[:] = 0.0
    counters[_LAST] = -1.0
    counters[_PREVIOUS] = np.nan


@njit(cache=True, inline="always")
def advance_progress(
    calls: NDArray[np.int64], counters: NDArray[np.float64], agent: int, out: NDArray[np.float32]
) -> None:
    """Begin a step of `agent` (0..V, V: unknown); write PROGRESS to `out`, float32 [6]."""
    counters[_RUN] = counters[_RUN] + 1.0 if counters[_LAST] == agent else 1.0
    counters[_DIFFERENT] += calls[agent] == 0
    calls[agent] += 1
    out[0] = counters[_STEPS]
    out[1] = counters[_DIFFERENT]
    out[2] = counters[_RUN]
    out[3] = calls[agent]
    out[4] = counters[_PRODUCED]
    out[5] = counters[_PREVIOUS]
    counters[_LAST] = agent
    counters[_STEPS] += 1.0
    counters[_PREVIOUS] = np.nan


@njit(cache=True, inline="always")
def produce(counters: NDArray[np.float64], output_tokens: float) -> None:
    """Record the output tokens of the step that began last, NaN if unknown."""
    counters[_PREVIOUS] = output_tokens
    if not np.isnan(output_tokens):
        counters[_PRODUCED] += output_tokens


@njit(cache=True)
def progress(
    agent: NDArray[np.int32], output_tokens: NDArray[np.float32], offsets: NDArray[np.int64], agents: int
) -> NDArray[np.float32]:
    """PROGRESS at every step, float32 [n, 6].

    `agent` is int32 [n], 0..V-1, or V for all unknown agents; `output_tokens` float32 [n], NaN where unknown; workflow
    w has the rows offsets[w]:offsets[w+1]; `agents` is V.
    """
    out = np.empty((len(agent), 6), np.float32)
    calls = np.zeros(agents + 1, np.int64)
    counters = np.zeros(COUNTERS, np.float64)
    for w in range(len(offsets) - 1):
        begin_progress(calls, counters)
        for row in range(offsets[w], offsets[w + 1]):
            advance_progress(calls, counters, agent[row], out[row])
            produce(counters, output_tokens[row])
    return out


@njit(cache=True)
def begin_course(row: NDArray[np.float32], calls: NDArray[np.int64], counters: NDArray[np.float64]) -> None:
    """Write the history and the progress of a workflow before its first step."""
    begin(row, len(calls) - 1)
    begin_progress(calls, counters)


@njit(cache=True)
def advance_course(
    row: NDArray[np.float32],
    calls: NDArray[np.int64],
    counters: NDArray[np.float64],
    agent: int,
    columns: NDArray[np.int64],
    out: NDArray[np.float32],
) -> None:
    """Begin a step of `agent`; write PROGRESS and these columns of the history to `out`, float32 [6 + H]."""
    advance(row, agent, len(calls) - 1)
    advance_progress(calls, counters, agent, out[:6])
    for i in range(len(columns)):
        out[6 + i] = row[columns[i]]
