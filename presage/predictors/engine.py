"""A fitted model unfolded for serving: four flat arrays that compiled code reads.

An `Engine` is built once, when a model is loaded, and never changes. Four arrays, not thirty, because passing an array
to compiled code costs a tenth of a microsecond. The names below number the parts of `floats` and `numbers`; `numbers`
begins with a header of scalars and the place of each part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.features.inputs import inputs_size, sums_size
from presage.predictors.next_agent.boosting import TreeEnsemble
from presage.predictors.next_agent.network_weights import ORDER, NetworkWeights
from presage.predictors.next_agent.ngram import NgramTable
from presage.predictors.next_agent.parts import TREES

# Scalars at the head of `numbers`.
AGENTS, PREFILL, COMPLETION, HIDDEN, PREFIX, ENOUGH, DEPTH, INPUTS, SUMS, OUTPUTS = range(10)
ENSEMBLES: Final = 10
"""Here and in the next places: the first tree of each ensemble of `parts.TREES` and, last, the number of all."""
HEADER: Final = ENSEMBLES + len(TREES) + 1

# Parts of `floats`: the network's arrays in their order, then these.
FLOATS: Final = (*ORDER, "thresholds", "scale", "base", "log_rows", "shares")
(
    RECENT_TABLE,
    KIND,
    ENCODED,
    DENSE,
    MOMENT,
    FROM_PREFIX,
    SECOND,
    SECOND_BIAS,
    HEAD,
    HEAD_BIAS,
    SKIP,
    AGENT_SKIP,
    STEP_AGENT,
    STEP_STATES,
    STEP_HIDDEN,
    STEP_HIDDEN_BIAS,
    THRESHOLDS,
    SCALE,
    BASE,
    LOG_ROWS,
    SHARES,
) = (HEADER + i for i in range(len(FLOATS)))

ABREAST: Final = 32
"""A leaf is filled up to a multiple of so many numbers: loops over it then run in vector registers to the end."""

# Parts of `numbers`.
FEATURES, CONTEXTS, EVIDENCE = (HEADER + len(FLOATS) + i for i in range(3))
FIRST_PART: Final = HEADER + len(FLOATS) + 3


class Engine(NamedTuple):
    """A named tuple, since that is what compiled code takes whole.

    Attributes:
        floats: float32, the parts FLOATS end to end. Of the trees (one ensemble of TREES after the other; all of DEPTH
            levels): thresholds [DEPTH, trees], scales [7, K (V+1)] and the base [K (V+1)] they start from. Logarithms
            of the n-gram's rows [C, K, V+1]. Shares [PATTERNS, 2, 3, K (V+1)]: how much network, trees and n-gram are
            believed, repeated for every outcome.
        numbers: int32, the header, where each part begins, then the parts: inputs compared [DEPTH, trees], n-gram rows
            by hash slot, evidence [T+1, V+1].
        leaves: int8 [trees 2^DEPTH, ≥ K (V+1)], in units of scale, filled up with zeros to a multiple of ABREAST.
        keys: uint64, the n-gram's hash table.
    """

    floats: NDArray[np.float32]
    numbers: NDArray[np.int32]
    leaves: NDArray[np.int8]
    keys: NDArray[np.uint64]


def build_engine(
    network: NetworkWeights,
    trees: Mapping[str, TreeEnsemble],
    ngram: NgramTable,
    shares: NDArray[np.float32],
    evidence: NDArray[np.int32],
    enough: int,
    tools: int,
    widths: tuple[int, int],
) -> Engine:
    """Unfolds the parts of a model.

    Args:
        network: its weights.
        trees: the ensembles of TREES.
        ngram: its table.
        shares: float32 [PATTERNS, 2, 3, K].
        evidence: int32 [T+1, V+1], training steps of an agent in a workflow type (`parts.NextAgentParts`).
        enough: below so much evidence of a known agent the network is left out, and of a type the trees too.
        tools: Z.
        widths: p and c, of the projected states.
    """
    agents = evidence.shape[1] - 1
    ensembles = [trees[name] for name in TREES]
    floats: list[NDArray[np.floating]] = [network.arrays[name] for name in ORDER]
    floats += [
        np.concatenate([ensemble.threshold for ensemble in ensembles]).T,
        np.stack([ensemble.scale for ensemble in ensembles]),
        np.sum([ensemble.base for ensemble in ensembles], axis=0),
        np.log(ngram.rows),
        np.repeat(shares, agents + 1, axis=3),
    ]
    numbers = [np.concatenate([ensemble.feature for ensemble in ensembles]).T, ngram.values, evidence]
    header = np.zeros(FIRST_PART, np.int32)
    header[AGENTS], (header[PREFILL], header[COMPLETION]), header[ENOUGH] = agents, widths, enough
    header[HIDDEN], header[PREFIX], header[DEPTH] = network.hidden_size, network.prefix_size, ensembles[0].depth
    header[INPUTS], header[SUMS] = inputs_size(agents, tools, *widths), sums_size(*widths)
    header[OUTPUTS] = len(ensembles[0].base)
    header[ENSEMBLES:HEADER] = np.cumsum([0, *map(len, ensembles)])
    header[HEADER : HEADER + len(FLOATS)] = _starts(floats, 0)
    header[FEATURES:FIRST_PART] = _starts(numbers, FIRST_PART)
    return Engine(
        np.concatenate([np.asarray(part, np.float32).ravel() for part in floats]),
        np.concatenate([header, *(np.asarray(part, np.int32).ravel() for part in numbers)]),
        _leaves(ensembles),
        ngram.keys,
    )


def with_shares(engine: Engine, shares: NDArray[np.float32], enough: int) -> Engine:
    """The same model with other mixture weights, float32 [PATTERNS, 2, 3, K], and another threshold of evidence."""
    floats, numbers = engine.floats.copy(), engine.numbers.copy()
    repeated = np.repeat(shares, numbers[AGENTS] + 1, axis=3)
    floats[numbers[SHARES] : numbers[SHARES] + repeated.size] = repeated.ravel()
    numbers[ENOUGH] = enough
    return Engine(floats, numbers, engine.leaves, engine.keys)


def _leaves(ensembles: Sequence[TreeEnsemble]) -> NDArray[np.int8]:
    outputs = len(ensembles[0].base)
    rows = np.concatenate([ensemble.leaves.reshape(-1, outputs) for ensemble in ensembles])
    return np.pad(rows, ((0, 0), (0, -outputs % ABREAST)))


def _starts(parts: Sequence[NDArray[np.generic]], first: int) -> NDArray[np.int64]:
    return first + np.cumsum([0, *(part.size for part in parts[:-1])])
