"""A Transformer over the steps, one and two layers (PBKV, appendix C.2).

Source: Vaswani et al., "Attention is all you need" (NeurIPS 2017), the layer of §3.1 under a causal mask. PBKV names
the number of layers alone. Two departures, both in its favour. The layers normalise first, which trains without a
warm-up tuned to it. And beside the sinusoidal positions (§3.5) each head learns a bias for every distance between two
steps (Raffel et al., "T5", JMLR 2020, §2.1): from absolute positions alone it hardly learnt, on a few hundred real
traces, to tell the last steps apart.

Not PyTorch's `TransformerEncoderLayer`: in evaluation it takes a shorter way that knows no learnt bias.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from torch import Tensor, nn

from paper_baselines.neural import NeuralConfig
from paper_baselines.sequence import SequenceBaseline

WIDTH: Final = 64
HEADS: Final = 4
REACH: Final = 32
"""Steps apart from which on the bias of a head is the same."""


class Transformer(SequenceBaseline):
    """Causal self-attention as the encoder of the steps."""

    def __init__(self, layers: int, config: NeuralConfig) -> None:
        super().__init__(f"transformer-{layers}", config)
        self.layers = layers

    def _encoder(self) -> tuple[nn.Module, int]:
        return CausalAttention(self.layers, self.config.dropout), WIDTH


class CausalAttention(nn.Module):
    """Steps [w, T, WIDTH] to contexts of the same shape; agents are not looked at."""

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, steps: Tensor, agents: Tensor) -> Tensor:
        """Contexts [w, T, WIDTH]."""
        length = steps.shape[1]
        apart = torch.arange(length)[:, None] - torch.arange(length)
        hidden = steps + positions(length)
        for layer in self.layers:
            hidden = layer(hidden, apart)
        out: Tensor = self.norm(hidden)
        return out


class _Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.asked = nn.Linear(WIDTH, 3 * WIDTH)
        self.told = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(HEADS, REACH + 1))
        self.each = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Dropout(dropout), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, steps: Tensor, apart: Tensor) -> Tensor:
        """`apart` int64 [T, T]: how many steps the row's step comes after the column's."""
        heads = self.asked(self.first(steps)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)  # each [w, HEADS, T, WIDTH / HEADS]
        bias = self.bias[:, apart.clamp(0, REACH)].masked_fill(apart < 0, -math.inf)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        hidden = steps + self.dropout(self.told(seen.transpose(1, 2).flatten(2)))
        out: Tensor = hidden + self.dropout(self.each(self.second(hidden)))
        return out


def positions(length: int) -> Tensor:
    """Sines and cosines of each position, [length, WIDTH] (Vaswani et al., §3.5)."""
    place = torch.arange(length, dtype=torch.float32)[:, None]
    rate = torch.exp(torch.arange(0, WIDTH, 2, dtype=torch.float32) * (-math.log(10000.0) / WIDTH))
    return torch.stack([torch.sin(place * rate), torch.cos(place * rate)], dim=2).flatten(1)
