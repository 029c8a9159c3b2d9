"""The worker that captures hidden states: `--worker-cls presage.serving_hooks.vllm.StatesWorker`.

It is vLLM's own worker of the platform with one call before tokens are sampled, and idle unless a `StatesConnector`
requests rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from presage.serving_hooks.vllm import engine_worker
from presage.serving_hooks.vllm.config import counted_from_1, read_config
from presage.serving_hooks.vllm.engine import EngineConfig
from presage.serving_hooks.vllm.hidden_states.connector import StatesConnector

engine_worker.check()

logger = logging.getLogger(__name__)


class StatesWorker(engine_worker.platform_worker()):  # type: ignore[misc]
    """vLLM's worker for this platform with hidden states captured.

    Raises:
        ConfigurationError: the model does not have the layer of the setting `state_layer`.
        EngineError: states of that layer cannot be read here.
    """

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model and hooks into it."""
        config = EngineConfig(self.vllm_config)
        layer = counted_from_1(read_config(config.additional).state_layer, config.layers)
        super().load_model(*args, **kwargs)
        if config.speculates:
            return  # no states are read, and the model's additional output belongs to the drafter
        if layer is not None:
            engine_worker.capture_layer(self, layer)
        if engine_worker.reports_rows():
            try:
                (engine_worker.hook_rows if layer is None else engine_worker.hook_layer_rows)(self, _captured)
            except Exception as error:  # slots, or a class in C or Rust
                logger.warning("no hidden states are read: vLLM's runner cannot be hooked: %s", type(error).__name__)


def _captured(ids: Sequence[str], rows: Callable[[], Any]) -> None:
    connector = engine_worker.connector(StatesConnector)
    if connector is not None:
        connector.captured(ids, rows)
