"""Host memory behind the GPU's cache, as a KV connector that vLLM's own scheduler queries, as in serving.

- Write-through: the host keeps each full block that vLLM caches, and those of a request once more when it leaves.
  Writing takes no time.
- Read when a request is selected: the blocks after those on the GPU, as many in a row as the host has. The iteration
  waits for them; `Loads` says how many tokens. A request's last token is always computed, as with vLLM's prefix cache.

Only the scheduler's side; there are no workers. The host evicts the least recently used block, under every policy.

Knows vLLM's private names, like `vllm/engine.py`: `cache_full_blocks` of the pool of blocks. The host observes it there
and not in `build_connector_meta`, so that the decode fast path writes in the same order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from presage.serving_hooks.engine_file import EngineFile


class HostCache:
    """Blocks in host memory by their hashes, evicted least recently used first; iterates in that order."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._kept: OrderedDict[bytes, None] = OrderedDict()  # the least recently used first

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._kept)

    def keep(self, hashes: Sequence[bytes]) -> None:
        """Writes consecutive blocks that are missing, and counts all of them as used.

        The first counts as used last, as when vLLM frees: a block is of no use without those before it.
        """
        kept = self._kept
        for block_hash in reversed(hashes):
            kept[block_hash] = None
            kept.move_to_end(block_hash)
        while len(kept) > self._blocks:
            kept.popitem(last=False)

    def found(self, hashes: Sequence[bytes]) -> int:
        """How many blocks from the first on are here. Does not count as use."""
        for number, block_hash in enumerate(hashes):
            if block_hash not in self._kept:
                return number
        return len(hashes)


_BLOCKS: Final = "blocks"


def transfer_config(engine: EngineFile) -> KVTransferConfig | None:
    """The `--kv-transfer-config` of the engine's host memory; None if it has none."""
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
        tokens: loaded from the host, by request id.
    """

    tokens: Mapping[str, int]


class HostTier(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The scheduler's side of the connector."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.host = HostCache(self._kv_transfer_config.kv_connector_extra_config[_BLOCKS])
        self._block_tokens: int = self._vllm_config.cache_config.block_size
        self._loads: dict[str, int] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        """Requests do not wait for writes."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Observes which blocks vLLM caches."""
        super().bind_kv_cache_manager(kv_cache_manager)
        pool = kv_cache_manager.block_pool
        pool.replay_host = self.host
        pool.__class__ = type(f"Hosted{type(pool).__name__}", (_WrittenThrough, type(pool)), {})

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that the host has after these, loaded synchronously. A query changes nothing."""
        size = self._block_tokens
        wanted = request.block_hashes[num_computed_tokens // size : (request.num_tokens - 1) // size]
        return self.host.found(wanted) * size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request was selected."""
        if num_external_tokens:
            self._loads[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """What this iteration loads."""
        loads, self._loads = self._loads, {}
        return Loads(loads)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """The GPU's blocks may be freed at once."""
        self.host.keep(request.block_hashes[: request.num_computed_tokens // self._block_tokens])
        return False, None

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Unused, like all of the worker's side, which a replay does not have."""

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


class _WrittenThrough:
    """vLLM's pool of blocks; the host keeps what it caches."""

    replay_host: HostCache

    def cache_full_blocks(
        self, request: Any, blocks: list[Any], num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
    ) -> None:
        pool: Any = super()
        pool.cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
        self.replay_host.keep(request.block_hashes[num_cached_blocks:num_full_blocks])
