"""The states of a trace as the compiled code takes them: projected, with a flag for each step that has one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from presage.features.inputs import unroll
from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.features.prefixes import Prefixes
from presage.features.projection import Projection


def project_all(prefixes: Prefixes, projections: Mapping[Moment, Projection]) -> dict[Moment, NDArray[np.float32]]:
    """The states of each moment that the model projects, float32 [n, m]; zeros where these prefixes have none."""
    return {
        moment: projection(prefixes.states[moment])
        if moment in prefixes.states
        else np.zeros((prefixes.steps, projection.size), np.float32)
        for moment, projection in projections.items()
    }


def with_presence(
    prefixes: Prefixes, projected: Mapping[Moment, NDArray[np.float32]], moment: Moment
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Projected states of a moment, float32 [n, m] (m = 0 if the model has none), and which steps have one."""
    if moment not in projected:
        return np.zeros((prefixes.steps, 0), np.float32), np.zeros(prefixes.steps, bool)
    raw = prefixes.states.get(moment)
    present = np.zeros(prefixes.steps, bool) if raw is None else ~np.isnan(raw[:, 0])
    return np.ascontiguousarray(projected[moment]), present


def unrolled(
    prefixes: Prefixes, projected: Mapping[Moment, NDArray[np.float32]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The input vectors of every step at prefill and at completion, two float32 [n, F] (`features/inputs.py`)."""
    first, second = unroll(
        prefixes.offsets,
        prefixes.workflow_type,
        prefixes.agent,
        prefixes.sizes,
        *with_presence(prefixes, projected, PREFILL),
        *with_presence(prefixes, projected, COMPLETION),
        len(prefixes.vocabulary.agents),
    )
    return first, second
