"""Forecasts for many workflows at once: the arithmetic of `kernels.py`, a matrix product where that has a row.

Weights are read once for a block of rows and multiplied by BLAS; trees compare one input of all rows with one
threshold. Products sum in another order than a row alone does, so the two agree to rounding, not bit by bit: trees,
n-gram and the inputs are the same numbers, the network's logits differ in the last digits.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.features.history import RECENT
from presage.features.inputs import SIZE_COUNT, at_prefill
from presage.predictors import engine as e
from presage.predictors.encoding import encode
from presage.predictors.engine import Engine
from presage.predictors.kernels import (
    EVERYTHING,
    FAST,
    add_total,
    ensemble_at,
    gate,
    has_trees,
    mix,
    pattern_of,
    softmax_rows,
    start_leaves,
    who_answers,
)

AGENTS, PREFILL, COMPLETION, INPUTS, SUMS, PREFIX = e.AGENTS, e.PREFILL, e.COMPLETION, e.INPUTS, e.SUMS, e.PREFIX
HIDDEN, DEPTH = e.HIDDEN, e.DEPTH

BLOCK: Final = 128
"""Rows together: what a block needs stays in the second-level cache."""

_TREES: Final = 4
"""Trees whose leaves are added together: the leaves that their rows choose from stay in the first-level cache."""


@njit(cache=True, inline="always")
def _matrix(engine: Engine, part: int, rows: int, columns: int) -> NDArray[np.float32]:
    start = engine.numbers[part]
    return engine.floats[start : start + rows * columns].reshape((np.int64(rows), np.int64(columns)))


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _step_prefixes(rows: NDArray[np.float32], engine: Engine) -> None:
    """`kernels.step_prefix` for rows [B, …] of workflows; one before its first step stays as it is."""
    numbers = engine.numbers
    g, states, size = numbers[PREFIX], numbers[PREFILL] + numbers[COMPLETION], numbers[INPUTS]
    first, hidden = size - 2 * states - 2, size + numbers[SUMS]
    seen, carried = np.empty((len(rows), states), np.float32), np.empty((len(rows), g), np.float32)
    for i in range(len(rows)):
        seen[i] = rows[i, first : first + states]
        carried[i] = rows[i, hidden:]
    given = np.dot(seen, _matrix(engine, e.STEP_STATES, states, 3 * g))
    kept = np.dot(carried, _matrix(engine, e.STEP_HIDDEN, g, 3 * g))
    bias = engine.floats[numbers[e.STEP_HIDDEN_BIAS] : numbers[e.STEP_HIDDEN_BIAS] + 3 * g]
    of_agents = _matrix(engine, e.STEP_AGENT, numbers[AGENTS] + 1, 3 * g)
    for i in range(len(rows)):
        of_agent = of_agents[max(int(rows[i, 0]), 0)]
        for j in range(3 * g):
            given[i, j] += of_agent[j]
            kept[i, j] += bias[j]
    gate(given, kept, carried)
    for i in range(len(rows)):
        if rows[i, 0] >= 0:
            rows[i, hidden:] = carried[i]


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _network_logits(rows: NDArray[np.float32], engine: Engine) -> NDArray[np.float32]:
    """`kernels.network_logits` at prefill for rows [B, …] of workflows, float32 [B, K (V+1)]."""
    numbers, floats = engine.numbers, engine.floats
    agents, width, g, size = numbers[AGENTS], numbers[HIDDEN], numbers[PREFIX], numbers[INPUTS]
    encoded = 2 * (agents + 1) + 5
    start = size - 2 * (numbers[PREFILL] + numbers[COMPLETION]) - 2 - SIZE_COUNT
    done = start + SIZE_COUNT + numbers[PREFILL]  # the completion state, all 0 yet, begins here and is passed over
    after = done + numbers[COMPLETION]
    here = done - start
    dense = here + size - after
    outputs = numbers[e.OUTPUTS]
    inputs = np.empty((len(rows), encoded + dense + g), np.float32)
    for i in range(len(rows)):
        row, to = rows[i], inputs[i]
        encode(row[:size], to[:encoded], agents)
        to[encoded : encoded + here] = row[start:done]
        to[encoded + here : encoded + dense] = row[after:size]
        to[encoded + dense :] = row[size + numbers[SUMS] :]
    first = np.dot(inputs, _matrix(engine, e.BATCH_FIRST, encoded + dense + g, width))
    recent = _matrix(engine, e.RECENT_TABLE, RECENT * (agents + 2), width)
    of_moment, kinds = _matrix(engine, e.MOMENT, 2, width)[0], engine.numbers[e.KIND]
    for i in range(len(rows)):
        row, to = rows[i], first[i]
        kind = kinds + int(row[start - 1]) * width
        r0, r1, r2, r3, r4 = (
            recent[int(row[0]) + 1],
            recent[agents + 3 + int(row[1])],
            recent[2 * agents + 5 + int(row[2])],
            recent[3 * agents + 7 + int(row[3])],
            recent[4 * agents + 9 + int(row[4])],
        )
        for j in range(width):
            common = of_moment[j] + floats[kind + j] + r0[j] + r1[j] + r2[j] + r3[j] + r4[j]
            to[j] = max(to[j] + common, np.float32(0.0))
    second = np.dot(first, _matrix(engine, e.SECOND, width, width))
    last = np.empty((len(rows), width + dense), np.float32)
    bias = floats[numbers[e.SECOND_BIAS] : numbers[e.SECOND_BIAS] + width]
    for i in range(len(rows)):
        to, here, more = last[i], first[i], second[i]
        for j in range(width):
            to[j] = here[j] + max(more[j] + bias[j], np.float32(0.0))
        to[width:] = inputs[i, encoded : encoded + dense]
    out: NDArray[np.float32] = np.dot(last, _matrix(engine, e.BATCH_LAST, width + dense, outputs))
    bias, of_agents = _matrix(engine, e.HEAD_BIAS, 1, outputs)[0], _matrix(engine, e.AGENT_SKIP, agents + 1, outputs)
    for i in range(len(rows)):
        to, of_agent = out[i], of_agents[int(rows[i, 0])]
        for j in range(outputs):
            to[j] += bias[j] + of_agent[j]
    return out


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _tree_logits(rows: NDArray[np.float32], patterns: NDArray[np.int32], engine: Engine) -> NDArray[np.float32]:
    """`kernels.tree_logits` at prefill for rows [B, …] of workflows, float32 [B, K (V+1)]."""
    numbers, count = engine.numbers, len(rows)
    columns = np.ascontiguousarray(rows[:, : numbers[INPUTS]].T)
    out = np.empty((count, numbers[e.OUTPUTS]), np.float32)
    for i in range(count):
        start_leaves(engine, out[i])
    # Rows a power of two apart would fall into the same few sets of the cache.
    leaf = np.empty((_TREES, count + 16), np.uint32)
    totals = np.empty((count, engine.leaves.shape[1]), np.int32)
    for stage in range(3):
        if stage > 0 and not (patterns & stage).any():
            continue
        ensemble = ensemble_at(stage, 0)
        first, last = numbers[e.ENSEMBLES + ensemble], numbers[e.ENSEMBLES + ensemble + 1]
        totals[:] = 0
        for tree in range(first, last, _TREES):
            together = min(_TREES, last - tree)
            for i in range(together):
                _find_leaves(tree + i, columns, engine, leaf[i, :count])
            _add_leaves(leaf[:together], engine.leaves, totals)
        for i in range(count):
            if stage == 0 or patterns[i] & stage:
                add_total(totals[i], ensemble, engine, out[i])
    return out


@njit(cache=True, inline="always")
def _find_leaves(tree: int, columns: NDArray[np.float32], engine: Engine, leaf: NDArray[np.uint32]) -> None:
    """Writes the leaf of a tree that each row falls into, uint32 [B], from the inputs [F, B]."""
    floats, numbers = engine.floats, engine.numbers
    depth, trees = numbers[DEPTH], numbers[e.HEADER - 1]
    features, thresholds = numbers[e.FEATURES] + tree, numbers[e.THRESHOLDS] + tree
    leaf[:] = tree << depth
    threes = depth // 3 * 3  # three levels a turn: each turn reads and writes the leaves
    for level in range(0, threes, 3):
        first, second, third = level * trees, (level + 1) * trees, (level + 2) * trees
        a, over_a = columns[numbers[features + first]], floats[thresholds + first]
        b, over_b = columns[numbers[features + second]], floats[thresholds + second]
        c, over_c = columns[numbers[features + third]], floats[thresholds + third]
        bit_a, bit_b, bit_c = np.uint32(1 << level), np.uint32(2 << level), np.uint32(4 << level)
        for i in range(len(leaf)):
            found = bit_a if a[i] >= over_a else np.uint32(0)
            found |= bit_b if b[i] >= over_b else np.uint32(0)
            found |= bit_c if c[i] >= over_c else np.uint32(0)
            leaf[i] |= found
    for level in range(threes, depth):
        at, bit = level * trees, np.uint32(1 << level)
        column, threshold = columns[numbers[features + at]], floats[thresholds + at]
        for i in range(len(leaf)):
            leaf[i] |= bit if column[i] >= threshold else np.uint32(0)


@njit(cache=True, inline="always")
def _add_leaves(leaf: NDArray[np.uint32], leaves: NDArray[np.int8], totals: NDArray[np.int32]) -> None:
    """Adds the leaves of at most _TREES trees, numbered by uint32 [trees, ≥ B], to int32 [B, ≥ K (V+1)]."""
    for i in range(len(totals)):
        total = totals[i]
        if len(leaf) == _TREES:
            a, b, c, d = leaves[leaf[0, i]], leaves[leaf[1, i]], leaves[leaf[2, i]], leaves[leaf[3, i]]
            for j in range(len(total)):
                total[j] += np.int32(a[j]) + np.int32(b[j]) + np.int32(c[j]) + np.int32(d[j])
        else:
            for number in leaf[:, i]:
                row = leaves[number]
                for j in range(len(total)):
                    total[j] += row[j]


@njit(cache=True, fastmath=FAST, error_model="numpy", nogil=True)
def prefilled_many(
    rows: NDArray[np.float32],
    agent: NDArray[np.int32],
    tokens: NDArray[np.float32],
    states: NDArray[np.float32],
    engine: Engine,
    out: NDArray[np.float32],
    evidence: NDArray[np.int32],
) -> None:
    """`running.prefilled` for B workflows: a step begins in each.

    Args:
        rows: the workflows, float32 [B, …], changed in place.
        agent: int32 [B], 0..V.
        tokens: log(1 + x) of the inputs' token counts, float32 [B], 0 where unknown.
        states: projected prefill states, float32 [B, p]; [B, 0] for none.
        engine: the model.
        out: float32 [B, K, V+1].
        evidence: int32 [B].
    """
    numbers = engine.numbers
    size, sums = numbers[INPUTS], numbers[INPUTS] + numbers[SUMS]
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        who, patterns = np.empty(len(block), np.int32), np.empty(len(block), np.int32)
        _step_prefixes(block, engine)
        for i in range(len(block)):
            row, at = block[i], start + i
            at_prefill(
                row[:size],
                row[size:sums],
                agent[at],
                tokens[at],
                states[at],
                numbers[AGENTS],
                numbers[PREFILL],
                numbers[COMPLETION],
            )
            who[i], patterns[i] = who_answers(row[:size], engine), pattern_of(row[:size], 0, numbers)
        nothing = np.zeros((len(block), out.shape[1] * out.shape[2]), np.float32)
        of_network = _network_logits(block, engine) if (who == EVERYTHING).any() else nothing
        of_trees = _tree_logits(block, patterns, engine) if has_trees(numbers) else nothing
        here = out[start : start + BLOCK]
        flat = here.reshape((len(here), here.shape[1] * here.shape[2]))
        for i in range(len(block)):
            evidence[start + i] = mix(
                block[i][:size], 0, patterns[i], who[i], of_network[i], of_trees[i], engine, flat[i]
            )
        softmax_rows(here.reshape((len(here) * here.shape[1], here.shape[2])))
