"""vLLM's pool and manager of KV-cache blocks, for prompts of thousands of blocks.

What vLLM does block by block, with checks for other kinds of caches, is done here in a few passes over all blocks of a
request. Blocks are found, allocated, cached, freed and evicted as by vLLM, in the same order; tests compare. They are
keyed by their hashes alone, without the group of layers.

For one group of full attention, without KV events and without metrics of blocks, as `vllm_scheduler` makes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from operator import attrgetter, truth
from typing import Any, Final

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from presage.serving_hooks.vllm.engine import cached_blocks

_USERS: Final = attrgetter("ref_cnt")


def take_fast_path(manager: Any) -> None:
    """Makes a new `KVCacheManager` and its parts those of this module."""
    manager.__class__ = _Manager
    (of_group,) = manager.coordinator.single_type_managers
    of_group.__class__ = _FullAttentionManager
    pool = manager.block_pool
    kind = type(pool)
    # A connector may have put a class before vLLM's, which stays in front.
    pool.__class__ = _Pool if kind is BlockPool else type(kind.__name__, (*kind.__bases__[:-1], _Pool), {})
    pool.free_block_queue.__class__ = _FreeQueue


class _FreeQueue(FreeKVCacheBlockQueue):  # type: ignore[misc]
    def remove_n(self, blocks: Sequence[Any]) -> None:
        """These free blocks are in use again. Most stand in rows, as their request left them: the last one in front."""
        before: Any = None
        after: Any = None
        last: Any = None
        for block in blocks:
            if last is None or block.next_free_block is not last:
                if last is not None:
                    before.next_free_block, after.prev_free_block = after, before
                after = block.next_free_block
            before = block.prev_free_block
            block.prev_free_block = block.next_free_block = None
            last = block
        before.next_free_block, after.prev_free_block = after, before
        self.num_free_blocks -= len(blocks)


class _Pool(BlockPool):  # type: ignore[misc]
    def cache_full_blocks(
        self, request: Any, blocks: list[Any], num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
    ) -> None:
        cached, size = cached_blocks(self), self.hash_block_size
        new = islice(blocks, num_cached_blocks, num_full_blocks)
        keys = islice(request.block_hashes, num_cached_blocks, None)
        for number, (block, key) in enumerate(zip(new, keys, strict=False), num_cached_blocks + 1):
            block.set_block_hash(key, number * size)
            if key in cached:
                self.cached_block_hash_to_block.insert(key, block)
            else:
                cached[key] = block

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        if num_blocks > self.free_block_queue.num_free_blocks:
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")  # vLLM's words
        cached, given = cached_blocks(self), self.free_block_queue.popleft_n(num_blocks)
        if self._reuse_watchers:
            self._notify_reuse(given)
        for block in given:
            key = block.block_hash
            if key is not None:
                if cached.get(key) is block:
                    del cached[key]
                else:
                    self.cached_block_hash_to_block.pop(key, block.block_id)
                block.reset_hash()
            block.ref_cnt = 1
        return list(given)

    def touch(self, blocks: Sequence[Any]) -> None:
        free = [block for block in blocks if not block.ref_cnt]
        for block in blocks:
            block.ref_cnt += 1
        queue = self.free_block_queue
        if not hasattr(queue, "remove_n"):
            for block in free:
                queue.remove(block)
        elif free:
            queue.remove_n(free)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        cached, blank = list[Any](), list[Any]()
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                (blank if block.block_hash is None else cached).append(block)
        self.free_block_queue.prepend_n(blank)
        self.free_block_queue.append_n(cached)


class _FullAttentionManager(FullAttentionManager):  # type: ignore[misc]
    @classmethod
    def _get_num_evictable_blocks(cls, blocks: Sequence[Any]) -> int:
        return list(map(_USERS, blocks)).count(0)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[bytes],
        max_length: int,
        *args: Any,
        block_pool: Any,
        kv_cache_spec: Any,
        **more: Any,
    ) -> tuple[tuple[list[Any], ...], int]:
        size = kv_cache_spec.block_size
        keys = islice(block_hashes, max_length // size)
        blocks: list[Any] = list(takewhile(truth, map(cached_blocks(block_pool).get, keys)))
        if set(map(type, blocks)) - {KVCacheBlock}:  # several blocks have the same content
            blocks = [block if isinstance(block, KVCacheBlock) else next(iter(block.values())) for block in blocks]
        return (blocks,), len(blocks) * size


class _Manager(KVCacheManager):  # type: ignore[misc]
    def estimate_cached_tokens(self, request: Any) -> int:
        (of_group,) = self.coordinator.single_type_managers
        return int(of_group.num_cached_block.get(request.request_id, 0) * of_group.block_size)
