"""A model over running workflows: the steps a server takes, compiled, and the same steps over a whole trace.

A workflow is one row of floats: its input vector [F], the sums behind it, the GRU's state [g]. `prefilled` and
`completed` move it by half a step each; whole traces call the same two, so evaluation and serving cannot differ.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.features.inputs import at_completion, at_prefill, begin
from presage.predictors import engine as e
from presage.predictors.engine import Engine
from presage.predictors.kernels import FAST, forecast_row, step_prefix

AGENTS, PREFILL, COMPLETION, INPUTS, SUMS, PREFIX = e.AGENTS, e.PREFILL, e.COMPLETION, e.INPUTS, e.SUMS, e.PREFIX


@njit(cache=True)
def opened(row: NDArray[np.float32], workflow_type: int, engine: Engine) -> None:
    """Writes a workflow of this type (T: unknown) before its first step."""
    numbers = engine.numbers
    inputs, sums = row[: numbers[INPUTS]], row[numbers[INPUTS] : numbers[INPUTS] + numbers[SUMS]]
    begin(inputs, sums, workflow_type, numbers[AGENTS], numbers[PREFILL], numbers[COMPLETION])
    row[numbers[INPUTS] + numbers[SUMS] :] = 0.0


@njit(cache=True, fastmath=FAST, error_model="numpy")
def prefilled(
    row: NDArray[np.float32],
    agent: int,
    tokens: float,
    state: NDArray[np.float32],
    engine: Engine,
    out: NDArray[np.float32],
) -> int:
    """The step before enters the prefix and a step of `agent` begins: its forecast goes to `out`, evidence returned.

    Args:
        row: the workflow, changed in place.
        agent: 0..V, V for an unknown agent.
        tokens: log(1 + x) of the input's token count, 0 where unknown.
        state: projected prefill state, float32 [p], or empty.
        engine: the model.
        out: float32 [K, V+1].
    """
    numbers = engine.numbers
    inputs, sums = row[: numbers[INPUTS]], row[numbers[INPUTS] : numbers[INPUTS] + numbers[SUMS]]
    hidden = row[numbers[INPUTS] + numbers[SUMS] :]
    if inputs[0] >= 0:
        step_prefix(inputs, hidden, engine)
    at_prefill(inputs, sums, agent, tokens, state, numbers[AGENTS], numbers[PREFILL], numbers[COMPLETION])
    return forecast_row(inputs, hidden, 0, engine, out)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def completed(
    row: NDArray[np.float32],
    tokens: float,
    state: NDArray[np.float32],
    engine: Engine,
    out: NDArray[np.float32],
) -> int:
    """The step has produced its last token: its forecast goes to `out`, the evidence is returned.

    `tokens` is of the output, `state` is the projected completion state, float32 [c], or empty.
    """
    numbers = engine.numbers
    inputs, sums = row[: numbers[INPUTS]], row[numbers[INPUTS] : numbers[INPUTS] + numbers[SUMS]]
    hidden = row[numbers[INPUTS] + numbers[SUMS] :]
    at_completion(inputs, sums, tokens, state, numbers[AGENTS], numbers[PREFILL], numbers[COMPLETION])
    return forecast_row(inputs, hidden, 1, engine, out)


@njit(cache=True, fastmath=FAST, error_model="numpy", nogil=True)
def forecast_trace(
    offsets: NDArray[np.int64],
    workflow_type: NDArray[np.int32],
    agent: NDArray[np.int32],
    sizes: NDArray[np.float32],
    prefill_states: NDArray[np.float32],
    has_prefill: NDArray[np.bool_],
    completion_states: NDArray[np.float32],
    has_completion: NDArray[np.bool_],
    engine: Engine,
    out: NDArray[np.float32],
) -> None:
    """Forecasts of every step of a trace at both moments, float32 [2, n, K, V+1]."""
    numbers = engine.numbers
    row = np.empty(numbers[INPUTS] + numbers[SUMS] + numbers[PREFIX], np.float32)
    for w in range(len(offsets) - 1):
        opened(row, workflow_type[w], engine)
        for i in range(offsets[w], offsets[w + 1]):
            known = np.where(np.isnan(sizes[i]), np.float32(0.0), sizes[i])
            state = prefill_states[i] if has_prefill[i] else prefill_states[i, :0]
            prefilled(row, agent[i], known[0], state, engine, out[0, i])
            state = completion_states[i] if has_completion[i] else completion_states[i, :0]
            completed(row, known[1], state, engine, out[1, i])
