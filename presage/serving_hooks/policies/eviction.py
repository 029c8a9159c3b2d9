"""The eviction order of free cached blocks.

Free blocks are evicted in tiers, each emptied before the next begins:

1. blank blocks, whose content no step has touched, the first freed first;
2. retired blocks, all of whose workflows have ended: those used by fewer workflows first, then the least recently used;
3. unowned blocks, which no running workflow is expected to use, likewise;
4. the others. Blocks with a forecast: the longest expected wait for a use first (`next_use.py`), over the workflows
   that would read them; their uses a second add up. Blocks of workflows without a forecast: fewer users first, then the
   least recently used; they count as needed after as long again as they have been free, which merges the two orders.

The wait for a block is that for the workflow's return, given the time it has been away, plus the steps before the first
touch, divided by the probability that one of the next K steps touches the block. Where one agent reads everything, that
is the return time alone. Within a group, the first freed is evicted first: an engine that frees a request's last block
first thereby keeps the beginnings of prompts.

The rule "pbkv" is that of the paper (PBKV, §4.2): tiers 3 and 4 are one, by rising score (eq. 2).

Kept per group of blocks, not per block: a group has one access map, hence one place. A `LazyHeap` holds the groups that
have free blocks. Entries are bytes, not tuples: the garbage collector counts tuples, and a heap that drops thousands at
once would make it scan the whole engine ten times as often. Freeing costs O(1) a block and O(log groups) a group;
evicting n blocks O(n + groups emptied · log groups); a new forecast, and a workflow that passes a quantile of its
return time, O(groups of the workflow). A group is emptied before the next in order.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import Any, Final, Literal

from presage.errors import InputError
from presage.serving_hooks.policies.access import AccessIndex, Group, Touched
from presage.serving_hooks.policies.next_use import ReturnCurve
from presage.serving_hooks.policies.score import NO_RATES, STALE, UNIT, LearntRates, Lookahead, TouchRates

PRIOR_BLOCKS: Final = 32
"""Prior counts, of blocks as PBKV assumes them, so that a few steps decide a rate, not one."""

_PRIOR: Final = Touched(PRIOR_BLOCKS, PRIOR_BLOCKS, PRIOR_BLOCKS // 8, PRIOR_BLOCKS, 0, PRIOR_BLOCKS)

MOST_AGENTS: Final = 10_000
"""Agents counted, over all workflow types. Clients choose the names, so the table needs a bound."""


class Sharing:
    """How often an agent reads blocks of its workflow that it has touched before, and others, by type and agent.

    PBKV (appendix G.1) assumes that an agent reads the blocks it has touched before in this workflow, and no others.
    That fails if every prompt begins with the common history, or if an agent begins a new conversation at each call. So
    each time a step begins, `observe` counts the blocks of its workflow by whether its agent had touched them, and how
    many of each the step found. A block that the cache has lost is in no count; a block behind a lost one counts as
    not found. So under heavy loss rates are too low, never too high.
    """

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, Touched]] = {}
        self._rates: dict[str, LearntRates] = {}
        self._agents = 0

    def __len__(self) -> int:
        """Workflow types with rates."""
        return len(self._rates)

    def observe(self, workflow_type: str, agent: str, touched: Touched) -> None:
        """A step of `agent` began."""
        if not (touched.latest or touched.earlier or touched.others):
            return
        before = self._counts.get(workflow_type, {}).get(agent)
        if before is None:
            if self._agents == MOST_AGENTS:
                return
            self._agents, before = self._agents + 1, _PRIOR
        counts = Touched(*(a + b for a, b in zip(before, touched, strict=True)))
        self._counts.setdefault(workflow_type, {})[agent] = counts
        rates = TouchRates(
            counts.latest_found / counts.latest,
            counts.earlier_found / counts.earlier,
            counts.others_found / counts.others,
        )
        self._rates.setdefault(workflow_type, LearntRates()).learn(agent, rates)

    def rates(self, workflow_type: str) -> LearntRates:
        """By agent, the shares of blocks that it reads."""
        return self._rates.get(workflow_type, NO_RATES)


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


MOST_EXPLAINED: Final = 50
"""Groups of one workflow."""
MOST_LOOKED_AT: Final = 256
"""Groups for which it is found how many blocks are evicted before them."""

CLASSES: Final = ("blank", "retired", "unowned", "unknown", "forecast")
"""Classes of evicted blocks: untouched content; all workflows ended; no use expected (unowned); a running workflow
without a forecast; one with a forecast."""

RETIRED: Final = 0
UNOWNED: Final = 1
ACTIVE: Final = 2

_ENTRY: Final = struct.Struct(">BQQQQ")
"""(tier, rank, users, last use, id of the group): the lowest is evicted first. Big-endian, so that bytes compare like
the numbers."""

_ALL: Final = 2**64 - 1
_SIGN: Final = 2**63

_TURNS: Final = 8
"""Workflows that may move to the next stage of their return times in one call, so that no call takes long."""

_MOST_STALE: Final = 1000

Rule = Literal["next-use", "pbkv"]


@dataclass(frozen=True)
class EvictionConfig:
    """Settings of the order.

    Attributes:
        rule: `next-use`, the longest expected wait for a use first; or `pbkv`, by the score of the paper.
    """

    rule: Rule = "next-use"


class FreeOrder:
    """Free blocks of a cache in eviction order, and their use by workflows. Not thread-safe.

    Args:
        blocks: number of blocks; a block is an int below it. None is free at first.
        clock: seconds, never falling.

    Attributes:
        evicted: evicted blocks by `CLASSES`.
    """

    def __init__(self, blocks: int, clock: Callable[[], float], config: EvictionConfig | None = None) -> None:
        self._by_score = (config or EvictionConfig()).rule == "pbkv"
        self.sharing = Sharing()
        self.evicted = dict.fromkeys(CLASSES, 0)
        self._clock = clock
        self._index = AccessIndex(blocks, self._by_score)
        self._blank: OrderedDict[int, None] = OrderedDict()
        self._used = LazyHeap(lambda entry: self._of(entry) is not None, self._discard)
        self._due = LazyHeap(lambda entry: self._of(entry) is not None, self._discard)  # groups with a forecast
        self._turns: list[tuple[float, int, str]] = []
        self._stamp = 0
        self._free = 0

    def __len__(self) -> int:
        return self._free

    def __iter__(self) -> Iterator[int]:
        """All free blocks in eviction order. Sorts: for inspection, not for every step."""
        yield from self._blank
        for group in self._ordered():
            yield from group.free

    def append(self, blocks: Iterable[int]) -> None:
        """Adds freed blocks, which keep their content until evicted."""
        freed, count = list[Group](), 0
        for group, run in groupby(blocks, self._index.group_of.__getitem__):
            part = dict.fromkeys(run)
            count += len(part)
            if group is None:
                self._blank.update(part)
                continue
            freed.append(group)
            if group.free:
                group.unpacked().update(part)
            else:
                group.free, group.holes = part, 0
        self._free += count
        now = self._clock()
        for group in freed:
            self._stamp += 1
            group.last_use, group.freed_at = self._stamp, now
            group.pack()
        self._place_all(freed)

    def remove(self, blocks: Iterable[int]) -> None:
        """Takes out free blocks that are in use again."""
        for group, run in groupby(blocks, self._index.group_of.__getitem__):
            free = self._blank if group is None else group.unpacked()
            try:
                for block in run:
                    del free[block]
                    self._free -= 1
            except KeyError:
                raise InputError(f"block {block} is not free: expected a block given to append() since") from None

    def pop(self, n: int) -> list[int]:
        """Evicts the first n free blocks and returns them."""
        if not 0 <= n <= self._free:
            raise InputError(f"{n} blocks were asked for and {self._free} are free; ask for no more than len()")
        self._free -= n
        evicted: list[int] = []
        blank = self._blank
        while blank and len(evicted) < n:
            evicted.append(blank.popitem(last=False)[0])
        self.evicted["blank"] += len(evicted)
        if not blank:
            blank.clear()  # an emptied table keeps its size until cleared
        if len(evicted) < n:
            self.turn()
        now = self._clock()
        while len(evicted) < n:
            heap = self._next_heap(now)
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
            self.evicted[self._index.kind(group)] += len(part)
            self._index.forget(group, part)
        return evicted

    def takes_active(self, n: int) -> bool:
        """Whether n evictions may take blocks that running workflows use, whose order depends on forecasts.

        Costs O(1): a look at the blank blocks and at the first group behind them.
        """
        if n <= len(self._blank):
            return False
        entry = self._used.first()
        if entry is None or entry[0] > RETIRED:
            return True
        return n > len(self._blank) + len(self._index.by_id[_id(entry)].free)

    def first(self, n: int) -> list[int]:
        """The first n free blocks, or all if fewer, without evicting them. Costs O(their groups · log groups)."""
        blocks = list(islice(self._blank, n))
        for group in self._nearest(n - len(blocks)):
            blocks += islice(group.free, n - len(blocks))
        return blocks

    def _nearest(self, blocks: float, most: float = math.inf) -> list[Group]:
        """The first groups in eviction order, `most` at most, until they have so many free blocks."""
        now = self._clock()
        looked: list[tuple[LazyHeap, bytes]] = []
        groups: list[Group] = []
        while blocks > 0 and len(groups) < most and (entry := (heap := self._next_heap(now)).first()) is not None:
            looked.append((heap, heap.pop()))
            groups.append(self._index.by_id[_id(entry)])
            blocks -= len(groups[-1].free)
        for heap, entry in looked:
            heap.push(entry)
        return groups

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
        if not self._by_score:
            self.sharing.observe(workflow_type, agent, self._index.touched(workflow, agent, parts))
            self._place_all(self._index.begin(workflow, agent, parts))
            return
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
        curve: ReturnCurve | None = None,
        since: float = 0.0,
        step_s: float = 0.0,
    ) -> None:
        """Sets the forecasts of a workflow.

        Args:
            lookahead: of its next agents; UNKNOWN for none.
            curve: of its return time, counted from `since`, seconds of the clock; None if unknown.
            step_s: expected seconds from one of its steps to the next.
        """
        if not self._by_score:
            lookahead = lookahead.with_rates(self.sharing.rates(workflow_type))
        self._place_all(self._index.forecast(workflow, lookahead, curve, since, step_s, self._clock()))
        self._schedule(workflow)
        self.turn()

    def turn(self) -> None:
        """Moves workflows whose return time has passed a quantile to the next stage; at most a few in one call."""
        now, turns, running = self._clock(), self._turns, self._index.running
        moved: list[Group] = []
        for _ in range(_TURNS):
            if not turns or turns[0][0] > now:
                break
            _, number, workflow = heapq.heappop(turns)
            active = running.get(workflow)
            if active is not None and active.turns == number:
                moved += self._index.advance(workflow, active, now)
                self._schedule(workflow)
        if moved:
            self._place_all(moved)

    def end(self, workflow: str) -> None:
        """Records the end of a workflow, which may retire its blocks. An unknown workflow is ignored."""
        self._place_all(self._index.end(workflow))

    def debug_state(self, unowned: str = "") -> dict[str, int]:
        """Entries of each table, to find leaks; the pseudo-workflow `unowned` is not counted as a workflow."""
        owned = [
            group for group in self._index.by_id.values() if any(workflow != unowned for workflow in group.workflows)
        ]
        return {
            "workflows with blocks": len(self._index.running.keys() - {unowned}),
            "groups of blocks": len(self._index.by_id),
            "eviction heap": len(self._used) + len(self._due),
            "stages to come": len(self._turns),
            "free blocks of workflows": sum(len(group.free) for group in owned),
            "sharing types": len(self.sharing),
        }

    def spare(self) -> int:
        """Free blocks that no active workflow uses: blank and retired ones. Costs O(groups that have free blocks)."""
        retired = (self._index.by_id[_id(entry)] for entry in self._used if entry[0] == RETIRED)
        return len(self._blank) + sum(len(group.free) for group in retired)

    def spared(self, blocks: Iterable[int]) -> int:
        """How many of these blocks `spare` counts."""
        group_of = self._index.group_of
        return sum(
            block in self._blank if group is None else not group.workflows and block in group.free
            for block, group in ((block, group_of[block]) for block in blocks)
        )

    def explain(self, workflow: str) -> list[dict[str, Any]]:
        """The groups of blocks that an active workflow uses, in eviction order, `MOST_EXPLAINED` at most.

        Each with its numbers of blocks and free blocks, the agents of the workflow that touch it, the number of
        workflows that ever did, the expected wait for a use in seconds (None if unknown; with the rule `pbkv` its
        score), and the free blocks evicted before it (None if it has no free block, or `MOST_LOOKED_AT` groups of all
        workflows come before).
        """
        running = self._index.running.get(workflow)
        before, count, now = {}, len(self._blank), self._clock()
        for group in self._nearest(math.inf, MOST_LOOKED_AT):
            before[group.id] = count
            count += len(group.free)
        groups = list(running.groups) if running is not None else []
        groups.sort(key=lambda group: (before.get(group.id, math.inf), -group.size))
        explained: list[dict[str, Any]] = []
        for group in groups[:MOST_EXPLAINED]:
            score = self._index.score(group)
            if self._by_score:
                expected: dict[str, float | None] = {"score": round(score / UNIT, 4)}
            else:
                expected = {"wait_s": round(max(0.0, self._index.due(group, now) - now), 3) if score > 0 else None}
            explained.append(
                {
                    "blocks": group.size,
                    "free": len(group.free),
                    "agents": sorted(agent.removesuffix(STALE) for agent in group.agents_of(workflow) or ()),
                    "users": group.users,
                    **expected,
                    "before": before.get(group.id),
                }
            )
        return explained

    def blocks_of(self, workflow: str) -> tuple[int, int]:
        """Blocks that an active workflow uses, and free ones of these."""
        running = self._index.running.get(workflow)
        groups = running.groups if running is not None else ()
        return sum(group.size for group in groups), sum(len(group.free) for group in groups)

    def _next_heap(self, now: float) -> LazyHeap:
        """The heap whose first group is evicted next."""
        entry = self._due.first()
        if entry is None:
            return self._used
        other = self._used.first()
        if other is None:
            return self._due
        foreseen, unknown = self._index.by_id[_id(entry)], self._index.by_id[_id(other)]
        return self._used if self._precedes(other, unknown, foreseen, now) else self._due

    @staticmethod
    def _precedes(entry: bytes, group: Group, foreseen: Group, now: float) -> bool:
        """Whether a group, of the heap `_used`, is evicted before one with a forecast."""
        return entry[0] < ACTIVE or now - group.freed_at >= foreseen.due - now

    def _ordered(self) -> Iterator[Group]:
        """All groups with free blocks in eviction order. Sorts."""
        now, by_id = self._clock(), self._index.by_id
        foreseen = [by_id[_id(entry)] for entry in sorted(self._due, reverse=True)]
        for entry in sorted(self._used):
            group = by_id[_id(entry)]
            while foreseen and not self._precedes(entry, group, foreseen[-1], now):
                yield foreseen.pop()
            yield group
        yield from reversed(foreseen)

    def _schedule(self, workflow: str) -> None:
        """Notes when the return time of a workflow reaches its next stage."""
        every = self._index.running
        running = every[workflow]
        if running.curve is None or not running.groups:
            return
        heapq.heappush(self._turns, (running.since + running.stage.until_s, running.turns, workflow))
        if len(self._turns) > _MOST_STALE + 4 * len(every):  # forecasts of decades, replaced before they came
            self._turns = [turn for turn in self._turns if turn[2] in every and every[turn[2]].turns == turn[1]]
            heapq.heapify(self._turns)

    def _of(self, entry: bytes) -> Group | None:
        """The group of a valid entry; None if the entry was replaced or the group has no free block."""
        group = self._index.by_id.get(_id(entry))
        return group if group is not None and group.entry is entry and group.free else None

    def _place_all(self, groups: Iterable[Group]) -> None:
        """Moves groups to the places of their current scores."""
        used = due = 0
        for group in groups:
            if not group.free:
                continue
            has_forecast = False
            if group.sole is None and not group.many:
                first = RETIRED, 0, group.users
            else:
                score = self._index.score(group)
                if self._by_score:
                    first = ACTIVE, min(max(0, score), _ALL), group.users
                elif score > 0:
                    group.due, has_forecast = self._index.due(group, self._clock()), True
                    first = ACTIVE, _latest_first(group.due), group.users
                else:
                    first = (ACTIVE if self._index.kind(group) == "unknown" else UNOWNED), 0, group.users
            entry = _ENTRY.pack(*first, group.last_use, group.id)
            if group.entry != entry:
                group.entry = entry
                (self._due if has_forecast else self._used).push(entry)
                used, due = used + (not has_forecast), due + has_forecast
        if used:
            self._used.sweep(used, len(self._index.by_id))
        if due:
            self._due.sweep(due, len(self._index.by_id))

    def _discard(self, entry: bytes) -> None:
        """An entry has left the heap: if it was the valid one of its group, the group has none."""
        group = self._index.by_id.get(_id(entry))
        if group is not None and group.entry is entry:
            group.entry = None


def _id(entry: bytes) -> int:
    return int.from_bytes(entry[-8:])


def _latest_first(due: float) -> int:
    """An integer that falls strictly as `due` rises: the inverted order of the bits of the float."""
    bits = int.from_bytes(struct.pack(">d", due + 0.0))  # no negative zero
    return bits if bits & _SIGN else _ALL - (bits | _SIGN)
