"""vLLM's scheduler and KV-cache manager without a model: their configuration, their requests, what a model would say.

Real: the scheduler, the cache manager, requests, block hashes. Made up: a model's folder with nothing but a
configuration, of which only the longest request matters here, and the output of an iteration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from presage.serving_hooks.replay.engine_file import EngineFile
from presage.serving_hooks.replay.host_tier import transfer_config
from presage.serving_hooks.replay.prompts import Hashes

_HASH: Final = get_hash_fn_by_name("sha256")  # vLLM's default
_MODEL: Final = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 512,
    "torch_dtype": "float32",
}


def scheduler(
    kind: type[Any], engine: EngineFile, longest: int, presage: Mapping[str, Any] | None, folder: Path
) -> Any:
    """A scheduler over an empty cache.

    Args:
        kind: class of it.
        engine: cache and limits.
        longest: tokens of the longest request, output included.
        presage: settings of the hooks; None for vLLM's own scheduler.
        folder: for the model's configuration.
    """
    longest += 1
    (folder / "config.json").write_text(json.dumps({**_MODEL, "max_position_embeddings": longest}), encoding="utf-8")
    cache = CacheConfig(block_size=engine.block_tokens, enable_prefix_caching=True)
    most_tokens = engine.most_tokens if engine.chunked_prefill else max(engine.most_tokens, longest)
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), dtype="float32", max_model_len=longest, skip_tokenizer_init=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=engine.most_requests,
            max_num_batched_tokens=most_tokens,
            max_model_len=longest,
            is_encoder_decoder=False,
            enable_chunked_prefill=engine.chunked_prefill,
            async_scheduling=False,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer_config(engine),
        additional_config={} if presage is None else {"presage": dict(presage)},
    )
    cache.num_gpu_blocks = engine.blocks
    _begin_hashes()
    attention = FullAttentionSpec(block_size=engine.block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=engine.blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=engine.block_tokens,
        hash_block_size=engine.block_tokens,
    )


def request(
    name: str,
    prompt: list[int],
    output_tokens: int,
    arrives_s: float,
    sent: Mapping[str, Any],
    known: Hashes,
    block_tokens: int,
) -> Request:
    """A request as the engine has it.

    Args:
        name: id of the request.
        prompt: token ids.
        output_tokens: it will be answered with, whatever they are.
        arrives_s: of the virtual clock.
        sent: what its client says of it.
        known: hashes of all blocks of its prompt and output, or none: they are computed then.
        block_tokens: of a block.
    """
    wanted = SamplingParams(max_tokens=output_tokens, ignore_eos=True, extra_args=dict(sent))
    wanted.update_from_generation_config({}, 1)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=wanted,
        pooling_params=None,
        arrival_time=arrives_s,
        block_hasher=partial(_hashes, known, block_tokens),
    )


def hashed(before: bytes | None, tokens: list[int]) -> bytes:
    """Hash of a block, by vLLM's function."""
    _begin_hashes()
    return bytes(hash_block_tokens(_HASH, before, tokens))


@lru_cache(maxsize=1)
def _begin_hashes() -> None:
    """What stands before a first block is drawn at random: once for all runs of a process, which share hashes."""
    init_none_hash(_HASH)


def _hashes(known: Hashes, block_tokens: int, of: Any) -> Hashes:
    """Those a request still lacks, as vLLM's own `get_request_block_hasher` computes them, but for those known."""
    have, tokens = of.block_hashes, of.all_token_ids
    if known:
        return known[len(have) : len(tokens) // block_tokens]
    last = have[-1] if have else None
    new: Hashes = []
    for start in range(len(have) * block_tokens, len(tokens) - block_tokens + 1, block_tokens):
        last = hashed(last, tokens[start : start + block_tokens])
        new.append(last)
    return new


def computed(scheduler: Any, output: Any, says: Mapping[str, int]) -> ModelRunnerOutput:
    """What a model would answer to an iteration: a token of every request whose prompt is read to its end."""
    names = list(output.num_scheduled_tokens)
    requests = scheduler.requests
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[] if requests[name].is_prefill_chunk else [says.get(name, 0)] for name in names],
    )
