"""Engines of random parts, their inputs, and the same arithmetic in plain NumPy, one operation after the other."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from presage.features.history import RECENT, history_size
from presage.features.inputs import SIZE_COUNT, inputs_size, known, unroll
from presage.features.moment import MOMENTS
from presage.features.prefixes import Prefixes
from presage.predictors.engine import Engine, build_engine
from presage.predictors.next_agent.boosting import UNREACHED, TreeEnsemble
from presage.predictors.next_agent.network_weights import NetworkWeights, encode_all, encoding_size
from presage.predictors.next_agent.ngram import BackoffNgram
from presage.predictors.next_agent.parts import PATTERNS, STAGES, TREES

HIDDEN, PREFIX = 6, 5


@dataclass(frozen=True)
class Sample:
    """A trace as the kernels take it, and a random model over it.

    Attributes:
        prefixes: the trace.
        states: projected states float32 [n, p] and [n, c], of both moments, and which steps have one.
        network, trees, ngram, shares, evidence: the parts of `engine`.
        enough: the threshold of evidence.
    """

    prefixes: Prefixes
    states: tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[np.float32], NDArray[np.bool_]]
    network: NetworkWeights
    trees: dict[str, TreeEnsemble]
    ngram: BackoffNgram
    shares: NDArray[np.float32]
    evidence: NDArray[np.int32]
    enough: int

    @property
    def agents(self) -> int:
        return len(self.prefixes.vocabulary.agents)

    @property
    def tools(self) -> int:
        return self.prefixes.called.shape[1] - 1

    @property
    def widths(self) -> tuple[int, int]:
        return self.states[0].shape[1], self.states[2].shape[1]

    @property
    def engine(self) -> Engine:
        return build_engine(
            self.network, self.trees, self.ngram.table, self.shares, self.evidence, self.enough, self.tools, self.widths
        )

    def inputs(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        p = self.prefixes
        first, second = unroll(p.offsets, p.workflow_type, p.agent, p.sizes, p.called, *self.states, self.agents)
        return first, second

    def pattern(self, x: NDArray[np.float32], moment: int) -> int:
        """1 for token counts, 2 for a state, 4 for the tools called, 8 for an unknown agent."""
        unknown = x[0] == len(self.prefixes.vocabulary.agents)
        return int(np.array([1, 2, 4]) @ known(x[None], moment, *self.widths)[:, 0] + 8 * unknown)

    def tree_logits(self, x: NDArray[np.float32], moment: int, pattern: int) -> NDArray[np.float64]:
        """Of the ensembles that a step of this pattern is asked for, one comparison at a time."""
        names = [TREES[0], *(f"{stage}.{MOMENTS[moment]}" for stage, bit in STAGES if pattern & bit)]
        return np.asarray(sum(walk(self.trees[name], x) for name in names))


def random_sample(
    prefixes: Prefixes,
    seed: int,
    *,
    widths: tuple[int, int] = (3, 2),
    trees: tuple[int, ...] = (11, 6, 5, 4, 7, 3, 8),
    tools: int = 2,
    depth: int = 4,
    enough: int = 2,
) -> Sample:
    """A model of random weights over `prefixes`, random sizes and states, some of them missing."""
    rng = np.random.default_rng(seed)
    n, agents, types = prefixes.steps, len(prefixes.vocabulary.agents), len(prefixes.vocabulary.workflow_types)
    sizes = np.where(rng.random((n, 2)) < 0.4, np.nan, rng.random((n, 2)) * 9).astype(np.float32)
    states = [
        (rng.normal(size=(n, w)).astype(np.float32), rng.random(n) < 0.8 if w else np.zeros(n, bool)) for w in widths
    ]
    called = np.where(rng.random((n, 1)) < 0.4, np.nan, rng.integers(0, 3, (n, 1 + tools))).astype(np.float32)
    outputs, size = prefixes.horizon * (agents + 1), inputs_size(agents, tools, *widths)
    evidence = rng.integers(0, 6, (types + 1, agents + 1)).astype(np.int32)
    evidence[-1], evidence[:, -1] = 0, 0
    return Sample(
        replace(prefixes, sizes=sizes, called=called),
        (*states[0], *states[1]),
        random_network(rng, agents, types, sum(widths), outputs),
        {
            name: random_trees(rng, count, depth, size, outputs, starts=name == TREES[0])
            for name, count in zip(TREES, trees, strict=True)
        },
        BackoffNgram(3).fit(prefixes, prefixes),
        rng.random((PATTERNS, 2, 3, prefixes.horizon)).astype(np.float32),
        evidence,
        enough,
    )


def random_network(rng: np.random.Generator, agents: int, types: int, states: int, outputs: int) -> NetworkWeights:
    h, g, dense = HIDDEN, PREFIX, SIZE_COUNT + 2 * states + 2
    shapes = {
        "recent": (RECENT, agents + 2, h),
        "kind": (types + 1, h),
        "encoded": (encoding_size(agents), h),
        "dense": (dense, h),
        "moment": (2, h),
        "from_prefix": (g, h),
        "second": (h, h),
        "second_bias": (h,),
        "head": (h, outputs),
        "head_bias": (outputs,),
        "skip": (dense, outputs),
        "agent_skip": (agents + 1, outputs),
        "step_agent": (agents + 1, 3 * g),
        "step_states": (states, 3 * g),
        "step_hidden": (g, 3 * g),
        "step_hidden_bias": (3 * g,),
    }
    return NetworkWeights({name: (rng.normal(size=s) * 0.4).astype(np.float16) for name, s in shapes.items()})


def random_trees(
    rng: np.random.Generator, count: int, depth: int, inputs: int, outputs: int, *, starts: bool
) -> TreeEnsemble:
    """Trees some of which end early; thresholds on a grid, so that values meet them. Only the first start somewhere."""
    threshold = rng.integers(-1, 4, (count, depth)).astype(np.float32)
    threshold[np.arange(depth) >= rng.integers(1, 2 * depth, (count, 1))] = UNREACHED
    return TreeEnsemble(
        rng.integers(0, inputs, (count, depth)).astype(np.int16),
        threshold,
        rng.integers(-127, 128, (count, 2**depth, outputs)).astype(np.int8),
        (rng.random(outputs) * 0.01).astype(np.float32) + np.float32(1e-6),
        (rng.normal(size=outputs) * starts).astype(np.float32),
    )


def walk(trees: TreeEnsemble, x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Logits of one row, float64 [K (V+1)], one comparison at a time."""
    out = trees.base.astype(float)
    for feature, threshold, leaves in zip(trees.feature, trees.threshold, trees.leaves, strict=True):
        leaf = sum((x[f] >= t) << level for level, (f, t) in enumerate(zip(feature, threshold, strict=True)))
        out += leaves[leaf].astype(float) * trees.scale
    return out


def gru_step(sample: Sample, x: NDArray[np.float32], hidden: NDArray[np.float64]) -> NDArray[np.float64]:
    """torch.nn.GRU's equations on the exported arrays, in float64."""
    w = {name: array.astype(float) for name, array in sample.network.arrays.items()}
    states = sum(sample.widths)
    first = history_size(sample.agents) + sample.tools + 2 + SIZE_COUNT
    given = w["step_agent"][int(x[0])] + x[first : first + states].astype(float) @ w["step_states"]
    kept = hidden @ w["step_hidden"] + w["step_hidden_bias"]
    (r_x, z_x, n_x), (r_h, z_h, n_h) = np.split(given, 3), np.split(kept, 3)
    r, z = 1 / (1 + np.exp(-r_x - r_h)), 1 / (1 + np.exp(-z_x - z_h))
    return np.asarray((1 - z) * np.tanh(n_x + r * n_h) + z * hidden)


def dense_logits(
    sample: Sample, x: NDArray[np.float32], hidden: NDArray[np.float64], moment: int
) -> NDArray[np.float64]:
    """The head on the exported arrays, in float64."""
    w = {name: array.astype(float) for name, array in sample.network.arrays.items()}
    kind = history_size(sample.agents) + sample.tools + 1
    dense = x[kind + 1 :].astype(float)
    first = w["moment"][moment] + w["kind"][int(x[kind])] + hidden @ w["from_prefix"]
    first = first + sum(w["recent"][i, int(x[i]) + 1] for i in range(RECENT))
    first = first + encode_all(x[None], sample.agents)[0].astype(float) @ w["encoded"] + dense @ w["dense"]
    first = np.maximum(first, 0)
    second = first + np.maximum(first @ w["second"] + w["second_bias"], 0)
    return np.asarray(second @ w["head"] + w["head_bias"] + dense @ w["skip"] + w["agent_skip"][int(x[0])])
