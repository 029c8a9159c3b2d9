"""The compiled forecast: network, trees and n-gram over one input vector, mixed. What a scheduler's thread runs.

Everything a model needs lies in a few flat arrays, since each array handed to compiled code costs about a tenth of a
microsecond. `network_weights.ORDER` numbers the network's arrays; the constants below are those numbers.

Sums run in a fixed order, so the same row gives the same bits alone, in a batch and in another process.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.features.history import RECENT
from presage.features.inputs import SIZE_COUNT
from presage.predictors.encoding import encode
from presage.predictors.engine import Engine
from presage.predictors.ngram import lookup

(
    W_RECENT,
    W_KIND,
    W_ENCODED,
    W_DENSE,
    W_MOMENT,
    W_FROM_PREFIX,
    W_SECOND,
    W_SECOND_BIAS,
    W_HEAD,
    W_HEAD_BIAS,
    W_SKIP,
    W_AGENT_SKIP,
    W_STEP_AGENT,
    W_STEP_STATES,
    W_STEP_HIDDEN,
    W_STEP_HIDDEN_BIAS,
) = range(16)

# Contraction into fused multiply-adds is exact enough and twice as fast; no reassociation, so sums keep their order.
FAST: Final = {"contract"}


@njit(cache=True, fastmath=FAST, inline="always")
def _add_product(
    out: NDArray[np.float32], x: NDArray[np.float32], weights: NDArray[np.float32], start: int
) -> None:
    """out += x @ W for the row-major W that begins at `start`; zeros in x, frequent in encodings, cost nothing."""
    width = len(out)
    for i in range(len(x)):
        value = x[i]
        if value != 0.0:
            row = weights[start + i * width : start + (i + 1) * width]
            for j in range(width):
                out[j] += value * row[j]


@njit(cache=True, fastmath=FAST, inline="always")
def _add_row(out: NDArray[np.float32], weights: NDArray[np.float32], start: int) -> None:
    for j in range(len(out)):
        out[j] += weights[start + j]


@njit(cache=True, fastmath=FAST)
def step_prefix(
    inputs: NDArray[np.float32],
    hidden: NDArray[np.float32],
    weights: NDArray[np.float32],
    starts: NDArray[np.int64],
    states: int,
) -> None:
    """One GRU step: the step that `inputs` describes at its completion enters the prefix. Writes `hidden` [g]."""
    g = len(hidden)
    dense = len(inputs) - (2 * states + 2) - SIZE_COUNT
    agent = int(inputs[0])
    given = np.empty(3 * g, np.float32)
    given[:] = weights[starts[W_STEP_AGENT] + agent * 3 * g : starts[W_STEP_AGENT] + (agent + 1) * 3 * g]
    _add_product(given, inputs[dense + SIZE_COUNT : dense + SIZE_COUNT + states], weights, starts[W_STEP_STATES])
    kept = np.empty(3 * g, np.float32)
    kept[:] = weights[starts[W_STEP_HIDDEN_BIAS] : starts[W_STEP_HIDDEN_BIAS] + 3 * g]
    _add_product(kept, hidden, weights, starts[W_STEP_HIDDEN])
    one = np.float32(1.0)
    for i in range(g):
        reset = one / (one + np.exp(-(given[i] + kept[i])))
        update = one / (one + np.exp(-(given[g + i] + kept[g + i])))
        new = np.tanh(given[2 * g + i] + reset * kept[2 * g + i])
        hidden[i] = (one - update) * new + update * hidden[i]


@njit(cache=True, fastmath=FAST, inline="always")
def network_logits(
    inputs: NDArray[np.float32],
    hidden: NDArray[np.float32],
    moment: int,
    weights: NDArray[np.float32],
    starts: NDArray[np.int64],
    agents: int,
    states: int,
    out: NDArray[np.float32],
) -> None:
    """Writes the network's logits, float32 [K (V+1)], for one input vector and the prefix before it."""
    width = (starts[W_SECOND_BIAS + 1] - starts[W_SECOND_BIAS])
    dense = len(inputs) - (2 * states + 2) - SIZE_COUNT
    encoded = np.empty(2 * (agents + 1) + 5, np.float32)
    encode(inputs, encoded, agents)
    first = np.empty(width, np.float32)
    first[:] = weights[starts[W_MOMENT] + moment * width : starts[W_MOMENT] + (moment + 1) * width]
    for i in range(RECENT):
        row = i * (agents + 2) + int(inputs[i]) + 1
        _add_row(first, weights, starts[W_RECENT] + row * width)
    _add_row(first, weights, starts[W_KIND] + int(inputs[dense - 1]) * width)
    _add_product(first, encoded, weights, starts[W_ENCODED])
    _add_product(first, inputs[dense:], weights, starts[W_DENSE])
    _add_product(first, hidden, weights, starts[W_FROM_PREFIX])
    for j in range(width):
        first[j] = max(first[j], np.float32(0.0))
    second = np.empty(width, np.float32)
    second[:] = weights[starts[W_SECOND_BIAS] : starts[W_SECOND_BIAS] + width]
    _add_product(second, first, weights, starts[W_SECOND])
    for j in range(width):
        first[j] += max(second[j], np.float32(0.0))
    outputs = len(out)
    out[:] = weights[starts[W_HEAD_BIAS] : starts[W_HEAD_BIAS] + outputs]
    _add_product(out, first, weights, starts[W_HEAD])
    _add_product(out, inputs[dense:], weights, starts[W_SKIP])
    _add_row(out, weights, starts[W_AGENT_SKIP] + int(inputs[0]) * outputs)


@njit(cache=True, inline="always")
def tree_logits(
    inputs: NDArray[np.float32],
    nodes: NDArray[np.int32],
    thresholds: NDArray[np.float32],
    roots: NDArray[np.int32],
    leaves: NDArray[np.float32],
    base: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Writes the trees' logits, float32 [K (V+1)]. `nodes` int32 [n, 2] holds (feature or −1, child or leaf)."""
    out[:] = base
    for root in roots:
        node = root
        while nodes[node, 0] >= 0:
            node = nodes[node, 1] + (inputs[nodes[node, 0]] >= thresholds[node])
        row = leaves[nodes[node, 1]]
        for j in range(len(out)):
            out[j] += row[j]


@njit(cache=True, fastmath=FAST, inline="always")
def softmax_rows(rows: NDArray[np.float32]) -> None:
    """Turns each row of logits, float32 [K, V+1], into probabilities in place."""
    for k in range(rows.shape[0]):
        row = rows[k]
        top = row[0]
        for j in range(1, len(row)):
            top = max(top, row[j])
        total = np.float32(0.0)
        for j in range(len(row)):
            row[j] = np.exp(row[j] - top)
            total += row[j]
        for j in range(len(row)):
            row[j] /= total


@njit(cache=True, fastmath=FAST)
def forecast_row(
    inputs: NDArray[np.float32], hidden: NDArray[np.float32], moment: int, engine: Engine, out: NDArray[np.float32]
) -> int:
    """Writes one forecast, float32 [K, V+1], and returns its evidence.

    Args:
        inputs: float32 [F]; hidden: float32 [g], the prefix before this step; moment: 0 prefill, 1 completion.
        engine: the model.
        out: where the probabilities go.
    """
    states = engine.prefill + engine.completion
    agent = int(inputs[0])
    kind = int(inputs[len(inputs) - (2 * states + 2) - SIZE_COUNT - 1])
    known = engine.evidence[kind, agent]
    context = lookup(engine.keys, engine.values, kind, agent, int(inputs[1]), int(inputs[2]))
    if known < engine.enough:
        out[:] = engine.rows[context]
        return known
    width = out.shape[1]
    share = engine.shares[moment]
    logits = np.empty(out.size, np.float32)
    network_logits(inputs, hidden, moment, engine.weights, engine.starts, engine.agents, states, logits)
    logarithms = engine.log_rows[context]
    for k in range(out.shape[0]):
        for j in range(width):
            out[k, j] = share[0, k] * logits[k * width + j] + share[2, k] * logarithms[k, j]
    roots = engine.roots[engine.root_starts[moment] : engine.root_starts[moment + 1]]
    if len(roots) > 0:
        tree_logits(inputs, engine.nodes, engine.thresholds, roots, engine.leaves, engine.base[moment], logits)
        for k in range(out.shape[0]):
            for j in range(width):
                out[k, j] += share[1, k] * logits[k * width + j]
    softmax_rows(out)
    return known
