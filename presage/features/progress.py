"""How far a workflow has come, as numbers at each of its steps: one definition, compiled, for training and serving.

Only what is known before a step produces its output counts: the step's own agent, but the outputs of earlier steps
alone. Counts of steps are those of the trace, tool calls included.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

PROGRESS: Final = ("step", "agents_so_far", "run", "calls", "produced_tokens", "previous_output_tokens")
"""Steps before this one; different agents so far, this one included; how often this agent was called in a row and in
all; output tokens of the earlier steps (of those whose number is known) and of the last of them (NaN: unknown)."""


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
    for w in range(len(offsets) - 1):
        calls[:] = 0
        different, run, produced = 0, 0, 0.0
        for row in range(offsets[w], offsets[w + 1]):
            first = row == offsets[w]
            run = 1 if first or agent[row] != agent[row - 1] else run + 1
            different += calls[agent[row]] == 0
            calls[agent[row]] += 1
            out[row, 0] = row - offsets[w]
            out[row, 1] = different
            out[row, 2] = run
            out[row, 3] = calls[agent[row]]
            out[row, 4] = produced
            out[row, 5] = np.nan if first else output_tokens[row - 1]
            if not np.isnan(output_tokens[row]):
                produced += output_tokens[row]
    return out
