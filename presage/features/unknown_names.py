"""Training workflows as they would be after a release that renames: what a predictor learns for unknown names."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.features.vocabulary import Vocabulary

_RENAMED: Final = 0.3
"""Share of the agents, and of the workflow types, whose names become unknown."""


def unknown_names(
    agent: NDArray[np.int32],
    workflow_type: NDArray[np.int32],
    offsets: NDArray[np.int64],
    vocabulary: Vocabulary,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Agents int32 [n] and types int32 [W] of W workflows, of which some are unknown now.

    Of each workflow at least one agent that it calls is unknown, and of about one in three the workflow type. Workflow
    w has the agents at offsets[w]:offsets[w+1], int64 [W+1].
    """
    workflows, sizes = len(workflow_type), np.diff(offsets)
    renamed = rng.random((workflows, len(vocabulary.agents) + 1)) < _RENAMED
    drawn = offsets[:-1] + (rng.random(workflows) * sizes).astype(np.int64)
    renamed[np.arange(workflows), agent[drawn]] = True
    types = np.where(rng.random(workflows) < _RENAMED, len(vocabulary.workflow_types), workflow_type)
    unknown = renamed[np.repeat(np.arange(workflows), sizes), agent]
    return np.where(unknown, vocabulary.unknown, agent).astype(np.int32), types.astype(np.int32)
