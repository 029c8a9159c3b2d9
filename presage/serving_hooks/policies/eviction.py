"""The eviction order of free cached blocks.

Source: PBKV, §4.2. Free blocks are evicted in three tiers, each emptied before the next begins:

1. blank blocks, whose content no step has touched, the first freed first;
2. retired blocks, all of whose workflows have ended: those used by fewer workflows first, then the least recently used;
3. active blocks by rising score (eq. 2). Scores within one step of `tie` share a rank. Within a rank: fewer users first
   (so a shared prefix outlives a private block of equal score), then the touch expected furthest away, then the least
   recently used. Within a group, the first freed first: an engine that frees a request's last block first thereby
   keeps the beginnings of prompts.

The paper sorts by score alone. Forecasts are accurate to a few hundredths at best, and by its corollary G.3 scores
closer than the error have no order. There the time to next use decides, as in Belady's rule. Ranks have fixed
boundaries, so two scores on either side of one keep their order however close they are.

One `LazyHeap` holds the groups that have free blocks. Entries are bytes, not tuples: the garbage collector counts
tuples, and a heap that drops thousands at once would make it scan the whole engine ten times as often. Freeing costs
O(1) a block and O(log groups) a group; evicting n blocks O(n + groups emptied · log groups); a new forecast O(groups of
the workflow). A group is emptied before the next in order.
"""

from __future__ import annotations

import heapq
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

from presage.errors import InputError
from presage.serving_hooks.policies.access import AccessIndex, Group
from presage.serving_hooks.policies.score import UNIT, Lookahead

PRIOR_BLOCKS: Final = 32
"""Prior count of blocks not touched, so that a few steps decide a rate, not one."""

MOST_AGENTS: Final = 10_000
"""Agents counted, over all workflow types. Clients choose the names, so the table needs a bound."""


class Sharing:
    """How often an agent reads blocks of its workflow that it has not touched before, by workflow type and agent.

    PBKV (appendix G.1) assumes that an agent touches only blocks it has touched before in this workflow. That fails if
    every prompt begins with the common history. So each time a step begins, `observe` counts the blocks of its workflow
    that its agent had not touched, and how many of them the step found. Such a block counts for the agent with this
    rate: near 0 is the paper's rule, near 1 suits history-first prompts. A block that the cache has lost is in neither
    count; a block behind a lost one counts as not touched. So under heavy loss rates are too low, never too high.
    """

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, tuple[int, int]]] = {}
        self._rates: dict[str, dict[str, float]] = {}
        self._agents = 0

    def __len__(self) -> int:
        """Workflow types with rates."""
        return len(self._rates)

    def observe(self, workflow_type: str, agent: str, touched: int, others: int) -> None:
        """A step of `agent` began: of `others` blocks it had not touched before, it now found `touched`."""
        if not others:
            return
        known = self._counts.get(workflow_type, {}).get(agent)
        if known is None:
            if self._agents == MOST_AGENTS:
                return
            self._agents, known = self._agents + 1, (0, PRIOR_BLOCKS)
        touched, others = known[0] + touched, known[1] + others
        self._counts.setdefault(workflow_type, {})[agent] = touched, others
        self._rates.setdefault(workflow_type, {})[agent] = touched / others

    def rates(self, workflow_type: str) -> Mapping[str, float]:
        """By agent, the share of previously untouched blocks that it touched, in [0, 1)."""
        return self._rates.get(workflow_type, {})


_SWEPT: Final = 8
"""Least entries per sweep. A sweep handles twice as many as are pushed, or it would never finish."""

_SLACK: Final = 64


class LazyHeap:
    """A priority queue, lowest entry first, with lazy deletion: stale entries are skipped, and dropped a few at a time.

    Removing all stale entries at once would stall the engine for milliseconds, so there are two heaps: when half of the
    young heap may be stale it becomes the old one, and every call of `sweep` moves the valid ones of the old heap's
    last few entries to a new young heap. With n valid entries, both hold at most 1.5 · (64 + 2 n).
    """

    def __init__(self, is_valid: Callable[[bytes], bool], on_drop: Callable[[bytes], None]) -> None:
        self._is_valid = is_valid
        self._on_drop = on_drop
        self._young: list[bytes] = []
        self._old: list[bytes] = []

    def __len__(self) -> int:
        """Number of entries, stale ones included."""
        return len(self._young) + len(self._old)

    def __iter__(self) -> Iterator[bytes]:
        """Valid entries, in no order."""
        return filter(self._is_valid, chain(self._young, self._old))

    def push(self, entry: bytes) -> None:
        """Adds a valid entry."""
        heapq.heappush(self._young, entry)

    def first(self) -> bytes | None:
        """The lowest valid entry, which stays; None if there is none."""
        while heap := self._lower():
            if self._is_valid(heap[0]):
                return heap[0]
            self._on_drop(heapq.heappop(heap))
        return None

    def pop(self) -> bytes:
        """Removes and returns the entry that `first` returned."""
        return heapq.heappop(self._lower())

    def sweep(self, pushed: int, valid: int) -> None:
        """Drops a few stale entries, if they may outnumber the valid ones.

        `pushed` counts the entries since the last sweep; `valid` is an upper bound on the number of valid ones.
        """
        if not self._old:
            if len(self._young) <= _SLACK + 2 * valid:
                return
            self._old, self._young = self._young, []
        for _ in range(min(len(self._old), max(_SWEPT, 2 * pushed))):
            entry = self._old.pop()
            if self._is_valid(entry):
                heapq.heappush(self._young, entry)
            else:
                self._on_drop(entry)

    def _lower(self) -> list[bytes]:
        young, old = self._young, self._old
        return old if old and not (young and young[0] < old[0]) else young


CLASSES: Final = ("blank", "retired", "worthless", "unknown", "forecast")
"""Classes of evicted blocks: untouched content; all workflows ended; no forecast and score 0 (unowned); no forecast;
an active workflow with a forecast."""

RETIRED: Final = 0
ACTIVE: Final = 1

_ENTRY: Final = struct.Struct(">BQQQQQ")
"""(tier, rank, users, how early it is due, last use, id of the group): the lowest is evicted first. Big-endian, so that
bytes compare like the numbers."""

_ALL: Final = 2**64 - 1
_SIGN: Final = 2**63


@dataclass(frozen=True)
class EvictionConfig:
    """Settings of the order.

    Attributes:
        tie: width of a rank of scores; 0 ranks them exactly, as in the paper.
        learn_sharing: whether to learn which agents read blocks that others wrote (`Sharing`); if not, an agent counts
            only for blocks it has touched, as in the paper.
    """

    tie: float = 1 / 16
    learn_sharing: bool = True


class FreeOrder:
    """Free blocks of a cache in eviction order, and their use by workflows. Not thread-safe.

    Args:
        blocks: number of blocks; a block is an int below it. None is free at first.

    Attributes:
        given_up: evicted blocks by `CLASSES`.
    """

    def __init__(self, blocks: int, config: EvictionConfig | None = None) -> None:
        self.config = config or EvictionConfig()
        self.sharing = Sharing()
        self.given_up = dict.fromkeys(CLASSES, 0)
        self._index = AccessIndex(blocks)
        self._rank = max(1, round(self.config.tie * UNIT))
        self._blank: OrderedDict[int, None] = OrderedDict()
        self._heap = LazyHeap(lambda entry: self._of(entry) is not None, self._discard)
        self._stamp = 0
        self._free = 0

    def __len__(self) -> int:
        return self._free

    def __iter__(self) -> Iterator[int]:
        """All free blocks in eviction order. Sorts: for inspection, not for every step."""
        yield from self._blank
        for entry in sorted(self._heap):
            yield from self._index.by_id[_id(entry)].free

    def append(self, blocks: Iterable[int]) -> None:
        """Adds freed blocks, which keep their content until evicted."""
        group_of, last, freed, count = self._index.group_of, None, [], 0
        free: dict[int, None] = {}
        for block in blocks:
            count += 1
            group = group_of[block]
            if group is None:
                self._blank[block] = None
                continue
            if group is not last:
                freed.append(group)
                last, free = group, group.unpacked()
            free[block] = None
        self._free += count
        for group in freed:
            self._stamp += 1
            group.last_use = self._stamp
            group.pack()
        self._place_all(freed)

    def remove(self, block: int) -> None:
        """Takes out a free block that is in use again."""
        group = self._index.group_of[block]
        try:
            del (self._blank if group is None else group.free)[block]  # type: ignore[union-attr]
        except (KeyError, TypeError):  # cheaper than a check: few groups are packed, and every block comes here
            if group is None or block not in group.free:
                raise InputError(
                    f"block {block} is not free; only a block that append() was evicted can be removed"
                ) from None
            del group.unpacked()[block]
        self._free -= 1

    def pop(self, n: int) -> list[int]:
        """Evicts the first n free blocks and returns them."""
        if not 0 <= n <= self._free:
            raise InputError(f"{n} blocks were asked for and {self._free} are free; ask for no more than len()")
        self._free -= n
        evicted: list[int] = []
        blank = self._blank
        while blank and len(evicted) < n:
            evicted.append(blank.popitem(last=False)[0])
        self.given_up["blank"] += len(evicted)
        if not blank:
            blank.clear()  # an emptied table keeps its size until cleared
        heap = self._heap
        while len(evicted) < n:
            entry = heap.first()
            assert entry is not None, "the order holds fewer blocks than are free"
            group = self._index.by_id[_id(entry)]
            wanted = n - len(evicted)
            if wanted >= len(group.free):
                part, group.free = list(group.free), ()
                group.entry = None
                heap.pop()
            else:
                free = group.free if isinstance(group.free, dict) else group.unpacked()
                part = list(islice(free, wanted))
                for block in part:
                    del free[block]
                group.holes += wanted
                if group.holes > 256 + len(free) // 8:  # iterating over a dict visits deleted entries
                    group.free, group.holes = dict.fromkeys(free), 0
            evicted += part
            self.given_up[self._index.kind(group)] += len(part)
            self._index.forget(group, part)
        return evicted

    def first(self, n: int) -> list[int]:
        """The first n free blocks, or all if fewer, without evicting them. Costs O(their groups · log groups)."""
        found, looked = list(islice(self._blank, n)), []
        while len(found) < n and (entry := self._heap.first()) is not None:
            looked.append(self._heap.pop())
            found += islice(self._index.by_id[_id(entry)].free, n - len(found))
        for entry in looked:
            self._heap.push(entry)
        return found

    def forget(self, blocks: Iterable[int]) -> None:
        """Records that the content of these blocks is lost. Free ones become blank, to be evicted first."""
        for block in blocks:
            group = self._index.group_of[block]
            if group is None:
                continue
            if block in group.free:
                del group.unpacked()[block]
                self._blank[block] = None
            self._index.forget(group, [block])

    def found(self, workflow_type: str, workflow: str, agent: str, blocks: Sequence[int]) -> None:
        """Records the prompt blocks that a new step found in the cache. Call it for every step, even without any."""
        parts = self._index.by_group(blocks)
        if self.config.learn_sharing:
            self.sharing.observe(workflow_type, agent, *self._index.untouched(workflow, agent, parts))
        self._place_all(self._index.touch(workflow, agent, parts))

    def filled(self, workflow: str, agent: str, blocks: Sequence[int]) -> None:
        """Records that a step has written these blocks, which belong to its workflow from now on."""
        if not self._index.write(workflow, agent, blocks):
            self._place_all(self._index.touch(workflow, agent, self._index.by_group(blocks)))

    def forecast(
        self,
        workflow_type: str,
        workflow: str,
        lookahead: Lookahead,
        *,
        next_step_at: float = 0.0,
        step_s: float = 0.0,
    ) -> None:
        """Sets the forecast of a workflow; UNKNOWN for none.

        Args:
            next_step_at: when its next step is expected, after its pause and the queue; seconds of the caller's clock.
                Give it for all workflows or for none.
            step_s: expected seconds from one of its steps to the next.
        """
        if self.config.learn_sharing:
            lookahead = lookahead.shared(self.sharing.rates(workflow_type))
        self._place_all(self._index.forecast(workflow, lookahead, next_step_at, step_s))

    def end(self, workflow: str) -> None:
        """Records the end of a workflow, which may retire its blocks. An unknown workflow is ignored."""
        self._place_all(self._index.end(workflow))

    def debug_state(self, unowned: str = "") -> dict[str, int]:
        """Entries of each table, to find leaks; the pseudo-workflow `unowned` is not counted as a workflow."""
        owned = [group for group in self._index.by_id.values() if any(of != unowned for of in group.workflows)]
        return {
            "workflows with blocks": len(self._index.running.keys() - {unowned}),
            "groups of blocks": len(self._index.by_id),
            "eviction heap": len(self._heap),
            "free blocks of workflows": sum(len(group.free) for group in owned),
            "sharing types": len(self.sharing),
        }

    def spare(self) -> int:
        """Free blocks that no active workflow uses: blank and retired ones. Costs O(groups that have free blocks)."""
        retired = (self._index.by_id[_id(entry)] for entry in self._heap if entry[0] == RETIRED)
        return len(self._blank) + sum(len(group.free) for group in retired)

    def spared(self, blocks: Iterable[int]) -> int:
        """How many of these blocks `spare` counts."""
        group_of = self._index.group_of
        return sum(
            block in self._blank if group is None else not group.workflows and block in group.free
            for block, group in ((block, group_of[block]) for block in blocks)
        )

    def _of(self, entry: bytes) -> Group | None:
        """The group of a valid entry; None if the entry was replaced or the group has no free block."""
        group = self._index.by_id.get(_id(entry))
        return group if group is not None and group.entry is entry and group.free else None

    def explain(self, workflow: str) -> list[dict[str, Any]]:
        """The groups of blocks that an active workflow uses, in eviction order. Costs O(groups).

        Each with its numbers of blocks and free blocks, the agents of the workflow that touch it, the number of
        workflows that ever did, its score, and the free blocks evicted before it (None if it has no free block).
        """
        running = self._index.running.get(workflow)
        before, count = {}, len(self._blank)
        for group in (self._index.by_id[_id(entry)] for entry in sorted(self._heap)):
            before[group.id] = count
            count += len(group.free)
        explained: list[dict[str, Any]] = [
            {
                "blocks": group.size,
                "free": len(group.free),
                "agents": sorted(group.agents_of(workflow) or ()),
                "users": group.users,
                "score": round(self._index.score(group) / UNIT, 4),
                "before": before.get(group.id),
            }
            for group in (running.groups if running is not None else ())
        ]
        return sorted(explained, key=lambda group: (group["before"] is None, group["before"], -group["blocks"]))

    def _place_all(self, groups: Iterable[Group]) -> None:
        """Moves groups to the places of their current scores, users and due times."""
        pushed = 0
        for group in groups:
            if not group.free:
                continue
            if group.sole is not None or group.many:
                rank = min(max(0, self._index.score(group) // self._rank), _ALL)  # invalid forecasts may exceed it
                first = ACTIVE, rank, group.users, _early(self._index.due(group))
            else:
                first = RETIRED, 0, group.users, 0
            entry = _ENTRY.pack(*first, group.last_use, group.id)
            if group.entry != entry:
                group.entry = entry
                self._heap.push(entry)
                pushed += 1
        if pushed:
            self._heap.sweep(pushed, len(self._index.by_id))

    def _discard(self, entry: bytes) -> None:
        """An entry has left the heap: if it was the valid one of its group, the group has none."""
        group = self._index.by_id.get(_id(entry))
        if group is not None and group.entry is entry:
            group.entry = None


def _id(entry: bytes) -> int:
    return int.from_bytes(entry[-8:])


def _early(due: float) -> int:
    """An integer that falls strictly as `due` rises: the inverted order of the bits of the float."""
    if due == 0.0:
        return _SIGN - 1
    bits = int.from_bytes(struct.pack(">d", due))
    return bits if bits & _SIGN else _ALL - (bits | _SIGN)
