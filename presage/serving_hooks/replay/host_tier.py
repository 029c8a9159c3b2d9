"""The host's memory behind the GPU's cache, as a KV connector: vLLM's own scheduler asks it, as it would in serving.

- Written through: each full block that vLLM's cache comes to know is kept by the host too, and those of a request once
  more when it leaves, by then perhaps given up. Writing takes no time: it goes beside the engine, the other way.
- Read where a request is selected: the blocks after those that the GPU has, as many in a row as the host has. They are
  loaded before the iteration that selects it computes, which waits for them: `Loads` says for how many tokens. A
  request's last token is always computed, in a block that is not loaded, as with vLLM's own prefix cache.

Only the scheduler's end: there are no workers. What the host gives up is what was used least recently, whatever the
policy that orders the GPU's blocks.

Knows vLLM's private names, like `vllm/engine.py`: `cache_full_blocks` of the pool of blocks. It is looked at there and
not by `build_connector_meta`, so that iterations done in short write in the same order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from presage.serving_hooks.replay.engine_file import EngineFile


class HostCache:
    """What the host keeps of the cache: blocks by their hashes, the least recently used given up first.

    Args:
        blocks: it has room for.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._kept: OrderedDict[bytes, None] = OrderedDict()  # the least recently used first

    def keep(self, hashes: Sequence[bytes]) -> None:
        """Blocks that follow each other are used, and written where they are not here.

        The first counts as used last: a block is of no use without those before it. vLLM frees in that order too.
        """
        kept = self._kept
        for one in reversed(hashes):
            kept[one] = None
            kept.move_to_end(one)
        while len(kept) > self._blocks:
            kept.popitem(last=False)

    def found(self, hashes: Sequence[bytes]) -> int:
        """How many of the first ones are here. Counts as no use of them."""
        for number, one in enumerate(hashes):
            if one not in self._kept:
                return number
        return len(hashes)


_BLOCKS: Final = "blocks"


def transfer_config(engine: EngineFile) -> KVTransferConfig | None:
    """What `--kv-transfer-config` would say of the engine's host; None where it has none."""
    if not engine.host_blocks:
        return None
    return KVTransferConfig(
        kv_connector=HostTier.__name__,
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_connector_extra_config={_BLOCKS: engine.host_blocks},
    )


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """What an iteration loads.

    Attributes:
        tokens: from the host, by the id of the request they are for.
    """

    tokens: Mapping[str, int]


class HostTier(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The scheduler's end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._host = HostCache(self._kv_transfer_config.kv_connector_extra_config[_BLOCKS])
        self._block_tokens: int = self._vllm_config.cache_config.block_size
        self._loads: dict[str, int] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for what is written."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Looks on as the cache comes to know blocks."""
        super().bind_kv_cache_manager(kv_cache_manager)
        pool = kv_cache_manager.block_pool
        pool.replay_host = self._host
        pool.__class__ = type(f"Hosted{type(pool).__name__}", (_WrittenThrough, type(pool)), {})

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that the host has after these, and that they are loaded at once. Asking changes nothing."""
        size = self._block_tokens
        wanted = request.block_hashes[num_computed_tokens // size : (request.num_tokens - 1) // size]
        return self._host.found(wanted) * size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request is selected."""
        if num_external_tokens:
            self._loads[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """What this iteration loads."""
        loads, self._loads = self._loads, {}
        return Loads(loads)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """The GPU's blocks may go at once."""
        self._host.keep(request.block_hashes[: request.num_computed_tokens // self._block_tokens])
        return False, None

    # A worker's end, which a replay has not.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Not here."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Not here."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Not here."""

    def wait_for_save(self) -> None:
        """Not here."""


class _WrittenThrough:
    """vLLM's pool of blocks; what it comes to know, the host keeps."""

    replay_host: HostCache

    def cache_full_blocks(
        self, request: Any, blocks: list[Any], num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
    ) -> None:
        pool: Any = super()
        pool.cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
        self.replay_host.keep(request.block_hashes[num_cached_blocks:num_full_blocks])
