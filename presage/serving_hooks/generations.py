"""Forecasters of one version of the models after the other, asked as one.

A workflow goes on with the version that it began with. What a predictor keeps of a running workflow means nothing to
another predictor; to bring that up to date its steps would have to be kept, and to begin anew in the middle would be a
forecast of another workflow. So a version stays for as long as workflows run that began with it, with its guards and
its own truth, and new workflows begin with the latest. Of versions that are replaced faster than workflows end, the
oldest are let go: their workflows then look to the latest like workflows of which steps were missed.

Hidden states arrive projected for the latest version: the older ones do without, as they do where a state is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import Moment
from presage.serving_hooks.forecaster import Forecaster
from presage.serving_hooks.live import LiveForecast, Projection

_MOST_OLDER: Final = 8


class Generations:
    """Not thread-safe, as a forecaster.

    Args:
        first: forecaster of the version that is there.

    Attributes:
        latest: of the version that new workflows begin with.
    """

    def __init__(self, first: Forecaster) -> None:
        self.latest = first
        self._older: list[Forecaster] = []

    @property
    def under_older(self) -> int:
        """Workflows that go on with a version before the latest."""
        return sum(map(len, self._older))

    def take_over(self, forecaster: Forecaster) -> None:
        """Workflows begin with this one from now on. Whether it awaits states is to be said anew."""
        self._older = [older for older in (self.latest, *self._older) if len(older)][:_MOST_OLDER]
        self.latest = forecaster

    def on_prefill(
        self,
        workflow_type: str,
        workflow_id: str,
        agent: str,
        *,
        step: int | None = None,
        input_tokens: int | None = None,
    ) -> LiveForecast:
        """As `Forecaster.on_prefill`."""
        of = self._of(workflow_type, workflow_id)
        return of.on_prefill(workflow_type, workflow_id, agent, step=step, input_tokens=input_tokens)

    def on_prefill_state(
        self, workflow_type: str, workflow_id: str, projected: NDArray[np.float32], forecast: LiveForecast
    ) -> LiveForecast | None:
        """As `Forecaster.on_prefill_state`; None for a workflow of an older version."""
        of = self._of(workflow_type, workflow_id)
        if of is not self.latest:
            return None
        return of.on_prefill_state(workflow_type, workflow_id, projected, forecast)

    def on_completion(
        self,
        workflow_type: str,
        workflow_id: str,
        *,
        output_tokens: int | None = None,
        projected: NDArray[np.float32] | None = None,
    ) -> LiveForecast:
        """As `Forecaster.on_completion`; without its state for a workflow of an older version."""
        of = self._of(workflow_type, workflow_id)
        state = projected if of is self.latest else None
        return of.on_completion(workflow_type, workflow_id, output_tokens=output_tokens, projected=state)

    def close(self, workflow_type: str, workflow_id: str, *, silent: bool = False) -> None:
        """As `Forecaster.close`."""
        of = self._of(workflow_type, workflow_id)
        of.close(workflow_type, workflow_id, silent=silent)
        if of is not self.latest and not len(of):
            self._older.remove(of)

    @property
    def projections(self) -> Mapping[Moment, Projection]:
        """Of the latest."""
        return self.latest.projections

    def await_states(self) -> None:
        """Prefill states come after `on_prefill` from now on."""
        self.latest.awaits_states = True

    def _of(self, workflow_type: str, workflow_id: str) -> Forecaster:
        for older in self._older:
            if older.follows(workflow_type, workflow_id):
                return older
        return self.latest
