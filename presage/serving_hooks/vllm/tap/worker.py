"""The worker whose model tells its rows: `--worker-cls presage.serving_hooks.vllm.StatesWorker`.

vLLM's own worker of the platform, with one call before tokens are sampled. It does nothing unless a `StatesConnector`
wants rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from presage.serving_hooks.vllm import compat, compat_worker
from presage.serving_hooks.vllm.config import counted_from_1, read_config
from presage.serving_hooks.vllm.tap.connector import StatesConnector

compat_worker.check()


class StatesWorker(compat_worker.platform_worker()):  # type: ignore[misc]
    """vLLM's worker for this platform, tapped.

    Raises:
        ConfigurationError: the setting `state_layer` names a layer that the model does not have.
        EngineError: states of that layer cannot be tapped here.
    """

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model as ever, then listens to it."""
        layer = counted_from_1(read_config(compat.additional_config(self)).state_layer, compat.layers(self))
        super().load_model(*args, **kwargs)
        if compat.speculates(self):
            return  # no states are read, and what the model hands out beside its output is the drafter's
        if layer is not None:
            compat_worker.tap_layer(self, layer)
        if compat_worker.tells_rows():
            (compat_worker.hook_rows if layer is None else compat_worker.hook_layer_rows)(self, _captured)


def _captured(ids: Sequence[str], rows: Callable[[], Any]) -> None:
    connector = compat_worker.connector(StatesConnector)
    if connector is not None:
        connector.captured(ids, rows)
