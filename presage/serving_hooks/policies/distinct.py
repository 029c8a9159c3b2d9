"""Which blocks a workflow has computed so far, by their hashes: how many, and how many of a new prompt's.

An engine hashes a block together with all before it, so a block of a prompt that is known means that the whole prompt
up to there was computed before. So one set answers both what a workflow's working set is (history first: one sequence,
counted once; own conversations: one for each agent) and what of a prompt an endless cache would have.

A set has an end: beyond `most` hashes only those divisible by 2 are kept, then by 4, and so on (Wegman's adaptive
sampling; Flajolet 1990, On adaptive sampling). Counts are exact until then; after it they err by about 1.2 / √most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

MOST: Final = 1024
"""Of one workflow: about 100 KB, and 16,000 tokens in blocks of 16 before anything is left out."""


class Distinct:
    """Hashes of one workflow's blocks.

    Args:
        most: how many are kept.
    """

    __slots__ = ("_every", "_kept", "_most")

    def __init__(self, most: int = MOST) -> None:
        self._kept: set[bytes] = set()
        self._every = 1
        self._most = most

    def __len__(self) -> int:
        """Distinct blocks, as counted or estimated."""
        return len(self._kept) * self._every

    def known(self, hashes: Sequence[bytes]) -> int:
        """How many of the distinct blocks `hashes`, of a prompt from its beginning, are among them."""
        return min(len(hashes), sum(map(self._kept.__contains__, hashes)) * self._every)

    def add(self, hashes: Sequence[bytes]) -> None:
        """These blocks are computed."""
        self._kept.update(hashes if self._every == 1 else self._sampled(hashes))
        while len(self._kept) > self._most:
            self._every *= 2
            self._kept = set(self._sampled(self._kept))

    def _sampled(self, hashes: Iterable[bytes]) -> Iterator[bytes]:
        return (one for one in hashes if int.from_bytes(one[:8], "little") % self._every == 0)
