"""A Transformer over the steps, one and two layers (PBKV, appendix C.2).

Source: Vaswani et al., "Attention is all you need" (NeurIPS 2017): the encoder layer (§3.1) under a causal mask, and
the sinusoidal positions (§3.5), which serve a workflow of any length. The layers normalise first, which trains without
their warm-up tuned to it. PBKV names the number of layers alone.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn

from presage.predictors.baselines.neural import NeuralConfig
from presage.predictors.baselines.sequence import SequenceBaseline

WIDTH: Final = 64
HEADS: Final = 4


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
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def forward(self, steps: Tensor, agents: Tensor) -> Tensor:
        """Contexts [w, T, WIDTH]."""
        length = steps.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        out: Tensor = self.layers(steps + positions(length), mask=mask, is_causal=True)
        return out


def positions(length: int) -> Tensor:
    """Sines and cosines of each position, [length, WIDTH] (Vaswani et al., §3.5)."""
    place = torch.arange(length, dtype=torch.float32)[:, None]
    rate = torch.exp(torch.arange(0, WIDTH, 2, dtype=torch.float32) * (-math.log(10000.0) / WIDTH))
    return torch.stack([torch.sin(place * rate), torch.cos(place * rate)], dim=2).flatten(1)
