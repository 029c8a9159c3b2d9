"""Checks at start that Presage supports the installed vLLM.

vLLM promises plugin groups and `--scheduler-cls`, but not the inside of a scheduler. `engine.py` and `engine_worker.py`
therefore name everything they use of it; here these names are compared with the installation. Signatures do not prove
meaning: tests on the real scheduler do.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final

from presage.errors import EngineError

VERIFIED: Final = ("0.32.0", "0.33.0")
"""The versions that the tests run on. Other patch releases of these minor versions are accepted."""

WINDOW: Final = " and ".join(f"{version.rpartition('.')[0]}.*" for version in VERIFIED)
"""The supported versions, for messages."""

SIGNATURES: Final = """
vllm.v1.core.sched.scheduler:Scheduler.add_request(self, request)
vllm.v1.core.sched.scheduler:Scheduler.schedule(self, throttle_prefills)
vllm.v1.core.sched.scheduler:Scheduler.get_grammar_bitmask(self, scheduler_output)
vllm.v1.core.sched.scheduler:Scheduler.update_from_output(self, scheduler_output, model_runner_output)
vllm.v1.core.sched.scheduler:Scheduler._free_request(self, request, delay_free_blocks)
vllm.v1.core.sched.scheduler:Scheduler.finish_requests(self, request_ids, finished_status)
vllm.v1.core.sched.scheduler:Scheduler.has_requests(self)
vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache(self)
vllm.v1.core.sched.scheduler:Scheduler.make_stats(self)
vllm.v1.core.sched.scheduler:Scheduler.shutdown(self)
vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.find_longest_cache_hit(self, block_hashes, max_cache_hit_length)
vllm.v1.core.block_pool:BlockPool._notify_reuse(self, blocks)
vllm.v1.core.block_pool:BlockPool.cache_full_blocks(self, request, blocks, num_cached_blocks, num_full_blocks)
vllm.v1.core.block_pool:BlockPool.evict_blocks(self, block_ids)
vllm.v1.core.block_pool:BlockPool.reset_prefix_cache(self)
vllm.v1.metrics.stats:PrefillStats.set(self, num_prompt_tokens, num_local_cached_tokens, num_external_cached_tokens)
vllm.v1.request:Request.__init__(self, request_id, prompt_token_ids, sampling_params)
vllm.v1.core.sched.async_scheduler:AsyncScheduler.schedule(self, throttle_prefills)
vllm.v1.core.sched.request_queue:create_request_queue(policy)
vllm.v1.engine.core_client:AsyncMPClient.call_utility_all_async(self, method)
vllm.v1.engine.async_llm:AsyncLLM.generate(self, prompt, sampling_params, request_id)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_connector_meta(self, scheduler_output)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.bind_connector_metadata(self, connector_metadata)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_connector_worker_meta(self)
"""
"""Functions that Presage calls or overrides, with their leading parameters."""

METHODS: Final[Mapping[str, str]] = {
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": (
        "popleft popleft_n remove append append_n prepend_n get_all_free_blocks iter_blocks_after"
    ),
    "vllm.v1.core.sched.request_queue:RequestQueue": (
        "add_request pop_request peek_request prepend_request prepend_requests remove_request remove_requests"
    ),
}
"""Classes that Presage replaces, with all their public methods: the replacement would lack any new one."""

ATTRIBUTES: Final = (
    "requests",
    "running",
    "waiting",
    "kv_holding_waiting",
    "deferred_waiting",
    "block_size",
    "hash_block_size",
    "policy.value",
    "connector",
    "is_encoder_decoder",
    "max_model_len",
    "max_num_scheduled_tokens",
    "max_num_running_reqs",
    "num_spec_tokens",
    "num_waiting_for_streaming_input",
    "pause_state",
    "cache_config.enable_prefix_caching",
    "parallel_config.data_parallel_size",
    "vllm_config.additional_config",
    "vllm_config.diffusion_config",
    "vllm_config.speculative_config",
    "vllm_config.model_config.runner_type",
    "vllm_config.model_config.served_model_name",
    "vllm_config.model_config.get_total_num_hidden_layers",
    "kv_cache_manager.block_pool.blocks",
    "kv_cache_manager.block_pool.null_block.block_id",
    "kv_cache_manager.block_pool.free_block_queue.num_free_blocks",
    "kv_cache_manager.coordinator.find_longest_cache_hit",
    "kv_cache_manager.coordinator.single_type_managers",
)
"""Attributes of a live scheduler. Constructors set them, so only an instance has them."""


def installed() -> str | None:
    """The version of the installed vLLM; None if there is none."""
    try:
        module = importlib.import_module("vllm")
    except ImportError:
        return None
    return str(module.__version__)


def verified() -> bool:
    """Whether the tests run on the installed version of vLLM; its builds for devices count as that version."""
    return (installed() or "").partition("+")[0] in VERIFIED


def differences(signatures: str = SIGNATURES, methods: Mapping[str, str] = METHODS) -> list[str]:
    """How the installed vLLM differs from the supported one, one line each; empty if it does not."""
    found, version = [], installed()
    if version is None:
        return ["vLLM is not installed"]
    if not version.startswith(tuple(verified.rpartition(".")[0] + "." for verified in VERIFIED)):
        found.append(f"version {version} is outside {WINDOW}")
    for signature in signatures.split("\n")[1:-1]:
        name, _, parameters = signature.rstrip(")").partition("(")
        function = _find(name)
        if function is None:
            found.append(f"{name} is missing")
            continue
        expected = parameters.split(", ") if parameters else []
        actual = list(inspect.signature(function).parameters)[: len(expected)]
        if actual != expected:
            found.append(f"{name} takes ({', '.join(actual)}), not ({parameters})")
    for name, listed in methods.items():
        known, kind = set(listed.split()), _find(name)
        if kind is None:
            found.append(f"{name} is missing")
            continue
        public = {method for method, value in vars(kind).items() if inspect.isfunction(value) and method[0] != "_"}
        found += [f"{name} has {method}, which is unknown" for method in sorted(public - known)]
        found += [f"{name} has no {method}" for method in sorted(known - public)]
    return found


def check(signatures: str = SIGNATURES, methods: Mapping[str, str] = METHODS) -> None:
    """Refuses an unsupported vLLM.

    Raises:
        EngineError: lists all `differences`.
    """
    _refuse(differences(signatures, methods))


def check_scheduler(scheduler: Any) -> None:
    """Refuses a scheduler that lacks an attribute the port reads.

    Raises:
        EngineError: lists all that are missing.
    """
    missing = []
    for path in ATTRIBUTES:
        try:
            attrgetter(path)(scheduler)
        except AttributeError:
            missing.append(f"a scheduler has no {path}")
    _refuse(missing)


def _refuse(found: list[str]) -> None:
    if found:
        listed = "\n  ".join(found)
        raise EngineError(
            f"Presage does not support this vLLM; install vllm {WINDOW}, or remove --scheduler-cls and --worker-cls "
            f"to run without Presage. Differences:\n  {listed}"
        )


def _find(name: str) -> Any:
    """The object with this name, such as "module:Class.method"; None if there is none."""
    module, path = name.split(":")
    try:
        return attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return None
