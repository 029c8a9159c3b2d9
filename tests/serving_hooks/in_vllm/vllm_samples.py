"""vLLM's own scheduler without a model, for a test: skipped without vLLM, and ended with the test."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; these tests run its own scheduler")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from presage.testing import engine
from presage.testing.engine import BLOCK, HASH, HASHER, QWEN, ask, everything_is_free, token
from presage.testing.engine import ScriptedEngine as Engine

TIER = {"kv_connector": "MadeUpTier", "kv_role": "kv_both", "kv_connector_module_path": "made_up_tier"}
"""A connector that has blocks of its own."""

NAMED = {"infer_workflows": False}
"""Settings under which requests that name no workflow are of none."""

BUILT: list[Any] = []
"""Schedulers; a test does not shut them down, so `conftest.py` ends what they have beside them."""


def build(folder: Path, kind: type[Any], **given: Any) -> Any:
    """A scheduler, as `presage.testing.engine.build` makes it."""
    BUILT.append(engine.build(folder, kind, max_model_len=4096, **given))
    return BUILT[-1]


__all__ = [
    "BLOCK",
    "BUILT",
    "HASH",
    "HASHER",
    "NAMED",
    "QWEN",
    "TIER",
    "AsyncScheduler",
    "Engine",
    "Request",
    "RequestStatus",
    "Scheduler",
    "ask",
    "build",
    "everything_is_free",
    "token",
]
