"""The port to vLLM: all engine internals that Presage uses and vLLM may change.

`EnginePort` reads and changes one live scheduler, `EngineConfig` reads its configuration, `EngineClient` calls engines
from the HTTP server. The protocols list what is read of vLLM's requests, blocks and outputs. `engine_worker.py` is the
port for worker processes; `start/engine_check.py` compares the names used in both with the installed vLLM.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from operator import add
from typing import Any, Protocol, TypeVar

from presage.continuation import TokenPrompt
from presage.errors import EngineError
from presage.serving_hooks.listeners import Found
from presage.serving_hooks.policies.workload import attention_pairs
from presage.serving_hooks.vllm.start.engine_check import check_scheduler, installed, lacking
from presage.serving_hooks.vllm.waiting import WaitingQueue
from presage.serving_hooks.workflows.identity import short

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind")


class EngineRequest(Protocol):
    """What is read of a vLLM `Request`; `priority` is also written."""

    request_id: str
    session_id: str | None
    arrival_time: float
    priority: int
    status: Any
    sampling_params: Any
    block_hashes: Sequence[bytes]
    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    output_token_ids: Sequence[int]
    all_token_ids: Sequence[int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    is_prefill_chunk: bool
    cache_salt: str | None
    mm_features: Any
    lora_request: Any
    resumable: bool
    kv_transfer_params: Any
    prefill_stats: Any

    def get_finished_reason(self) -> object: ...  # noqa: D102


class NewRequest(Protocol):
    """A request that an iteration selects for the first time; with vLLM's second model runner, also a resumed one."""

    req_id: str
    prompt_len: int
    block_ids: Sequence[list[int]]
    num_computed_tokens: int


class Iteration(Protocol):
    """What is read of a vLLM `SchedulerOutput`."""

    scheduled_new_reqs: Sequence[NewRequest]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: Mapping[str, int]
    total_num_scheduled_tokens: int
    preempted_req_ids: Collection[str] | None
    finished_req_ids: Collection[str]


class Block(Protocol):
    """What is read of a KV-cache block."""

    block_id: int
    block_hash: Any


class FreeQueue(Protocol):
    """vLLM's queue of free blocks; blocks are evicted from its front."""

    @property
    def num_free_blocks(self) -> int: ...  # noqa: D102
    def popleft_n(self, n: int) -> list[Any]: ...  # noqa: D102
    def remove(self, block: Any) -> None: ...  # noqa: D102
    def append_n(self, blocks: list[Any]) -> None: ...  # noqa: D102
    def prepend_n(self, blocks: list[Any]) -> None: ...  # noqa: D102
    def get_all_free_blocks(self) -> list[Any]: ...  # noqa: D102


class BlockOrder(FreeQueue, Protocol):
    """A queue of free blocks that also receives block events. Its methods must not raise."""

    def filled(self, request: EngineRequest, blocks: Sequence[Block]) -> None:
        """The request has computed these blocks; those with a hash are in the prefix cache from now on."""

    def lost(self, blocks: Iterable[int]) -> None:
        """The prefix cache has dropped the contents of these blocks."""


class _PoolSeam:
    """Goes before the class of vLLM's `BlockPool`, so that connectors keep valid references to the pool."""

    presage_order: BlockOrder | None = None
    presage_reuse: Callable[[Iterable[Block]], None] | None = None

    def cache_full_blocks(
        self, request: Any, blocks: list[Any], num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
    ) -> None:
        super().cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)  # type: ignore[misc]
        if self.presage_order is not None and num_cached_blocks < num_full_blocks:
            self.presage_order.filled(request, blocks[num_cached_blocks:num_full_blocks])

    def evict_blocks(self, block_ids: set[int], *args: Any, **kwargs: Any) -> None:
        super().evict_blocks(block_ids, *args, **kwargs)  # type: ignore[misc]
        if self.presage_order is not None:
            self.presage_order.lost(block_ids)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        done = bool(super().reset_prefix_cache(*args, **kwargs))  # type: ignore[misc]
        if done and self.presage_order is not None:
            self.presage_order.lost(range(len(self.blocks)))  # type: ignore[attr-defined]
        return done

    def _notify_reuse(self, blocks: Any, *args: Any, **kwargs: Any) -> None:
        if self.presage_reuse is not None:
            self.presage_reuse(blocks)
        super()._notify_reuse(blocks, *args, **kwargs)  # type: ignore[misc]


class _Watchers(dict[int, Any]):
    """vLLM's watchers of blocks: true even if empty, so that vLLM always reports."""

    def __bool__(self) -> bool:
        return True


class SchedulerSeam:
    """Goes before a vLLM scheduler class and reports when a request leaves, however it ends."""

    def request_leaves(self, request: EngineRequest) -> None:
        """The request has finished or was aborted; its blocks are about to be freed. Must not raise."""

    def request_left(self, request: EngineRequest) -> None:
        """The request has finished or was aborted; its blocks are free. Must not raise."""

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.request_leaves(request)
        answer = super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        self.request_left(request)
        return answer


class EngineConfig:
    """The configuration of an engine, from vLLM's for its scheduler and workers.

    Attributes:
        additional: the value of `--additional-config`.
        served_model: the name by which clients request the model; the first if there are several.
        speculates: whether one step may produce several tokens of a request.
        chunks_prefill: whether prompts may be prefilled in several iterations.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._model = vllm_config.model_config
        self.additional: object = vllm_config.additional_config
        self.served_model = str(self._model.served_model_name)
        self.generates = bool(self._model.runner_type == "generate")
        self.layers = int(self._model.get_total_num_hidden_layers())
        self.speculates = vllm_config.speculative_config is not None
        self.chunks_prefill = bool(vllm_config.scheduler_config.enable_chunked_prefill)

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state of the model."""
        return int(self._model.get_hidden_size())

    def decoder(self) -> Callable[[Sequence[int]], str] | None:
        """Decodes token ids, special tokens included; None where the engine has no tokenizer."""
        if self._model.skip_tokenizer_init:
            return None
        from vllm.tokenizers import cached_tokenizer_from_config

        tokenizer = cached_tokenizer_from_config(self._model)
        return lambda ids: str(tokenizer.decode(list(ids)))


class EnginePort:
    """A live vLLM scheduler, which only methods change.

    Attributes:
        requests: all requests in the engine, by id.
        blocks: all KV-cache blocks, each at its id.
        hash_tokens: tokens of each of a request's `block_hashes`.
        hash_lookahead: tokens after these that the hash covers too; 0 but for EAGLE and the like without a connector.
        most_tokens: limit of tokens in an iteration.
        longest: limit of tokens of a request, output included.
        by_priority: whether vLLM schedules and preempts by the `priority` of requests.
        has_connector: whether there is a KV connector.

    Raises:
        EngineError: the scheduler lacks an attribute the port reads, or a diffusion model is served.
    """

    def __init__(self, scheduler: Any) -> None:
        check_scheduler(scheduler)
        if scheduler.vllm_config.diffusion_config is not None:
            raise EngineError(
                "diffusion models need vLLM's diffusion scheduler, which --scheduler-cls would replace; remove "
                "--scheduler-cls to serve this model without Presage"
            )
        self.config = EngineConfig(scheduler.vllm_config)
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        # Of the managers: with decode context parallelism a block holds the tokens of all ranks.
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._group_sizes = [manager.block_size for manager in managers]
        self.requests: Mapping[str, EngineRequest] = scheduler.requests
        self.blocks: Sequence[Block] = self._pool.blocks
        self.block_tokens = int(scheduler.block_size)
        self.hash_tokens = int(scheduler.hash_block_size)
        self.hash_lookahead = int(getattr(scheduler, "num_hash_lookahead_tokens", 0))  # since 0.33
        self.most_running = int(scheduler.max_num_running_reqs)
        self.most_tokens = int(scheduler.max_num_scheduled_tokens)
        self.longest = int(scheduler.max_model_len)
        self.by_priority = bool(scheduler.policy.value == "priority")
        self.caches_prefixes = bool(scheduler.cache_config.enable_prefix_caching)
        self.has_connector = scheduler.connector is not None

    # The engine.

    @property
    def unpaused(self) -> bool:
        """Whether the engine has not been paused."""
        return bool(self._scheduler.pause_state.name == "UNPAUSED")

    @property
    def busy(self) -> bool:
        """Whether requests wait or run."""
        return bool(self._scheduler.has_unfinished_requests())

    def cache_tokens(self) -> float:
        """Tokens that fit into the KV cache. Each takes a slot in a block of every group of layers."""
        return float((len(self.blocks) - 1) / sum(1 / size for size in self._group_sizes))

    def connector(self, kind: type[Kind]) -> Kind | None:
        """The scheduler's side of the KV connector of this kind."""
        return next(of_kind(kind, self._scheduler.connector), None)

    def described(self) -> dict[str, Any]:
        """The engine as plain values: version, model, device, cache and limits."""
        return {
            "vllm": installed(),
            "model": self.config.served_model,
            "device": platform()[1],
            "cache_tokens": int(self.cache_tokens()) + self.block_tokens,  # with vLLM's null block
            "block_tokens": self.block_tokens,
            "most_requests": self.most_running,
            "most_tokens": self.most_tokens,
            "chunked_prefill": self.config.chunks_prefill,
        }

    # Blocks.

    @property
    def free_queue(self) -> FreeQueue:
        """The queue of free blocks in use now."""
        queue: FreeQueue = self._pool.free_block_queue
        return queue

    def order_blocks(self, order: BlockOrder) -> None:
        """Uses this order, which holds the same free blocks as the queue in use."""
        self._hook_pool()
        self._pool.free_block_queue = self._pool.presage_order = order

    def restore_blocks(self, queue: FreeQueue) -> None:
        """Uses vLLM's own queue, which holds the same free blocks as the order in use."""
        self._pool.free_block_queue, self._pool.presage_order = queue, None

    def cannot_lay(self) -> dict[str, str]:
        """What vLLM does not let us change, by `engine_check.SEAMS`, and why; its own is tried and left as it is."""
        found = lacking()
        for policy, attempt in {"eviction": self._try_pool, "queues": self._try_queues}.items():
            try:
                attempt()
            except Exception as error:  # slots, or a class in C or Rust
                found.setdefault(policy, f"vLLM lets nobody change its {policy}: {type(error).__name__}")
        return found

    def _try_pool(self) -> None:
        kind = type(self._pool)
        self._hook_pool()
        self._pool.free_block_queue, self._pool.presage_order = self._pool.free_block_queue, None
        self._pool.__class__ = kind

    def _try_queues(self) -> None:
        for name in ("waiting", "kv_holding_waiting"):
            setattr(self._scheduler, name, getattr(self._scheduler, name))

    def on_reuse(self, report: Callable[[Iterable[Block]], None]) -> None:
        """Passes the free blocks that vLLM hands out to `report`, all of one call together; done once."""
        self._hook_pool()
        self._pool.presage_reuse, self._pool._reuse_watchers = report, _Watchers(self._pool._reuse_watchers)

    def _hook_pool(self) -> None:
        kind = type(self._pool)
        if not issubclass(kind, _PoolSeam):
            self._pool.__class__ = type(f"Presage{kind.__name__}", (_PoolSeam, kind), {})

    def cached(self, hashes: list[bytes]) -> list[int]:
        """Ids of the blocks of the longest cached prefix of these hashes. Costs O(prefix)."""
        find = self._scheduler.kv_cache_manager.coordinator.find_longest_cache_hit
        return [block.block_id for block in find(hashes, len(hashes) * self.block_tokens)[0][0]]

    # Queues.

    @property
    def running(self) -> list[EngineRequest]:
        """The requests that have been selected and have not ended."""
        found: list[EngineRequest] = self._scheduler.running
        return found

    @property
    def waiting(self) -> Any:
        """The queue of waiting requests that hold no blocks."""
        return self._scheduler.waiting

    @property
    def waiting_queues(self) -> tuple[Any, Any]:
        """The queues of waiting requests: those without blocks, those that hold blocks."""
        return self._scheduler.waiting, self._scheduler.kv_holding_waiting

    def num_waiting(self) -> int:
        """Waiting requests, except those that wait for more of their streamed input."""
        return sum(map(len, self.waiting_queues)) - int(self._scheduler.num_waiting_for_streaming_input)

    def stalled(self) -> bool:
        """Whether nothing runs and no waiting request can be selected."""
        return not (self._scheduler.running or any(map(bool, self.waiting_queues)))

    def hook_waiting(self, make: Callable[[], WaitingQueue]) -> None:
        """Replaces both queues of waiting requests by queues that `make` returns, with the same requests."""
        for name in ("waiting", "kv_holding_waiting"):
            fresh = make()
            for request in getattr(self._scheduler, name):
                fresh.add_request(request)
            setattr(self._scheduler, name, fresh)

    def restore_waiting(self) -> None:
        """Gives both queues of waiting requests back to vLLM, preempted requests first. Between two iterations only."""
        from vllm.v1.core.sched.request_queue import create_request_queue

        for name in ("waiting", "kv_holding_waiting"):
            own = create_request_queue(self._scheduler.policy)
            waiting = list(getattr(self._scheduler, name))
            for request in sorted(waiting, key=lambda r: (not r.num_preemptions, r.arrival_time, r.request_id)):
                own.add_request(request)
            setattr(self._scheduler, name, own)

    def vllm_order(self, held: Callable[[Any], bool]) -> WaitingQueue:
        """A queue in vLLM's own order that skips held requests."""
        if self.by_priority:
            return WaitingQueue(lambda request: (request.priority, request.arrival_time, request.request_id), held)
        return WaitingQueue(lambda request: (), held, in_front=True)

    def defer(self, request: EngineRequest, deferred: bool) -> None:
        """Adds a waiting request to those that vLLM counts as deferred, or removes it."""
        requests = self._scheduler.deferred_waiting
        (requests.add if deferred else requests.discard)(request)

    def abort(self, names: Iterable[str]) -> None:
        """Ends these requests; the cache keeps the blocks they have computed."""
        from vllm.v1.request import RequestStatus

        self._scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)

    # An iteration that has just been scheduled.

    def _first_selected(self, output: Iteration) -> Iterator[NewRequest]:
        for new in output.scheduled_new_reqs:
            request = self.requests.get(new.req_id)  # aborted since then, it may be gone
            if request is not None and not request.num_preemptions:
                yield new

    def resumed(self, output: Iteration) -> Iterator[str]:
        """Ids of the requests that are selected again after a preemption."""
        yield from output.scheduled_cached_reqs.resumed_req_ids
        for new in output.scheduled_new_reqs:
            request = self.requests.get(new.req_id)
            if request is not None and request.num_preemptions:
                yield new.req_id

    def first_found(self, output: Iteration) -> Iterator[tuple[EngineRequest, Found]]:
        """The requests that are selected for the first time and still in the engine, and what is cached of them."""
        if not output.scheduled_new_reqs:
            return
        null = self._pool.null_block.block_id  # replaces blocks that a sliding window has left
        for new in self._first_selected(output):
            found = list[int]()
            for block_ids, size in zip(new.block_ids, self._group_sizes, strict=True):
                found += block_ids[: new.num_computed_tokens // size]
            blocks = [one for one in found if one != null] if null in found else found
            yield self.requests[new.req_id], Found(blocks, new.num_computed_tokens)

    def iteration_tokens(self, output: Iteration) -> tuple[int, int]:
        """Tokens that the iteration decodes, and tokens that it prefills."""
        scheduled = output.num_scheduled_tokens
        if len(scheduled) == output.total_num_scheduled_tokens:  # one each
            return output.total_num_scheduled_tokens, 0
        decoded = 0
        for request_id, tokens in scheduled.items():
            request = self.requests.get(request_id) if tokens != 1 else None
            # After a preemption all tokens but the last are computed again, output tokens included.
            if request is not None and (
                request.num_computed_tokens - tokens < request.num_prompt_tokens or request.num_preemptions
            ):
                continue
            decoded += tokens
        return decoded, output.total_num_scheduled_tokens - decoded

    def attention_pairs(self, output: Iteration) -> int:
        """Pairs of a prefilled token and a token up to it, as `Cost` counts them."""
        found = 0
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.requests.get(request_id) if tokens != 1 else None
            if request is not None:
                found += attention_pairs(tokens, request.num_computed_tokens)
        return found

    def context_tokens(self, output: Iteration) -> int:
        """Tokens that the scheduled requests have in the cache after the iteration."""
        scheduled = filter(None, map(self.requests.get, output.num_scheduled_tokens))
        return sum(request.num_computed_tokens for request in scheduled)

    def prefill_tokens(self, output: Iteration) -> int:
        """Prompt tokens in the iteration, except for the few that complete a prompt."""
        decodes = len(output.num_scheduled_tokens) * (1 + int(self._scheduler.num_spec_tokens))
        return max(0, int(output.total_num_scheduled_tokens) - decodes)

    # Requests.

    def computed_hashes(self, request: EngineRequest) -> Sequence[bytes]:
        """Hashes of the blocks that a request has computed."""
        return request.block_hashes[: request.num_computed_tokens // self.hash_tokens]

    def prompt_hashes(self, request: EngineRequest) -> Sequence[bytes]:
        """Hashes of the blocks of a prompt that can be cached; the last prompt token is always computed."""
        covered = max(0, request.num_prompt_tokens - max(1, self.hash_lookahead))
        return request.block_hashes[: covered // self.hash_tokens]

    def loadable_tokens(self, request: EngineRequest, found_tokens: int) -> int:
        """Tokens after the first `found_tokens` that the connector has; 0 if it cannot answer yet."""
        return int(self._scheduler.connector.get_num_new_matched_tokens(request, found_tokens)[0] or 0)

    @property
    def data_parallel(self) -> int:
        """Engines that share this one's requests, itself included."""
        return int(self._scheduler.parallel_config.data_parallel_size)

    def why_no_prefetch(self) -> str | None:
        """Why this engine cannot prefetch; None where it can."""
        scheduler = self._scheduler
        reasons = {
            "prefix caching is off": not self.caches_prefixes,
            "the model generates no text": not self.config.generates,
            "an encoder and a decoder share the cache": scheduler.is_encoder_decoder,
            "its layers keep several kinds of cache": len(self._group_sizes) != 1,
            "its block hashes have another block size than its cache": self.block_tokens != self.hash_tokens,
            # Data-parallel engines step together: an idle one cannot work for itself alone.
            "it is one of several data-parallel engines": self.data_parallel > 1,
            # Since 0.33 a prefetch would start the interval anew, and clients' prompts would wait for it.
            "prefills keep an interval (--prefill-schedule-interval)": getattr(scheduler, "local_prefill_interval", 1)
            > 1,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)


class EngineClient:
    """The engines behind an HTTP server, reached through its engine client."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @property
    def names(self) -> list[str]:
        """The engines as vLLM's own metrics name them, in the order of `call`."""
        return [str(rank) for rank in self._client.engine_core.engine_ranks_managed]

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method that `add_engine_method` has added, on every engine; returns their answers."""
        answers: list[Any] = await self._client.engine_core.call_utility_all_async(method, *args)
        return answers

    def on_generate(self, mark: Callable[[Any, object], None]) -> None:
        """Calls `mark` with sampling parameters and session id of every request before the engine receives it."""

        def report(prompt: Any, sampling_params: Any, *_: Any, session_id: object = None, **__: Any) -> None:
            mark(sampling_params, session_id)

        call_before(self._client, "generate", report)


def call_before(holder: Any, name: str, report: Callable[..., None]) -> None:
    """Calls `report` with the arguments of each call of this method, before the method, until it raises."""
    method, on = getattr(holder, name), True

    def reported(*args: Any, **kwargs: Any) -> Any:
        nonlocal on
        if on:
            try:
                report(*args, **kwargs)
            except Exception as error:
                on = False
                logger.error("what Presage does before %s is switched off: %s", name, type(error).__name__)
        return method(*args, **kwargs)

    setattr(holder, name, reported)


def add_engine_method(name: str, method: Callable[..., Any]) -> None:
    """Adds a method to vLLM's engine core; `EngineClient.call` calls it from the HTTP server's process."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, name, method)


# Requests.


def completed(request: EngineRequest) -> bool:
    """Whether a request that has left produced its last token: it was neither aborted nor failed."""
    return finish_reason(request) in ("stop", "length", "repetition")


def finish_reason(request: EngineRequest) -> str | None:
    """vLLM's reason why a request that has left has ended; "abort" for an aborted one, None if there is none."""
    reason = request.get_finished_reason()
    return None if reason is None else str(reason)


def hands_over(request: EngineRequest) -> bool:
    """Whether this engine only reads the prompt and another one answers (disaggregated prefill)."""
    params = request.kv_transfer_params
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode"))


def prompt_of(request: EngineRequest, tenant: str) -> TokenPrompt | None:
    """What identity is inferred from: the request's tokens so far, with the scope in which they mean the same.

    None where tokens do not say what was asked, or are not all there yet.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.resumable:
        return None
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    media = [
        (of.mm_position.offset, of.mm_position.offset + of.mm_position.length, str(of.identifier).encode())
        for of in request.mm_features or ()
    ]
    salt = None if request.cache_salt is None else short(request.cache_salt)  # kept for hours, and of any length
    return TokenPrompt((tenant, salt, adapter), request.block_hashes, request.all_token_ids, media)


def state(request: EngineRequest) -> str:
    """The state of a request: RUNNING, WAITING_FOR_REMOTE_KVS while a connector loads it, or another."""
    return str(request.status.name)


def untouched(request: EngineRequest) -> bool:
    """Whether a waiting request loses nothing by waiting: it has no blocks, no output, and no other engine's cache."""
    return not (
        request.num_computed_tokens
        or request.num_preemptions
        or request.resumable
        or request.kv_transfer_params
        or request.status.name == "WAITING_FOR_REMOTE_KVS"
    )


def cached_blocks(pool: Any) -> dict[bytes, Any]:
    """vLLM's own table of cached blocks by key; several blocks of one key are a dict by their ids."""
    found: dict[bytes, Any] = pool.cached_block_hash_to_block._cache
    return found


def token_lists(request: EngineRequest) -> tuple[list[int], list[int]]:
    """vLLM's own lists of a request's output tokens and of all its tokens; a token is appended to both."""
    own: Any = request
    return own._output_token_ids, own._all_token_ids


def prompt_by_tier(request: EngineRequest) -> tuple[int, int, int]:
    """Prompt tokens of a request that was just selected, and how many came from the cache and from a connector.

    All are 0 for the next part of a streamed input, which vLLM does not account for.
    """
    stats = request.prefill_stats
    if stats is None:
        return 0, 0, 0
    return stats.num_prompt_tokens, stats.num_local_cached_tokens, stats.num_external_cached_tokens


def can_be_repeated(request: EngineRequest) -> bool:
    """Whether tokens and salt alone determine the request's blocks.

    They do not with images, embeddings or an adapter (which may have been unloaded since: repeating the request would
    load it), nor where the input is streamed or comes from another engine.
    """
    return not (
        request.mm_features
        or request.prompt_token_ids is None
        or request.prompt_embeds is not None
        or request.lora_request is not None
        or request.resumable
        or request.kv_transfer_params is not None
    )


def internal_request(name: str, tokens: list[int], hashes: list[bytes], salt: str | None) -> EngineRequest:
    """An internal one-token request over whole blocks with these hashes; it runs after all others."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    sampling.update_from_generation_config({}, None)
    request: Any = Request(name, tokens, sampling, None, arrival_time=math.inf, priority=2**40, cache_salt=salt)
    request.block_hashes = hashes  # computed earlier by vLLM; without a hasher it computes none
    found: EngineRequest = request
    return found


# Outputs.


def of_kind(kind: type[Kind], found: Any) -> Iterator[Kind]:
    """The object itself or the parts of vLLM's `MultiConnector` in it, as far as they are of this kind."""
    if isinstance(found, kind):
        yield found
        return
    several = getattr(found, "_connectors", None) or getattr(found, "metadata", None)
    for one in several if isinstance(several, list | tuple) else ():
        if isinstance(one, kind):
            yield one


def worker_metadata(output: Any) -> Any:
    """The metadata that the workers' KV connectors sent with an iteration's tokens; None if they sent none."""
    return output.kv_connector_output.kv_connector_worker_meta if output.kv_connector_output is not None else None


def reached(output: Iteration) -> Iterator[tuple[str, int]]:
    """The scheduled requests, and how many of their tokens are computed after the iteration."""
    cached, tokens = output.scheduled_cached_reqs, output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens + tokens[new.req_id]
    more = map(tokens.__getitem__, cached.req_ids)
    yield from zip(cached.req_ids, map(add, cached.num_computed_tokens, more), strict=True)


def hide_answers(answers: dict[int, Any], names: Set[str]) -> None:
    """Removes these requests from the answers to clients."""
    for client in answers.values():
        if any(output.request_id in names for output in client.outputs):
            client.outputs = [output for output in client.outputs if output.request_id not in names]
        if client.finished_requests:
            client.finished_requests = client.finished_requests - names or None


def hide_from_stats(stats: Any, states: Iterable[str], lookups: Iterable[tuple[int, int]]) -> None:
    """Removes internal requests from vLLM's statistics, but not from those of a connector's loads.

    Args:
        stats: vLLM's; None where it keeps none.
        lookups: (tokens looked up, tokens found) of those that began since the last call.
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
    for looked_up, found in lookups:
        kept = stats.prefix_cache_stats
        kept.requests, kept.queries, kept.hits = (
            max(0, count - ours) for count, ours in ((kept.requests, 1), (kept.queries, looked_up), (kept.hits, found))
        )


# The process.


def log_as_vllm_does() -> None:
    """Sends our log lines to vLLM's handlers, unless logging is configured for them already."""
    ours, theirs = logging.getLogger("presage"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers and not logging.getLogger().handlers:
        ours.handlers, ours.propagate = theirs.handlers, False
        ours.setLevel(theirs.level)


def platform() -> tuple[str, str]:
    """vLLM's platform and the name of its device, such as ("cpu", "cpu").

    Raises:
        Exception: of any kind, if a tensor cannot be created on it.
    """
    import torch
    from vllm.platforms import current_platform

    torch.zeros(1, device=current_platform.device_type)
    return str(current_platform.device_name or current_platform.device_type), str(current_platform.get_device_name())


def schedules_ahead(scheduler_cls: str) -> bool:
    """Whether an engine with this scheduler and default options schedules a step while the previous one runs."""
    from vllm.config import SchedulerConfig, VllmConfig

    config = VllmConfig(scheduler_config=SchedulerConfig.default_factory(scheduler_cls=scheduler_cls))
    return bool(config.scheduler_config.async_scheduling)
