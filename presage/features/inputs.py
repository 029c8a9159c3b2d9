"""The input vector of a position: the whole input of a predictor at one moment of a workflow, in one row of floats.

Layout (R = history_size(V), Z tools, p and c = widths of the projected prefill and completion state):

    [0, R)      history: latest agents, counts, steps since, position, run length
    then  Z     whether the latest output calls each tool; at prefill that of the step before
          1     the number of tools that it calls; NO_ANSWER where unknown, and before the first output
          1     workflow type (T: unknown)
          2     log(1 + x) of input and output tokens; 0 where unknown, or not known yet
          p     projected prefill state of this step
          c     projected completion state of this step, 0 at prefill
          p     mean of the projected prefill states so far
          c     mean of the projected completion states so far
          1     distance of the prefill state from the previous one of the workflow; NO_EARLIER without a previous
                one, NO_STATE without a state of this step
          1     the same of the completion state, NO_STATE at prefill

`begin`, `at_prefill` and `at_completion` are the only writers: serving calls them once a step on a workflow's row,
training over whole traces (`unroll`). The sums behind the means are in a row of their own.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.features.history import RECENT, advance, history_size
from presage.features.history import begin as begin_history
from presage.features.prefixes import SIZES

SIZE_COUNT: Final = len(SIZES)

NO_ANSWER: Final = -1.0
NO_EARLIER: Final = -1.0
NO_STATE: Final = -2.0
"""Replace a number of tools, and a distance, where there is none."""


def inputs_size(agents: int, tools: int, prefill: int, completion: int) -> int:
    """Length F of the input vector for V agents, Z tools and projected states of these widths."""
    return history_size(agents) + tools + 2 + SIZE_COUNT + 2 * (prefill + completion) + 2


def sums_size(prefill: int, completion: int) -> int:
    """Length of the accumulators: two sums, two previous states, two counts."""
    return 2 * (prefill + completion) + 2


@njit(cache=True, inline="always")
def sizes_at(inputs: NDArray[np.float32], prefill: int, completion: int) -> int:
    """Where the token counts begin; before them stand the workflow type and the number of tools."""
    return len(inputs) - 2 - 2 * (prefill + completion) - SIZE_COUNT


@njit(cache=True, inline="always")
def begin(
    inputs: NDArray[np.float32],
    sums: NDArray[np.float32],
    workflow_type: int,
    agents: int,
    prefill: int,
    completion: int,
) -> None:
    """Starts a workflow: no step yet."""
    inputs[:] = 0.0
    sums[:] = 0.0
    begin_history(inputs, agents)
    size = sizes_at(inputs, prefill, completion)
    inputs[size - 1] = workflow_type
    inputs[size - 2] = NO_ANSWER


@njit(cache=True, inline="always")
def _distance(
    state: NDArray[np.float32], sums: NDArray[np.float32], start: int, width: int, seen: float
) -> np.floating:
    """Root mean square difference to the previous state, which is replaced; NO_EARLIER without one.

    A square of a float32 is exact in float64: the sum has the same bits whether or not a compiler fuses it with the
    product, which differs between callers.
    """
    total = 0.0
    for i in range(width):
        difference = np.float64(state[i] - sums[start + i])
        total += difference * difference
        sums[start + i] = state[i]
    return np.sqrt(total / max(width, 1)) if seen > 0 else np.float32(NO_EARLIER)


@njit(cache=True)
def at_prefill(
    inputs: NDArray[np.float32],
    sums: NDArray[np.float32],
    agent: int,
    tokens: float,
    state: NDArray[np.float32],
    agents: int,
    prefill: int,
    completion: int,
) -> None:
    """A step of `agent` has been prefilled; `state` is its projected prefill state, empty if none was captured."""
    size = sizes_at(inputs, prefill, completion)
    here = size + SIZE_COUNT
    done = here + prefill
    mean = done + completion
    distance = mean + prefill + completion
    seen = 2 * (prefill + completion)
    advance(inputs, agent, agents)
    inputs[size] = tokens
    inputs[size + 1] = 0.0
    for i in range(completion):
        inputs[done + i] = 0.0
    inputs[distance + 1] = NO_STATE
    if len(state) == 0:
        for i in range(prefill):
            inputs[here + i] = 0.0
        inputs[distance] = NO_STATE
        return
    inputs[distance] = _distance(state, sums, prefill + completion, prefill, sums[seen])
    sums[seen] += 1.0
    for i in range(prefill):
        inputs[here + i] = state[i]
        sums[i] += state[i]
        inputs[mean + i] = sums[i] / sums[seen]


@njit(cache=True)
def at_completion(
    inputs: NDArray[np.float32],
    sums: NDArray[np.float32],
    tokens: float,
    state: NDArray[np.float32],
    called: NDArray[np.float32],
    agents: int,
    prefill: int,
    completion: int,
) -> None:
    """The step has produced its last token.

    `state` is its projected completion state, empty if none was captured; `called` are the tools that its output calls,
    float32 [1 + Z] (`vocabulary.tools_of`), empty if unknown.
    """
    size = sizes_at(inputs, prefill, completion)
    tools = RECENT + 2 * (agents + 1) + 2
    inputs[size - 2] = called[0] if len(called) else np.float32(NO_ANSWER)
    for i in range(size - 2 - tools):
        inputs[tools + i] = called[1 + i] if len(called) else np.float32(0.0)
    done = size + SIZE_COUNT + prefill
    mean = done + completion + prefill
    distance = mean + completion
    seen = 2 * (prefill + completion) + 1
    inputs[size + 1] = tokens
    if len(state) == 0:
        return  # `at_prefill` has cleared what belongs here
    inputs[distance + 1] = _distance(state, sums, 2 * prefill + completion, completion, sums[seen])
    sums[seen] += 1.0
    for i in range(completion):
        inputs[done + i] = state[i]
        sums[prefill + i] += state[i]
        inputs[mean + i] = sums[prefill + i] / sums[seen]


@njit(cache=True, inline="always")
def knows_tokens(inputs: NDArray[np.float32], prefill: int, completion: int) -> bool:
    """Whether a token count of this step is known; a count of 0 is none."""
    size = sizes_at(inputs, prefill, completion)
    return bool(inputs[size] > 0 or inputs[size + 1] > 0)


@njit(cache=True, inline="always")
def knows_answer(inputs: NDArray[np.float32], prefill: int, completion: int) -> bool:
    """Whether it is known which tools the latest output calls."""
    return bool(inputs[sizes_at(inputs, prefill, completion) - 2] > NO_ANSWER)


@njit(cache=True, inline="always")
def knows_state(inputs: NDArray[np.float32], moment: int, prefill: int, completion: int) -> bool:
    """Whether this step has the state for a forecast at this moment (0 prefill, 1 completion).

    At completion that is the completion state, or the prefill state if the model reads no completion states.
    """
    marker = len(inputs) - 1 if (completion > 0 and moment == 1) or prefill == 0 else len(inputs) - 2
    return bool(prefill + completion > 0 and inputs[marker] > NO_STATE / 2 + NO_EARLIER / 2)


@njit(cache=True)
def known(inputs: NDArray[np.float32], moment: int, prefill: int, completion: int) -> NDArray[np.bool_]:
    """`knows_tokens`, `knows_state` and `knows_answer` of every input vector, bool [3, n], from float32 [n, F]."""
    out = np.empty((3, len(inputs)), np.bool_)
    for row in range(len(inputs)):
        out[0, row] = knows_tokens(inputs[row], prefill, completion)
        out[1, row] = knows_state(inputs[row], moment, prefill, completion)
        out[2, row] = knows_answer(inputs[row], prefill, completion)
    return out


@njit(cache=True)
def unroll(
    offsets: NDArray[np.int64],
    workflow_type: NDArray[np.int32],
    agent: NDArray[np.int32],
    sizes: NDArray[np.float32],
    called: NDArray[np.float32],
    prefill_states: NDArray[np.float32],
    has_prefill: NDArray[np.bool_],
    completion_states: NDArray[np.float32],
    has_completion: NDArray[np.bool_],
    agents: int,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The input vectors of every step at prefill and at completion, two float32 [n, F].

    `sizes` float32 [n, 2] and `called` float32 [n, 1 + Z] with NaN where unknown; states are projected, float32 [n, p]
    and [n, c].
    """
    prefill, completion = prefill_states.shape[1], completion_states.shape[1]
    width = RECENT + 2 * (agents + 1) + 2 + called.shape[1] + 1 + SIZE_COUNT + 2 * (prefill + completion) + 2
    first = np.empty((len(agent), width), np.float32)
    second = np.empty((len(agent), width), np.float32)
    inputs = np.empty(width, np.float32)
    sums = np.empty(2 * (prefill + completion) + 2, np.float32)
    for w in range(len(offsets) - 1):
        begin(inputs, sums, workflow_type[w], agents, prefill, completion)
        for row in range(offsets[w], offsets[w + 1]):
            known_sizes = np.where(np.isnan(sizes[row]), np.float32(0.0), sizes[row])
            state = prefill_states[row] if has_prefill[row] else prefill_states[row, :0]
            at_prefill(inputs, sums, agent[row], known_sizes[0], state, agents, prefill, completion)
            first[row] = inputs
            state = completion_states[row] if has_completion[row] else completion_states[row, :0]
            tools = called[row, :0] if np.isnan(called[row, 0]) else called[row]
            at_completion(inputs, sums, known_sizes[1], state, tools, agents, prefill, completion)
            second[row] = inputs
    return first, second
