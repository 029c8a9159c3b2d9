"""vLLM's own scheduler and KV-cache manager without a model: what the engine would compute is made up here."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when it is imported

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
HASH = get_hash_fn_by_name("sha256")
HASHER = get_request_block_hasher(BLOCK, HASH)
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


def build(
    folder: Path,
    kind: type[Any],
    *,
    blocks: int,
    presage: Mapping[str, Any] | None = None,
    policy: str = "fcfs",
    seqs: int = 16,
    tokens: int = 256,
    max_model_len: int = 4096,
    caching: bool = True,
    stats: bool = False,
    groups: Sequence[Any] = (),
    connector: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """A scheduler over a cache of `blocks` blocks of 16 tokens, one of which vLLM keeps for itself.

    `groups` are KV-cache specs, by default one of full attention; `more` goes to `VllmConfig`.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN), encoding="utf-8")
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=caching)
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), dtype="float32", max_model_len=max_model_len, skip_tokenizer_init=True
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=issubclass(kind, AsyncScheduler),
            policy=policy,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(**connector) if connector is not None else None,
        additional_config={} if presage is None else {"presage": dict(presage)},
        **more,
    )
    # On a CPU vLLM never schedules ahead; here nothing is computed, so it may.
    config.scheduler_config.async_scheduling = issubclass(kind, AsyncScheduler)
    cache.num_gpu_blocks = blocks
    init_none_hash(HASH)
    layers = groups or [FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)]
    block = BLOCK * config.parallel_config.decode_context_parallel_size
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer-{i}"], spec) for i, spec in enumerate(layers)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block,
        hash_block_size=block,
        include_finished_set=stats,
        log_stats=stats,
    )


def ask(name: str, prompt: list[int], output: int, *, arrival: float = 0.0, priority: int = 0, **sent: Any) -> Request:
    """A request for `output` tokens; `sent` is what its client says of it."""
    wanted = SamplingParams(max_tokens=output, ignore_eos=True, extra_args=sent or None)
    wanted.update_from_generation_config({}, 1)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=wanted,
        pooling_params=None,
        arrival_time=arrival,
        priority=priority,
        block_hasher=HASHER,
    )


class ScriptedEngine:
    """Runs a scheduler as the engine would; with `ahead`, step N+1 is scheduled before the output of N is known.

    Attributes:
        hits: prompt tokens found in the cache, of each request at its first selection.
        said: output tokens of each request.
        ended: requests that have finished, in order.
        log: what each step scheduled.
    """

    def __init__(self, scheduler: Any, ahead: bool = False) -> None:
        self.scheduler = scheduler
        self.ahead = ahead
        self.hits: dict[str, int] = {}
        self.said: dict[str, list[int]] = {}
        self.ended: list[str] = []
        self.log: list[Any] = []
        self._under_way: deque[tuple[Any, Any]] = deque()

    def step(self) -> None:
        """One iteration, or with `ahead` the first half of one and the second of the one before."""
        self.schedule()
        if len(self._under_way) > self.ahead:
            self._finish()

    def schedule(self) -> None:
        """The first half of an iteration; its output is under way."""
        output = self.scheduler.schedule()
        self.scheduler.get_grammar_bitmask(output)  # once the model has been started
        for new in output.scheduled_new_reqs:
            self.hits[new.req_id] = new.num_computed_tokens
        preempted = tuple(sorted(output.preempted_req_ids or ()))
        self.log.append((dict(output.num_scheduled_tokens), dict(self.hits), preempted))
        self._under_way.append((output, self._computed(output)))

    def run(self, most: int = 100_000) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            if not self.scheduler.has_unfinished_requests():
                self.drain()
                return
            self.step()
        raise RuntimeError(f"not done after {most} steps")

    def drain(self) -> None:
        """Outputs that are under way arrive."""
        while self._under_way:
            self._finish()

    def abort(self, *names: str) -> None:
        """The clients of these requests have gone."""
        self.scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)

    def _computed(self, output: Any) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        tokens = [[] if requests[name].is_prefill_chunk else [token(name)] for name in names]
        loaded = getattr(self.scheduler.connector, "done", None)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=tokens,
            kv_connector_output=None if loaded is None else KVConnectorOutput(finished_recving=loaded()),
        )

    def _finish(self) -> None:
        output, computed = self._under_way.popleft()
        for answers in self.scheduler.update_from_output(output, computed).values():
            for answer in answers.outputs:
                self.said.setdefault(answer.request_id, []).extend(answer.new_token_ids)
                if answer.finish_reason is not None:
                    self.ended.append(answer.request_id)


def token(name: str) -> int:
    """What the model says to a request: always the same."""
    return sum(name.encode()) % 500


def everything_is_free(scheduler: Any) -> bool:
    """Every block but vLLM's own is free exactly once, and the two ways of counting agree."""
    pool = scheduler.kv_cache_manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    return (
        sorted(free) == [b.block_id for b in pool.blocks if not b.is_null] and len(free) == pool.get_num_free_blocks()
    )
