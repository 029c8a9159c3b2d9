"""The compiled forecast: network, trees and n-gram over one input vector, mixed. What a scheduler's thread runs.

Sums run in a fixed order and the exponential is our own, so the same row gives the same bits alone, in a batch and in
another process.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.features.history import RECENT
from presage.features.inputs import SIZE_COUNT
from presage.predictors import engine as e
from presage.predictors.encoding import encode
from presage.predictors.engine import Engine
from presage.predictors.ngram import lookup

AGENTS, PREFILL, COMPLETION, HIDDEN = e.AGENTS, e.PREFILL, e.COMPLETION, e.HIDDEN
ENOUGH, DEPTH, TREES_AT_PREFILL, TREES = e.ENOUGH, e.DEPTH, e.TREES_AT_PREFILL, e.TREES

# Contraction into fused multiply-adds only; no reassociation, so sums keep their order.
FAST: Final = {"contract"}

TOGETHER: Final = 8
"""Trees walked side by side: a walk waits for memory at every level, eight wait together."""


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _add_product(out: NDArray[np.float32], x: NDArray[np.float32], weights: NDArray[np.float32], start: int) -> None:
    """out += x @ W, W row-major from `start` on. Four inputs a turn; zeros, frequent in encodings, are free."""
    size, width = len(x), len(out)
    matrix = weights[start : start + size * width].reshape((size, width))
    whole = size - size % 4
    for i in range(0, whole, 4):
        a, b, c, d = x[i], x[i + 1], x[i + 2], x[i + 3]
        if a == 0.0 and b == 0.0 and c == 0.0 and d == 0.0:
            continue
        for j in range(width):
            out[j] += a * matrix[i, j] + b * matrix[i + 1, j] + c * matrix[i + 2, j] + d * matrix[i + 3, j]
    for i in range(whole, size):
        a = x[i]
        for j in range(width):
            out[j] += a * matrix[i, j]


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _add_row(out: NDArray[np.float32], weights: NDArray[np.float32], start: int) -> None:
    row = weights[start : start + len(out)]
    for j in range(len(out)):
        out[j] += row[j]


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def exponential(x: NDArray[np.float32]) -> None:
    """e^x in place, relative error below 2e-7: 2^n times a polynomial (Cephes expf), in a loop that vectorises."""
    power = np.empty(len(x), np.int32)
    for i in range(len(x)):
        value = min(max(x[i], np.float32(-87.0)), np.float32(88.0))
        n = np.floor(value * np.float32(1.44269504) + np.float32(0.5))
        r = value - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
        y = np.float32(1.9875691500e-4)
        y = y * r + np.float32(1.3981999507e-3)
        y = y * r + np.float32(8.3334519073e-3)
        y = y * r + np.float32(4.1665795894e-2)
        y = y * r + np.float32(1.6666665459e-1)
        y = y * r + np.float32(5.0000001201e-1)
        x[i] = y * r * r + r + np.float32(1.0)
        power[i] = (np.int32(n) + 127) << 23  # the bits of 2^n
    scale = power.view(np.float32)
    for i in range(len(x)):
        x[i] *= scale[i]


@njit(cache=True, fastmath=FAST, error_model="numpy")
def step_prefix(inputs: NDArray[np.float32], hidden: NDArray[np.float32], engine: Engine) -> None:
    """One GRU step: the step that `inputs` describes at its completion enters the prefix. Writes `hidden` [g]."""
    floats, numbers = engine.floats, engine.numbers
    g = len(hidden)
    states = numbers[PREFILL] + numbers[COMPLETION]
    first = len(inputs) - 2 * states - 2
    given = np.empty(3 * g, np.float32)
    at = numbers[e.STEP_AGENT] + int(inputs[0]) * 3 * g
    given[:] = floats[at : at + 3 * g]
    _add_product(given, inputs[first : first + states], floats, numbers[e.STEP_STATES])
    kept = np.empty(3 * g, np.float32)
    kept[:] = floats[numbers[e.STEP_HIDDEN_BIAS] : numbers[e.STEP_HIDDEN_BIAS] + 3 * g]
    _add_product(kept, hidden, floats, numbers[e.STEP_HIDDEN])
    one = np.float32(1.0)
    gates = np.empty(2 * g, np.float32)
    for i in range(2 * g):
        gates[i] = -(given[i] + kept[i])
    exponential(gates)
    new = np.empty(g, np.float32)
    for i in range(g):
        new[i] = np.float32(-2.0) * (given[2 * g + i] + kept[2 * g + i] / (one + gates[i]))
    exponential(new)
    for i in range(g):
        candidate = np.float32(2.0) / (one + new[i]) - one  # tanh
        update = one / (one + gates[g + i])
        hidden[i] = candidate + update * (hidden[i] - candidate)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def network_logits(
    inputs: NDArray[np.float32], hidden: NDArray[np.float32], moment: int, engine: Engine, out: NDArray[np.float32]
) -> None:
    """Writes the network's logits, float32 [K (V+1)], for one input vector and the prefix before it."""
    floats, numbers = engine.floats, engine.numbers
    agents, width = numbers[AGENTS], numbers[HIDDEN]
    dense = len(inputs) - 2 * (numbers[PREFILL] + numbers[COMPLETION]) - 2 - SIZE_COUNT
    encoded = np.empty(2 * (agents + 1) + 5, np.float32)
    encode(inputs, encoded, agents)
    first = np.empty(width, np.float32)
    at = numbers[e.MOMENT] + moment * width
    first[:] = floats[at : at + width]
    for i in range(RECENT):
        row = i * (agents + 2) + int(inputs[i]) + 1
        _add_row(first, floats, numbers[e.RECENT_TABLE] + row * width)
    _add_row(first, floats, numbers[e.KIND] + int(inputs[dense - 1]) * width)
    _add_product(first, encoded, floats, numbers[e.ENCODED])
    _add_product(first, inputs[dense:], floats, numbers[e.DENSE])
    _add_product(first, hidden, floats, numbers[e.FROM_PREFIX])
    for j in range(width):
        first[j] = max(first[j], np.float32(0.0))
    second = np.empty(width, np.float32)
    second[:] = floats[numbers[e.SECOND_BIAS] : numbers[e.SECOND_BIAS] + width]
    _add_product(second, first, floats, numbers[e.SECOND])
    for j in range(width):
        first[j] += max(second[j], np.float32(0.0))
    outputs = len(out)
    out[:] = floats[numbers[e.HEAD_BIAS] : numbers[e.HEAD_BIAS] + outputs]
    _add_product(out, first, floats, numbers[e.HEAD])
    _add_product(out, inputs[dense:], floats, numbers[e.SKIP])
    _add_row(out, floats, numbers[e.AGENT_SKIP] + int(inputs[0]) * outputs)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def tree_logits(inputs: NDArray[np.float32], moment: int, engine: Engine, out: NDArray[np.float32]) -> None:
    """Writes the trees' logits, float32 [K (V+1)]."""
    floats, numbers = engine.floats, engine.numbers
    depth, outputs = numbers[DEPTH], len(out)
    inner, ends = 2**depth - 1, 2**depth
    features, thresholds, leaf_of = numbers[e.FEATURES], numbers[e.THRESHOLDS], numbers[e.LEAF_OF]
    out[:] = floats[numbers[e.BASE] + moment * outputs : numbers[e.BASE] + (moment + 1) * outputs]
    begin = 0 if moment == 0 else numbers[TREES_AT_PREFILL]
    end = numbers[TREES_AT_PREFILL] if moment == 0 else numbers[TREES]
    node = np.empty(TOGETHER, np.int64)
    for start in range(begin, end, TOGETHER):
        count = min(TOGETHER, end - start)
        node[:] = 0
        for _ in range(depth):
            for t in range(count):
                at = (start + t) * inner + node[t]
                node[t] = 2 * node[t] + 1 + (inputs[numbers[features + at]] >= floats[thresholds + at])
        for t in range(count):
            _add_row(out, floats, numbers[e.LEAVES] + numbers[leaf_of + (start + t) * ends + node[t] - inner] * outputs)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def softmax_rows(rows: NDArray[np.float32]) -> None:
    """Turns each row of logits, float32 [K, V+1], into probabilities in place."""
    for k in range(rows.shape[0]):
        row = rows[k]
        top = row[0]
        for j in range(1, len(row)):
            top = max(top, row[j])
        for j in range(len(row)):
            row[j] -= top
        exponential(row)
        total = np.float32(0.0)
        for j in range(len(row)):
            total += row[j]
        for j in range(len(row)):
            row[j] /= total


@njit(cache=True, fastmath=FAST, error_model="numpy")
def forecast_row(
    inputs: NDArray[np.float32], hidden: NDArray[np.float32], moment: int, engine: Engine, out: NDArray[np.float32]
) -> int:
    """Writes one forecast, float32 [K, V+1], and returns its evidence.

    With too little evidence of the agent the network is left out: trees and n-gram answer, which read the rest of the
    workflow; with too little of the whole workflow type the n-gram answers alone.

    Args:
        inputs: float32 [F]; hidden: float32 [g], the prefix before this step; moment: 0 prefill, 1 completion.
        engine: the model.
        out: where the probabilities go.
    """
    floats, numbers = engine.floats, engine.numbers
    horizon, width = out.shape
    agent = int(inputs[0])
    kind = int(inputs[len(inputs) - 2 * (numbers[PREFILL] + numbers[COMPLETION]) - 2 - SIZE_COUNT - 1])
    known: int = numbers[numbers[e.EVIDENCE] + kind * width + agent]
    values = numbers[numbers[e.CONTEXTS] : numbers[e.CONTEXTS] + len(engine.keys)]
    context = lookup(engine.keys, values, kind, agent, int(inputs[1]), int(inputs[2])) * out.size
    trees = numbers[TREES_AT_PREFILL] if moment == 0 else numbers[TREES] - numbers[TREES_AT_PREFILL]
    thin = known < numbers[ENOUGH]
    if thin:
        of_type = 0
        for j in range(width):
            of_type += numbers[numbers[e.EVIDENCE] + kind * width + j]
        if trees == 0 or of_type < numbers[ENOUGH]:
            at = numbers[e.ROWS] + context
            for k in range(horizon):
                for j in range(width):
                    out[k, j] = floats[at + k * width + j]
            return known
    share = numbers[e.SHARES] + moment * 3 * horizon
    logits = np.zeros(out.size, np.float32)
    if not thin:
        network_logits(inputs, hidden, moment, engine, logits)
    at = numbers[e.LOG_ROWS] + context
    for k in range(horizon):
        of_network, of_counts = floats[share + k], floats[share + 2 * horizon + k]
        if thin:  # the n-gram takes the place of the network, whose embedding of this agent learnt next to nothing
            of_counts += of_network
        for j in range(width):
            out[k, j] = of_network * logits[k * width + j] + of_counts * floats[at + k * width + j]
    if trees > 0:
        tree_logits(inputs, moment, engine, logits)
        for k in range(horizon):
            of_trees = floats[share + horizon + k]
            for j in range(width):
                out[k, j] += of_trees * logits[k * width + j]
    softmax_rows(out)
    return known
