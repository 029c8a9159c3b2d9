"""The network: GraphSAGE for the agents, an ordered prefix, the projected states, a residual head for K steps.

Source: Zheng et al. (arXiv 2605.06472), §4.1 and appendix B. Kept: H^(0) and the two GraphSAGE layers over the
row-normalised transition matrix (eq. 3), logits of all K steps from one pass, the masked cross-entropy. Changed,
because it measured better: the attention of eq. (4) ignores order; a GRU over [H^(2) ‖ projected states] of the steps
so far replaces it, with the last five agents, counts and steps since each agent as further inputs.

Eq. (3), H^(l) = ReLU([H^(l-1) ‖ A H^(l-1)] W^T), is torch-geometric's `GraphConv` without bias over edges weighted by
A. H^(2) does not depend on requests, so `export` folds it into tables with one row an agent.

Training drops the token counts or the states of a workflow at random, so that the same weights serve without them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from numpy.typing import NDArray
from torch import nn

from presage.features.history import RECENT
from presage.features.inputs import NO_STATE, SIZE_COUNT
from presage.predictors.common.probabilities import outcome_shift
from presage.predictors.next_agent.network_weights import NetworkConfig, NetworkWeights, encode_all, encoding_size

with warnings.catch_warnings():
    # It imports tqdm.auto, which warns in every notebook where ipywidgets are not installed.
    warnings.filterwarnings("ignore", message="IProgress not found")
    from torch_geometric.nn.conv import GraphConv

if TYPE_CHECKING:
    from torch import Tensor


_STILL: Final = 1e-3
"""A dense input with a smaller standard deviation counts as constant and is ignored."""

_UPDATES: Final = 8
"""Least updates of an epoch of a network that is trained further, which often has few traces."""


@dataclass(frozen=True)
class Examples:
    """Input vectors at prefill and at completion, float32 [n, F], and labels int32 [n, K] of W workflows."""

    offsets: NDArray[np.int64]
    inputs: tuple[NDArray[np.float32], NDArray[np.float32]]
    outcomes: NDArray[np.int32]

    def and_then(self, more: Examples) -> Examples:
        """Both, one after the other."""
        first, second = (np.concatenate(pair) for pair in zip(self.inputs, more.inputs, strict=True))
        offsets = np.concatenate([self.offsets, more.offsets[1:] + self.offsets[-1]])
        return Examples(offsets, (first, second), np.concatenate([self.outcomes, more.outcomes]))


class WorkflowBatch:
    """Rows of w workflows, and their padded [w, T] view for the GRU (indices of rows; n is padding).

    `dropped`, bool [w, 2], are the workflows without token counts, and without states and texts.
    """

    def __init__(
        self,
        data: ExampleTensors,
        offsets: NDArray[np.int64],
        workflows: NDArray[np.int64],
        dropped: NDArray[np.bool_],
    ) -> None:
        rows, padded = rows_and_padding(offsets, workflows)
        index = torch.from_numpy(rows)
        self.padded = torch.from_numpy(padded)
        self.recent = data.recent[index]
        self.kind = data.kind[index]
        self.encoded = data.encoded[index]
        self.dense = data.dense[:, index]
        self.outcomes = data.outcomes[index]
        lengths = np.diff(offsets)[workflows]
        for source, columns in enumerate((data.tokens, data.states)):
            lacks = np.flatnonzero(np.repeat(dropped[:, source], lengths))
            if len(lacks):
                self.dense[:, torch.from_numpy(lacks), columns] = data.absent[columns]


class ExampleTensors:
    """The examples of a fit as tensors, with standardised dense inputs: token counts, and states and what derives from
    them. `absent`, float32 [D], is the dense input of a step without both.
    """

    tokens = slice(0, SIZE_COUNT)
    states = slice(SIZE_COUNT, None)

    def __init__(self, examples: Examples, agents: int, mean: NDArray[np.float32], spread: NDArray[np.float32]) -> None:
        dense = len(mean)
        first = examples.inputs[0]
        self.recent = torch.from_numpy(first[:, :RECENT].astype(np.int64) + 1)
        self.kind = torch.from_numpy(first[:, -dense - 1].astype(np.int64))
        self.encoded = torch.from_numpy(encode_all(first, agents))
        self.dense = torch.from_numpy((np.stack([x[:, -dense:] for x in examples.inputs]) - mean) / spread)
        self.outcomes = torch.from_numpy(examples.outcomes.astype(np.int64))
        absent = np.zeros_like(mean)
        absent[-2:] = NO_STATE
        self.absent = torch.from_numpy((absent - mean) / spread)


class _Dropout(nn.Module):
    """Dropout by random bytes; torch draws floats, a quarter of the training time."""

    def __init__(self, share: float, rng: np.random.Generator) -> None:
        super().__init__()
        self.least, self.rng = round(share * 256), rng  # of the 256 values of a byte, the lowest drop

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.least:
            return x
        drawn = np.frombuffer(self.rng.bytes(x.numel()), np.uint8).reshape(x.shape)
        return x * torch.from_numpy((drawn >= self.least) * np.float32(256 / (256 - self.least)))


class AgentGraph(nn.Module):
    """PBKV eq. (3): two GraphSAGE layers over the transition matrix A, float32 [V+1, V+1], by torch-geometric."""

    edges: Tensor
    weights: Tensor

    def __init__(self, transition: Tensor, size: int) -> None:
        super().__init__()
        to, source = transition.nonzero(as_tuple=True)  # agent i receives A[i, j] of what agent j has
        self.register_buffer("edges", torch.stack([source, to]))
        self.register_buffer("weights", transition[to, source])
        self.layers = nn.ModuleList([GraphConv(size, size, aggr="add", bias=False) for _ in range(2)])

    def forward(self, embedding: Tensor) -> Tensor:
        """H^(2), [V+1, a], from H^(0)."""
        for layer in self.layers:
            embedding = torch.relu(layer(embedding, self.edges, self.weights))
        return embedding


class NextAgentNetwork(nn.Module):
    """Trainable form. Dimensions: a = agent embedding, h = hidden, g = GRU, D = dense inputs, O = K (V+1) logits."""

    def __init__(
        self,
        transition: Tensor,
        types: int,
        dense: int,
        states: int,
        horizon: int,
        config: NetworkConfig,
        rng: np.random.Generator,
    ) -> None:
        super().__init__()
        nodes = transition.shape[0]
        a, h, g, outputs = config.agent_size, config.hidden_size, config.prefix_size, horizon * nodes
        self.horizon, self.nodes, self.states = horizon, nodes, states
        self.embedding = nn.Parameter(torch.randn(nodes, a) * 0.3)
        self.graph = AgentGraph(transition, a) if config.graph else nn.Identity()
        self.absent = nn.Parameter(torch.zeros(1, a))
        self.recent = nn.Linear(RECENT * a, h)
        self.kind = nn.Embedding(types + 1, h)
        self.encoded = nn.Linear(encoding_size(nodes - 1), h, bias=False)
        self.dense = nn.Linear(dense, h, bias=False)
        self.prefix = nn.GRU(a + states, g, batch_first=True)
        self.from_prefix = nn.Linear(g, h, bias=False)
        self.moment = nn.Parameter(torch.zeros(2, h))
        self.second = nn.Linear(h, h)
        self.head = nn.Linear(h, outputs)
        self.skip = nn.Linear(dense, outputs, bias=False)
        self.agent_skip = nn.Embedding(nodes, outputs)
        self.dropout = _Dropout(config.dropout, rng)
        self.input_dropout = _Dropout(config.input_dropout, rng)
        nn.init.zeros_(self.kind.weight)
        nn.init.zeros_(self.skip.weight)
        nn.init.zeros_(self.agent_skip.weight)

    def agents(self) -> Tensor:
        """H^(2), [V+1, a]; the last row is the unknown agent."""
        table: Tensor = self.graph(self.embedding)
        return table

    def entries(self, batch: WorkflowBatch) -> tuple[Tensor, Tensor]:
        """What the latest agents add to the hidden layer, [rows, h], and the GRU's inputs, [rows, a + p + c]."""
        table = torch.cat([self.absent, self.agents()])  # row 0: no such step yet
        states = batch.dense[1][:, SIZE_COUNT : SIZE_COUNT + self.states]
        return self.recent(table[batch.recent].flatten(1)), torch.cat([table[batch.recent[:, 0]], states], dim=1)

    def folded(self) -> dict[str, Tensor]:
        """Arrays of serving that H^(2) is folded into, for scaled states."""
        table, a = torch.cat([self.absent, self.agents()]), self.embedding.shape[1]
        rnn = dict(self.prefix.named_parameters())
        return {
            "recent": torch.stack([table @ self.recent.weight[:, i * a : (i + 1) * a].T for i in range(RECENT)]),
            "moment": self.moment + self.recent.bias,
            "step_agent": table[1:] @ rnn["weight_ih_l0"][:, :a].T + rnn["bias_ih_l0"],
            "step_states": rnn["weight_ih_l0"][:, a:].T,
        }

    def forward(self, batch: WorkflowBatch) -> Tensor:
        """Logits [2, rows, K, V+1], at prefill and at completion."""
        recent, steps = self.entries(batch)
        steps = torch.cat([steps, steps.new_zeros(1, steps.shape[1])])
        ran, _ = self.prefix(steps[batch.padded])
        before = torch.cat([torch.zeros_like(ran[:, :1]), ran[:, :-1]], dim=1)  # a step sees the steps before it
        carried = before[batch.padded < len(recent)]

        common = (
            recent
            + self.kind(batch.kind)
            + self.encoded(self.input_dropout(batch.encoded))
            + self.from_prefix(self.dropout(carried))
        )
        hidden = common + self.dense(self.input_dropout(batch.dense)) + self.moment[:, None]
        hidden = self.dropout(torch.relu(hidden))
        hidden = hidden + self.dropout(torch.relu(self.second(hidden)))
        out: Tensor = self.head(hidden) + self.skip(batch.dense) + self.agent_skip(batch.recent[:, 0] - 1)
        return out.view(2, -1, self.horizon, self.nodes)


class ContinuedNetwork(NextAgentNetwork):
    """The arrays of serving, to train further: tables in place of the embeddings and layers that they fold."""

    def __init__(
        self,
        weights: NetworkWeights,
        mean: NDArray[np.float32],
        spread: NDArray[np.float32],
        horizon: int,
        config: NetworkConfig,
        rng: np.random.Generator,
    ) -> None:
        old = {name: torch.from_numpy(array.astype(np.float32)) for name, array in weights.arrays.items()}
        nodes, types, states = len(old["step_agent"]), len(old["kind"]) - 1, len(old["step_states"])
        super().__init__(torch.zeros(nodes, nodes), types, len(mean), states, horizon, config, rng)
        del self.embedding, self.graph, self.absent, self.recent
        of_states = slice(SIZE_COUNT, SIZE_COUNT + states)
        unit, centre = torch.from_numpy(spread)[:, None], torch.from_numpy(mean)
        self.recent_table = nn.Parameter(old["recent"])
        self.step_agent = nn.Parameter(old["step_agent"] + centre[of_states] @ old["step_states"])
        self.step_states = nn.Parameter(old["step_states"] * unit[of_states])
        gates = self.step_agent.shape[1]
        self.prefix = nn.GRU(gates, gates // 3, batch_first=True)
        learnt = {
            "kind.weight": old["kind"],
            "encoded.weight": old["encoded"].T,
            "dense.weight": (old["dense"] * unit).T,
            "moment": old["moment"] + centre @ old["dense"],
            "from_prefix.weight": old["from_prefix"].T,
            "second.weight": old["second"].T,
            "second.bias": old["second_bias"],
            "head.weight": old["head"].T,
            "head.bias": old["head_bias"] + centre @ old["skip"],
            "skip.weight": (old["skip"] * unit).T,
            "agent_skip.weight": old["agent_skip"],
            "prefix.weight_hh_l0": old["step_hidden"].T,
            "prefix.bias_hh_l0": old["step_hidden_bias"],
            "prefix.weight_ih_l0": torch.eye(gates),  # its inputs are sums of rows of the tables
            "prefix.bias_ih_l0": torch.zeros(gates),
        }
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name in learnt:
                    parameter.copy_(learnt[name])
                parameter.requires_grad_(not name.endswith("_ih_l0"))

    def entries(self, batch: WorkflowBatch) -> tuple[Tensor, Tensor]:
        """As before, [rows, h] and the gates' sums, [rows, 3g]."""
        recent = self.recent_table[torch.arange(RECENT), batch.recent].sum(dim=1)
        states = batch.dense[1][:, SIZE_COUNT : SIZE_COUNT + self.states]
        return recent, self.step_agent[batch.recent[:, 0] - 1] + states @ self.step_states

    def folded(self) -> dict[str, Tensor]:
        """As before; they are its own."""
        return {
            "recent": self.recent_table,
            "moment": self.moment,
            "step_agent": self.step_agent,
            "step_states": self.step_states,
        }


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: a second one slows such small matrices down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.random.fork_rng(devices=[])
@one_thread()
def fit_network(
    train: Examples,
    validation: Examples,
    transition: NDArray[np.float32],
    types: int,
    states: int,
    config: NetworkConfig,
    seed: int,
    *,
    start: NetworkWeights | None = None,
    epochs: int | None = None,
    progress: Callable[[int, float, float], None] | None = None,
) -> tuple[NetworkWeights, int]:
    """Train the network.

    Args:
        train: training examples; validation: examples for early stopping.
        transition: A, float32 [V+1, V+1].
        types: T; states: p + c, the width of both projected states together.
        config: sizes and schedule.
        seed: of initialisation, order and dropout.
        start: weights to train further, once the likelihood of each outcome is that of `train`.
        epochs: number of epochs; None: early stopping on `validation`.
        progress: called after each epoch with its number, the training loss (with dropout) and the validation loss, in
            nats a label (NaN with `epochs`).

    Returns:
        The weights as arrays, and the epoch they are from (counted from 1).
    """
    torch.manual_seed(seed)
    agents = len(transition) - 1
    dense = SIZE_COUNT + 2 * states + 2
    both = np.concatenate([inputs[:, -dense:] for inputs in train.inputs])
    mean, spread = both.mean(axis=0), both.std(axis=0)
    spread[spread < _STILL] = np.inf if start is None else 1.0  # what `start` makes of such an input stays
    data = ExampleTensors(train, agents, mean, spread)
    held_out = ExampleTensors(validation, agents, mean, spread)
    horizon = train.outcomes.shape[1]
    rng = np.random.default_rng(seed)
    lengths = np.diff(train.offsets)
    if start is None:
        network = NextAgentNetwork(torch.from_numpy(transition), types, len(mean), states, horizon, config, rng)
    else:
        network = ContinuedNetwork(start, mean, spread, horizon, config, rng)
        steps = min(config.batch_steps, int(lengths.sum()) // _UPDATES)
        config = replace(config, batch_steps=max(steps, 1))
        _shift(network, data, train.offsets)
    average = copy.deepcopy(network)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
    )
    total = config.epochs
    per_epoch = -(-int(lengths.sum()) // config.batch_steps)  # at most: a long workflow fills several
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=total * (per_epoch + 2), pct_start=0.15
    )
    check = batches(np.diff(validation.offsets), 8192, None)
    # Every other held-out workflow goes without states, so that early stopping fits serving with and without them.
    bare = np.stack([np.zeros(len(validation.offsets) - 1, bool), np.arange(len(validation.offsets) - 1) % 2 == 1], 1)
    weights, followers = tuple(network.parameters()), tuple(average.parameters())
    drops = np.array([config.drop_tokens, config.drop_states if states else 0.0])
    best, best_epoch, kept = np.inf, 0, average.state_dict()
    updates = 0
    for epoch in range(1, (epochs or total) + 1):
        network.train()
        total_loss = rows = 0.0
        for workflows in batches(lengths, config.batch_steps, rng):
            batch = WorkflowBatch(data, train.offsets, workflows, rng.random((len(workflows), 2)) < drops)
            loss = masked_cross_entropy(network(batch), batch.outcomes)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            updates += 1
            total_loss += loss.item() * len(batch.outcomes)
            rows += len(batch.outcomes)
            _follow(followers, weights, min(config.averaging, updates / (updates + 10)))
        score = np.nan if epochs is not None else _score(average, held_out, validation.offsets, check, bare)
        if progress is not None:
            progress(epoch, total_loss / rows / 2.0, score)
        if epochs is not None:
            kept, best_epoch = average.state_dict(), epoch
            continue
        if score < best - 1e-5:
            best, best_epoch, kept = score, epoch, copy.deepcopy(average.state_dict())
        elif epoch - best_epoch >= config.patience:
            break
    average.load_state_dict(kept)
    return export(average, mean, spread), best_epoch


def masked_cross_entropy(logits: Tensor, outcomes: Tensor) -> Tensor:
    """Sum of both moments' mean cross-entropies: logits [2, rows, K, V+1], outcomes [rows, K]."""
    size = logits.shape[-1]
    labels = torch.where(outcomes < size, outcomes, -1).reshape(-1)  # unseen agents are not among the outcomes
    if not bool((labels >= 0).any()):
        return logits.sum() * 0.0
    # Outcomes before positions: torch's softmax is three times as slow over a short last axis.
    by_outcome = logits.reshape(2, -1, size).transpose(1, 2).contiguous()
    return 2.0 * F.cross_entropy(by_outcome, labels.expand(2, -1), ignore_index=-1)


@torch.no_grad()
def _follow(average: tuple[Tensor, ...], weights: tuple[Tensor, ...], keep: float) -> None:
    """Exponential moving average of the weights: most of the gain of an ensemble at no cost."""
    torch._foreach_lerp_(average, weights, 1.0 - keep)


@torch.no_grad()
def _shift(network: NextAgentNetwork, data: ExampleTensors, offsets: NDArray[np.int64]) -> None:
    """Shift the logits of each outcome to its share of the labels."""
    network.eval()
    logits, outcomes = [], []
    for workflows in batches(np.diff(offsets), 8192, None):
        batch = WorkflowBatch(data, offsets, workflows, np.zeros((len(workflows), 2), bool))
        logits.append(network(batch).flatten(0, 1).numpy())
        outcomes += [batch.outcomes.numpy()] * 2
    shift = outcome_shift(np.concatenate(logits), np.concatenate(outcomes))
    network.head.bias.add_(torch.from_numpy(shift.ravel()))


@torch.no_grad()
def _score(
    network: NextAgentNetwork,
    data: ExampleTensors,
    offsets: NDArray[np.int64],
    parts: Sequence[NDArray[np.int64]],
    dropped: NDArray[np.bool_],
) -> float:
    network.eval()
    total = rows = 0.0
    for workflows in parts:
        batch = WorkflowBatch(data, offsets, workflows, dropped[workflows])
        total += float(masked_cross_entropy(network(batch), batch.outcomes)) * len(batch.outcomes)
        rows += len(batch.outcomes)
    return total / rows / 2.0


@torch.no_grad()
def export(network: NextAgentNetwork, mean: NDArray[np.float32], spread: NDArray[np.float32]) -> NetworkWeights:
    """Fold H^(2) and the scaling of dense inputs into the tables and matrices of serving."""
    folded, rnn = network.folded(), dict(network.prefix.named_parameters())
    unit = torch.from_numpy(spread)[:, None]
    centre = torch.from_numpy(mean)
    dense, skip = network.dense.weight.T / unit, network.skip.weight.T / unit
    of_states = slice(SIZE_COUNT, SIZE_COUNT + network.states)
    step_states = folded["step_states"] / unit[of_states]
    arrays: Mapping[str, Any] = {
        "recent": folded["recent"],
        "kind": network.kind.weight,
        "encoded": network.encoded.weight.T,
        "dense": dense,
        "moment": folded["moment"] - centre @ dense,
        "from_prefix": network.from_prefix.weight.T,
        "second": network.second.weight.T,
        "second_bias": network.second.bias,
        "head": network.head.weight.T,
        "head_bias": network.head.bias - centre @ skip,
        "skip": skip,
        "agent_skip": network.agent_skip.weight,
        "step_agent": folded["step_agent"] - centre[of_states] @ step_states,
        "step_states": step_states,
        "step_hidden": rnn["weight_hh_l0"].T,
        "step_hidden_bias": rnn["bias_hh_l0"],
    }
    return NetworkWeights({name: np.ascontiguousarray(array.numpy(), np.float16) for name, array in arrays.items()})


def batches(lengths: NDArray[np.int64], steps: int, rng: np.random.Generator | None) -> Sequence[NDArray[np.int64]]:
    """Batches of workflows with about `steps` rows each, sorted by length to limit padding."""
    key = lengths.astype(float) if rng is None else lengths * rng.uniform(0.8, 1.25, len(lengths))
    order = np.argsort(key, kind="stable")
    group = (np.cumsum(lengths[order]) - 1) // steps
    parts = [order[group == g] for g in np.unique(group)]
    return parts if rng is None else [parts[i] for i in rng.permutation(len(parts))]


def rows_and_padding(
    offsets: NDArray[np.int64], workflows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of some workflows, int64 [m], and their padded view, int64 [w, T]: indices of those rows; m is padding."""
    lengths = np.diff(offsets)[workflows]
    rows = np.concatenate([np.arange(offsets[w], offsets[w + 1]) for w in workflows])
    padded = np.full((len(workflows), int(lengths.max())), len(rows))
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.arange(len(rows))
    return rows, padded
