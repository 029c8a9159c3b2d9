"""What the sequence families share: TCN, Transformer and R-GCN differ in how they read the steps so far.

The inputs of a step are its agent, the workflow type, the number of earlier steps, its prefill state, and the
completion state of the step before it. A causal encoder turns the steps into a context for each. The head of the
published predictor (a hidden layer with dropout and the logits of all K steps; PBKV, appendix B) forecasts from the
context, the current agent and the states of this step known at the moment.

The paper's families know one moment. Ours learn both in one pass, which adds a second input to the head and changes
nothing at prefill.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paper_baselines.neural import NeuralBaseline
from paper_baselines.reduction import reduce_states
from presage.features.moment import COMPLETION, PREFILL
from presage.features.prefixes import Prefixes
from presage.predictors.next_agent.parts import project_all


class SequenceBaseline(NeuralBaseline):
    """A family that reads the steps in order."""

    @abstractmethod
    def _encoder(self) -> tuple[nn.Module, int]:
        """An untrained encoder and its width d: steps [w, T, d] and their agents int64 [w, T] to contexts [w, T, d].
        A context depends on its own step and those before it, padding comes last."""

    def _begin(self, train: Prefixes) -> nn.Module:
        self._projections = reduce_states(train, self.config.seed)
        prefill, completion = (
            self._projections[moment].size if moment in self._projections else 0 for moment in (PREFILL, COMPLETION)
        )
        encoder, width = self._encoder()
        vocabulary = train.vocabulary
        agents, types = len(vocabulary.agents), len(vocabulary.workflow_types)
        return _Sequence(encoder, width, agents, types, prefill, completion, train.horizon, self.config.dropout)

    def _columns(self, prefixes: Prefixes) -> Sequence[NDArray[np.generic]]:
        projected = project_all(prefixes, self._projections)
        nothing = np.zeros((prefixes.steps, 0), np.float32)
        done = projected.get(COMPLETION, nothing)
        before = np.zeros_like(done)
        before[1:] = done[:-1]
        before[prefixes.offsets[:-1]] = 0.0
        return [
            prefixes.agent.astype(np.int64),
            prefixes.workflow_type[prefixes.workflow].astype(np.int64),
            np.log1p(prefixes.position[:, None]).astype(np.float32),
            projected.get(PREFILL, nothing),
            before,
            done,
        ]


class _Sequence(nn.Module):
    def __init__(
        self,
        encoder: nn.Module,
        width: int,
        agents: int,
        types: int,
        prefill: int,
        completion: int,
        horizon: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.encoder, self.horizon = encoder, horizon
        # The unknown agent and the unknown type are zero and stay it: training has none, and a vector that was drawn
        # at random and never trained would be worse than nothing.
        self.agent = nn.Embedding(agents + 1, width, padding_idx=agents)
        self.workflow_type = nn.Embedding(types + 1, width, padding_idx=types)
        self.step = nn.Linear(1 + prefill + completion, width)
        self.moments = 2 if completion else 1
        self.current = nn.Embedding(agents + 1, width, padding_idx=agents)
        self.context = nn.Linear(width, width, bias=False)
        self.now = nn.Linear(self.moments + prefill + completion, width)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, horizon * (agents + 1))

    def forward(
        self,
        agent: Tensor,
        workflow_type: Tensor,
        position: Tensor,
        prefill: Tensor,
        before: Tensor,
        done: Tensor,
        padded: Tensor,
    ) -> tuple[Tensor, ...]:
        """Logits at prefill and, if there are completion states, at completion, each [m, K, V+1]."""
        steps = self.agent(agent) + self.workflow_type(workflow_type)
        steps = steps + self.step(torch.cat([position, prefill, before], dim=1))
        steps = torch.cat([steps, steps.new_zeros(1, steps.shape[1])])
        agents = torch.cat([agent, agent.new_full((1,), -1)])
        context = self.encoder(self.dropout(steps[padded]), agents[padded])[padded < len(agent)]
        common = self.context(context) + self.current(agent)
        logits = []
        for moment in range(self.moments):
            told = position.new_zeros(len(agent), self.moments)
            told[:, moment] = 1.0
            known = torch.cat([told, prefill, done * moment], dim=1)
            hidden = self.dropout(torch.relu(common + self.now(known)))
            logits.append(self.out(hidden).view(len(agent), self.horizon, -1))
        return tuple(logits)
