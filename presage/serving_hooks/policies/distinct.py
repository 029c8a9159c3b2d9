"""The blocks a workflow has computed so far, by their hashes: how many, and how many of a new prompt are among them.

An engine hashes a block together with all before it, so a block of a prompt that is known means that the whole prompt
up to there was computed before, and what a workflow has computed is a tree. It is kept in runs: a run begins where a
prompt leaves all that was known, and grows while prompts go on from its end (history first: one run; own
conversations: one for each agent). So a prompt that goes on where the last one ended costs a search for that end and
its new blocks, however long it is. One answer serves both what a workflow's working set is and what of a prompt an
endless cache would have.

A tree has an end: beyond `most` only every second block from the beginning of a prompt is kept, then every fourth, and
so on, each for all up to it. Counts are exact until then; after it a prompt's beginning is known to the last kept one,
and a run's length to about the distance between two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MOST: Final = 1024
"""Of one workflow: 8 KB, and 16,000 tokens in blocks of 16 before anything is left out."""

_WORD: Final = 8
"""Bytes of a hash that are kept: two blocks of one workflow share them once in 10^13 workflows of MOST blocks."""

_RUN: Final = 8
"""Kept hashes that a run counts for besides its own: what is searched and stored of it."""


class Distinct:
    """Hashes of one workflow's blocks.

    Args:
        most: how many are kept, runs included.
    """

    __slots__ = ("_every", "_most", "_runs", "_words")

    def __init__(self, most: int = MOST) -> None:
        self._runs: tuple[tuple[int, bytes], ...] = ()  # where in a prompt it begins, in kept blocks; their hashes
        self._words = 0  # in all runs
        self._every = 1
        self._most = most

    def __len__(self) -> int:
        """Distinct blocks, as counted or estimated."""
        return self._words * self._every

    @property
    def kept(self) -> int:
        """Hashes that are kept."""
        return self._words

    def known(self, hashes: Sequence[bytes]) -> int:
        """How many of the distinct blocks `hashes`, of a prompt from its beginning, are among them."""
        return self._end(hashes)[0] * self._every

    def add(self, hashes: Sequence[bytes]) -> None:
        """These blocks, of a prompt from its beginning, are computed."""
        known, at = self._end(hashes)
        every = self._every
        fresh = [_word(one) for one in hashes[every * (known + 1) - 1 :: every]]
        if not fresh:
            return
        self._words += len(fresh)
        words = b"".join(fresh)
        runs = self._runs
        if at is not None and runs[at][0] + len(runs[at][1]) // _WORD == known:
            self._runs = (*runs[:at], (runs[at][0], runs[at][1] + words), *runs[at + 1 :])
        else:
            self._runs = (*runs, (known, words))
        while self._words + _RUN * len(self._runs) > self._most and self._words:
            self._thin()

    def _end(self, hashes: Sequence[bytes]) -> tuple[int, int | None]:
        """Up to where `hashes` are known, in kept blocks, and in which run that is.

        Of the runs whose first block the prompt has the one that begins last: no block is in two runs.
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
        """Every second kept block goes."""
        runs = []
        for start, words in self._runs:
            ours = [words[at : at + _WORD] for at in range(_WORD * (1 - start % 2), len(words), 2 * _WORD)]
            if ours:
                runs.append((start // 2, b"".join(ours)))
        self._runs = tuple(runs)
        self._words = sum(len(words) for _, words in runs) // _WORD
        self._every *= 2


def _word(one: bytes) -> bytes:
    return one[:_WORD].ljust(_WORD, b"\0")
