"""Counts the distinct blocks that a workflow has computed, by their hashes, and those of a new prompt among them.

The count gives a workflow's working set, and the part of a prompt that an infinite cache would hold. An engine hashes a
block together with all before it, so the blocks of a workflow form a tree. It is stored in runs: a run begins where a
prompt leaves all known blocks, and grows while prompts continue from its end (history-first prompts: one run; separate
conversations: one for each agent).

Memory is bounded: beyond `most` hashes only every second block of a prompt is kept, then every fourth, and so on, each
standing for the blocks up to it. Counts are exact before that, and afterwards to about the distance between kept
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MOST: Final = 1024
"""Hashes kept of one workflow: 8 KB, exact up to 16,000 tokens in blocks of 16."""

_WORD: Final = 8
"""Bytes kept of a hash: two blocks of one workflow collide once in 10^13 workflows of MOST blocks."""

_RUN: Final = 8
"""The cost of a run, in hashes, besides its own hashes: for storage and search."""


class Distinct:
    """The distinct blocks of one workflow; keeps at most `most` hashes, including the cost of runs."""

    __slots__ = ("_every", "_most", "_runs", "_words")

    def __init__(self, most: int = MOST) -> None:
        self._runs: tuple[tuple[int, bytes], ...] = ()  # start in the prompt, in kept blocks; hashes
        self._words = 0  # in all runs
        self._every = 1
        self._most = most

    def __len__(self) -> int:
        """Number of distinct blocks, counted or estimated."""
        return self._words * self._every

    @property
    def kept(self) -> int:
        """Number of hashes kept."""
        return self._words

    def known(self, hashes: Sequence[bytes]) -> int:
        """How many blocks of a prompt, by their `hashes` from its beginning, were computed before."""
        return self._end(hashes)[0] * self._every

    def add(self, hashes: Sequence[bytes]) -> None:
        """Adds the blocks of a prompt, by their `hashes` from its beginning."""
        known_blocks, run_index = self._end(hashes)
        every = self._every
        fresh = [_word(block_hash) for block_hash in hashes[every * (known_blocks + 1) - 1 :: every]]
        if not fresh:
            return
        self._words += len(fresh)
        words = b"".join(fresh)
        runs = self._runs
        if run_index is not None and runs[run_index][0] + len(runs[run_index][1]) // _WORD == known_blocks:
            self._runs = (*runs[:run_index], (runs[run_index][0], runs[run_index][1] + words), *runs[run_index + 1 :])
        else:
            self._runs = (*runs, (known_blocks, words))
        while self._words + _RUN * len(self._runs) > self._most and self._words:
            self._thin()

    def _end(self, hashes: Sequence[bytes]) -> tuple[int, int | None]:
        """The number of known `hashes`, in kept blocks, and the index of the run where they end.

        That is the run with the latest start among those whose first block the prompt has: no block is in two runs.
        """
        every, first, run = self._every, -1, None
        blocks = len(hashes) // every
        for number, (start, words) in enumerate(self._runs):
            if first < start < blocks and words.startswith(_word(hashes[every * (start + 1) - 1])):
                first, run = start, number
        if run is None:
            return 0, None
        words = self._runs[run][1]
        low, high = 1, min(blocks - first, len(words) // _WORD)
        while low < high:
            middle = (low + high + 1) // 2
            if words.startswith(_word(hashes[every * (first + middle) - 1]), _WORD * (middle - 1)):
                low = middle
            else:
                high = middle - 1
        return first + low, run

    def _thin(self) -> None:
        """Drops every second kept block."""
        runs = []
        for start, words in self._runs:
            ours = [words[offset : offset + _WORD] for offset in range(_WORD * (1 - start % 2), len(words), 2 * _WORD)]
            if ours:
                runs.append((start // 2, b"".join(ours)))
        self._runs = tuple(runs)
        self._words = sum(len(words) for _, words in runs) // _WORD
        self._every *= 2


def _word(block_hash: bytes) -> bytes:
    return block_hash[:_WORD].ljust(_WORD, b"\0")
