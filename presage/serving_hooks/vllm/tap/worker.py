"""The worker whose model tells its rows: `--worker-cls presage.serving_hooks.vllm.StatesWorker`.

vLLM's own worker of the platform, with one call before logits are computed. It does nothing unless a `StatesConnector`
wants rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from presage.serving_hooks.vllm import compat_worker
from presage.serving_hooks.vllm.tap.connector import StatesConnector

compat_worker.check()


class StatesWorker(compat_worker.platform_worker()):  # type: ignore[misc]
    """vLLM's worker for this platform, tapped."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model as ever, then listens to it."""
        super().load_model(*args, **kwargs)
        if compat_worker.tells_rows():
            compat_worker.hook_rows(self, _captured)


def _captured(ids: Sequence[str], rows: Callable[[], Any]) -> None:
    connector = compat_worker.connector(StatesConnector)
    if connector is not None:
        connector.captured(ids, rows)
