"""A prefix as one vector, for the families that take no sequence: MLP, kNN, linear probe.

The columns are those of Presage's input vector (`presage/features/inputs.py`) without sizes, with agents and workflow
types as one-hot columns, so that distances and linear maps are meaningful. A column that is constant over the training
set is always zero: what training never saw (an unknown agent, a state where there was none) has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from paper_baselines.reduction import COMPONENTS, reduce_states
from presage.features.history import RECENT, history_size
from presage.features.inputs import SIZE_COUNT
from presage.features.moment import COMPLETION, MOMENTS, PREFILL, Moment
from presage.features.prefixes import Prefixes
from presage.predictors.next_agent.network_weights import encode_all
from presage.predictors.next_agent.parts import project_all, unrolled


@dataclass(frozen=True)
class Vectors:
    """n prefixes at one moment; V agents, T workflow types, s numbers of state.

    Attributes:
        recent: float32 [n, RECENT (V+1)], the latest agents, the current one first, as ones and zeros.
        workflow_type: float32 [n, T+1], ones and zeros.
        history: float32 [n, E], counts, steps since, position, run length: see `predictors/encoding.py`.
        state: float32 [n, s], reduced states of this step, 0 for what is not known yet at this moment.
        earlier: float32 [n, s+2], means of the states so far, and how far the last ones moved.
    """

    recent: NDArray[np.float32]
    workflow_type: NDArray[np.float32]
    history: NDArray[np.float32]
    state: NDArray[np.float32]
    earlier: NDArray[np.float32]


class PrefixVectors:
    """Turns prefixes into vectors, the same way for training and any other prefixes.

    Args:
        components: principal components of a moment's states, at most.
    """

    def __init__(self, components: int = COMPONENTS) -> None:
        self.components = components

    def fit(self, train: Prefixes, seed: int) -> Self:
        """Fits the principal components and finds out which columns vary."""
        self._projections = reduce_states(train, seed, self.components)
        self._varies: dict[Moment, dict[str, NDArray[np.bool_]]] = {}
        for moment, vectors in zip(MOMENTS, self._plain(train), strict=True):
            self._varies[moment] = {name: np.ptp(block, axis=0) > 0 for name, block in vars(vectors).items()}
        return self

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The moments that differ: without completion states both know the same."""
        return MOMENTS if COMPLETION in self._projections else (PREFILL,)

    def __call__(self, prefixes: Prefixes, moment: Moment) -> Vectors:
        """The vectors of every prefix at this moment."""
        plain = vars(self._plain(prefixes)[MOMENTS.index(moment)])
        return Vectors(**{name: np.where(self._varies[moment][name], block, 0) for name, block in plain.items()})

    def _plain(self, prefixes: Prefixes) -> list[Vectors]:
        agents, types = len(prefixes.vocabulary.agents), len(prefixes.vocabulary.workflow_types)
        kind = history_size(agents) + len(prefixes.vocabulary.tools) + 1
        states = kind + 1 + SIZE_COUNT
        width = sum(projection.size for projection in self._projections.values())
        found = []
        for inputs in unrolled(prefixes, project_all(prefixes, self._projections)):
            latest = inputs[:, :RECENT, None] == np.arange(agents + 1)
            found.append(
                Vectors(
                    latest.reshape(len(inputs), -1).astype(np.float32),
                    (inputs[:, kind, None] == np.arange(types + 1)).astype(np.float32),
                    encode_all(inputs, agents),
                    inputs[:, states : states + width],
                    inputs[:, states + width :],
                )
            )
        return found
