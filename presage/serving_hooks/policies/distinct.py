"""Which blocks a workflow has computed so far, by their hashes: how many, and how many of a new prompt's.

An engine hashes a block together with all before it, so a block of a prompt that is known means that the whole prompt
up to there was computed before. So one set answers both what a workflow's working set is (history first: one sequence,
counted once; own conversations: one for each agent) and what of a prompt an endless cache would have.

A set has an end: beyond `most` hashes only those divisible by 2 are kept, then by 4, and so on (Wegman's adaptive
sampling; Flajolet 1990, On adaptive sampling). Counts are exact until then; after it they err by about 1.2 / √most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

MOST: Final = 1024
"""Of one workflow: 8 KB, and 16,000 tokens in blocks of 16 before anything is left out."""

_WORD: Final = 8
"""Bytes of a hash that are kept: two blocks of one workflow share them once in 10^13 workflows of MOST blocks."""


class Distinct:
    """Hashes of one workflow's blocks.

    Args:
        most: how many are kept.
    """

    __slots__ = ("_every", "_kept", "_most")

    def __init__(self, most: int = MOST) -> None:
        self._kept = b""  # 8 bytes a block, rising; a set of the hashes would take a dozen times that
        self._every = 1
        self._most = most

    def __len__(self) -> int:
        """Distinct blocks, as counted or estimated."""
        return len(self._kept) // _WORD * self._every

    def known(self, hashes: Sequence[bytes]) -> int:
        """How many of the distinct blocks `hashes`, of a prompt from its beginning, are among them."""
        if not self._kept or not hashes:
            return 0
        kept, asked = np.frombuffer(self._kept, np.uint64), _words(hashes)
        at = np.minimum(kept.searchsorted(asked), len(kept) - 1)
        return min(len(hashes), int(np.count_nonzero(kept[at] == asked)) * self._every)

    def add(self, hashes: Sequence[bytes]) -> None:
        """These blocks are computed."""
        if not hashes:
            return
        both = np.concatenate([np.frombuffer(self._kept, np.uint64), self._sampled(_words(hashes))])
        both.sort()
        fresh = np.ones(len(both), np.bool_)
        np.not_equal(both[1:], both[:-1], out=fresh[1:])
        kept = both[fresh]
        while len(kept) > self._most:
            self._every *= 2
            kept = self._sampled(kept)
        self._kept = kept.tobytes()

    def _sampled(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return words if self._every == 1 else words[words % np.uint64(self._every) == 0]


def _words(hashes: Sequence[bytes]) -> NDArray[np.uint64]:
    """The first 8 bytes of each, uint64 [n]."""
    width, joined = len(hashes[0]), b"".join(hashes)
    if width % _WORD or len(joined) != width * len(hashes):
        width, joined = _WORD, b"".join([one[:_WORD].ljust(_WORD, b"\0") for one in hashes])
    return np.frombuffer(joined, np.uint64)[:: width // _WORD]
