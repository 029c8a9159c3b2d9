"""A model over a running workflow: the steps a server takes, compiled, and the same steps over a whole trace.

A workflow is a row of three arrays: its input vector, the sums behind it and the GRU's state. `prefilled` and
`completed` move it by half a step each; `forecast_trace` calls them for every step of a trace, so evaluation and
serving cannot differ.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.features.inputs import at_completion, at_prefill, begin
from presage.predictors.engine import Engine
from presage.predictors.kernels import FAST, forecast_row, step_prefix


@njit(cache=True, fastmath=FAST)
def prefilled(
    inputs: NDArray[np.float32],
    sums: NDArray[np.float32],
    hidden: NDArray[np.float32],
    agent: int,
    tokens: float,
    chars: float,
    state: NDArray[np.float32],
    engine: Engine,
    out: NDArray[np.float32],
) -> int:
    """The step before enters the prefix and a step of `agent` begins: its forecast goes to `out`, evidence returned.

    Args:
        inputs: float32 [F], sums, hidden: float32 [g]: the workflow, changed in place.
        agent: 0..V, V for an unknown agent.
        tokens, chars: log(1 + x) of the input's size, 0 where unknown.
        state: projected prefill state, float32 [p], or empty.
        engine: the model.
        out: float32 [K, V+1].
    """
    if inputs[0] >= 0:
        step_prefix(inputs, hidden, engine.weights, engine.starts, engine.prefill + engine.completion)
    at_prefill(inputs, sums, agent, tokens, chars, state, engine.agents, engine.prefill, engine.completion)
    return forecast_row(inputs, hidden, 0, engine, out)


@njit(cache=True, fastmath=FAST)
def completed(
    inputs: NDArray[np.float32],
    sums: NDArray[np.float32],
    hidden: NDArray[np.float32],
    tokens: float,
    chars: float,
    state: NDArray[np.float32],
    engine: Engine,
    out: NDArray[np.float32],
) -> int:
    """The step has produced its last token: its forecast goes to `out`, the evidence is returned.

    `tokens` and `chars` are of the output, `state` is the projected completion state, float32 [c], or empty.
    """
    at_completion(inputs, sums, tokens, chars, state, engine.agents, engine.prefill, engine.completion)
    return forecast_row(inputs, hidden, 1, engine, out)


@njit(cache=True, fastmath=FAST)
def forecast_trace(
    offsets: NDArray[np.int64],
    workflow_type: NDArray[np.int32],
    agent: NDArray[np.int32],
    sizes: NDArray[np.float32],
    prefill_states: NDArray[np.float32],
    has_prefill: NDArray[np.bool_],
    completion_states: NDArray[np.float32],
    has_completion: NDArray[np.bool_],
    row: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]],
    engine: Engine,
    out: NDArray[np.float32],
) -> None:
    """Forecasts of every step of a trace at both moments, float32 [2, n, K, V+1].

    `row` holds scratch arrays for one workflow: inputs, sums, hidden.
    """
    inputs, sums, hidden = row
    for w in range(len(offsets) - 1):
        begin(inputs, sums, workflow_type[w], engine.agents, engine.prefill, engine.completion)
        hidden[:] = 0.0
        for i in range(offsets[w], offsets[w + 1]):
            known = np.where(np.isnan(sizes[i]), np.float32(0.0), sizes[i])
            state = prefill_states[i] if has_prefill[i] else prefill_states[i, :0]
            prefilled(inputs, sums, hidden, agent[i], known[0], known[2], state, engine, out[0, i])
            state = completion_states[i] if has_completion[i] else completion_states[i, :0]
            completed(inputs, sums, hidden, known[1], known[3], state, engine, out[1, i])
