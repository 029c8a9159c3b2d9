"""vLLM's scheduler and KV-cache manager without a model: vLLM's own, or with the hooks of a policy.

Real: the scheduler, the cache manager, requests, block hashes. Made up: a model folder that has only a configuration,
and the outputs of iterations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, hash_block_tokens, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from presage.replay.belady import BeladyBlocks, NextUses
from presage.replay.decode_fast_path import FastPathScheduler
from presage.replay.forecasts import LengthsOnly
from presage.replay.host_tier import transfer_config
from presage.replay.policies import Policy
from presage.replay.prompts import Hashes, LazyTokens
from presage.serving_hooks.engine_file import EngineFile
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.modes import Switch
from presage.serving_hooks.vllm.blocks import ScoredBlocks
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.engine import EngineRequest
from presage.serving_hooks.vllm.scheduler import Policies

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


def make_scheduler(
    kind: type[Any], engine: EngineFile, longest: int, presage: Mapping[str, Any] | None, folder: Path
) -> Any:
    """A scheduler over an empty cache. `longest` counts the tokens of the longest request; `folder` takes the model's
    configuration."""
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


def make_request(
    name: str,
    prompt: LazyTokens,
    output_tokens: int,
    arrives_s: float,
    sent: Mapping[str, Any],
    known: Hashes,
    block_tokens: int,
) -> Request:
    """A request to the engine, with metadata that its client `sent` (`vllm_xargs`).

    `known` holds the hashes of all blocks of its prompt and output; if it is empty, vLLM computes them.
    """
    wanted = SamplingParams(max_tokens=output_tokens, ignore_eos=True, extra_args=dict(sent))
    wanted.update_from_generation_config({}, 1)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=wanted,
        pooling_params=None,
        arrival_time=arrives_s,
        block_hasher=partial(_lacking, known, block_tokens) if known else get_request_block_hasher(block_tokens, _HASH),
    )


def block_hash(before: bytes | None, tokens: list[int]) -> bytes:
    """vLLM's hash of a block, from that of the block before it."""
    _begin_hashes()
    return bytes(hash_block_tokens(_HASH, before, tokens))


@lru_cache(maxsize=1)
def _begin_hashes() -> None:
    """Draws vLLM's random root of hashes, once per process, since runs share hashes."""
    init_none_hash(_HASH)


def _lacking(known: Hashes, block_tokens: int, of: Any) -> Hashes:
    """The known hashes that a request still lacks."""
    return known[len(of.block_hashes) : len(of.all_token_ids) // block_tokens]


class _ManyAtOnce(ScoredBlocks):
    """Free blocks by score, of the fast path."""

    def remove_n(self, blocks: Sequence[Any]) -> None:
        """Free blocks are in use again."""
        self.vllm_queue.remove_n(blocks)  # type: ignore[attr-defined]  # of the fast path
        self._used_again += [block.block_id for block in blocks]


class HookedScheduler(Policies, FastPathScheduler):
    """The hooks before the scheduler with the fast path.

    Attributes:
        reasons: the recorded finish reasons of requests; those of their made-up outputs mean nothing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reasons: dict[str, str | None] = {}

    @staticmethod
    def identity_key() -> bytes:
        """Always the same: replays are repeatable, and have no secrets."""
        return b"presage replay"

    def finish_reason(self, request: EngineRequest) -> str | None:
        """As recorded."""
        return self.reasons.pop(request.request_id, None)

    def may_fast_forward(self) -> bool:
        """Whether only the order of free blocks acts, which has no work in a decode-only iteration."""
        return not self.queue_policies.active

    def make_block_order(self, config: PresageConfig, switch: Switch) -> Any:
        """The scored order, which takes many blocks at once."""
        order = super().make_block_order(config, switch)
        order.__class__ = type(order.__class__.__name__, (_ManyAtOnce, order.__class__), {})
        return order

    def on_fast_forward(self) -> None:
        """Expires workflows, and passes the forecasts of the previous iteration to the order of free blocks."""
        self.catch_up()


class BeladyScheduler(HookedScheduler):
    """Belady's rule in place of the scored order of free blocks."""

    next_uses: ClassVar[NextUses]

    def make_block_order(self, config: PresageConfig, switch: Switch) -> Any:
        """The order by Belady's rule."""
        port = self.engine_port
        return BeladyBlocks(port.free_queue, port.blocks, type(self).next_uses, switch)


def scheduler_class(
    policy: Policy,
    agents: Any,
    clock: Callable[[], float],
    fast_path: bool = True,
    *,
    lengths: Any = None,
    returns: Any = None,
    contexts: Any = None,
    next_uses: NextUses | None = None,
) -> type[Any]:
    """The scheduler class of a policy.

    Args:
        agents: forecasts of next agents; None without.
        fast_path: whether decode-only iterations take the fast path.
        lengths: forecasts of remaining tokens; None uses `agents`.
        returns: forecasts of return times; None without.
        contexts: forecasts of context growth; None without.
    """
    if policy.settings is None:
        return type("StockScheduler", (FastPathScheduler,), {"fast_path": fast_path})

    def forecasts(self: Any, config: PresageConfig) -> Forecasts:
        if lengths is None:
            return Forecasts(agents, agents, returns=returns, contexts=contexts)
        told = LengthsOnly(lengths) if agents is None and hasattr(lengths, "close") else agents
        return Forecasts(told, lengths, returns=returns, contexts=contexts)

    base: type[Any] = BeladyScheduler if policy.foresight else HookedScheduler
    if policy.scheduler is not None:
        base = policy.scheduler(base)
    own = {"fast_path": fast_path, "clock": staticmethod(clock), "forecasts": forecasts, "next_uses": next_uses}
    return type("ReplayScheduler", (base,), own)
