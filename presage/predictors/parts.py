"""What a next-agent predictor consists of: its configuration and its learnt parts, as an artefact keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.features.inputs import inputs_size
from presage.features.moment import MOMENTS, Moment
from presage.features.projection import Projection
from presage.features.vocabulary import Vocabulary
from presage.predictors.boosting import BoostingConfig, TreeEnsemble
from presage.predictors.network_weights import NetworkConfig, NetworkWeights
from presage.predictors.ngram import BackoffNgram


@dataclass(frozen=True)
class NextAgentConfig:
    """What a fit needs to know.

    Attributes:
        components, discriminants: of the prefill states, how many principal components and directions that tell
            outcomes apart to keep. Half-precision products by 17 columns take twice as long as by 16.
        completion_components, completion_discriminants: of the completion states, where the agent says whom it calls.
        min_evidence: training steps of an agent in a workflow type below which the network is left out (`back-off`),
            and of a whole workflow type below which the n-gram answers alone.
        refit: learn again on training and validation prefixes together once rounds, epochs and weights are known.
        network: sizes and schedule of the network.
        boosting: how trees are grown; 0 rounds leave them out.
    """

    components: int = 8
    discriminants: int = 8
    completion_components: int = 12
    completion_discriminants: int = 12
    min_evidence: int = 10
    refit: bool = True
    network: NetworkConfig = field(default_factory=NetworkConfig)
    boosting: BoostingConfig = field(default_factory=BoostingConfig)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NextAgentConfig:
        """Inverse of `dataclasses.asdict`."""
        return cls(
            **{**data, "network": NetworkConfig(**data["network"]), "boosting": BoostingConfig(**data["boosting"])}
        )


@dataclass(frozen=True)
class Parts:
    """What is learnt.

    Attributes:
        projections: of the states of each moment that training had states for.
        network: its weights.
        trees: at prefill and at completion.
        ngram: counted on the same traces.
        evidence: int32 [T+1, V+1], training steps of each agent in each workflow type; the unknown have none.
        shares: float32 [2, 3, K], mixture weights of network, trees and n-gram at each moment and horizon.
    """

    projections: Mapping[Moment, Projection]
    network: NetworkWeights
    trees: tuple[TreeEnsemble, TreeEnsemble]
    ngram: BackoffNgram
    evidence: NDArray[np.int32]
    shares: NDArray[np.float32]

    @property
    def widths(self) -> tuple[int, int]:
        """p and c, of the projected states; 0 where a moment has none."""
        p, c = (self.projections[m].size if m in self.projections else 0 for m in MOMENTS)
        return p, c

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """Arrays by "part/name"."""
        parts: dict[str, Mapping[str, NDArray[Any]]] = {
            "network": self.network.to_tensors(),
            **{f"trees.{moment}": trees.to_tensors() for moment, trees in zip(MOMENTS, self.trees, strict=True)},
            "n-gram": self.ngram.to_tensors(),
            **{f"projection.{moment}": projection.to_tensors() for moment, projection in self.projections.items()},
            "mixture": {"shares": self.shares, "evidence": self.evidence},
        }
        return {f"{part}/{name}": array for part, arrays in parts.items() for name, array in arrays.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]], vocabulary: Vocabulary, horizon: int) -> Parts:
        """Inverse of `to_tensors`; other tensors are left alone.

        Raises:
            KeyError: a tensor is missing. ValueError, TypeError: one is not what it should be.
        """
        parts: dict[str, dict[str, NDArray[Any]]] = {}
        for name, array in tensors.items():
            part, _, inner = name.rpartition("/")
            parts.setdefault(part, {})[inner] = array
        at_prefill, at_completion = (TreeEnsemble.from_tensors(parts[f"trees.{moment}"]) for moment in MOMENTS)
        loaded = cls(
            projections={
                moment: Projection.from_tensors(parts[f"projection.{moment}"])
                for moment in MOMENTS
                if f"projection.{moment}" in parts
            },
            network=NetworkWeights.from_tensors(parts["network"]),
            trees=(at_prefill, at_completion),
            ngram=BackoffNgram.from_tensors(parts["n-gram"], vocabulary, horizon),
            evidence=parts["mixture"]["evidence"].astype(np.int32),
            shares=parts["mixture"]["shares"].astype(np.float32),
        )
        loaded._check(len(vocabulary.agents), len(vocabulary.workflow_types), horizon)
        return loaded

    def _check(self, agents: int, types: int, horizon: int) -> None:
        """Raises ValueError unless all parts fit each other: compiled code reads them without looking."""
        for projection in self.projections.values():
            if not projection.scale.shape == projection.bias.shape == (projection.size,):
                raise ValueError(f"a projection to {projection.size} numbers has scales and biases of other lengths")
        self.network.check(agents, types, sum(self.widths), horizon)
        for trees in self.trees:
            trees.check(inputs_size(agents, *self.widths), horizon * (agents + 1))
        if self.trees[0].depth != self.trees[1].depth:
            raise ValueError(
                f"trees of {self.trees[0].depth} levels at prefill and {self.trees[1].depth} at completion"
            )
        if self.evidence.shape != (types + 1, agents + 1):
            raise ValueError(f"evidence has the shape {self.evidence.shape}; wanted {(types + 1, agents + 1)}")
        if self.shares.shape != (len(MOMENTS), 3, horizon):
            raise ValueError(f"shares have the shape {self.shares.shape}; wanted {(len(MOMENTS), 3, horizon)}")
