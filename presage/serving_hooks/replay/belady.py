"""When each block will be read next: the truth of the trace, for Belady's rule.

Which steps will read a block is known for certain: those whose prompts begin with it. When they will is known as far as
a policy does not decide it itself. Here a step comes when its parents have ended and its pause is over, as the trace
says; a step that has not ended is taken to last as many seconds as the steps so far took for each output token, waiting
and prefill included. So the order of reads within a workflow is exact, and between workflows as good as that estimate.

Belady (1966) is optimal for a sequence of reads that is given. Here the sequence depends on what was evicted, misses
cost time, and a block is of use only if all before it are there too: this is a strong clairvoyant rule for hits, not a
proof that no policy could be faster.

What several workflows read, an opening, is due when the first of those under way reads it; where none of them will, at
the pace at which workflows have come so far.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.replay.prompts import Hashes
from presage.serving_hooks.replay.workload import ReplayJob
from presage.serving_hooks.vllm.modes import Switch
from presage.serving_hooks.workflows.table import EndReason, RunningWorkflow

_FIRST_S_PER_TOKEN: Final = 0.03
"""Until a step has ended; whatever it is, it is the same for all."""

_NEW: Final = 0.05
"""What the step that ended last counts in the mean."""

NEVER: Final = 0
"""The group of blocks that nobody reads again."""


class NextUses:
    """Next uses of blocks. A block belongs to the group of those with the same readers.

    Args:
        jobs: that are replayed.
        hashes: of each job, of each step: those of the blocks of its prompt and output.

    Attributes:
        due: of each group, seconds of the virtual clock; infinity for never. float64 [groups].
    """

    def __init__(self, jobs: Sequence[ReplayJob], hashes: Sequence[Sequence[Hashes]]) -> None:
        self._jobs = jobs
        self._group_of: dict[bytes, tuple[int, int]] = {}
        self._readers: list[tuple[int, ...]] = [()]  # of each group, of its job
        self._groups: list[list[int]] = [[] for _ in jobs]
        self._shared: dict[int, dict[int, tuple[int, ...]]] = {}  # of each shared group, by job, who reads
        self._shared_of: list[list[int]] = [[] for _ in jobs]
        self._sort(hashes)
        self.due: NDArray[np.float64] = np.full(len(self._readers), math.inf)
        self._asked: list[dict[int, float]] = [{} for _ in jobs]
        self._ended: list[dict[int, float]] = [{} for _ in jobs]
        self._soonest: dict[int, dict[int, float]] = {group: {} for group in self._shared}
        self._left = {group: len(of) for group, of in self._shared.items()}  # jobs that will read it
        self._s_per_token = _FIRST_S_PER_TOKEN
        self._begun = 0

    def group(self, block_hash: bytes) -> tuple[int, int]:
        """The group of a block by its hash, and how many blocks come before it in a prompt."""
        return self._group_of.get(block_hash, (NEVER, 0))

    def began(self, number: int, at_s: float) -> None:
        """A job begins."""
        self._begun += 1
        self._look(number, at_s)

    def asked(self, number: int, index: int, at_s: float) -> None:
        """A step of it has come."""
        self._asked[number][index] = at_s
        self._look(number, at_s)

    def selected(self, number: int, index: int, at_s: float) -> None:
        """A step of it is computed; until it has ended it may have to read its blocks again."""

    def finished(self, number: int, index: int, at_s: float) -> None:
        """A step of it has ended."""
        took_s = at_s - self._asked[number][index]
        tokens = self._jobs[number].steps[index].output_tokens
        self._s_per_token += _NEW * (took_s / tokens - self._s_per_token)
        self._ended[number][index] = at_s
        self._look(number, at_s)

    def _look(self, number: int, now: float) -> None:
        """When the blocks of a job are due, as seen now."""
        coming = self._coming(number, now)
        for group in self._groups[number]:
            self.due[group] = min([coming[step] for step in self._readers[group] if step in coming], default=math.inf)
        for group in self._shared_of[number]:
            soonest = self._soonest[group]
            pending = [coming[step] for step in self._shared[group][number] if step in coming]
            if pending:
                soonest[number] = min(pending)
            elif soonest.pop(number, None) is not None:
                self._left[group] -= 1
            gap_s = now / max(1, self._begun)
            later = now + gap_s if self._left[group] else math.inf
            self.due[group] = min(soonest.values(), default=later)

    def _coming(self, number: int, now: float) -> dict[int, float]:
        """Of each step of a job that has not ended, when it reads its prompt."""
        asked, ended = self._asked[number], self._ended[number]
        found: dict[int, float] = {}
        ends: dict[int, float] = {}
        for index, step in enumerate(self._jobs[number].steps):
            if index in ended:
                ends[index] = ended[index]
                continue
            at_s = asked.get(index)
            if at_s is None:
                at_s = max(now, max((ends[parent] for parent in step.parents), default=now) + step.pause_s)
            found[index] = at_s
            ends[index] = max(now, at_s + step.output_tokens * self._s_per_token)
        return found

    def _sort(self, hashes: Sequence[Sequence[Hashes]]) -> None:
        """Groups blocks by who reads them."""
        readers: dict[bytes, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        places: dict[bytes, int] = {}
        for number, of in enumerate(hashes):
            for index, blocks in enumerate(of):
                # A step that is preempted reads its output again, and its own last block.
                for place, block in enumerate(blocks):
                    readers[block][number].append(index)
                    places[block] = place
        groups: dict[tuple[tuple[int, tuple[int, ...]], ...], int] = {}
        for block, by_job in readers.items():
            key = tuple((number, tuple(steps)) for number, steps in by_job.items())
            group = groups.get(key)
            if group is None:
                group = groups[key] = self._new(key)
            self._group_of[block] = group, places[block]

    def _new(self, key: tuple[tuple[int, tuple[int, ...]], ...]) -> int:
        group = len(self._readers)
        self._readers.append(key[0][1])
        if len(key) == 1:
            self._groups[key[0][0]].append(group)
            return group
        self._shared[group] = dict(key)
        for number, _ in key:
            self._shared_of[number].append(group)
        return group


_A_PLACE_S: Final = 1e-6
"""How much later a block counts as due for each block before it in its prompt: less than times differ by."""


class BeladyBlocks:
    """Free blocks by Belady's rule, in place of vLLM's queue: the next use furthest away is given up first.

    vLLM's own queue stays underneath and hears of everything, as in `vllm/blocks.py`. Blocks due at one time are given
    up from the end of their prompts, since a block is of no use without those before it. Which to give up is looked for
    among all free blocks each time: a few operations on arrays.

    Has the methods of vLLM's queue of free blocks, and takes what the hooks tell an order of blocks.

    Args:
        queue: vLLM's queue as it stands.
        blocks: all blocks of the pool, each at its id.
        foresight: when blocks are read next.

    Attributes:
        given_up, watched: for the status of the hooks; this order has no classes of blocks.
        acts: set by the hooks; nothing here is ever in shadow.
    """

    def __init__(self, queue: Any, blocks: Sequence[Any], foresight: NextUses) -> None:
        self.given_up: dict[str, int] = {}
        self.watched: dict[str, int] = {}
        self.acts = True
        self.switch = Switch("eviction", EventCounts())
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

    def ended(self, workflow: RunningWorkflow, reason: EndReason) -> None:
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
