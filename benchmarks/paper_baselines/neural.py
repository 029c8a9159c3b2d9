"""Training and prediction of the neural baselines: one loop for MLP, TCN, Transformer and R-GCN.

As in the published predictor, the loss is cross-entropy over the next K agents, with END as a target and everything
after it masked (appendix B). Early stopping, the moving average of the weights and the learning rate are ours, and the
same for every family.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from presage.errors import ConfigurationError
from presage.features.moment import MOMENTS, Moment
from presage.features.prefixes import Prefixes
from presage.predictors.next_agent.network import batches, one_thread, rows_and_padding

_PREDICT_STEPS: Final = 8192
_LARGEST_GRADIENT: Final = 1.0
_UPDATES: Final = 16
"""Updates an epoch wanted: with few traces batches are smaller, else early stopping would come before learning."""
_FEWEST_STEPS: Final = 32
"""But not smaller than this."""


@dataclass(frozen=True)
class NeuralConfig:
    """How a neural baseline learns; the paper names none of this.

    Attributes:
        epochs: passes over the training data, at most.
        learning_rate: of AdamW, at its highest: it rises from and falls back to almost nothing (one cycle).
        weight_decay: of AdamW.
        batch_steps: positions in a batch, about; fewer where there are few.
        dropout: share of hidden units that is dropped.
        averaging: how much the moving average of the weights, which is what forecasts, keeps at each update.
        patience: stop when the validation loss has not fallen for so many epochs, and keep the best epoch.
        seed: of the initial weights, the order of the batches and the dropout.
    """

    epochs: int = 40
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    batch_steps: int = 512
    dropout: float = 0.2
    averaging: float = 0.98
    patience: int = 5
    seed: int = 0


class NeuralBaseline(ABC):
    """A family: what it reads of a prefix, and the network that reads it.

    Args:
        name: of the family and its size.
        config: how it learns.
    """

    def __init__(self, name: str, config: NeuralConfig) -> None:
        self.name = name
        self.config = config

    @abstractmethod
    def _begin(self, train: Prefixes) -> nn.Module:
        """Looks at the training prefixes and makes the untrained network: from the columns of a batch [m, …] and their
        padded view int64 [w, T] (m: padding) to the logits of each moment it knows, each [m, K, V+1]."""

    @abstractmethod
    def _columns(self, prefixes: Prefixes) -> Sequence[NDArray[np.generic]]:
        """What the network reads of each step, arrays [n, …]."""

    def fit(self, train: Prefixes, validation: Prefixes) -> Self:
        """Learns from `train`; `validation` decides when to stop."""
        config = self.config
        if min(config.epochs, config.batch_steps, config.patience) < 1 or not 0 <= config.dropout < 1:
            raise ConfigurationError(
                f"got {config}; epochs, batch_steps and patience are at least 1, dropout from 0 to less than 1"
            )
        with torch.random.fork_rng(devices=[]), one_thread():
            torch.manual_seed(config.seed)
            self.network = _train(self._begin(train), self._data(train), self._data(validation), config)
        return self

    def predict(self, prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        """Probabilities float32 [n, K, V+1]; a network that knows one moment says the same at both."""
        data = self._data(prefixes)
        found = np.empty((prefixes.steps, prefixes.horizon, prefixes.vocabulary.outcomes), np.float32)
        with torch.no_grad(), one_thread():
            for batch in data.batches(_PREDICT_STEPS, None):
                logits = self.network(*batch.inputs)
                found[batch.rows] = logits[min(MOMENTS.index(moment), len(logits) - 1)].softmax(dim=-1).numpy()
        return found

    def _data(self, prefixes: Prefixes) -> _Data:
        known = (prefixes.outcomes >= 0) & (prefixes.outcomes < prefixes.vocabulary.outcomes)
        return _Data(
            prefixes.offsets,
            [torch.from_numpy(column) for column in self._columns(prefixes)],
            torch.from_numpy(np.where(known, prefixes.outcomes, _IGNORED).astype(np.int64)),
        )


_IGNORED: Final = -1
"""The label of what is not known and of an agent out of the vocabulary: no outcome to learn."""


@dataclass(frozen=True)
class _Batch:
    rows: NDArray[np.int64]
    inputs: Sequence[Tensor]
    labels: Tensor


@dataclass(frozen=True)
class _Data:
    offsets: NDArray[np.int64]
    columns: Sequence[Tensor]
    labels: Tensor

    def batches(self, steps: int, rng: np.random.Generator | None) -> list[_Batch]:
        made = []
        for workflows in batches(np.diff(self.offsets), steps, rng):
            rows, padded = rows_and_padding(self.offsets, workflows)
            index = torch.from_numpy(rows)
            inputs = [*(column[index] for column in self.columns), torch.from_numpy(padded)]
            made.append(_Batch(rows, inputs, self.labels[index]))
        return made


def _train(network: nn.Module, data: _Data, held_out: _Data, config: NeuralConfig) -> nn.Module:
    """The moving average of the weights at the epoch whose validation loss was lowest, ready to forecast."""
    rng = np.random.default_rng(config.seed)
    optimiser = torch.optim.AdamW(network.parameters(), config.learning_rate, weight_decay=config.weight_decay)
    average = AveragedModel(network, multi_avg_fn=_moving(config.averaging))
    check = held_out.batches(_PREDICT_STEPS, None)
    batch_steps = min(config.batch_steps, max(_FEWEST_STEPS, len(data.labels) // _UPDATES))
    most = config.epochs * (len(data.labels) // batch_steps + 2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, config.learning_rate, total_steps=most, pct_start=0.15)
    best, waited, kept = np.inf, 0, copy.deepcopy(average.module)
    for _ in range(config.epochs):
        network.train()
        for batch in data.batches(batch_steps, rng):
            loss, labels = _loss(network(*batch.inputs), batch.labels)
            if not labels:
                continue
            optimiser.zero_grad(set_to_none=True)
            (loss / labels).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), _LARGEST_GRADIENT)
            optimiser.step()
            schedule.step()
            average.update_parameters(network)
        average.eval()
        with torch.no_grad():
            losses = [_loss(average(*batch.inputs), batch.labels) for batch in check]
        score = float(sum(loss for loss, _ in losses)) / max(sum(labels for _, labels in losses), 1)
        waited = waited + 1 if score >= best else 0
        if not waited:
            best, kept = score, copy.deepcopy(average.module)
        if waited == config.patience:
            break
    return kept.eval()


_Weights = tuple[Tensor, ...] | list[Tensor]


def _moving(keep: float) -> Callable[[_Weights, _Weights, Tensor | int], None]:
    """The moving average of weights; with few updates behind it, it forgets where they began."""

    def average(averages: _Weights, latest: _Weights, updates: Tensor | int) -> None:
        kept = min(keep, float(updates) / (float(updates) + 10))
        torch._foreach_lerp_(averages, latest, 1.0 - kept)

    return average


def _loss(logits: Sequence[Tensor], labels: Tensor) -> tuple[Tensor, int]:
    """Cross-entropy summed over the known labels of all K steps and moments, and how many there are."""
    flat = labels.flatten()
    total = torch.stack(
        [F.cross_entropy(out.flatten(0, 1), flat, ignore_index=_IGNORED, reduction="sum") for out in logits]
    ).sum()
    return total, len(logits) * int((flat != _IGNORED).sum())
