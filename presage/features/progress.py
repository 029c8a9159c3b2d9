"""How far a workflow has come, as numbers at each of its steps: one definition, compiled, for training and serving.

Only what is known before a step produces its output counts: the step's own agent, but the outputs of earlier steps
alone. Counts of steps are those of the trace, tool calls included.

`begin`, `advance` and `produce` are the only writers: serving calls them once a step, training calls the same code in a
loop over whole workflows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

PROGRESS: Final = ("step", "agents_so_far", "run", "calls", "produced_tokens", "previous_output_tokens")
"""Steps before this one; different agents so far, this one included; how often this agent was called in a row and in
all; output tokens of the earlier steps (of those whose number is known) and of the last of them (NaN: unknown)."""


COUNTERS: Final = 6
_STEPS, _DIFFERENT, _RUN, _LAST, _PRODUCED, _PREVIOUS = range(COUNTERS)


@njit(cache=True, inline="always")
def begin(calls: NDArray[np.int64], counters: NDArray[np.float64]) -> None:
    """Writes a workflow before its first step: `calls` int64 [V+1], `counters` float64 [COUNTERS]."""
    calls[:] = 0
    counters[:] = 0.0
    counters[_LAST] = -1.0
    counters[_PREVIOUS] = np.nan


@njit(cache=True, inline="always")
def advance(calls: NDArray[np.int64], counters: NDArray[np.float64], agent: int, out: NDArray[np.float32]) -> None:
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
        begin(calls, counters)
        for row in range(offsets[w], offsets[w + 1]):
            advance(calls, counters, agent[row], out[row])
            produce(counters, output_tokens[row])
    return out
