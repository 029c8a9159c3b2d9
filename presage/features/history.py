"""How a workflow has run so far, as numbers at each of its steps: one definition, compiled, for training and serving.

A history says which agents came in which order, a small float32 vector. PROGRESS says how far the workflow has come;
only what is known before a step produces its output counts there: the step's own agent, but the outputs of earlier
steps alone. Counts of steps are those of the trace, tool calls included.

`begin` and `advance` alone write a history, `begin_progress`, `advance_progress` and `produce` alone write progress.
Serving calls them once a step, training calls the same code in a loop over whole workflows.
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


PROGRESS: Final = ("step", "agents_so_far", "run", "calls", "produced_tokens", "previous_output_tokens")
"""Steps before this one; different agents so far, this one included; how often this agent was called in a row and in
all; output tokens of the earlier steps (of those whose number is known) and of the last of them (NaN: unknown)."""

COUNTERS: Final = 6
_STEPS, _DIFFERENT, _RUN, _LAST, _PRODUCED, _PREVIOUS = range(COUNTERS)


@njit(cache=True, inline="always")
def begin_progress(calls: NDArray[np.int64], counters: NDArray[np.float64]) -> None:
    """Writes a workflow before its first step: `calls` int64 [V+1], `counters` float64 [COUNTERS]."""
    calls[:] = 0
    counters[:] = 0.0
    counters[_LAST] = -1.0
    counters[_PREVIOUS] = np.nan


@njit(cache=True, inline="always")
def advance_progress(
    calls: NDArray[np.int64], counters: NDArray[np.float64], agent: int, out: NDArray[np.float32]
) -> None:
    """A step of `agent` (0..V, V: unknown) begins: the numbers of PROGRESS go to `out`, float32 [6]."""
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
    """The step that began last has produced so many tokens; NaN where that is not known."""
    counters[_PREVIOUS] = output_tokens
    if not np.isnan(output_tokens):
        counters[_PRODUCED] += output_tokens


@njit(cache=True)
def progress(
    agent: NDArray[np.int32], output_tokens: NDArray[np.float32], offsets: NDArray[np.int64], agents: int
) -> NDArray[np.float32]:
    """The numbers of PROGRESS at every step, float32 [n, 6].

    Args:
        agent: int32 [n], 0..V-1, or V for an unknown agent; all of those count as one.
        output_tokens: float32 [n], NaN where not known.
        offsets: int64 [W+1], workflow w has the rows offsets[w]:offsets[w+1].
        agents: V.
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


class LengthHistory:
    """One running workflow, moved step by step: `LengthEncoder.course` where no trace is at hand.

    Its size is that of the vocabulary, however many steps the workflow takes.

    Args:
        agents: V.
        columns: int64 [H], which numbers of the history are wanted, in this order.
    """

    __slots__ = ("_calls", "_columns", "_counters", "_history")

    def __init__(self, agents: int, columns: NDArray[np.int64]) -> None:
        self._columns = columns
        self._history = np.empty(history_size(agents), np.float32)
        self._calls = np.empty(agents + 1, np.int64)
        self._counters = np.empty(COUNTERS, np.float64)
        _begin_course(self._history, self._calls, self._counters)

    def begun(self, agent: int) -> NDArray[np.float32]:
        """A step of `agent` (0..V, V: unknown) begins: what is known of it, float32 [6 + H]."""
        out = np.empty(len(PROGRESS) + len(self._columns), np.float32)
        _advance_course(self._history, self._calls, self._counters, agent, self._columns, out)
        return out

    def completed(self, output_tokens: float) -> None:
        """It has produced so many tokens; NaN where that is not known, as it is where this is not called."""
        produce(self._counters, output_tokens)


@njit(cache=True)
def _begin_course(row: NDArray[np.float32], calls: NDArray[np.int64], counters: NDArray[np.float64]) -> None:
    begin(row, len(calls) - 1)
    begin_progress(calls, counters)


@njit(cache=True)
def _advance_course(
    row: NDArray[np.float32],
    calls: NDArray[np.int64],
    counters: NDArray[np.float64],
    agent: int,
    columns: NDArray[np.int64],
    out: NDArray[np.float32],
) -> None:
    advance(row, agent, len(calls) - 1)
    advance_progress(calls, counters, agent, out[:6])
    for i in range(len(columns)):
        out[6 + i] = row[columns[i]]
