"""Free blocks in the order of Belady's rule, in place of vLLM's queue: the next use furthest away is given up first.

vLLM's own queue stays underneath and hears of everything, as in `vllm/blocks.py`. Blocks due at one time are given up
from the end of their prompts, since a block is of no use without those before it. Which to give up is looked for among
all free blocks each time: a few operations on arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from presage.serving_hooks.replay.foresight import NEVER, Foresight
from presage.serving_hooks.vllm.modes import Switch

_A_PLACE_S: Final = 1e-6
"""How much later a block counts as due for each block before it in its prompt: less than times differ by."""


class ForeseenBlocks:
    """The methods of vLLM's queue of free blocks, and what the hooks tell an order of blocks.

    Args:
        queue: vLLM's queue as it stands.
        blocks: all blocks of the pool, each at its id.
        foresight: when blocks are read next.

    Attributes:
        given_up, watched: for the status of the hooks; this order has no classes of blocks.
        acts: set by the hooks; nothing here is ever in shadow.
    """

    def __init__(self, queue: Any, blocks: Sequence[Any], foresight: Foresight) -> None:
        self.given_up: dict[str, int] = {}
        self.watched: dict[str, int] = {}
        self.acts = True
        self.switch = Switch("eviction", Counter())
        self._queue, self._blocks, self._foresight = queue, blocks, foresight
        self._free = np.zeros(len(blocks), np.bool_)
        self._free[[block.block_id for block in queue.get_all_free_blocks()]] = True
        self._group = np.full(len(blocks), NEVER, np.int64)
        self._later = np.zeros(len(blocks))

    @property
    def num_free_blocks(self) -> int:
        """Free blocks."""
        return int(self._queue.num_free_blocks)

    def popleft(self) -> Any:
        """The next free block to be given up."""
        return self.popleft_n(1)[0] if self._queue.num_free_blocks else self._queue.popleft()

    def popleft_n(self, n: int) -> list[Any]:
        """The next n free blocks to be given up."""
        given = [self._blocks[block_id] for block_id in self._furthest(n)]
        for block in given:
            self._queue.remove(block)
            self._free[block.block_id] = False
            self._group[block.block_id] = NEVER
        return given

    def remove(self, block: Any) -> None:
        """A free block is in use again."""
        self._queue.remove(block)
        self._free[block.block_id] = False

    def append(self, block: Any) -> None:
        """A block is free, and keeps what it holds until it is given up."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """These blocks are free, and keep what they hold until they are given up."""
        self._queue.append_n(blocks)
        self._free[[block.block_id for block in blocks]] = True

    def prepend_n(self, blocks: list[Any]) -> None:
        """These blocks are free and hold nothing."""
        self._queue.prepend_n(blocks)
        ids = [block.block_id for block in blocks]
        self._free[ids], self._group[ids] = True, NEVER

    def get_all_free_blocks(self) -> list[Any]:
        """All free blocks, the next to be given up first."""
        return [self._blocks[block_id] for block_id in self._furthest(int(self._free.sum()))]

    def iter_blocks_after(self, cursor: Any | None) -> Iterator[Any]:
        """Free blocks in the order they are given up, those after `cursor`; all, if it is None or not free."""
        blocks = self.get_all_free_blocks()
        at = next((i for i, block in enumerate(blocks) if block is cursor), -1)
        return iter(blocks[at + 1 :])

    def filled(self, request: Any, blocks: Sequence[Any]) -> None:
        """A request has written blocks that the cache knows now."""
        for block in blocks:
            group, place = self._foresight.group(bytes(block.block_hash[:-4]))  # without the group of layers
            self._group[block.block_id], self._later[block.block_id] = group, place * _A_PLACE_S

    def settle(self) -> None:
        """Nothing waits: what a block holds is looked up when it is written."""

    def lost(self, blocks: Iterable[int]) -> None:
        """What these blocks held is not in the cache any more, be they free or in use."""
        self._group[list(blocks)] = NEVER

    def begins(self, request_id: str, found: list[int]) -> None:
        """A request is selected for the first time."""

    def forecast(self, step: Any, lookahead: Any) -> None:
        """The truth needs no forecasts."""

    def end(self, workflow: str) -> None:
        """A workflow has ended; nobody reads its blocks any more, and that is known."""

    def _furthest(self, n: int) -> list[int]:
        """The first n free blocks by their next use, the furthest away first; for equals, the end of a prompt first."""
        free = np.flatnonzero(self._free)
        due = self._foresight.due[self._group[free]] + self._later[free]
        if n == 1:
            return [int(free[np.argmax(due)])]
        if 0 < n < len(free):
            first = np.argpartition(-due, n - 1)[:n]
            free, due = free[first], due[first]
        return [int(block_id) for block_id in free[np.argsort(-due, kind="stable")]][:n]
