"""Presage's policies inside vLLM's scheduler and KV-cache manager.

They are enabled by `--scheduler-cls presage.serving_hooks.vllm.WorkflowScheduler`. If a policy fails, vLLM
continues without it.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Imports the scheduler and the worker on first use: the rest of this package does not need vLLM."""
    if name == "WorkflowScheduler":
        from presage.serving_hooks.vllm.scheduler import WorkflowScheduler

        return WorkflowScheduler
    if name == "StatesWorker":
        from presage.serving_hooks.vllm.hidden_states.worker import StatesWorker

        return StatesWorker
    raise AttributeError(f"module {__name__} has no attribute {name}")
