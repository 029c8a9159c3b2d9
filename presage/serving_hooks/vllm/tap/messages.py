"""What the scheduler's end of the connector sends to the worker's, and what comes back with the tokens of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from presage.features.moment import Moment
from presage.serving_hooks.forecasting.live import Projection

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
        self._parts.append((moment, whole, ids, np.asarray(states) if ready is None else states, ready))

    def rows(self, moment: Moment, *, whole: bool = False) -> Rows | None:
        """States of this moment, projected or whole; None if there are none."""
        found = [self._arrived(part) for part in self._of(moment, whole)]
        if len(found) < 2:
            return found[0] if found else None
        return [name for ids, _ in found for name in ids], np.concatenate([states for _, states in found])

    def row(self, moment: Moment, request_id: str, *, whole: bool = False) -> NDArray[Any] | None:
        """The state of one request; None if there is none. Of all that came, nothing but this one is looked at."""
        for part in self._of(moment, whole):
            if request_id in self._parts[part][2]:
                ids, states = self._arrived(part)
                found: NDArray[Any] = states[ids.index(request_id)]
                return found
        return None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> States:
        """Those of two workers."""
        if isinstance(other, States):
            self._parts += other._parts
        return self

    def _of(self, moment: Moment, whole: bool) -> list[int]:
        return [place for place, part in enumerate(self._parts) if part[0] == moment and part[1] == whole]

    def _arrived(self, place: int) -> Rows:
        moment, whole, ids, states, ready = self._parts[place]
        if ready is not None:
            ready.synchronize()
            states = np.asarray(states)
            self._parts[place] = (moment, whole, ids, states, None)
        return ids, states

    def __getstate__(self) -> dict[str, Any]:
        for place in range(len(self._parts)):
            self._arrived(place)
        return {"_parts": self._parts}
