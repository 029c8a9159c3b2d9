"""What of vLLM's workers the hidden-state tap stands on: with `compat.py` the only file that names its private API.

Two model runners: the first (`gpu_model_runner.py`; the CPU's, too, where Triton is missing) computes logits from one
row a request in the order of its input batch. The second (`gpu/model_runner.py`, the default on GPUs) hands the rows
to `sample`, together with the batch. The way through the second, and all that concerns GPUs, tensor parallelism and
pipelines, was written from vLLM's source and has not been run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from presage.serving_hooks.vllm import compat

Connector = TypeVar("Connector")
Captured = Callable[[Sequence[str], Callable[[], Any]], None]
"""Told request ids and how to get their rows, [batch, d], in this order. Must not raise."""

SIGNATURES: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm.v1.worker.gpu_worker:Worker.load_model": ("self",),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": ("self", "scheduler_output"),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample": ("self", "hidden_states", "input_batch"),
    "vllm.distributed.kv_transfer:has_kv_transfer_group": (),
    "vllm.distributed.kv_transfer:get_kv_transfer_group": (),
    "vllm.distributed.parallel_state:get_tensor_model_parallel_rank": (),
}
"""Functions that are called or wrapped, with their leading parameters."""


def check(version: str | None = None, load: Callable[[str], Any] = importlib.import_module) -> None:
    """Refuses a vLLM whose workers are not those the tap knows.

    Raises:
        EngineError: with all differences.
    """
    compat.check(version, load, SIGNATURES, {})


def platform_worker() -> Any:
    """vLLM's own worker class for this platform."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def tells_rows() -> bool:
    """Whether this worker is the one of its group that tells: all ranks of tensor parallelism have the same rows."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return bool(get_tensor_model_parallel_rank() == 0)


def hook_rows(worker: Any, captured: Captured) -> None:
    """From now on `captured` hears of the rows that tokens are sampled from, before they are."""
    runner = worker.model_runner
    if worker.use_v2_model_runner:
        _hook_sample(runner, captured)
    else:
        _hook_logits(runner, captured)


def _hook_logits(runner: Any, captured: Captured) -> None:
    own = runner.model.compute_logits

    def compute_logits(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        captured(runner.input_batch.req_ids, lambda: hidden_states)
        return own(hidden_states, *args, **kwargs)

    runner.model.compute_logits = compute_logits


def _hook_sample(runner: Any, captured: Captured) -> None:
    own = runner.sample

    def sample(hidden_states: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        captured(input_batch.req_ids, lambda: hidden_states[input_batch.logits_indices])
        return own(hidden_states, input_batch, *args, **kwargs)

    runner.sample = sample


def connector(kind: type[Connector]) -> Connector | None:
    """The connector of this kind in this worker, alone or inside vLLM's `MultiConnector`."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return next(compat.of_kind(kind, get_kv_transfer_group()), None) if has_kv_transfer_group() else None
