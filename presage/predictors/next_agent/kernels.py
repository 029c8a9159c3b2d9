"""The compiled forecast in a scheduler's thread: a mixture of network, trees and n-gram over one input vector.

Sums have a fixed order and the exponential is our own, so a row gives the same bits in a trace, alone and in another
process. A workflow is one row of floats: its input vector [F], the sums behind it, the GRU's state [g]. `prefilled` and
`completed` advance it by half a step each, in serving and over whole traces.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.features.history import RECENT
from presage.features.inputs import (
    SIZE_COUNT,
    at_completion,
    at_prefill,
    begin,
    knows_answer,
    knows_state,
    knows_tokens,
    sizes_at,
)
from presage.predictors import engine as e
from presage.predictors.engine import Engine
from presage.predictors.next_agent.network_weights import encode
from presage.predictors.next_agent.ngram import lookup

AGENTS, PREFILL, COMPLETION, HIDDEN, PREFIX = e.AGENTS, e.PREFILL, e.COMPLETION, e.HIDDEN, e.PREFIX
INPUTS, SUMS, ENOUGH, DEPTH, ENSEMBLES, EVIDENCE = e.INPUTS, e.SUMS, e.ENOUGH, e.DEPTH, e.ENSEMBLES, e.EVIDENCE

# Contraction into fused multiply-adds only; no reassociation, so sums keep their order.
FAST: Final = {"contract"}

NGRAM_ALONE, WITHOUT_NETWORK, EVERYTHING = range(3)
"""Parts of a forecast, by the evidence of the workflow type and of the agent."""


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _add_product(out: NDArray[np.float32], x: NDArray[np.float32], weights: NDArray[np.float32], start: int) -> None:
    """out += x @ W, W row-major from `start` on, four inputs at a time; zeros, frequent in encodings, are skipped."""
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
    """One GRU step, written to `hidden` [g]: the step of `inputs`, at its completion, enters the prefix."""
    floats, numbers = engine.floats, engine.numbers
    g = len(hidden)
    states = numbers[PREFILL] + numbers[COMPLETION]
    first = len(inputs) - 2 * states - 2
    given = np.empty(3 * g, np.float32)
    offset = numbers[e.STEP_AGENT] + int(inputs[0]) * 3 * g
    given[:] = floats[offset : offset + 3 * g]
    _add_product(given, inputs[first : first + states], floats, numbers[e.STEP_STATES])
    kept = np.empty(3 * g, np.float32)
    kept[:] = floats[numbers[e.STEP_HIDDEN_BIAS] : numbers[e.STEP_HIDDEN_BIAS] + 3 * g]
    _add_product(kept, hidden, floats, numbers[e.STEP_HIDDEN])
    gate(given.reshape((1, 3 * g)), kept.reshape((1, 3 * g)), hidden.reshape((1, g)))


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def gate(given: NDArray[np.float32], kept: NDArray[np.float32], hidden: NDArray[np.float32]) -> None:
    """The gates of a GRU: the next states [B, g], from the products of step and state, [B, 3g] each."""
    rows, g = hidden.shape
    one = np.float32(1.0)
    gates = np.empty((rows, 2 * g), np.float32)
    for r in range(rows):
        for i in range(2 * g):
            gates[r, i] = -(given[r, i] + kept[r, i])
    exponential(gates.reshape(gates.size))
    new = np.empty((rows, g), np.float32)
    for r in range(rows):
        for i in range(g):
            new[r, i] = np.float32(-2.0) * (given[r, 2 * g + i] + kept[r, 2 * g + i] / (one + gates[r, i]))
    exponential(new.reshape(new.size))
    for r in range(rows):
        for i in range(g):
            candidate = np.float32(2.0) / (one + new[r, i]) - one  # tanh
            update = one / (one + gates[r, g + i])
            hidden[r, i] = candidate + update * (hidden[r, i] - candidate)


@njit(cache=True, fastmath=FAST, error_model="numpy")
def network_logits(
    inputs: NDArray[np.float32], hidden: NDArray[np.float32], moment: int, engine: Engine, out: NDArray[np.float32]
) -> None:
    """Write the network's logits, float32 [K (V+1)], for one input vector and the prefix before it."""
    floats, numbers = engine.floats, engine.numbers
    agents, width = numbers[AGENTS], numbers[HIDDEN]
    dense = len(inputs) - 2 * (numbers[PREFILL] + numbers[COMPLETION]) - 2 - SIZE_COUNT
    encoded = np.empty(2 * (agents + 1) + 5, np.float32)
    encode(inputs, encoded, agents)
    first = np.empty(width, np.float32)
    offset = numbers[e.MOMENT] + moment * width
    first[:] = floats[offset : offset + width]
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


@njit(cache=True, inline="always")
def pattern_of(inputs: NDArray[np.float32], moment: int, numbers: NDArray[np.int32]) -> int:
    """Inputs of this step, as a number of `parts.PATTERNS`."""
    p, c = numbers[PREFILL], numbers[COMPLETION]
    return (
        int(knows_tokens(inputs, p, c))
        + 2 * int(knows_state(inputs, moment, p, c))
        + 4 * int(knows_answer(inputs, p, c))
        + 8 * int(inputs[0] == numbers[AGENTS])
    )


@njit(cache=True, inline="always")
def has_trees(numbers: NDArray[np.int32]) -> bool:
    """Whether the model has any trees."""
    return bool(numbers[e.HEADER - 1] > 0)


@njit(cache=True, inline="always")
def ensemble_at(stage: int, moment: int) -> int:
    """Number of an ensemble of `parts.TREES`: stage 0 reads ids, the others those of `parts.STAGES`."""
    return 0 if stage == 0 else 3 * moment + stage


@njit(cache=True, inline="always")
def reads(pattern: int, stage: int) -> bool:
    """Whether a step of this pattern is read by this stage."""
    return bool(stage == 0 or pattern & (4 if stage == 1 else stage - 1))


@njit(cache=True, fastmath=FAST, error_model="numpy")
def tree_logits(
    inputs: NDArray[np.float32], moment: int, pattern: int, engine: Engine, out: NDArray[np.float32]
) -> None:
    """Write the logits of the trees that read only inputs of this step, float32 [K (V+1)]."""
    numbers = engine.numbers
    own = ENSEMBLES + ensemble_at(1, moment)
    ids, first, last = numbers[ENSEMBLES + 1], numbers[own], numbers[own + 3]
    leaf, compared = np.empty(numbers[e.HEADER - 1], np.uint32), np.empty(max(ids, last - first), np.float32)
    _find_leaves(inputs, 0, ids, engine, compared, leaf)
    if pattern & 7:
        _find_leaves(inputs, first, last, engine, compared, leaf)
    start_leaves(engine, out)
    total = np.empty(engine.leaves.shape[1], np.int32)
    for stage in range(4):
        if reads(pattern, stage):
            ensemble = ensemble_at(stage, moment)
            _sum_leaves(leaf[numbers[ENSEMBLES + ensemble] : numbers[ENSEMBLES + ensemble + 1]], engine.leaves, total)
            add_total(total, ensemble, engine, out)


@njit(cache=True, inline="always")
def _find_leaves(
    inputs: NDArray[np.float32],
    first: int,
    last: int,
    engine: Engine,
    compared: NDArray[np.float32],
    leaf: NDArray[np.uint32],
) -> None:
    """Write the leaves, uint32 [trees], of the trees from `first` to `last`; `compared` is a buffer of that length.

    Level by level for all trees, so that the comparisons vectorise.
    """
    floats, numbers = engine.floats, engine.numbers
    depth, trees, count = numbers[DEPTH], numbers[e.HEADER - 1], last - first
    mine = leaf[first:last]
    for i in range(count):
        mine[i] = (first + i) << depth
    for level in range(depth):
        features, thresholds = (
            numbers[e.FEATURES] + level * trees + first,
            numbers[e.THRESHOLDS] + level * trees + first,
        )
        for i in range(count):
            compared[i] = inputs[numbers[features + i]]
        bit, over = np.uint32(1 << level), floats[thresholds : thresholds + count]
        for i in range(count):
            mine[i] |= bit if compared[i] >= over[i] else np.uint32(0)


@njit(cache=True, inline="always")
def start_leaves(engine: Engine, out: NDArray[np.float32]) -> None:
    """Write the logits before the first tree, float32 [K (V+1)]."""
    base = engine.numbers[e.BASE]
    for j in range(len(out)):
        out[j] = engine.floats[base + j]


@njit(cache=True, inline="always")
def _sum_leaves(leaf: NDArray[np.uint32], leaves: NDArray[np.int8], total: NDArray[np.int32]) -> None:
    """Write the sum of these leaves as integers."""
    total[:] = 0
    fours = len(leaf) // 4 * 4
    for i in range(0, fours, 4):
        a, b, c, d = leaves[leaf[i]], leaves[leaf[i + 1]], leaves[leaf[i + 2]], leaves[leaf[i + 3]]
        for j in range(len(total)):
            total[j] += np.int32(a[j]) + np.int32(b[j]) + np.int32(c[j]) + np.int32(d[j])
    for number in leaf[fours:]:
        row = leaves[number]
        for j in range(len(total)):
            total[j] += row[j]


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def add_total(total: NDArray[np.int32], ensemble: int, engine: Engine, out: NDArray[np.float32]) -> None:
    """Add the scaled sum of an ensemble's leaves to the logits."""
    scale = engine.numbers[e.SCALE] + ensemble * len(out)
    scales = engine.floats[scale : scale + len(out)]
    for j in range(len(out)):
        out[j] += scales[j] * total[j]


@njit(cache=True, fastmath=FAST, error_model="numpy")
def softmax_rows(rows: NDArray[np.float32]) -> None:
    """Softmax of each row, float32 [B, V+1], in place."""
    for row in rows:
        top = row[0]
        for j in range(1, len(row)):
            top = max(top, row[j])
        for j in range(len(row)):
            row[j] -= top
    exponential(rows.reshape(rows.size))
    for row in rows:
        total = np.float32(0.0)
        for j in range(len(row)):
            total += row[j]
        scale = np.float32(1.0) / total
        for j in range(len(row)):
            row[j] *= scale


@njit(cache=True, inline="always")
def workflow_type_of(inputs: NDArray[np.float32], numbers: NDArray[np.int32]) -> int:
    """Index of the workflow type in an input vector."""
    return int(inputs[sizes_at(inputs, numbers[PREFILL], numbers[COMPLETION]) - 1])


@njit(cache=True)
def who_answers(inputs: NDArray[np.float32], engine: Engine) -> int:
    """The parts of the forecast: without the network if the evidence of the agent is too small, unless it is unknown,
    as many agents were in training; the n-gram alone if that of the workflow type is."""
    numbers = engine.numbers
    width, kind, agent = numbers[AGENTS] + 1, workflow_type_of(inputs, numbers), int(inputs[0])
    of_agents = numbers[EVIDENCE] + kind * width
    if numbers[of_agents + agent] >= numbers[ENOUGH]:
        return EVERYTHING
    of_type = 0
    for j in range(width):
        of_type += numbers[of_agents + j]
    if of_type < numbers[ENOUGH]:
        return NGRAM_ALONE
    if agent == numbers[AGENTS]:
        return EVERYTHING
    return WITHOUT_NETWORK if has_trees(numbers) else NGRAM_ALONE


@njit(cache=True, fastmath=FAST, error_model="numpy")
def mix(
    inputs: NDArray[np.float32],
    moment: int,
    pattern: int,
    who: int,
    of_network: NDArray[np.float32],
    of_trees: NDArray[np.float32],
    engine: Engine,
    out: NDArray[np.float32],
) -> int:
    """Write the mixed logits of the forecast, float32 [K (V+1)]; return the evidence."""
    floats, numbers = engine.floats, engine.numbers
    agent, kind = int(inputs[0]), workflow_type_of(inputs, numbers)
    values = numbers[numbers[e.CONTEXTS] : numbers[e.CONTEXTS] + len(engine.keys)]
    size = len(out)
    offset = numbers[e.LOG_ROWS] + lookup(engine.keys, values, kind, agent, int(inputs[1]), int(inputs[2])) * size
    counts = floats[offset : offset + size]
    share = numbers[e.SHARES] + (2 * pattern + moment) * 3 * size
    to_network, to_trees = floats[share : share + size], floats[share + size : share + 2 * size]
    to_counts = floats[share + 2 * size : share + 3 * size]
    if who == EVERYTHING:
        for i in range(size):
            out[i] = to_network[i] * of_network[i] + to_trees[i] * of_trees[i] + to_counts[i] * counts[i]
    elif who == WITHOUT_NETWORK:  # its embedding of this agent is untrained; the n-gram replaces it
        for i in range(size):
            out[i] = to_trees[i] * of_trees[i] + (to_counts[i] + to_network[i]) * counts[i]
    else:
        out[:] = counts
    evidence: int = numbers[numbers[EVIDENCE] + kind * (numbers[AGENTS] + 1) + agent]
    return evidence


@njit(cache=True, fastmath=FAST, error_model="numpy")
def forecast_row(
    inputs: NDArray[np.float32], hidden: NDArray[np.float32], moment: int, engine: Engine, out: NDArray[np.float32]
) -> int:
    """Write one forecast to `out`, float32 [K, V+1]; return its evidence.

    `inputs` is float32 [F], `hidden` float32 [g] the prefix before this step, `moment` 0 prefill or 1 completion.
    """
    who, pattern = who_answers(inputs, engine), pattern_of(inputs, moment, engine.numbers)
    of_network, of_trees = np.zeros(out.size, np.float32), np.zeros(out.size, np.float32)
    if who == EVERYTHING:
        network_logits(inputs, hidden, moment, engine, of_network)
    if who != NGRAM_ALONE:
        tree_logits(inputs, moment, pattern, engine, of_trees)
    evidence = mix(inputs, moment, pattern, who, of_network, of_trees, engine, out.reshape(out.size))
    softmax_rows(out)
    return evidence


@njit(cache=True)
def opened(row: NDArray[np.float32], workflow_type: int, engine: Engine) -> None:
    """Write a workflow of this type (T: unknown) before its first step."""
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
    """Begin a step of `agent` (V: unknown): write its forecast to `out`, float32 [K, V+1]; return the evidence.

    Args:
        row: the workflow, changed in place.
        tokens: log(1 + x) of the input's token count, 0 if unknown.
        state: projected prefill state, float32 [p], or empty.
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
    called: NDArray[np.float32],
    engine: Engine,
    out: NDArray[np.float32],
) -> int:
    """Complete the step: as `prefilled`, with `tokens` of the output and the completion state, float32 [c] or empty.

    `called` are the tools that the output calls, float32 [1 + Z], or empty.
    """
    numbers = engine.numbers
    inputs, sums = row[: numbers[INPUTS]], row[numbers[INPUTS] : numbers[INPUTS] + numbers[SUMS]]
    hidden = row[numbers[INPUTS] + numbers[SUMS] :]
    at_completion(inputs, sums, tokens, state, called, numbers[AGENTS], numbers[PREFILL], numbers[COMPLETION])
    return forecast_row(inputs, hidden, 1, engine, out)


@njit(cache=True, fastmath=FAST, error_model="numpy", nogil=True)
def forecast_trace(
    offsets: NDArray[np.int64],
    workflow_type: NDArray[np.int32],
    agent: NDArray[np.int32],
    sizes: NDArray[np.float32],
    called: NDArray[np.float32],
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
            known_sizes = np.where(np.isnan(sizes[i]), np.float32(0.0), sizes[i])
            state = prefill_states[i] if has_prefill[i] else prefill_states[i, :0]
            prefilled(row, agent[i], known_sizes[0], state, engine, out[0, i])
            state = completion_states[i] if has_completion[i] else completion_states[i, :0]
            tools = called[i, :0] if np.isnan(called[i, 0]) else called[i]
            completed(row, known_sizes[1], state, tools, engine, out[1, i])
