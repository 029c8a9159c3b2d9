"""The order of free blocks: which cached block is given up next.

Source: PBKV, §4.2. Free blocks are given up in this order, the first tier to its end before the next begins:

1. blocks that hold nothing anybody touched, the first freed first;
2. retired blocks, all of whose workflows have ended: those used by fewer workflows first, then the least recently used;
3. active blocks by rising score (eq. 2). Scores within the same `tie` are one rank, and in a rank: fewer users first
   (so a shared prefix outlives a private block of equal score), then the touch expected furthest away, then the least
   recently used. Within a group, the first freed first: an engine that frees a request's last block first so keeps
   the beginnings of prompts.

Where we depart. The paper sorts by the score alone. Forecasts are right to a few hundredths at best, and by its own
corollary G.3 scores closer than the error have no order; there time to next use decides, as in Belady's rule, which is
the one thing known where every block is needed for certain (score.py). Ties are cut by rank, so two scores on either
side of a cut keep their order however close they are.

One `LazyHeap` holds the groups that have free blocks: a changed score pushes a new entry, the old one is skipped when
it comes up. Entries are bytes, not tuples: the collector of garbage counts every tuple there is, and a heap that drops
thousands at once would have it look through the whole engine ten times as often. Freeing costs O(1) a block and
O(log groups) a group; giving up n blocks O(n + groups emptied · log groups); a new forecast O(groups of the workflow).
A group is emptied to its end before the next in order begins.
"""

from __future__ import annotations

import heapq
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

from presage.errors import ConfigurationError, InputError
from presage.serving_hooks.policies.access import AccessIndex, Group
from presage.serving_hooks.policies.score import UNIT, Lookahead

PRIOR_BLOCKS: Final = 32
"""Blocks counted as not touched before the first is seen: a few steps decide, not one."""

MOST_AGENTS: Final = 10_000
"""Agents, over all workflow types, that are counted: names come with requests, and a table must not grow with them."""


class Sharing:
    """How often an agent reads blocks of its workflow that it has not touched before, by workflow type and agent.

    PBKV (appendix G.1) holds that an agent touches only blocks it has touched before in this workflow. That is so where
    each agent has its own conversation. Where every prompt begins with the common history it is not: the next agent
    reads all that was written so far, most of it for the first time, and a score that waits for the first touch gives
    it up.

    So each time a step begins, the blocks of its workflow that its agent had not touched are counted, and those of them
    it found. The rate is the probability by which such a block counts for the agent: near 0 the paper's rule, near 1
    the history-first one. A block the cache has lost is in neither count; one behind a lost block counts as not
    touched, since a prefix breaks there, so under heavy loss rates are too low, never too high.
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
        """Of each agent that has had the choice: the share of untouched blocks it went on to touch, in [0, 1)."""
        return self._rates.get(workflow_type, {})


_SWEPT: Final = 8
"""Entries that a sweep looks at, at least: twice as many as are pushed, or it would never come to an end."""

_SLACK: Final = 64


class LazyHeap:
    """The lowest entry first. Many entries do not stand any more: they are skipped, and dropped a few at a time.

    An entry that is replaced stays where it is, since to find it would cost more than to skip it. So that they do not
    pile up, the heap is gone through again and again; at once that would take milliseconds in which an engine waits. So
    there are two heaps: when half of the young one may be stale it becomes the old one, and every call of `sweep` moves
    what stands of the old one's last few entries to a new young one. Without its last entry a heap is still a heap.
    Where n entries stand there are never more than half as many again as 64 + 2 n.

    Args:
        stands: whether an entry does.
        gone: told of each entry that was dropped, since it did not.
    """

    def __init__(self, stands: Callable[[bytes], bool], gone: Callable[[bytes], None]) -> None:
        self._stands = stands
        self._gone = gone
        self._young: list[bytes] = []
        self._old: list[bytes] = []

    def __len__(self) -> int:
        """Entries, those that do not stand among them."""
        return len(self._young) + len(self._old)

    def __iter__(self) -> Iterator[bytes]:
        """Entries that stand, in no order."""
        return filter(self._stands, chain(self._young, self._old))

    def push(self, entry: bytes) -> None:
        """One that stands."""
        heapq.heappush(self._young, entry)

    def first(self) -> bytes | None:
        """The lowest that stands, which stays; None if there is none."""
        while heap := self._lower():
            if self._stands(heap[0]):
                return heap[0]
            self._gone(heapq.heappop(heap))
        return None

    def pop(self) -> bytes:
        """Takes what `first` has answered."""
        return heapq.heappop(self._lower())

    def sweep(self, pushed: int, standing: int) -> None:
        """Drops a few that do not stand, where there may be more of them than of others.

        Args:
            pushed: entries since the last time.
            standing: how many stand, at most.
        """
        if not self._old:
            if len(self._young) <= _SLACK + 2 * standing:
                return
            self._old, self._young = self._young, []
        for _ in range(min(len(self._old), max(_SWEPT, 2 * pushed))):
            entry = self._old.pop()
            if self._stands(entry):
                heapq.heappush(self._young, entry)
            else:
                self._gone(entry)

    def _lower(self) -> list[bytes]:
        young, old = self._young, self._old
        return old if old and not (young and young[0] < old[0]) else young


CLASSES: Final = ("blank", "retired", "worthless", "unknown", "forecast")
"""What a block that is given up was: it held nothing; its workflows have ended; an active one uses it and is told to be
worth nothing, or nothing is forecast of it; some forecast speaks of it."""

RETIRED: Final = 0
ACTIVE: Final = 1

_ENTRY: Final = struct.Struct(">BQQQQQ")
"""(tier, rank, users, how early it is due, last use, id of the group): the lower is given up first. Big-endian, so that
entries compare as their numbers do."""

_ALL: Final = 2**64 - 1
_SIGN: Final = 2**63


@dataclass(frozen=True)
class EvictionConfig:
    """Settings of the order.

    Attributes:
        tie: scores are ranked in steps of this; 0 ranks them exactly, as the paper does.
        learn_sharing: whether agents that read what others wrote are found by counting (`Sharing`); without it an
            agent counts for the blocks it has touched and for no other, as in the paper.
    """

    tie: float = 1 / 16
    learn_sharing: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.tie <= 1:
            raise ConfigurationError(f"tie is {self.tie}; it is a difference of scores, give a number from 0 to 1")


class FreeOrder:
    """Free blocks of a cache, in the order in which they are given up, and who uses which.

    Not thread-safe. It reads no clock: times are the caller's seconds.

    Args:
        blocks: of the cache; a block is an int below it. None is free at first.
        config: settings.

    Attributes:
        given_up: blocks by what they were, as `CLASSES`.
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
        """All free blocks, the next to be given up first. Sorts: for inspection, not for every step."""
        yield from self._blank
        for entry in sorted(self._heap):
            yield from self._index.by_id[_id(entry)].free

    def append(self, blocks: Iterable[int]) -> None:
        """These blocks are free now, and keep what they hold until they are given up."""
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
        """A free block is in use again."""
        group = self._index.group_of[block]
        try:
            del (self._blank if group is None else group.free)[block]  # type: ignore[union-attr]
        except (KeyError, TypeError):  # not looked at before: few are packed, and this is done for every block
            if group is None or block not in group.free:
                raise InputError(
                    f"block {block} is not free; only a block that append() was given can be removed"
                ) from None
            del group.unpacked()[block]
        self._free -= 1

    def pop(self, n: int) -> list[int]:
        """Gives up the first n free blocks; what they held is forgotten."""
        if not 0 <= n <= self._free:
            raise InputError(f"{n} blocks were asked for and {self._free} are free; ask for no more than len()")
        self._free -= n
        given: list[int] = []
        blank = self._blank
        while blank and len(given) < n:
            given.append(blank.popitem(last=False)[0])
        self.given_up["blank"] += len(given)
        if not blank:
            blank.clear()  # an emptied table keeps its size, this gives it back
        heap = self._heap
        while len(given) < n:
            entry = heap.first()
            assert entry is not None, "fewer blocks stand in the order than are free"
            group = self._index.by_id[_id(entry)]
            wanted = n - len(given)
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
                if group.holes > 256 + len(free) // 8:  # a dict keeps the holes and would walk over them
                    group.free, group.holes = dict.fromkeys(free), 0
            given += part
            self.given_up[self._index.kind(group)] += len(part)
            self._index.forget(group, part)
        return given

    def first(self, n: int) -> list[int]:
        """The first n free blocks, or all, which stay. Costs O(groups they are of · log groups)."""
        found, looked = list(islice(self._blank, n)), []
        while len(found) < n and (entry := self._heap.first()) is not None:
            looked.append(self._heap.pop())
            found += islice(self._index.by_id[_id(entry)].free, n - len(found))
        for entry in looked:
            self._heap.push(entry)
        return found

    def forget(self, blocks: Iterable[int]) -> None:
        """What these blocks hold is lost, free or not: a free one is given up before all that hold something."""
        for block in blocks:
            group = self._index.group_of[block]
            if group is None:
                continue
            if block in group.free:
                del group.unpacked()[block]
                self._blank[block] = None
            self._index.forget(group, [block])

    def found(self, workflow_type: str, workflow: str, agent: str, blocks: Sequence[int]) -> None:
        """A step begins and these blocks of its prompt were in the cache. Call it once a step, also with none."""
        parts = self._index.by_group(blocks)
        if self.config.learn_sharing:
            self.sharing.observe(workflow_type, agent, *self._index.untouched(workflow, agent, parts))
        self._place_all(self._index.touch(workflow, agent, parts))

    def filled(self, workflow: str, agent: str, blocks: Sequence[int]) -> None:
        """A step has written these blocks. They belong to the workflow from now on."""
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
        """A new forecast of a workflow.

        Args:
            workflow_type: the application.
            workflow: one run of it.
            lookahead: its forecast (score.lookahead); UNKNOWN where there is none.
            next_step_at: when its next step is expected, after its pause and the queue; seconds of the caller's clock.
                Give it for all workflows or for none.
            step_s: expected seconds from one of its steps to the next.
        """
        if self.config.learn_sharing:
            lookahead = lookahead.shared(self.sharing.rates(workflow_type))
        self._place_all(self._index.forecast(workflow, lookahead, next_step_at, step_s))

    def end(self, workflow: str) -> None:
        """The workflow has ended; blocks that only ended workflows used are retired. No error if it is not there."""
        self._place_all(self._index.end(workflow))

    def debug_state(self, unowned: str = "") -> dict[str, int]:
        """Entries of each table, to find leaks; the pseudo-workflow `unowned` is not counted as a workflow."""
        owned = [group for group in self._index.by_id.values() if any(of != unowned for of in group.workflows)]
        return {
            "workflows with blocks": len(self._index.running.keys() - {unowned}),
            "groups of blocks": self._index.groups,
            "eviction heap": len(self._heap),
            "free blocks of workflows": sum(len(group.free) for group in owned),
            "sharing types": len(self.sharing),
        }

    def spare(self) -> int:
        """Free blocks that no active workflow uses: blank and retired ones. Costs O(groups that have free blocks)."""
        retired = (self._index.by_id[_id(entry)] for entry in self._heap if entry[0] == RETIRED)
        return len(self._blank) + sum(len(group.free) for group in retired)

    def spared(self, blocks: Iterable[int]) -> int:
        """How many of these are among them."""
        group_of = self._index.group_of
        return sum(
            block in self._blank if group is None else not group.workflows and block in group.free
            for block, group in ((block, group_of[block]) for block in blocks)
        )

    def _of(self, entry: bytes) -> Group | None:
        """The group that an entry stands for; None for one that has been replaced, or whose group has no free block."""
        group = self._index.by_id.get(_id(entry))
        return group if group is not None and group.entry is entry and group.free else None

    def explain(self, workflow: str) -> list[dict[str, Any]]:
        """The groups of blocks that an active workflow uses, the next to be given up first. Costs O(groups).

        Of each: how many blocks, how many of them are free, the agents of the workflow that touch them, how many
        workflows ever did, the score, and how many free blocks are evicted before (None if none is free).
        """
        running = self._index.running.get(workflow)
        before, count = {}, len(self._blank)
        for group in (self._index.by_id[_id(entry)] for entry in sorted(self._heap)):
            before[group.id] = count
            count += len(group.free)
        told: list[dict[str, Any]] = [
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
        return sorted(told, key=lambda group: (group["before"] is None, group["before"], -group["blocks"]))

    def _place_all(self, groups: Iterable[Group]) -> None:
        """Puts groups where their present scores, users and due times say."""
        pushed = 0
        for group in groups:
            if not group.free:
                continue
            if group.sole is not None or group.many:
                rank = min(max(0, self._index.score(group) // self._rank), _ALL)  # beyond are forecasts that are none
                first = ACTIVE, rank, group.users, _early(self._index.due(group))
            else:
                first = RETIRED, 0, group.users, 0
            entry = _ENTRY.pack(*first, group.last_use, group.id)
            if group.entry != entry:
                group.entry = entry
                self._heap.push(entry)
                pushed += 1
        if pushed:
            self._heap.sweep(pushed, self._index.groups)

    def _discard(self, entry: bytes) -> None:
        """An entry has left the heap: if it was its group's valid one, the group stands nowhere."""
        group = self._index.by_id.get(_id(entry))
        if group is not None and group.entry is entry:
            group.entry = None


def _id(entry: bytes) -> int:
    return int.from_bytes(entry[-8:])


def _early(due: float) -> int:
    """Falls as `due` rises, and keeps every difference: the number's bits, which rise with it, from the other end."""
    if due == 0.0:
        return _SIGN - 1
    bits = int.from_bytes(struct.pack(">d", due))
    return bits if bits & _SIGN else _ALL - (bits | _SIGN)
