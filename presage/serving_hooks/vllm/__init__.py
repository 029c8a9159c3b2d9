"""The policies inside vLLM's own scheduler and KV-cache manager.

`--scheduler-cls presage.serving_hooks.vllm.WorkflowScheduler` is all the engine is told. Whatever goes wrong in here,
vLLM's own behaviour goes on.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """The scheduler and the worker, imported where it is asked for: the rest of this package does without vLLM."""
    if name == "WorkflowScheduler":
        from presage.serving_hooks.vllm.scheduler import WorkflowScheduler

        return WorkflowScheduler
    if name == "StatesWorker":
        from presage.serving_hooks.vllm.hidden_states.worker import StatesWorker

        return StatesWorker
    raise AttributeError(f"module {__name__} has no attribute {name}")
