"""Baselines of the next-agent predictor: the published predictor, and gradient-boosted trees.

`PublishedGraphSage` is PBKV (Zheng et al., arXiv 2605.06472), appendix B, eq. 3 and 4: agent embeddings, two GraphSAGE
layers over the call graph, attention of the current agent over earlier ones, a projection of the hidden state, and a
two-layer perceptron for all K steps. 5120-d states and 7 agents make 0.37 million parameters (the paper: "roughly
350K"). PyTorch Geometric's `SAGEConv` ignores edge weights, while eq. 3 aggregates by transition probability, A·H.

`BoostedTrees` is LightGBM, one multi-class model for each horizon and moment: the strongest baseline on a few hundred
real workflows, but too slow for serving (1,800 trees a forecast). Its inputs are the history of agents
(`features/history.py`), workflow type, token counts, and the first dimensions of the states.

n-grams are in `ngram.py`; the other families of the paper are in `benchmarks/paper_baselines`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from presage.errors import ConfigurationError
from presage.features.history import RECENT, histories
from presage.features.moment import MOMENTS, PREFILL, Moment
from presage.features.prefixes import SIZES, Prefixes, transition_matrix
from presage.predictors.common.threads import lightgbm_settings

_IGNORED: Final = -100
_PREDICT_STEPS: Final = 8192


@dataclass(frozen=True)
class PublishedConfig:
    """Settings that the paper leaves open, except the number of layers and, by way of the parameter count, `dim`.

    Attributes:
        dim: d, width of the embeddings, of the projected state and of the perceptron.
        batch_steps: positions in a batch.
        dropout: of the perceptron's hidden units.
        patience: stop after so many epochs without a better validation loss and keep the best epoch; None trains for
            all epochs, as the paper suggests, which overfits.
    """

    dim: int = 64
    epochs: int = 30
    learning_rate: float = 1e-3
    batch_steps: int = 256
    dropout: float = 0.1
    patience: int | None = 5
    seed: int = 0


class PublishedGraphSage:
    """PBKV's predictor; its forecast at completion is the one at prefill."""

    network: PublishedNetwork

    def __init__(self, config: PublishedConfig = PublishedConfig()) -> None:
        self.config = config
        self.name = "published-graphsage" if config.patience else f"published-graphsage-{config.epochs}-epochs"

    def fit(self, train: Prefixes, validation: Prefixes) -> Self:
        """Train on the prefill prefixes of `train`; `validation` stops training if `patience` is set."""
        config = self.config
        counts = (config.dim, config.epochs, config.batch_steps, 1 if config.patience is None else config.patience)
        if min(counts) < 1 or not 0 <= config.dropout < 1:
            raise ConfigurationError(
                f"got {config}; dim, epochs, batch_steps and patience are at least 1, dropout from 0 to less than 1"
            )
        generator = torch.Generator().manual_seed(config.seed)
        self._state_size = train.states[PREFILL].shape[1] if PREFILL in train.states else 0
        self.network = PublishedNetwork(
            torch.from_numpy(transition_matrix(train)), self._state_size, train.horizon, config, generator
        )
        optimiser = torch.optim.Adam(self.network.parameters(), config.learning_rate)
        inputs, labels = self._inputs(train), _labels(train)
        held_inputs, held_labels = self._inputs(validation), _labels(validation)
        rows = torch.nonzero((labels != _IGNORED).any(dim=1))[:, 0]
        stops = config.patience is not None and bool((held_labels != _IGNORED).any())
        best_loss, best_weights, waited = math.inf, None, 0
        for _ in range(config.epochs):
            shuffled = rows[torch.randperm(len(rows), generator=generator)]
            for start in range(0, len(rows), config.batch_steps):
                batch = shuffled[start : start + config.batch_steps]
                loss = _loss(self.network(*(column[batch] for column in inputs), generator), labels[batch])
                optimiser.zero_grad()
                torch.autograd.backward(loss)
                optimiser.step()
            if not stops:
                continue
            with torch.no_grad():
                held_loss = float(_loss(self._logits(held_inputs), held_labels))
            waited = waited + 1 if held_loss >= best_loss else 0
            if not waited:
                best_loss = held_loss
                best_weights = {name: weight.clone() for name, weight in self.network.state_dict().items()}
            if waited == config.patience:
                break
        if best_weights is not None:
            self.network.load_state_dict(best_weights)
        return self

    def predict(self, prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        """Probabilities float32 [n, K, V+1], from the prefill state at both moments."""
        with torch.no_grad():
            probabilities: NDArray[np.float32] = self._logits(self._inputs(prefixes)).softmax(dim=-1).numpy()
        return probabilities

    def _logits(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        parts = (torch.split(column, _PREDICT_STEPS) for column in inputs)
        return torch.cat([self.network(*part) for part in zip(*parts, strict=True)])

    def _inputs(self, prefixes: Prefixes) -> tuple[Tensor, Tensor, Tensor]:
        """Current agent int64 [n], counts of the agents before it float32 [n, V+1], prefill state float32 [n, D]."""
        states = prefixes.states.get(PREFILL)
        if states is None or not self._state_size:
            states = np.zeros((prefixes.steps, self._state_size), np.float32)
        return (
            torch.from_numpy(prefixes.agent.astype(np.int64)),
            torch.from_numpy(earlier_agents(prefixes)),
            torch.from_numpy(np.nan_to_num(states, nan=0.0)),  # an unrecorded state is the zero vector
        )


class PublishedNetwork(nn.Module):
    """Eq. 3, eq. 4 and the head; A is a constant of the model."""

    A: Tensor

    def __init__(
        self, A: Tensor, state_size: int, horizon: int, config: PublishedConfig, generator: torch.Generator
    ) -> None:
        super().__init__()
        d, outcomes = config.dim, len(A)
        self.register_buffer("A", A)
        self.dropout, self.horizon = config.dropout, horizon
        # Row V of H0 is the unknown agent: it has no neighbours, so its embedding stays as initialised.
        self.H0 = nn.Parameter(torch.empty(outcomes, d).normal_(generator=generator))
        self.W1, self.W2 = (_weight(d, 2 * d, generator) for _ in range(2))
        self.Wq = _weight(d, d, generator)
        self.Wt = _weight(d, state_size, generator)
        self.hidden, self.hidden_bias = _weight(d, 3 * d, generator), nn.Parameter(torch.zeros(d))
        self.out = _weight(horizon * outcomes, d, generator)
        self.out_bias = nn.Parameter(torch.zeros(horizon * outcomes))

    def embeddings(self) -> Tensor:
        """H2 [V+1, d], eq. 3."""
        H: Tensor = self.H0
        for W in (self.W1, self.W2):
            H = torch.relu(torch.cat([H, self.A @ H], dim=1) @ W.T)
        return H

    def path(self, H: Tensor, agent: Tensor, earlier: Tensor) -> Tensor:
        """h_path [n, d], eq. 4: attention of the current agent over the earlier steps; zero without earlier steps.

        Steps of one agent have equal keys and values: a sum over agents weighted by their counts is exact.
        """
        scores = (H @ self.Wq.T) @ H.T / math.sqrt(H.shape[1])  # [V+1 current, V+1 earlier]
        any_earlier = earlier.sum(dim=1, keepdim=True) > 0
        weighed = torch.where(any_earlier, scores[agent] + earlier.log(), torch.zeros_like(earlier))
        return torch.where(any_earlier, weighed.softmax(dim=1) @ H, 0.0)

    def forward(
        self, agent: Tensor, earlier: Tensor, state: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        """Logits [n, K, V+1] from agent [n], earlier [n, V+1] and state [n, D]; a generator turns dropout on."""
        H = self.embeddings()
        joined = torch.cat([H[agent], self.path(H, agent, earlier), torch.relu(state @ self.Wt.T)], dim=1)
        hidden = torch.relu(joined @ self.hidden.T + self.hidden_bias)
        if generator is not None:
            kept = 1 - self.dropout
            hidden = hidden * torch.empty_like(hidden).bernoulli_(kept, generator=generator) / kept
        return (hidden @ self.out.T + self.out_bias).view(len(agent), self.horizon, -1)


def earlier_agents(prefixes: Prefixes) -> NDArray[np.float32]:
    """Count of each agent before each step of its workflow, the step itself excluded, float32 [n, V+1]."""
    called = np.zeros((prefixes.steps, prefixes.vocabulary.unknown + 1), np.float32)
    called[np.arange(prefixes.steps), prefixes.agent] = 1.0
    counts = called.cumsum(axis=0, dtype=np.float64) - called
    counts -= np.repeat(counts[prefixes.offsets[:-1]], np.diff(prefixes.offsets), axis=0)
    return counts.astype(np.float32)


def _weight(rows: int, columns: int, generator: torch.Generator) -> nn.Parameter:
    """Glorot-uniform weights."""
    bound = math.sqrt(6 / (rows + columns))
    return nn.Parameter(torch.empty(rows, columns).uniform_(-bound, bound, generator=generator))


def _labels(prefixes: Prefixes) -> Tensor:
    """int64 [n, K]; END is a target like any other, masked outcomes and unseen agents are ignored."""
    counts = (prefixes.outcomes >= 0) & (prefixes.outcomes < prefixes.vocabulary.outcomes)
    return torch.from_numpy(np.where(counts, prefixes.outcomes, _IGNORED).astype(np.int64))


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the targets of all K steps."""
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED)


_STATE_DIMS: Final = 64
_INPUT_SIZES: Final = [i for i, name in enumerate(SIZES) if name.startswith("input_")]


class BoostedTrees:
    """LightGBM with the semantic states, or on ids and sizes alone; `threads` 0 is all cores."""

    def __init__(self, *, use_states: bool = True, seed: int = 0, threads: int = 0) -> None:
        self.use_states = use_states
        self.seed = seed
        self.threads = threads
        self.name = "boosted-trees" if use_states else "boosted-trees-ids"

    def fit(self, train: Prefixes, validation: Prefixes) -> Self:
        """Train K models for each moment on `train`; `validation` is not used: the number of trees is fixed."""
        self._outcomes = train.vocabulary.outcomes
        self._dims: dict[Moment, int] = {
            moment: min(_STATE_DIMS, train.states[moment].shape[1]) if self.use_states and moment in train.states else 0
            for moment in MOMENTS
        }
        self._models: dict[Moment, list[tuple[NDArray[np.int64], Any]]] = {}
        for moment in MOMENTS:
            inputs = self._inputs(train, moment)
            self._models[moment] = [self._fit_horizon(inputs, train.outcomes[:, k]) for k in range(train.horizon)]
        return self

    def predict(self, prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        """Probabilities float32 [n, K, V+1]; 0 for outcomes that training never saw at a horizon."""
        inputs = self._inputs(prefixes, moment)
        probabilities = np.zeros((prefixes.steps, len(self._models[moment]), self._outcomes), np.float32)
        for k, (classes, model) in enumerate(self._models[moment]):
            probabilities[:, k, classes] = (
                1 / len(classes) if model is None else model.predict(inputs, num_threads=self.threads)
            )
        return probabilities

    def _fit_horizon(self, inputs: NDArray[np.float32], outcomes: NDArray[np.int32]) -> tuple[NDArray[np.int64], Any]:
        """The outcomes seen at this horizon (all if none was seen), and a LightGBM model over them.

        The model is None if all are equally likely.
        """
        import lightgbm

        rows = np.flatnonzero((outcomes >= 0) & (outcomes < self._outcomes))
        classes, labels = np.unique(outcomes[rows], return_inverse=True)
        if not len(classes):
            return np.arange(self._outcomes), None
        if len(classes) == 1:
            return classes.astype(np.int64), None
        settings = {
            "objective": "multiclass",
            "num_class": len(classes),
            "learning_rate": 0.08,
            "num_leaves": 15,
            "min_child_samples": 10,
            # With LightGBM's defaults of 0.001 and 0 its leaves diverge on rare outcomes: on two of five real traces
            # accuracy was .28 instead of .69.
            "min_sum_hessian_in_leaf": 1.0,
            "lambda_l2": 1.0,
            "bagging_fraction": 0.8,
            "bagging_freq": 1,
            "feature_fraction": 0.5,
            **lightgbm_settings(self.seed, self.threads),
        }
        categorical = [*range(RECENT), inputs.shape[1] - 1]
        data = lightgbm.Dataset(inputs[rows], labels, categorical_feature=categorical, params={"verbosity": -1})
        return classes.astype(np.int64), lightgbm.train(settings, data, num_boost_round=100)

    def _inputs(self, prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        """Inputs of each step at this moment, float32 [n, F]; the workflow type is the last column."""
        known_sizes = _INPUT_SIZES if moment == PREFILL else list(range(len(SIZES)))
        history = histories(prefixes.agent, prefixes.offsets, len(prefixes.vocabulary.agents))
        history[:, :RECENT] += 1  # "before the start" becomes category 0; LightGBM treats -1 as missing
        columns = [history, prefixes.sizes[:, known_sizes]]
        for earlier in MOMENTS[: MOMENTS.index(moment) + 1]:  # chronological
            states = prefixes.states.get(earlier)
            missing = np.full((prefixes.steps, self._dims[earlier]), np.nan, np.float32)
            columns.append(missing if states is None else states[:, : self._dims[earlier]])
        columns.append(prefixes.workflow_type[prefixes.workflow, None].astype(np.float32))
        return np.concatenate(columns, axis=1)
