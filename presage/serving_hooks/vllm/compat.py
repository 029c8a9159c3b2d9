"""What of vLLM the hooks stand on: the only file that names its private API, but for workers (`compat_worker.py`).

vLLM promises plugin groups and `--scheduler-cls`; it does not promise what a scheduler looks like inside. So all that
is relied on is listed here, compared with the vLLM that is installed, and an engine that differs is refused with the
list of differences, before it serves anything. Signatures do not prove meaning: that the hooks do what they should is
shown by the tests on the real scheduler.

The seams translate vLLM's private calls into events of ours: a request leaves, blocks are filled, blocks are lost.
They add to a live object's class, not replace the object, so references that connectors hold stay valid.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from operator import add
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from presage.errors import EngineError
from presage.serving_hooks.vllm.waiting import WaitingQueue

Kind = TypeVar("Kind")

WINDOW: Final = "0.32"
"""Versions read and tested, all patches of it."""

SIGNATURES: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": ("self", "request"),
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": ("self", "throttle_prefills"),
    "vllm.v1.core.sched.scheduler:Scheduler.get_grammar_bitmask": ("self", "scheduler_output"),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": ("self", "scheduler_output", "model_runner_output"),
    "vllm.v1.core.sched.scheduler:Scheduler._free_request": ("self", "request", "delay_free_blocks"),
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": ("self", "request_ids", "finished_status"),
    "vllm.v1.core.sched.scheduler:Scheduler.has_requests": ("self",),
    "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache": ("self",),
    "vllm.v1.core.sched.scheduler:Scheduler.make_stats": ("self",),
    "vllm.v1.core.sched.scheduler:Scheduler.shutdown": ("self",),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.find_longest_cache_hit": (
        "self",
        "block_hashes",
        "max_cache_hit_length",
    ),
    "vllm.v1.metrics.stats:PrefillStats.set": (
        "self",
        "num_prompt_tokens",
        "num_local_cached_tokens",
        "num_external_cached_tokens",
    ),
    "vllm.v1.request:Request.__init__": ("self", "request_id", "prompt_token_ids", "sampling_params"),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler.schedule": ("self", "throttle_prefills"),
    "vllm.v1.core.sched.request_queue:create_request_queue": ("policy",),
    "vllm.v1.core.block_pool:BlockPool.cache_full_blocks": (
        "self",
        "request",
        "blocks",
        "num_cached_blocks",
        "num_full_blocks",
    ),
    "vllm.v1.core.block_pool:BlockPool.evict_blocks": ("self", "block_ids"),
    "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache": ("self",),
    "vllm.v1.engine.core_client:AsyncMPClient.call_utility_all_async": ("self", "method"),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": ("self", "prompt", "sampling_params", "request_id"),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_connector_meta": (
        "self",
        "scheduler_output",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.bind_connector_metadata": (
        "self",
        "connector_metadata",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_connector_worker_meta": ("self",),
}
"""Functions that are called or overridden, with their leading parameters."""

METHODS: Final[Mapping[str, frozenset[str]]] = {
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": frozenset(
        {
            "popleft",
            "popleft_n",
            "remove",
            "append",
            "append_n",
            "prepend_n",
            "get_all_free_blocks",
            "iter_blocks_after",
        }
    ),
    "vllm.v1.core.sched.request_queue:RequestQueue": frozenset(
        {
            "add_request",
            "pop_request",
            "peek_request",
            "prepend_request",
            "prepend_requests",
            "remove_request",
            "remove_requests",
        }
    ),
}
"""Classes that others stand in for: exactly these public methods, since one more would be one nobody answers."""

ATTRIBUTES: Final = (
    "requests",
    "running",
    "waiting",
    "kv_holding_waiting",
    "deferred_waiting",
    "hash_block_size",
    "max_num_running_reqs",
    "policy.value",
    "cache_config.enable_prefix_caching",
    "vllm_config.additional_config",
    "vllm_config.diffusion_config",
    "connector",
    "vllm_config.model_config.served_model_name",
    "vllm_config.speculative_config",
    "vllm_config.model_config.get_total_num_hidden_layers",
    "kv_cache_config.kv_cache_groups",
    "kv_cache_manager.block_pool.blocks",
    "kv_cache_manager.block_pool.null_block.block_id",
    "kv_cache_manager.block_pool.free_block_queue.num_free_blocks",
    "kv_cache_manager.coordinator.find_longest_cache_hit",
    "block_size",
    "hash_block_size",
    "connector",
    "is_encoder_decoder",
    "max_model_len",
    "max_num_scheduled_tokens",
    "max_num_running_reqs",
    "num_spec_tokens",
    "num_waiting_for_streaming_input",
    "pause_state",
    "parallel_config.data_parallel_size",
    "vllm_config.model_config.runner_type",
)
"""Of a live scheduler; they come into being in constructors, so only an instance shows them."""


class Block(Protocol):
    """A KV-cache block, as far as it is read."""

    block_id: int
    block_hash: Any


class FreeQueue(Protocol):
    """vLLM's queue of free blocks, the first to be given up in front."""

    num_free_blocks: int

    def popleft_n(self, n: int) -> list[Any]: ...  # noqa: D102
    def remove(self, block: Any) -> None: ...  # noqa: D102
    def append_n(self, blocks: list[Any]) -> None: ...  # noqa: D102
    def prepend_n(self, blocks: list[Any]) -> None: ...  # noqa: D102
    def get_all_free_blocks(self) -> list[Any]: ...  # noqa: D102


class BlockEvents(Protocol):
    """Who is told what happens to blocks. Must not raise."""

    def filled(self, request: Any, blocks: Sequence[Block]) -> None:
        """The request has written these blocks and the cache knows them now."""

    def lost(self, blocks: Iterable[int]) -> None:
        """The cache does not know the contents of these blocks any more."""


def differences(
    version: str | None = None,
    load: Callable[[str], Any] = importlib.import_module,
    signatures: Mapping[str, tuple[str, ...]] = SIGNATURES,
    methods: Mapping[str, frozenset[str]] = METHODS,
) -> list[str]:
    """How the vLLM at hand differs from the one the hooks know, one line each; empty if it does not.

    Args:
        version: of vLLM; None asks the installation.
        load: imports a module by name.
        signatures, methods: what is compared.
    """
    found = []
    version = version if version is not None else installed()
    if version is None:
        return ["vLLM is not installed"]
    if version != WINDOW and not version.startswith(WINDOW + "."):
        found.append(f"version {version} is outside {WINDOW}.*")
    for name, wanted in signatures.items():
        function = _find(name, load)
        if function is None:
            found.append(f"{name} is not there")
            continue
        given = tuple(inspect.signature(function).parameters)[: len(wanted)]
        if given != wanted:
            found.append(f"{name} takes ({', '.join(given)}), not ({', '.join(wanted)})")
    for name, known in methods.items():
        kind = _find(name, load)
        if kind is None:
            found.append(f"{name} is not there")
            continue
        public = {method for method, value in vars(kind).items() if inspect.isfunction(value) and method[0] != "_"}
        found += [f"{name} has {method}, which is unknown" for method in sorted(public - known)]
        found += [f"{name} has no {method}" for method in sorted(known - public)]
    return found


def check(
    version: str | None = None,
    load: Callable[[str], Any] = importlib.import_module,
    signatures: Mapping[str, tuple[str, ...]] = SIGNATURES,
    methods: Mapping[str, frozenset[str]] = METHODS,
) -> None:
    """Refuses a vLLM that is not the one the hooks know.

    Raises:
        EngineError: with all differences.
    """
    _refuse(differences(version, load, signatures, methods))


def check_scheduler(scheduler: Any) -> None:
    """Refuses a scheduler without what the hooks reach for.

    Raises:
        EngineError: with all that is missing.
    """
    _refuse([f"a scheduler has no {path}" for path in ATTRIBUTES if not _has(scheduler, path)])


def check_engine(scheduler: Any) -> None:
    """Refuses an engine that needs a scheduler of its own, where ours would stand in its place.

    Raises:
        EngineError: a diffusion model is to be served.
    """
    if scheduler.vllm_config.diffusion_config is not None:
        raise EngineError(
            "diffusion models need vLLM's diffusion scheduler, which --scheduler-cls would replace; leave it out to "
            "serve this model without Presage"
        )


def _refuse(found: list[str]) -> None:
    if found:
        listed = "\n  ".join(found)
        raise EngineError(
            f"this vLLM is not one the hooks were written for; install vllm {WINDOW}.*, or leave --scheduler-cls "
            f"and --worker-cls out to run without Presage. What differs:\n  {listed}"
        )


def installed() -> str | None:
    """The version of vLLM at hand; None if there is none."""
    try:
        module = importlib.import_module("vllm")
    except ImportError:
        return None
    return str(module.__version__)


def _find(name: str, load: Callable[[str], Any]) -> Any:
    module, path = name.split(":")
    try:
        found = load(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


def _has(found: Any, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


class SchedulerSeam:
    """Goes before a vLLM scheduler class: tells when a request leaves, however it ends."""

    def request_left(self, request: Any) -> None:
        """The request has finished or was aborted; its blocks are free. Must not raise."""
        raise NotImplementedError

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        answer = super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        self.request_left(request)
        return answer


class _PoolSeam:
    presage_events: BlockEvents

    def cache_full_blocks(
        self, request: Any, blocks: list[Any], num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
    ) -> None:
        super().cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)  # type: ignore[misc]
        if num_cached_blocks < num_full_blocks:
            written = [block for block in blocks[num_cached_blocks:num_full_blocks] if block.block_hash is not None]
            self.presage_events.filled(request, written)

    def evict_blocks(self, block_ids: set[int]) -> None:
        super().evict_blocks(block_ids)  # type: ignore[misc]
        self.presage_events.lost(block_ids)

    def reset_prefix_cache(self) -> bool:
        done = bool(super().reset_prefix_cache())  # type: ignore[misc]
        if done:
            self.presage_events.lost(range(len(self.blocks)))  # type: ignore[attr-defined]
        return done


def requests(scheduler: Any) -> Mapping[str, Any]:
    """All requests in the engine, by id."""
    found: Mapping[str, Any] = scheduler.requests
    return found


def additional_config(engine: Any) -> object:
    """What the operator gave as `--additional-config`; of a scheduler or a worker."""
    return engine.vllm_config.additional_config


def by_priority(scheduler: Any) -> bool:
    """Whether vLLM runs, and preempts, by the number a client gave as `priority`."""
    return bool(scheduler.policy.value == "priority")


def caches_prefixes(scheduler: Any) -> bool:
    """Whether what free blocks hold is of use to anybody."""
    return bool(scheduler.cache_config.enable_prefix_caching)


def block_pool(scheduler: Any) -> Any:
    """The pool of KV-cache blocks of a scheduler: `blocks`, and the queue of those that are free."""
    return scheduler.kv_cache_manager.block_pool


def free_queue(scheduler: Any) -> Any:
    """The queue of free blocks that stands now."""
    return block_pool(scheduler).free_block_queue


def hook_blocks(scheduler: Any, queue: Any, events: BlockEvents) -> None:
    """From now on `queue` is the queue of free blocks, and `events` hears of blocks."""
    pool = block_pool(scheduler)
    pool.free_block_queue = queue
    pool.presage_events = events
    pool.__class__ = type(f"Presage{type(pool).__name__}", (_PoolSeam, type(pool)), {})


class Deaf:
    """Hears of blocks and does nothing."""

    def filled(self, request: Any, blocks: Sequence[Block]) -> None:
        """See `BlockEvents`."""

    def lost(self, blocks: Iterable[int]) -> None:
        """See `BlockEvents`."""


def swap_blocks(scheduler: Any, queue: Any, events: BlockEvents) -> None:
    """Others in the places that `hook_blocks` has made; `queue` holds the same blocks as the one before."""
    pool = block_pool(scheduler)
    pool.free_block_queue, pool.presage_events = queue, events


def first_selected(scheduler: Any, output: Any) -> Iterator[Any]:
    """What vLLM says of the requests that an iteration selects for the first time.

    With its second model runner vLLM lists those that resume after a preemption beside them.
    """
    return (new for new in output.scheduled_new_reqs if not scheduler.requests[new.req_id].num_preemptions)


def resumed(scheduler: Any, output: Any) -> Iterator[str]:
    """Requests that an iteration selects again after a preemption; see `first_selected`."""
    yield from output.scheduled_cached_reqs.resumed_req_ids
    yield from (new.req_id for new in output.scheduled_new_reqs if scheduler.requests[new.req_id].num_preemptions)


def begun(scheduler: Any, output: Any) -> Iterator[tuple[Any, list[int]]]:
    """The requests an iteration selects for the first time, and which blocks of their prompts were in the cache."""
    if not output.scheduled_new_reqs:
        return
    sizes = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups]
    nothing = block_pool(scheduler).null_block.block_id  # stands where a window has moved on
    for new in first_selected(scheduler, output):
        found = (
            block_id
            for block_ids, size in zip(new.block_ids, sizes, strict=True)
            for block_id in block_ids[: new.num_computed_tokens // size]
        )
        yield scheduler.requests[new.req_id], [block_id for block_id in found if block_id != nothing]


def hook_waiting(scheduler: Any, queue: Callable[[], Any]) -> None:
    """Both queues of waiting requests are made by `queue` from now on; who waits already comes along."""
    for name in ("waiting", "kv_holding_waiting"):
        fresh = queue()
        for request in getattr(scheduler, name):
            fresh.add_request(request)
        setattr(scheduler, name, fresh)


def own_waiting(scheduler: Any) -> None:
    """Both queues of waiting requests are vLLM's own again, the preempted in front. Between two iterations only."""
    from vllm.v1.core.sched.request_queue import create_request_queue

    for name in ("waiting", "kv_holding_waiting"):
        own = create_request_queue(scheduler.policy)
        waiting = list(getattr(scheduler, name))
        for request in sorted(waiting, key=lambda r: (not r.num_preemptions, r.arrival_time, r.request_id)):
            own.add_request(request)
        setattr(scheduler, name, own)


def own_order(scheduler: Any, held: Callable[[Any], bool]) -> WaitingQueue:
    """A queue in the order of vLLM's own."""
    if by_priority(scheduler):
        return WaitingQueue(lambda request: (request.priority, request.arrival_time, request.request_id), held)
    return WaitingQueue(lambda request: (), held, in_front=True)


def untouched(request: Any) -> bool:
    """Whether nothing is lost if a waiting request waits longer: no blocks, no output, no other engine behind it."""
    return not (
        request.num_computed_tokens
        or request.num_preemptions
        or request.resumable
        or request.kv_transfer_params
        or request.status.name == "WAITING_FOR_REMOTE_KVS"
    )


def defer(scheduler: Any, request: Any, deferred: bool) -> None:
    """vLLM counts a waiting request among those that it passes by, or does not any more."""
    (scheduler.deferred_waiting.add if deferred else scheduler.deferred_waiting.discard)(request)


def stands_still(scheduler: Any) -> bool:
    """Nothing runs, and there is nothing to choose."""
    return not (scheduler.running or any(map(bool, waiting_queues(scheduler))))


def cache_tokens(scheduler: Any) -> float:
    """Tokens that fit into the KV cache: each takes a place in a block of every group of layers."""
    sizes = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups]
    return float((len(block_pool(scheduler).blocks) - 1) / sum(1 / size for size in sizes))


def block_tokens(scheduler: Any) -> int:
    """Tokens of each of a request's `block_hashes`."""
    return int(scheduler.hash_block_size)


def most_running(scheduler: Any) -> int:
    """Requests that run at once."""
    return int(scheduler.max_num_running_reqs)


def computed_hashes(scheduler: Any, request: Any) -> Sequence[bytes]:
    """The hashes of a request's blocks that have been computed."""
    hashes: Sequence[bytes] = request.block_hashes
    return hashes[: request.num_computed_tokens // block_tokens(scheduler)]


def prompt_hashes(scheduler: Any, request: Any) -> Sequence[bytes]:
    """The hashes of the blocks of a request's prompt that a cache might have; its last token is always computed."""
    hashes: Sequence[bytes] = request.block_hashes
    return hashes[: (request.num_prompt_tokens - 1) // block_tokens(scheduler)]


def found_tokens(scheduler: Any, output: Any) -> list[tuple[Any, int]]:
    """Requests that an iteration selects for the first time, and tokens of their prompts that need not be computed."""
    requests = scheduler.requests
    return [(requests[new.req_id], new.num_computed_tokens) for new in first_selected(scheduler, output)]


def prompt_by_tier(request: Any) -> tuple[int, int, int]:
    """Of a request that has just been selected for the first time: tokens of its prompt, and how many of them were in
    the cache and came from elsewhere.

    All 0 for the next part of a streamed input, of which vLLM keeps no account.
    """
    stats = request.prefill_stats
    if stats is None:
        return 0, 0, 0
    return stats.num_prompt_tokens, stats.num_local_cached_tokens, stats.num_external_cached_tokens


def iteration_tokens(scheduler: Any, output: Any) -> tuple[int, int]:
    """Tokens that an iteration which has just been scheduled decodes, and those it prefills."""
    scheduled = output.num_scheduled_tokens
    if len(scheduled) == output.total_num_scheduled_tokens:  # one each
        return output.total_num_scheduled_tokens, 0
    decoded = 0
    for request_id, tokens in scheduled.items():
        if tokens != 1:
            request = scheduler.requests[request_id]
            # After a preemption all but the last token are computed again, those of the output too.
            if request.num_computed_tokens - tokens < request.num_prompt_tokens or request.num_preemptions:
                continue
        decoded += tokens
    return decoded, output.total_num_scheduled_tokens - decoded


def context_tokens(scheduler: Any, output: Any) -> int:
    """Tokens that the requests of an iteration which has just been scheduled have in the cache when it is over."""
    return sum(scheduler.requests[request_id].num_computed_tokens for request_id in output.num_scheduled_tokens)


def unfinished(scheduler: Any) -> bool:
    """Whether there are requests, waiting or running."""
    return bool(scheduler.has_unfinished_requests())


def described(scheduler: Any) -> dict[str, Any]:
    """The engine, as plain values: its version, model and device, its cache and its limits."""
    config = scheduler.vllm_config
    return {
        "vllm": installed(),
        "model": served_model(scheduler),
        "device": platform()[1],
        "cache_tokens": int(cache_tokens(scheduler)) + scheduler.block_size,  # with vLLM's own block
        "block_tokens": scheduler.block_size,
        "most_requests": most_running(scheduler),
        "most_tokens": scheduler.max_num_scheduled_tokens,
        "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
    }


def waiting_queues(scheduler: Any) -> tuple[Any, Any]:
    """The queues of waiting requests: those without blocks, those that hold blocks."""
    return scheduler.waiting, scheduler.kv_holding_waiting


def completed(request: Any) -> bool:
    """Whether a request that has left had its last token, and was neither aborted nor failed."""
    return str(request.get_finished_reason()) in ("stop", "length", "repetition")


def finish_reason(request: Any) -> str | None:
    """Why a request that has left has ended, "abort" where it was broken off; None if vLLM does not say."""
    reason = request.get_finished_reason()
    return None if reason is None else str(reason)


def prompt_tokens(request: Any) -> list[int] | None:
    """A copy of the token ids of a prompt; None where it was given as embeddings."""
    return None if request.prompt_token_ids is None else list(request.prompt_token_ids)


def output_tokens(request: Any) -> list[int]:
    """A copy of the token ids that a request has produced."""
    return list(request.output_token_ids)


def decoder(scheduler: Any) -> Callable[[Sequence[int]], str] | None:
    """Makes a text of token ids, special tokens included; None where the engine runs without a tokenizer."""
    config = scheduler.vllm_config.model_config
    if config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(config)
    return lambda ids: str(tokenizer.decode(list(ids)))


def served_model(scheduler: Any) -> str:
    """The name by which clients ask for the model, the first if there are several."""
    return str(scheduler.vllm_config.model_config.served_model_name)


def hidden_size(scheduler: Any) -> int:
    """Numbers in a hidden state of the model."""
    return int(scheduler.vllm_config.model_config.get_hidden_size())


def layers(engine: Any) -> int:
    """Transformer layers of the model; of a scheduler or a worker."""
    return int(engine.vllm_config.model_config.get_total_num_hidden_layers())


def speculates(engine: Any) -> bool:
    """Whether a step may produce several tokens a request; of a scheduler or a worker."""
    return engine.vllm_config.speculative_config is not None


def of_kind(kind: type[Kind], found: Any) -> Iterator[Kind]:
    """What is of this kind: the object itself, or what vLLM's `MultiConnector` has put together in it."""
    several = getattr(found, "_connectors", None) or getattr(found, "metadata", None)
    for one in several if isinstance(several, list | tuple) else (found,):
        if isinstance(one, kind):
            yield one


def connector(scheduler: Any, kind: type[Kind]) -> Kind | None:
    """The scheduler's end of the KV connector of this kind."""
    return next(of_kind(kind, scheduler.connector), None)


def worker_meta(output: Any) -> Any:
    """What the workers' ends of the KV connectors sent along with the tokens of an iteration; None for nothing."""
    return output.kv_connector_output.kv_connector_worker_meta if output.kv_connector_output is not None else None


def prompts(output: Any) -> Iterator[tuple[str, int]]:
    """Requests that an iteration selects for the first time, and the tokens of their prompts."""
    return ((new.req_id, new.prompt_len) for new in output.scheduled_new_reqs)


def reached(output: Any) -> Iterator[tuple[str, int]]:
    """Requests that an iteration selects, and how many of their tokens are computed after it."""
    cached, tokens = output.scheduled_cached_reqs, output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens + tokens[new.req_id]
    more = map(tokens.__getitem__, cached.req_ids)
    yield from zip(cached.req_ids, map(add, cached.num_computed_tokens, more), strict=True)


def cannot_fetch(scheduler: Any) -> str | None:
    """Why nothing can be fetched ahead on this engine; None where it can.

    Data-parallel engines keep in step with each other, so that an idle one does not work for itself alone.
    """
    reasons = {
        "prefix caching is off": not caches_prefixes(scheduler),
        "it generates no text": scheduler.vllm_config.model_config.runner_type != "generate",
        "an encoder and a decoder share the cache": scheduler.is_encoder_decoder,
        "its layers keep several kinds of cache": len(scheduler.kv_cache_config.kv_cache_groups) != 1,
        "its hashes are not those of blocks": scheduler.block_size != scheduler.hash_block_size,
        "it is one of several in data parallel": scheduler.parallel_config.data_parallel_size > 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class EngineLimits(NamedTuple):
    """What an engine does at most: tokens of a block, requests and tokens of an iteration, tokens of a request."""

    block: int
    requests: int
    tokens: int
    length: int


def limits(scheduler: Any) -> EngineLimits:
    """Of this scheduler."""
    return EngineLimits(
        scheduler.block_size,
        scheduler.max_num_running_reqs,
        scheduler.max_num_scheduled_tokens,
        scheduler.max_model_len,
    )


def running(scheduler: Any) -> list[Any]:
    """The requests that have been selected and have not ended."""
    found: list[Any] = scheduler.running
    return found


def prefills(request: Any) -> bool:
    """Whether a running request has not read its prompt yet."""
    return bool(request.is_prefill_chunk)


def waits(scheduler: Any) -> int:
    """Requests that wait, but for those that wait for more of their input."""
    return sum(map(len, waiting_queues(scheduler))) - int(scheduler.num_waiting_for_streaming_input)


def has_tier(scheduler: Any) -> bool:
    """Whether a connector brings blocks from elsewhere."""
    return scheduler.connector is not None


def can_be_asked_again(request: Any) -> bool:
    """Whether tokens and salt are all that made a request's blocks.

    Not so with images, given embeddings or an adapter (which may have been unloaded since: to ask for it again would
    load it), nor where the input streams, or comes from another engine.
    """
    return not (
        request.mm_features
        or request.prompt_token_ids is None
        or request.prompt_embeds is not None
        or request.lora_request is not None
        or request.resumable
        or request.kv_transfer_params is not None
    )


def internal_request(name: str, tokens: list[int], hashes: list[bytes], salt: str | None) -> Any:
    """A request of nobody's for one token; the hashes are of its blocks, all of which are whole. The last to run."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    wanted = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    wanted.update_from_generation_config({}, None)
    request = Request(name, tokens, wanted, None, arrival_time=math.inf, priority=2**40, cache_salt=salt)
    request.block_hashes = hashes  # as vLLM computed them before: without a hasher it computes none
    return request


def abort(scheduler: Any, names: Iterable[str]) -> None:
    """These requests end now; what they have computed stays in the cache."""
    from vllm.v1.request import RequestStatus

    scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)


def cached(scheduler: Any, hashes: list[bytes]) -> list[int]:
    """The blocks of the longest beginning that is in the cache. Costs O(those)."""
    coordinator = scheduler.kv_cache_manager.coordinator
    blocks: list[int] = [
        block.block_id for block in coordinator.find_longest_cache_hit(hashes, len(hashes) * scheduler.block_size)[0][0]
    ]
    return blocks


def loads(scheduler: Any, request: Any, found_tokens: int) -> int:
    """Tokens after those found that the connector has for a request in the engine; 0 also where it cannot say yet."""
    return int(scheduler.connector.get_num_new_matched_tokens(request, found_tokens)[0] or 0)


def state(request: Any) -> str:
    """Of a request in the engine: RUNNING, WAITING_FOR_REMOTE_KVS while a connector loads it, or another."""
    return str(request.status.name)


def is_unpaused(scheduler: Any) -> bool:
    """Whether nobody has told the engine to hold still."""
    return bool(scheduler.pause_state.name == "UNPAUSED")


def prefilled(scheduler: Any, output: Any) -> int:
    """Prompt tokens in an iteration, to the few that end a prompt."""
    decodes = len(output.num_scheduled_tokens) * (1 + int(scheduler.num_spec_tokens))
    return max(0, int(output.total_num_scheduled_tokens) - decodes)


def hide_answers(answers: dict[int, Any], names: Set[str]) -> None:
    """Takes what concerns these requests out of what clients are told."""
    for client in answers.values():
        if any(output.request_id in names for output in client.outputs):
            client.outputs = [output for output in client.outputs if output.request_id not in names]
        if client.finished_requests:
            client.finished_requests = client.finished_requests - names or None


def hide_from_stats(stats: Any, states: Iterable[str], lookups: Iterable[tuple[int, int]]) -> None:
    """Takes internal requests out of what is published, but not out of what a connector says of its own loads.

    Args:
        stats: vLLM's, or None where it keeps none.
        states: of those in the engine.
        lookups: (tokens asked for, tokens found) of those that began since the last time.
    """
    if stats is None:
        return
    for state_ in states:
        if state_ == "RUNNING":
            stats.num_running_reqs -= 1
        elif state_ == "WAITING_FOR_REMOTE_KVS" and stats.num_skipped_waiting_reqs:
            stats.num_skipped_waiting_reqs -= 1
        else:
            stats.num_waiting_reqs -= 1
    for asked, found in lookups:
        kept = stats.prefix_cache_stats
        kept.requests, kept.queries, kept.hits = (
            max(0, count - ours) for count, ours in ((kept.requests, 1), (kept.queries, asked), (kept.hits, found))
        )


def add_to_engine(methods: Mapping[str, Callable[..., Any]]) -> None:
    """Gives the engine's core these methods, which `call_engines` reaches from the process that serves HTTP."""
    from vllm.v1.engine.core import EngineCore

    for name, method in methods.items():
        setattr(EngineCore, name, method)


def on_generate(client: Any, tell: Callable[[Any], None]) -> None:
    """`tell` hears the sampling parameters of every request that a server gives to its engine, before it does."""
    generate = client.generate

    def told(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        tell(sampling_params)
        return generate(prompt, sampling_params, *args, **kwargs)

    client.generate = told


async def call_engines(client: Any, method: str, *args: str | None) -> list[Any]:
    """Calls a method of the core of every engine behind a client; their answers."""
    answers: list[Any] = await client.engine_core.call_utility_all_async(method, *args)
    return answers


def engine_names(client: Any) -> list[str]:
    """The engines behind a client as vLLM's own metrics name them, in the order of `call_engines`."""
    return [str(rank) for rank in client.engine_core.engine_ranks_managed]


def log_as_vllm_does() -> None:
    """Our log lines go where vLLM's go, unless the operator has said where ours go."""
    ours, theirs = logging.getLogger("presage"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers and not logging.getLogger().handlers:
        ours.handlers, ours.propagate = theirs.handlers, False
        ours.setLevel(theirs.level)


def platform() -> tuple[str, str]:
    """The platform that vLLM has found, and the name of its device: ("cpu", "cpu").

    Raises:
        Exception: of any kind, where a tensor cannot be made on it.
    """
    import torch
    from vllm.platforms import current_platform

    torch.zeros(1, device=current_platform.device_type)
    return str(current_platform.device_name or current_platform.device_type), str(current_platform.get_device_name())


def schedules_ahead(scheduler_cls: str) -> bool:
    """Whether an engine with this scheduler and no other option prepares a step while the one before runs."""
    from vllm.config import SchedulerConfig, VllmConfig

    config = VllmConfig(scheduler_config=SchedulerConfig.default_factory(scheduler_cls=scheduler_cls))
    return bool(config.scheduler_config.async_scheduling)
