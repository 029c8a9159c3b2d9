"""A KV connector that moves no cache: it carries which rows are wanted to the worker, and their states back.

    --kv-transfer-config '{"kv_connector": "StatesConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "presage.serving_hooks.vllm.tap.connector"}'

A producer, since vLLM holds blocks back for whoever reads cache from elsewhere, and nobody does here. One class for
both ends, as vLLM wants it: each process has one of them. This file and those it imports do without numba: a vLLM for
CPUs that has no Triton looks through all loaded modules when its worker starts, and fails at numba's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from presage.features.moment import Moment
from presage.serving_hooks.forecasting.live import Projection
from presage.serving_hooks.vllm.tap.messages import States, Wanted
from presage.serving_hooks.vllm.tap.rows import Projector, whole
from presage.serving_hooks.vllm.tap.wanted import WantedRows

logger = logging.getLogger(__name__)


class StatesConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both ends; idle until the scheduler's end is told to `tap`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wanted: WantedRows | None = None
        self._to_send: Mapping[Moment, Projection] | None = None
        self._whole: tuple[Moment, ...] = ()
        self._moments: frozenset[Moment] = frozenset()
        self._projector: Projector | None = None
        self._rows: Mapping[Moment, tuple[str, ...]] = {}
        self._states: States | None = None
        self._nothing = Wanted()

    @property
    def requires_kv_delivery(self) -> bool:
        """No cache is handed on."""
        return False

    # In the scheduler.

    def tap(
        self,
        is_step: Callable[[str], bool],
        projections: Mapping[Moment, Projection],
        whole: tuple[Moment, ...] = (),
    ) -> None:
        """From the next step on, rows of requests that are steps of workflows come back, projected.

        Told again, it projects otherwise from then on. At the moments `whole` they also come as the model has them.
        """
        self._wanted = self._wanted or WantedRows(is_step)
        self._to_send, self._whole = projections, whole
        self._moments = frozenset((*projections, *whole))

    def build_connector_meta(self, scheduler_output: Any) -> Wanted:
        """Whose rows of this step are wanted."""
        if self._wanted is None:
            return self._nothing
        try:
            rows = self._wanted.of(scheduler_output, self._moments)
            projections, self._to_send = self._to_send, None
            if not rows and projections is None:
                return self._nothing
            return Wanted(rows, projections, self._whole)
        except Exception as error:
            self._fails(error)
            return self._nothing

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """No cache comes from here."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """No cache comes from here."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may go at once."""
        return False, None

    # In the worker.

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        if connector_metadata.projections is not None:
            self._projector, self._whole = Projector(connector_metadata.projections), connector_metadata.whole
        self._rows = connector_metadata.rows
        self._states = States() if self._rows else None

    def captured(self, ids: Sequence[str], rows: Callable[[], Any]) -> None:
        """The model has computed these requests' rows, [batch, d]; taken only if some are wanted. Does not raise."""
        wanted, self._rows = self._rows, {}
        if not wanted or self._projector is None or self._states is None:
            return
        try:
            places, hidden = {name: place for place, name in enumerate(ids)}, rows()
            if len(hidden) != len(ids):
                raise ValueError  # several rows a request: nobody knows which
            for moment, names in wanted.items():
                here = [name for name in names if name in places]
                which = [places[name] for name in here]
                if moment in self._projector and here:
                    self._states.add(moment, here, *self._projector.project(moment, hidden, which))
                if moment in self._whole and here:
                    self._states.add(moment, here, *whole(hidden, which), whole=True)
        except Exception as error:
            self._fails(error)

    def build_connector_worker_meta(self) -> States | None:
        """The states of this step; those that are not computed yet come into it (see `States`)."""
        return self._states

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """No cache comes from here."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No cache comes from here."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """No cache is kept here."""

    def wait_for_save(self) -> None:
        """No cache is kept here."""

    def _fails(self, error: Exception) -> None:
        """Off for good; the message of the error is not told, it might repeat what a request says."""
        self._wanted, self._projector = None, None
        logger.error("hidden states are off from here on: %s", type(error).__name__)
