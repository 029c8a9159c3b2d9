"""What the host's memory keeps of the cache: blocks by their hashes, the least recently used given up first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class HostCache:
    """The second tier.

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
