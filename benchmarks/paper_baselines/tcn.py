"""Temporal convolutional networks over the steps, two sizes (PBKV, appendix C.2: small, large).

Source: Bai, Kolter and Koltun, "An empirical evaluation of generic convolutional and recurrent networks for sequence
modeling" (arXiv 1803.01271), §3: residual blocks of two dilated causal convolutions, each with weight normalisation,
ReLU and dropout. With kernels of k taps and dilations 1, 2, 4, … of L blocks the last output sees the last
1 + 2 (k − 1) (2^L − 1) steps. Theirs drops whole channels; ours single units, since prefixes are short. PBKV names no
sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from paper_baselines.neural import NeuralConfig
from paper_baselines.sequence import SequenceBaseline

Size = Literal["small", "large"]

TAPS: Final = 3
"""k, the steps a convolution looks at."""

SIZES: Final[Mapping[Size, tuple[int, int]]] = MappingProxyType({"small": (32, 2), "large": (64, 4)})
"""Channels, and blocks L: they see 13 and 61 steps."""


class Tcn(SequenceBaseline):
    """Dilated causal convolutions as the encoder of the steps."""

    def __init__(self, size: Size, config: NeuralConfig) -> None:
        super().__init__(f"tcn-{size}", config)
        self.size = size

    def _encoder(self) -> tuple[nn.Module, int]:
        channels, blocks = SIZES[self.size]
        return TemporalConvolutions(channels, blocks, self.config.dropout), channels


class TemporalConvolutions(nn.Module):
    """Steps [w, T, channels] to contexts of the same shape; agents are not looked at."""

    def __init__(self, channels: int, blocks: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(channels, 2**level, dropout) for level in range(blocks))

    def forward(self, steps: Tensor, agents: Tensor) -> Tensor:
        """Contexts [w, T, channels]."""
        hidden = steps.transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.transpose(1, 2)


class _Block(nn.Module):
    def __init__(self, channels: int, dilation: int, dropout: float) -> None:
        super().__init__()
        self.reach = (TAPS - 1) * dilation
        self.convolutions = nn.ModuleList(
            weight_norm(nn.Conv1d(channels, channels, TAPS, dilation=dilation)) for _ in range(2)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, steps: Tensor) -> Tensor:
        hidden = steps
        for convolution in self.convolutions:
            hidden = self.dropout(torch.relu(convolution(F.pad(hidden, (self.reach, 0)))))
        return torch.relu(steps + hidden)
