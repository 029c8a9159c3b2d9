"""Free blocks by their next use: the furthest first, the end of a prompt before its beginning."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from presage.replay.belady import BeladyBlocks
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.modes import Switch


@dataclass(eq=False)
class Block:
    block_id: int
    block_hash: bytes | None = None
    block_hash_num_tokens: int | None = None


class Queue:
    """As much of vLLM's queue as is stood before: first in, first out."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = list(blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self.blocks)

    def get_all_free_blocks(self) -> list[Block]:
        return list(self.blocks)

    def remove(self, block: Block) -> None:
        self.blocks.remove(block)

    def append_n(self, blocks: list[Block]) -> None:
        self.blocks += blocks

    def prepend_n(self, blocks: list[Block]) -> None:
        self.blocks = blocks + self.blocks


class Known:
    """Two workflows: the first is due in 5 s, the second in 3, and 0 is the group of what is never read."""

    due = np.array([np.inf, 5.0, 3.0])
    changes = 0

    def group(self, block_hash: bytes) -> int:
        return block_hash[0]


def held(*what: bytes | None) -> tuple[BeladyBlocks, list[Block]]:
    """All blocks of a cache, with this in them, freed in their order."""
    blocks = [Block(number) for number in range(len(what))]
    foreseen: Any = BeladyBlocks(Queue(blocks), blocks, Known(), Switch("eviction", EventCounts()))  # type: ignore[arg-type]
    taken = foreseen.popleft_n(len(blocks))
    assert foreseen.num_free_blocks == 0
    for block, one in zip(blocks, what, strict=True):
        if one is not None:
            block.block_hash, block.block_hash_num_tokens = one + b"....", one[1] + 1
            foreseen.filled(None, [block])
    assert len(taken) == len(blocks)
    foreseen.append_n(blocks)
    return foreseen, blocks


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_the_furthest_goes_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    foreseen, _ = held(b"\x02\x00", b"\x01\x00", b"\x01\x01", b"\x02\x01", None, b"\x01\x02")
    assert ids(foreseen.get_all_free_blocks()) == [4, 5, 2, 1, 3, 0]
    assert ids(foreseen.popleft_n(3)) == [4, 5, 2]
    assert foreseen.popleft().block_id == 1
    assert ids(foreseen.popleft_n(2)) == [3, 0]


def test_what_is_lost_or_never_read_goes_before_all_else() -> None:
    foreseen, blocks = held(b"\x02\x00", b"\x01\x00", b"\x00\x00", b"\x02\x01")
    foreseen.lost([0])
    assert set(ids(foreseen.popleft_n(2))) == {0, 2}
    foreseen.remove(blocks[1])
    assert ids(foreseen.get_all_free_blocks()) == [3]
    foreseen.append(blocks[1])
    assert ids(list(foreseen.iter_blocks_after(None))) == [1, 3]
    assert ids(list(foreseen.iter_blocks_after(blocks[1]))) == [3]
    foreseen.prepend_n([blocks[2]])
    assert foreseen.popleft() is blocks[2]
