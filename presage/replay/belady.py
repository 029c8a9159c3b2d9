"""Belady's rule: evict the free block whose next use is furthest away, according to the trace.

A step that has not ended is assumed to take the mean seconds per output token so far, waiting and prefill included. So
the order of reads is exact within a workflow, and an estimate between workflows.

Belady (1966) is optimal for a given sequence of reads. Here the sequence depends on evictions, misses cost time, and a
block is useless without those before it: a strong clairvoyant rule for hits, not a bound on speed.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.replay.prompts import HASH_BYTES, PromptIds
from presage.replay.workload import ReplayJob
from presage.serving_hooks.modes import Switch
from presage.serving_hooks.policies.eviction import EvictionConfig
from presage.serving_hooks.vllm.blocks import ScoredBlocks
from presage.serving_hooks.workflows import EndReason, Workflow

_FIRST_S_PER_TOKEN: Final = 0.03
"""Until a step has ended; its value does not matter, since it is the same for all."""

_NEW: Final = 0.05
"""Weight of the latest step in the mean."""

NEVER: Final = 0
"""The group of blocks that no step reads again."""


class _Groups(NamedTuple):
    """The groups of one job, numbered from `first` on: `readers` has their steps, those of each group from its place in
    `starts` on."""

    first: int
    starts: NDArray[np.intp]
    readers: NDArray[np.intp]


class NextUses:
    """Next uses of blocks, in groups with the same readers.

    A block of several workflows is due when the first running one reads it; if no running one will, its due time is
    estimated from the rate of arrivals so far.

    Args:
        prompts: with their hashes.

    Attributes:
        due: float64 [groups], seconds of the virtual clock; infinity for never.
        changes: how often `due` may have changed.
    """

    def __init__(self, jobs: Sequence[ReplayJob], prompts: PromptIds) -> None:
        self._jobs = jobs
        self._group_of: dict[bytes, int] = {}
        self._groups: list[_Groups] = []  # of one job each
        self._shared: dict[int, dict[int, tuple[int, ...]]] = {}  # of each shared group, the steps that read it, by job
        self._shared_of: list[list[int]] = [[] for _ in jobs]
        self.due: NDArray[np.float64] = np.full(self._sort(prompts), math.inf)
        self._asked: list[dict[int, float]] = [{} for _ in jobs]
        self._ended: list[dict[int, float]] = [{} for _ in jobs]
        self._open = [list(range(len(job.steps))) for job in jobs]  # steps that have not ended
        self._soonest: dict[int, dict[int, float]] = {group: {} for group in self._shared}
        self._left = {group: len(readers) for group, readers in self._shared.items()}  # jobs that will read it
        self._s_per_token = _FIRST_S_PER_TOKEN
        self._begun = 0
        self.changes = 0

    def group(self, block_hash: bytes) -> int:
        """The group of a block."""
        return self._group_of.get(block_hash, NEVER)

    def began(self, number: int, at_s: float) -> None:
        """A job begins."""
        self._begun += 1
        self._look(number, at_s)

    def asked(self, number: int, index: int, at_s: float) -> None:
        """A step has arrived."""
        self._asked[number][index] = at_s
        self._look(number, at_s)

    def selected(self, number: int, index: int, at_s: float) -> None:
        """A step has begun; until it ends it may have to read its blocks again."""

    def finished(self, number: int, index: int, at_s: float) -> None:
        """A step has ended."""
        took_s = at_s - self._asked[number][index]
        tokens = self._jobs[number].steps[index].output_tokens
        self._s_per_token += _NEW * (took_s / tokens - self._s_per_token)
        self._ended[number][index] = at_s
        self._open[number].remove(index)
        self._look(number, at_s)

    def _look(self, number: int, now: float) -> None:
        """Updates when the blocks of a job are due."""
        self.changes += 1
        coming = self._coming(number, now)
        groups = self._groups[number]
        if len(groups.starts):
            at_s = np.full(len(self._jobs[number].steps), math.inf)
            at_s[list(coming)] = list(coming.values())
            self.due[groups.first : groups.first + len(groups.starts)] = np.minimum.reduceat(
                at_s[groups.readers], groups.starts
            )
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
        """When each unfinished step of a job reads its prompt, by step."""
        asked, steps = self._asked[number], self._jobs[number].steps
        by_step: dict[int, float] = {}
        ends = self._ended[number].copy()
        for index in self._open[number]:
            step, at_s = steps[index], asked.get(index)
            if at_s is None:
                at_s = max(now, max((ends[parent] for parent in step.parents), default=now) + step.pause_s)
            by_step[index] = at_s
            ends[index] = max(now, at_s + step.output_tokens * self._s_per_token)
        return by_step

    def _sort(self, prompts: PromptIds) -> int:
        """Groups blocks by their readers; returns the number of groups. Only blocks of openings have several owners."""
        owners = Counter(
            block
            for job, own in zip(self._jobs, prompts.own, strict=True)
            for step, blocks in zip(job.steps, own, strict=True)
            if step.continues is None
            for block in blocks
        )
        several = {block for block, many in owners.items() if many > 1}
        readers_of: dict[bytes, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        groups = NEVER + 1
        for number, (job, own) in enumerate(zip(self._jobs, prompts.own, strict=True)):
            reads: list[list[tuple[int, int]]] = [[] for _ in job.steps]  # by owner: how many blocks, by whom
            for index in range(len(job.steps)):
                # A step that is preempted reads its output again, and its own last block.
                for owner, blocks in prompts.stretches(number, index):
                    reads[owner].append((blocks, index))
            first, starts, readers = groups, [0], list[int]()
            for owner, own_reads in enumerate(reads):
                begin = 0
                for end in sorted({blocks for blocks, _ in own_reads}):
                    steps = [index for blocks, index in own_reads if blocks >= end]
                    alone = dict.fromkeys((block for block in own[owner][begin:end] if block not in several), groups)
                    for block in own[owner][begin : end - len(alone)]:
                        readers_of[block][number].update(steps)
                    if alone:
                        self._group_of |= alone
                        readers += steps
                        starts.append(len(readers))
                        groups += 1
                    begin = end
            self._groups.append(_Groups(first, np.array(starts[:-1], np.intp), np.array(readers, np.intp)))
        shared: dict[tuple[tuple[int, tuple[int, ...]], ...], int] = {}
        for block, by_job in readers_of.items():
            key = tuple((number, tuple(sorted(steps))) for number, steps in by_job.items())
            self._group_of[block] = group = shared.setdefault(key, groups + len(shared))
            if group not in self._shared:
                self._shared[group] = dict(key)
                for number, _ in key:
                    self._shared_of[number].append(group)
        return groups + len(shared)


_A_TOKEN_S: Final = 1e-8
"""Added to the due time for each token before it in its prompt; smaller than any difference of times."""


_AHEAD: Final = 1024
"""Blocks whose order of eviction is found at once; it stands until blocks come or go, or one is due at another time."""


class BeladyBlocks(ScoredBlocks):
    """Evicts by Belady's rule; it has no classes of blocks and no forecasts, and is never in shadow.

    Blocks due at the same time are evicted from the end of their prompts.
    """

    def __init__(self, queue: Any, blocks: Sequence[Any], next_uses: NextUses, switch: Switch) -> None:
        self._next_uses = next_uses
        super().__init__(queue, blocks, EvictionConfig(), lambda request_id: None, switch, lambda: 0.0)

    def begin(self) -> None:
        """Starts from the blocks in vLLM's queue; when they are read next is unknown."""
        self._free = np.zeros(len(self._blocks), np.bool_)
        self._free[[block.block_id for block in self.vllm_queue.get_all_free_blocks()]] = True
        self._group = np.full(len(self._blocks), NEVER, np.int64)
        self._later = np.zeros(len(self._blocks))
        self._first: list[int] = []  # ids of the next blocks to evict, in order, as long as `_stands`
        self._stands: int | None = None

    @property
    def evicted(self) -> dict[str, int]:
        """Empty."""
        return {}

    def popleft_n(self, n: int) -> list[Any]:
        """The next n free blocks to evict."""
        ids = self._furthest(n)
        del self._first[len(self._first) - n :]
        self._free[ids], self._group[ids] = False, NEVER
        given = [self._blocks[block_id] for block_id in ids]
        for block in given:
            self.vllm_queue.remove(block)
        return given

    def remove(self, block: Any) -> None:
        """A free block is in use again."""
        self.vllm_queue.remove(block)
        self._free[block.block_id], self._stands = False, None

    def remove_n(self, blocks: Sequence[Any]) -> None:
        """Free blocks are in use again."""
        self.vllm_queue.remove_n(blocks)  # type: ignore[attr-defined]  # of the fast path
        self._free[[block.block_id for block in blocks]], self._stands = False, None

    def append_n(self, blocks: list[Any]) -> None:
        """Blocks are free, and keep their content until they are evicted."""
        self.vllm_queue.append_n(blocks)
        self._free[[block.block_id for block in blocks]], self._stands = True, None

    def prepend_n(self, blocks: list[Any]) -> None:
        """Blocks without content are free."""
        self.vllm_queue.prepend_n(blocks)
        ids = [block.block_id for block in blocks]
        self._free[ids], self._group[ids], self._stands = True, NEVER, None

    @property
    def pressed(self) -> bool:
        """Never: the trace is known."""
        return False

    def get_all_free_blocks(self) -> list[Any]:
        """All free blocks, the next to evict first."""
        return [self._blocks[block_id] for block_id in self._furthest(int(self._free.sum()))]

    def filled(self, request: Any, blocks: Sequence[Any]) -> None:
        """A request has filled blocks, which are cached now."""
        for block in blocks:
            self._group[block.block_id] = self._next_uses.group(block.block_hash[:HASH_BYTES])
            self._later[block.block_id] = block.block_hash_num_tokens * _A_TOKEN_S

    def settle(self) -> None:
        """Nothing to do: blocks are looked up when they are filled."""

    def lost(self, blocks: Iterable[int]) -> None:
        """The content of these blocks is no longer cached; they may be free or in use."""
        self._group[list(blocks)], self._stands = NEVER, None

    def request_scheduled(self, request: Any, step: Any, found: Any) -> None:
        """Ignored: the trace is known."""

    def forecast(self, step: Any, lookahead: Any, curve: Any, since: float, step_s: float) -> None:
        """Ignored: the trace is known."""

    def workflow_ended(self, workflow: Workflow, reason: EndReason) -> None:
        """Ignored: the trace is known."""

    def _furthest(self, n: int) -> list[int]:
        """Ids of the n free blocks to evict first: furthest next use, then the end of a prompt."""
        if self._stands != self._next_uses.changes or n > len(self._first):
            self._first = self._ordered(max(n, _AHEAD))[::-1]
            self._stands = self._next_uses.changes
        return self._first[: -n - 1 : -1]

    def _ordered(self, n: int) -> list[int]:
        free = np.flatnonzero(self._free)
        due = self._next_uses.due[self._group[free]] + self._later[free]
        if 0 < n < len(free):  # argpartition is slow where many are never due
            least = np.partition(due, len(due) - n)[len(due) - n]
            later = np.flatnonzero(due > least)
            first = np.r_[later, np.flatnonzero(due == least)[: n - len(later)]]
            free, due = free[first], due[first]
        in_order: list[int] = free[np.argsort(-due, kind="stable")].tolist()
        return in_order
