"""The network for serving: sizes, arrays, and the encoding of a history; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.features.history import RECENT
from presage.features.inputs import SIZE_COUNT


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes and schedule.

    Attributes:
        agent_size: a, width of an agent's embedding.
        prefix_size: g, width of the GRU's state.
        hidden_size: h, width of the head.
        dropout: of hidden units; input_dropout: of the head's inputs.
        learning_rate: peak of a one-cycle schedule.
        patience: epochs without a better validation loss before training stops.
        batch_steps: positions a batch, about.
        averaging: share of the moving average kept at each update.
        drop_tokens, drop_states: share of the workflows of an epoch without token counts, and without states and texts.
        graph: False leaves the GraphSAGE layers out (for the ablation).
    """

    agent_size: int = 24
    prefix_size: int = 24
    hidden_size: int = 48
    dropout: float = 0.3
    input_dropout: float = 0.15
    learning_rate: float = 6e-3
    weight_decay: float = 3e-2
    epochs: int = 30
    patience: int = 8
    batch_steps: int = 768
    averaging: float = 0.98
    drop_tokens: float = 0.1
    drop_states: float = 0.2
    graph: bool = True


SHAPES: Final[Mapping[str, tuple[str, ...]]] = {
    "recent": ("R", "V+2", "h"),  # row 0: no such step
    "kind": ("T+1", "h"),
    "encoded": ("E", "h"),
    "dense": ("D", "h"),
    "moment": ("2", "h"),
    "from_prefix": ("g", "h"),
    "second": ("h", "h"),
    "second_bias": ("h",),
    "head": ("h", "O"),
    "head_bias": ("O",),
    "skip": ("D", "O"),
    "agent_skip": ("V+1", "O"),
    "step_agent": ("V+1", "3g"),  # gates r, z, n as in torch
    "step_states": ("p+c", "3g"),
    "step_hidden": ("g", "3g"),
    "step_hidden_bias": ("3g",),
}
"""Arrays in the order of an engine: R latest agents, E encoding, D dense inputs, h hidden, g prefix, O = K (V+1)."""
ORDER: Final = tuple(SHAPES)


@dataclass(frozen=True)
class NetworkWeights:
    """Arrays of SHAPES by name, float16, inputs before outputs (x @ W)."""

    arrays: Mapping[str, NDArray[np.float16]]

    @property
    def hidden_size(self) -> int:
        """h."""
        return int(self.arrays["second"].shape[0])

    @property
    def prefix_size(self) -> int:
        """g."""
        return int(self.arrays["from_prefix"].shape[0])

    def check(self, agents: int, types: int, states: int, horizon: int) -> None:
        """Raise ValueError unless the shapes are those of V agents, T types, p + c states and K steps ahead."""
        sizes = {"R": RECENT, "2": 2, "h": self.hidden_size, "g": self.prefix_size, "3g": 3 * self.prefix_size}
        sizes |= {"V+1": agents + 1, "V+2": agents + 2, "T+1": types + 1, "p+c": states, "E": encoding_size(agents)}
        sizes |= {"D": SIZE_COUNT + 2 * states + 2, "O": horizon * (agents + 1)}
        for name, symbols in SHAPES.items():
            shape = tuple(sizes[symbol] for symbol in symbols)
            if self.arrays[name].shape != shape:
                raise ValueError(f"network array {name!r} has the shape {self.arrays[name].shape}; expected {shape}")

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """Arrays of an artefact by name."""
        return dict(self.arrays)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]]) -> NetworkWeights:
        """Inverse of `to_tensors`."""
        return cls({name: tensors[name].astype(np.float16) for name in ORDER})


LOGARITHM: Final = np.log1p(np.arange(256, dtype=np.float32))
"""log(1 + x) of a count, at most 255; a table, because a logarithm costs more than a row of the network."""


def encoding_size(agents: int) -> int:
    """E: two numbers an agent (and the unknown one), one for the position, four for the run."""
    return 2 * (agents + 1) + 5


@njit(cache=True)
def encode(inputs: NDArray[np.float32], out: NDArray[np.float32], agents: int) -> None:
    """Writes the encoding of an input vector's history to `out`, float32 [E]."""
    width = agents + 1
    for i in range(width):
        out[i] = LOGARITHM[min(int(inputs[RECENT + i]), 255)]
        out[width + i] = np.float32(1.0) / (np.float32(1.0) + inputs[RECENT + width + i])
    out[2 * width] = LOGARITHM[min(int(inputs[RECENT + 2 * width]), 255)]
    run = int(inputs[RECENT + 2 * width + 1])
    out[2 * width + 1] = LOGARITHM[min(run, 255)]
    for i in range(3):
        out[2 * width + 2 + i] = np.float32(1.0) if run >= i + 2 else np.float32(0.0)


@njit(cache=True)
def encode_all(inputs: NDArray[np.float32], agents: int) -> NDArray[np.float32]:
    """The encoding of every row of float32 [n, F], float32 [n, E]."""
    out = np.zeros((len(inputs), 2 * (agents + 1) + 5), np.float32)
    for row in range(len(inputs)):
        encode(inputs[row], out[row], agents)
    return out
