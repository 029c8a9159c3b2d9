"""A relational graph convolutional network over the steps of the prefix (PBKV, appendix C.2 and §6: R-GCN).

Source: Schlichtkrull et al., "Modeling relational data with graph convolutional networks" (ESWC 2018), eq. 2:

    h_i^(l+1) = ReLU( W_0^(l) h_i^(l) + Σ_r Σ_{j ∈ N_i^r} 1/|N_i^r| · W_r^(l) h_j^(l) )

PBKV puts it in the place of GraphSAGE, over agents, and names no relations. There the prefix still comes in through its
eq. 4, which cannot see order, so that the graph could be no better than that. Here the nodes are the
steps of a workflow, which makes it a rival in its own right. A step's neighbours are

- the step before it,
- the earlier steps of the same agent,
- the steps that came right after those: what this agent was followed by so far,
- all earlier steps.

Every neighbour is an earlier step, so that one graph a workflow serves all its prefixes.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from paper_baselines.neural import NeuralConfig
from paper_baselines.sequence import SequenceBaseline

WIDTH: Final = 64
LAYERS: Final = 3
RELATIONS: Final = 4


class Rgcn(SequenceBaseline):
    """Relational convolutions over the graph of the steps as their encoder."""

    def __init__(self, config: NeuralConfig) -> None:
        super().__init__("rgcn", config)

    def _encoder(self) -> tuple[nn.Module, int]:
        return RelationalConvolutions(WIDTH, LAYERS, self.config.dropout), WIDTH


class RelationalConvolutions(nn.Module):
    """Steps [w, T, width] and their agents int64 [w, T] to contexts [w, T, width]."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.of_relation = nn.ModuleList(nn.Linear(RELATIONS * width, width, bias=False) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, steps: Tensor, agents: Tensor) -> Tensor:
        """Contexts [w, T, width]: eq. 2, layer after layer."""
        shares = relations(agents)
        hidden = steps
        for own, of_relation in zip(self.own, self.of_relation, strict=True):
            received = torch.einsum("wrij,wjd->wird", shares, hidden).flatten(2)
            hidden = self.dropout(torch.relu(own(hidden) + of_relation(received)))
        return hidden


def relations(agents: Tensor) -> Tensor:
    """1/|N_i^r| where step j is a neighbour of step i by relation r, else 0: float32 [w, RELATIONS, T, T].

    Args:
        agents: int64 [w, T], the agent of each step.
    """
    length = agents.shape[1]
    earlier = torch.ones(length, length).tril(-1).expand(len(agents), -1, -1)
    same = (agents[:, :, None] == agents[:, None, :]) * earlier
    answers = torch.zeros_like(same)
    answers[:, :, 1:] = same[:, :, :-1]  # j follows an earlier step of i's agent; it is i itself at the latest
    neighbours = torch.stack([earlier.triu(-1), same, answers * earlier, earlier], dim=1)
    return neighbours / neighbours.sum(dim=3, keepdim=True).clamp(min=1.0)
