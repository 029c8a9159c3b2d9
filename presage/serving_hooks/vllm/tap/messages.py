"""What the scheduler's end of the connector sends to the worker's, and what comes back with the tokens of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from presage.features.moment import Moment
from presage.serving_hooks.live import Projection

Rows = tuple[Sequence[str], NDArray[Any]]
"""Request ids, and a state of each: projected, float32 [n, p], or whole, float16 [n, d]."""


@dataclass
class Wanted(KVConnectorMetadata):  # type: ignore[misc]
    """To the worker.

    Attributes:
        rows: request ids by moment: whose rows of this step are wanted.
        projections: how to project them from now on; None: as before.
        whole: moments whose states are also wanted as the model has them; holds where `projections` is given.
    """

    rows: Mapping[Moment, tuple[str, ...]] = field(default_factory=dict)
    projections: Mapping[Moment, Projection] | None = None
    whole: tuple[Moment, ...] = ()


class States(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Back from the worker.

    vLLM's first model runner asks for this before the rows of the step exist and sends it after: so it is handed out
    empty, and filled. On a GPU a state is still on its way to the host when it is added. It is waited for when it is
    read or sent, which is after the tokens of the same step have come by the same way.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Moment, bool, Sequence[str], Any, Any]] = []

    def add(self, moment: Moment, ids: Sequence[str], states: Any, ready: Any = None, *, whole: bool = False) -> None:
        """States of these requests on the host, as `Rows`; `ready` is an event to wait for."""
        self._parts.append((moment, whole, ids, states, ready))

    def rows(self, moment: Moment, *, whole: bool = False) -> Rows | None:
        """States of this moment, projected or whole; None if there are none."""
        self._arrive()
        found = [(ids, states) for at, as_is, ids, states, _ in self._parts if (at, as_is) == (moment, whole)]
        if not found:
            return None
        return [name for ids, _ in found for name in ids], np.concatenate([states for _, states in found])

    def aggregate(self, other: KVConnectorWorkerMetadata) -> States:
        """Those of two workers."""
        if isinstance(other, States):
            self._parts += other._parts
        return self

    def _arrive(self) -> None:
        for number, (moment, whole, ids, states, ready) in enumerate(self._parts):
            if ready is not None:
                ready.synchronize()
            self._parts[number] = (moment, whole, ids, np.asarray(states), None)

    def __getstate__(self) -> dict[str, Any]:
        self._arrive()
        return {"_parts": self._parts}
