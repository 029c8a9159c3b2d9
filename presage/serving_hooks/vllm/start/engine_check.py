"""Checks at start that Presage supports the installed vLLM.

vLLM promises plugin groups and `--scheduler-cls`, but not the inside of a scheduler. `engine.py` and `engine_worker.py`
therefore name everything they use of it; here these names are compared with the installation. A patch release may add
parameters: what we override passes everything on. Signatures do not prove meaning: tests on the real scheduler do.
"""

from __future__ import annotations

import importlib
import inspect
import re
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
vllm.v1.core.sched.scheduler:Scheduler.schedule(self, ...)
vllm.v1.core.sched.scheduler:Scheduler.get_grammar_bitmask(self, ...)
vllm.v1.core.sched.scheduler:Scheduler.update_from_output(self, scheduler_output, model_runner_output, ...)
vllm.v1.core.sched.scheduler:Scheduler._free_request(self, request, ...)
vllm.v1.core.sched.scheduler:Scheduler.finish_requests(self, request_ids, finished_status)
vllm.v1.core.sched.scheduler:Scheduler.has_requests(self, ...)
vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache(self, ...)
vllm.v1.core.sched.scheduler:Scheduler.make_stats(self, ...)
vllm.v1.core.sched.scheduler:Scheduler.shutdown(self, ...)
vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.find_longest_cache_hit(self, block_hashes, max_cache_hit_length)
vllm.v1.metrics.stats:PrefillStats.set(self, num_prompt_tokens, num_local_cached_tokens, ...)
vllm.v1.request:Request.__init__(self, request_id, prompt_token_ids, sampling_params, pooling_params)
vllm.v1.core.sched.async_scheduler:AsyncScheduler.schedule(self, ...)
vllm.v1.core.sched.request_queue:create_request_queue(policy)
vllm.v1.engine.core_client:AsyncMPClient.call_utility_all_async(self, method)
vllm.v1.engine.async_llm:AsyncLLM.generate(self, prompt, sampling_params, ...)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_connector_meta(self, scheduler_output, ...)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.bind_connector_metadata(self, ...)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_connector_worker_meta(self, ...)
"""
"""Functions that Presage calls or overrides, with their leading parameters. Where `...` follows, it only passes on what
vLLM passes, whatever that is; elsewhere it gives these arguments alone, so further parameters need a default."""

SEAMS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "eviction": (
        """
vllm.v1.core.block_pool:BlockPool._notify_reuse(self, blocks, ...)
vllm.v1.core.block_pool:BlockPool.cache_full_blocks(self, request, blocks, num_cached_blocks, num_full_blocks, ...)
vllm.v1.core.block_pool:BlockPool.evict_blocks(self, block_ids, ...)
vllm.v1.core.block_pool:BlockPool.reset_prefix_cache(self, ...)
""",
        {
            "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": (
                "popleft() popleft_n(n) remove(block) append(block) append_n(blocks) prepend_n(blocks) "
                "get_all_free_blocks() iter_blocks_after(cursor)"
            )
        },
    ),
    "queues": (
        "",
        {
            "vllm.v1.core.sched.request_queue:RequestQueue": (
                "add_request(request) pop_request() peek_request() prepend_request(request) prepend_requests(requests) "
                "remove_request(request) remove_requests(requests)"
            )
        },
    ),
}
"""What single policies need: functions that they override, and classes that they replace, with all public methods and
their parameters, since the replacement would lack any new one. "queues" are priority and admission."""

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


def differences(signatures: str = SIGNATURES, methods: Mapping[str, str] | None = None) -> list[str]:
    """How the installed vLLM differs from the supported one, one line each; empty if it does not."""
    version = installed()
    if version is None:
        return ["vLLM is not installed"]
    outside = not version.startswith(tuple(verified.rpartition(".")[0] + "." for verified in VERIFIED))
    found = [f"version {version} is outside {WINDOW}"] if outside else []
    return found + _differing(signatures, methods or {})


def lacking() -> dict[str, str]:
    """The policies for which the installed vLLM differs from the supported one, and how; engines run without them."""
    found = {policy: _differing(*seam) for policy, seam in SEAMS.items()}
    return {policy: "; ".join(lines) for policy, lines in found.items() if lines}


def _differing(signatures: str, methods: Mapping[str, str]) -> list[str]:
    found = []
    for signature in signatures.split("\n")[1:-1]:
        name, _, parameters = signature.rstrip(")").partition("(")
        function = _find(name)
        found += [f"{name} is missing"] if function is None else _other_parameters(name, function, parameters)
    for name, listed in methods.items():
        known, kind = dict(_METHOD.findall(listed)), _find(name)
        if kind is None:
            found.append(f"{name} is missing")
            continue
        public = {method: value for method, value in vars(kind).items() if callable(value) and method[0] != "_"}
        found += [f"{name} has {method}, which is unknown" for method in sorted(public.keys() - known.keys())]
        found += [f"{name} has no {method}" for method in sorted(known.keys() - public.keys())]
        for method in sorted(known.keys() & public.keys()):
            whole = ", ".join(filter(None, ("self", known[method])))
            found += _other_parameters(f"{name}.{method}", public[method], whole, alone=True)
    return found


_METHOD: Final = re.compile(r"(\w+)\(([^)]*)\)")


def _other_parameters(name: str, function: Any, parameters: str, *, alone: bool = False) -> list[str]:
    """How its parameters differ from these.

    Args:
        alone: whether it may have no others, not even with a default.
    """
    try:
        actual = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [f"{name} does not show its parameters, as functions in C or Rust"]
    expected = parameters.split(", ") if parameters else []
    passes_on = expected[-1:] == ["..."]
    expected = expected[: len(expected) - passes_on]
    leading, further = actual[: len(expected)], actual[len(expected) :]
    if [of.name for of in leading if of.kind is of.POSITIONAL_OR_KEYWORD] != expected:
        return [f"{name} takes ({', '.join(of.name for of in leading)}), not ({parameters})"]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [of.name for of in further if alone or (of.default is of.empty and of.kind not in variadic)]
    return [f"{name} also takes {', '.join(needed)}, which Presage cannot pass on"] if needed and not passes_on else []


def check(signatures: str = SIGNATURES) -> None:
    """Refuses an unsupported vLLM.

    Raises:
        EngineError: lists all `differences`.
    """
    _refuse(differences(signatures))


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
