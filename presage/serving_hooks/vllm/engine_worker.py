"""The port to vLLM's worker processes, the counterpart of `engine.py`.

It is a file of its own because a worker process imports it without a scheduler and compares other names of vLLM.

vLLM has two model runners. The first (`gpu_model_runner.py`, also the CPU's where Triton is missing) computes logits
from one row a request in the order of its input batch. The second (`gpu/model_runner.py`, the default on GPUs) passes
the rows and the batch to `sample`. Both have run on one GPU (docs/states_in_vllm.md); everything about tensor
parallelism and pipelines was written from vLLM's source and has not been run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from presage.errors import EngineError
from presage.serving_hooks.vllm.engine import call_before, of_kind
from presage.serving_hooks.vllm.start import engine_check

Connector = TypeVar("Connector")
Captured = Callable[[Sequence[str], Callable[[], Any]], None]
"""Receives request ids and a function that returns their rows, [batch, d], in this order. Must not raise."""

SIGNATURES: Final = """
vllm.v1.worker.gpu_worker:Worker.load_model(self, ...)
vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model(self, scheduler_output, ...)
vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample(self, hidden_states, input_batch, ...)
vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens(self, grammar_output, ...)
vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model(self)
vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens(self, grammar_output, ...)
vllm.v1.worker.gpu.model_runner:GPUModelRunner.get_model(self)
vllm.model_executor.models.interfaces:supports_eagle3(model)
vllm.model_executor.models.interfaces:SupportsEagle3.set_aux_hidden_state_layers(self, layers)
vllm.distributed.kv_transfer:has_kv_transfer_group()
vllm.distributed.kv_transfer:get_kv_transfer_group()
vllm.distributed.parallel_state:get_tensor_model_parallel_rank()
"""
"""Functions that Presage calls or wraps, as `engine_check.SIGNATURES`."""


def check() -> None:
    """Refuses a vLLM with unsupported workers.

    Raises:
        EngineError: lists all differences.
    """
    engine_check.check(SIGNATURES)


def platform_worker() -> Any:
    """vLLM's own worker class for this platform."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def reports_rows() -> bool:
    """Whether this worker is the one of its tensor-parallel group that reports rows: all ranks have the same ones."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return bool(get_tensor_model_parallel_rank() == 0)


def capture_layer(worker: Any, layer: int) -> None:
    """Makes the model return its hidden states after this layer, from 1, beside its output, from its first step on.

    Uses vLLM's interface for EAGLE-3 drafters, without a drafter, after the model is loaded and before it is compiled
    or captured in graphs. The key of vLLM's cache of compiled models includes `additional_config`, and so the layer.

    Raises:
        EngineError: this model, or the way it is served, does not give states of this layer.
    """
    from vllm.model_executor.models.interfaces import supports_eagle3

    runner, parallel = worker.model_runner, worker.vllm_config.parallel_config
    model = runner.get_model()
    reasons = {
        f"vLLM's {type(model).__name__} does not implement SupportsEagle3": not supports_eagle3(model),
        "a pipeline splits the layers between workers": parallel.pipeline_parallel_size > 1,
        "prompts are split between workers": parallel.prefill_context_parallel_size > 1,
        "batches are split in two": parallel.use_ubatching,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise EngineError(
            f"presage.state_layer is {layer}, but states of single layers cannot be read here: {reason}; remove it "
            "for states after the final norm"
        )
    model.set_aux_hidden_state_layers((layer,))
    runner.use_aux_hidden_state_outputs = True


def hook_layer_rows(worker: Any, captured: Captured) -> None:
    """As `hook_rows`, for the rows of the layer that `capture_layer` has set."""
    runner, second = worker.model_runner, worker.use_v2_model_runner

    def report(*_: Any, **__: Any) -> None:
        state = runner.execute_model_state
        if state is None:
            return
        ids = (state.input_batch if second else runner.input_batch).req_ids

        def rows() -> Any:
            (hidden_states,) = state.aux_hidden_states
            if second:
                return hidden_states[state.input_batch.logits_indices]
            # The last token of each request in this step; so in the first runner where nothing drafts.
            return hidden_states[runner.query_start_loc.gpu[1 : len(ids) + 1] - 1]

        captured(ids, rows)

    call_before(runner, "sample_tokens", report)


def hook_rows(worker: Any, captured: Captured) -> None:
    """Passes the rows that tokens are sampled from to `captured`, before they are sampled."""
    runner = worker.model_runner

    def logits(hidden_states: Any, *_: Any, **__: Any) -> None:
        captured(runner.input_batch.req_ids, lambda: hidden_states)

    def sample(hidden_states: Any, input_batch: Any, *_: Any, **__: Any) -> None:
        captured(input_batch.req_ids, lambda: hidden_states[input_batch.logits_indices])

    if worker.use_v2_model_runner:
        call_before(runner, "sample", sample)
    else:
        call_before(runner.model, "compute_logits", logits)


def connector(kind: type[Connector]) -> Connector | None:
    """The connector of this kind in this worker, alone or inside vLLM's `MultiConnector`."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return next(of_kind(kind, get_kv_transfer_group()), None) if has_kv_transfer_group() else None
