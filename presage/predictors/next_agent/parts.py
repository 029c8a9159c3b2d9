"""Configuration and learnt parts of a next-agent predictor, as an artefact keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError
from presage.features.inputs import inputs_size, unroll
from presage.features.moment import COMPLETION, MOMENTS, PREFILL, Moment
from presage.features.prefixes import Prefixes
from presage.features.projection import Projection
from presage.features.vocabulary import Vocabulary
from presage.predictors.common.artefact import nested, under
from presage.predictors.next_agent.boosting import BoostingConfig, TreeEnsemble
from presage.predictors.next_agent.network_weights import NetworkConfig, NetworkWeights
from presage.predictors.next_agent.ngram import BackoffNgram

Component = Literal["network", "trees", "n-gram"]

COMPONENTS: Final[tuple[Component, ...]] = ("network", "trees", "n-gram")
"""The components of the mixture, in the order of its weights."""

STAGES: Final = (("answers", 4), ("tokens", 1), ("states", 2))
"""What trees read beside ids, in the order in which they are grown, with the bit of a step's pattern that it has it."""

TREES: Final = ("ids", *(f"{stage}.{moment}" for moment in MOMENTS for stage, _ in STAGES))
"""The ensembles of trees; their logits add up. The first reads ids alone and serves both moments. Each moment adds one
for each of STAGES, for the steps that have it."""

PATTERNS: Final = 16
"""Number of patterns of inputs of a step: bit 1 for token counts, bit 2 for a state, bit 4 for the tools called, bit 8
for an agent that is unknown."""


@dataclass(frozen=True)
class NextAgentConfig:
    """Settings of a fit.

    Attributes:
        components, discriminants: principal components and discriminant directions kept of prefill states.
        completion_components, completion_discriminants: the same of completion states.
        min_evidence: with fewer training steps of a known agent in a workflow type the network is left out
            (`back-off`); with fewer of the workflow type the n-gram forecasts alone.
        refit: fit again on training and validation prefixes with the rounds, epochs and weights found.
        mixture: components to use, at least one of COMPONENTS.
        boosting: settings of the trees; 0 rounds leave them out.
    """

    components: int = 8
    discriminants: int = 8
    completion_components: int = 12
    completion_discriminants: int = 12
    min_evidence: int = 10
    refit: bool = True
    mixture: tuple[Component, ...] = COMPONENTS
    network: NetworkConfig = field(default_factory=NetworkConfig)
    boosting: BoostingConfig = field(default_factory=BoostingConfig)

    def __post_init__(self) -> None:
        if not self.mixture:
            raise ConfigurationError(f"mixture is empty; at least one of {', '.join(COMPONENTS)} has to answer")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NextAgentConfig:
        """Inverse of `dataclasses.asdict`."""
        parts = {"network": NetworkConfig(**data["network"]), "boosting": BoostingConfig(**data["boosting"])}
        return cls(**{**data, **parts, "mixture": tuple(data["mixture"])})


@dataclass(frozen=True)
class NextAgentParts:
    """The learnt parts.

    Attributes:
        projections: of states, by moment; moments without states in training are absent.
        trees: ensembles by the names of TREES.
        evidence: int32 [T+1, V+1], training steps by workflow type and agent; 0 for an unknown agent, and in an unknown
            workflow type the least that the agent has in any that calls it.
        shares: float32 [PATTERNS, 2, 3, K], mixture weights by inputs of the step, moment, component and horizon.
    """

    projections: Mapping[Moment, Projection]
    network: NetworkWeights
    trees: Mapping[str, TreeEnsemble]
    ngram: BackoffNgram
    evidence: NDArray[np.int32]
    shares: NDArray[np.float32]

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of the projected states at both moments."""
        return widths_of(self.projections)

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """Arrays by "part/name"."""
        parts: dict[str, Mapping[str, NDArray[Any]]] = {
            "network": self.network.to_tensors(),
            **{f"trees.{name}": trees.to_tensors() for name, trees in self.trees.items()},
            "n-gram": self.ngram.to_tensors(),
            **{f"projection.{moment}": projection.to_tensors() for moment, projection in self.projections.items()},
            "mixture": {"shares": self.shares, "evidence": self.evidence},
        }
        return nested(parts)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]], vocabulary: Vocabulary, horizon: int) -> NextAgentParts:
        """Inverse of `to_tensors`; raises KeyError, ValueError or TypeError for a missing or malformed tensor."""
        projections = {moment: under(tensors, f"projection.{moment}/") for moment in MOMENTS}
        loaded = cls(
            projections={moment: Projection.from_tensors(arrays) for moment, arrays in projections.items() if arrays},
            network=NetworkWeights.from_tensors(under(tensors, "network/")),
            trees={name: TreeEnsemble.from_tensors(under(tensors, f"trees.{name}/")) for name in TREES},
            ngram=BackoffNgram.from_tensors(under(tensors, "n-gram/"), vocabulary, horizon),
            evidence=tensors["mixture/evidence"].astype(np.int32),
            shares=_with_unknown(tensors["mixture/shares"].astype(np.float32)),
        )
        loaded._check(vocabulary, horizon)
        return loaded

    def _check(self, vocabulary: Vocabulary, horizon: int) -> None:
        """Raise ValueError unless the shapes of all parts match; compiled code does not check them."""
        agents, types, tools = len(vocabulary.agents), len(vocabulary.workflow_types), len(vocabulary.tools)
        for projection in self.projections.values():
            if not projection.scale.shape == projection.bias.shape == (projection.size,):
                raise ValueError(f"a projection to {projection.size} numbers has scales or biases of another length")
        self.network.check(agents, types, sum(self.widths), horizon)
        for trees in self.trees.values():
            trees.check(inputs_size(agents, tools, *self.widths), horizon * (agents + 1))
        if len(depths := {trees.depth for trees in self.trees.values()}) != 1:
            raise ValueError(f"trees of depths {' and '.join(map(str, sorted(depths)))}; expected one depth")
        for name, array, shape in (
            ("evidence", self.evidence, (types + 1, agents + 1)),
            ("shares", self.shares, (PATTERNS, len(MOMENTS), len(COMPONENTS), horizon)),
        ):
            if array.shape != shape:
                raise ValueError(f"{name} of the shape {array.shape}; expected {shape}")


def _with_unknown(shares: NDArray[np.float32]) -> NDArray[np.float32]:
    """The mixture weights of a model trained before there were any for unknown agents: it leaves the network out."""
    if len(shares) != PATTERNS // 2:
        return shares
    network, trees, ngram = np.moveaxis(shares, 2, 0)
    return np.concatenate([shares, np.stack([np.zeros_like(network), trees, network + ngram], axis=2)])


def widths_of(projections: Mapping[Moment, Projection]) -> tuple[int, int]:
    """p and c, the widths of projected prefill and completion states; 0 without a projection."""
    p, c = (projections[m].size if m in projections else 0 for m in MOMENTS)
    return p, c


def project_all(prefixes: Prefixes, projections: Mapping[Moment, Projection]) -> dict[Moment, NDArray[np.float32]]:
    """Projected states by moment, float32 [n, m]; zeros for prefixes without states."""
    return {
        moment: projection(prefixes.states[moment])
        if moment in prefixes.states
        else np.zeros((prefixes.steps, projection.size), np.float32)
        for moment, projection in projections.items()
    }


def with_presence(
    prefixes: Prefixes, projected: Mapping[Moment, NDArray[np.float32]], moment: Moment
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Projected states of a moment, float32 [n, m] (m = 0 without a projection), and steps with a state, bool [n]."""
    if moment not in projected:
        return np.zeros((prefixes.steps, 0), np.float32), np.zeros(prefixes.steps, bool)
    raw = prefixes.states.get(moment)
    present = np.zeros(prefixes.steps, bool) if raw is None else ~np.isnan(raw[:, 0])
    return np.ascontiguousarray(projected[moment]), present


def unrolled(
    prefixes: Prefixes, projected: Mapping[Moment, NDArray[np.float32]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Input vectors of all steps at prefill and at completion, two float32 [n, F] (`features/inputs.py`)."""
    first, second = unroll(
        prefixes.offsets,
        prefixes.workflow_type,
        prefixes.agent,
        prefixes.sizes,
        prefixes.called,
        *with_presence(prefixes, projected, PREFILL),
        *with_presence(prefixes, projected, COMPLETION),
        len(prefixes.vocabulary.agents),
    )
    return first, second
