"""In which order calls run, and where: prompts that begin alike one after the other, long chains early.

Source: Helium (Wadlom et al., 2026), section 5. The cost model is the paper's. A call uses
`output × new + output (output + 1) / 2` token steps, divided by the worker's cache; `new` are the prompt tokens that it
does not share with the call before it on the same worker. What reads an answer may begin `output` token steps after its
call has ended.

Departure: the paper's greedy recursion over the tree is replaced by list scheduling. It chooses among the ready calls
that share most with the worker's last call and the one with the longest chain behind it, is tried with several
weights, and is improved by moves of single calls where there are few. Over many rows a run follows a soft order
instead.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, Final

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from presage.batch.operators import Call, Given
from presage.batch.plan import Plan
from presage.batch.prefix_tree import PromptNode, guessed_text

_WEIGHTS: Final = (0.0, 0.1, 1.0, 10.0)
"""Of the chain behind a call, against the token steps until it has ended."""
_IMPROVED_BELOW: Final = 65
_MOVES: Final = 12_000
_SCHEDULED: Final = 32
"""Calls of a whole batch up to which `schedule` is fast enough."""
_SIMULATED: Final = 64
"""Calls of the rows that soft orders are compared over."""
_ALL_BELOW: Final = 4
"""Calls of a row up to which every soft order is compared."""
_MOVED: Final = 1_000
"""Moves of calls that are tried, where not all orders are."""
_CLEARLY: Final = 1.01
_SMALL_CACHE: Final = 8192.0
"""Tokens of a worker for which few calls are compared: with a large cache every order of these is as good."""
_LARGE_CACHE: Final = 400_000.0
"""Tokens of an engine for which many calls are compared; there long chains of answers cost most."""
_COMPARED: Final = 512
"""Characters of a row's field. The texts of 100,000 rows would take more memory than all else."""


@dataclass(frozen=True)
class PlannedCall:
    """A call in a schedule.

    Attributes:
        path: what the prompt is made of from its beginning, equal where prompts are alike, and its tokens.
        output: expected tokens of its answer.
        after: indices of the calls whose answers it reads.
    """

    path: tuple[tuple[Hashable, float], ...]
    output: float
    after: tuple[int, ...]


@dataclass(frozen=True)
class BatchSchedule:
    """Indices of the calls of each worker, in order, and the token step at which the last has ended."""

    workers: tuple[tuple[int, ...], ...]
    makespan: float


class Costs:
    """Token steps of some calls.

    Args:
        cache: tokens that a worker's cache holds (M in the paper).
    """

    def __init__(self, calls: Sequence[PlannedCall], cache: float) -> None:
        self.calls = calls
        self.cache = cache
        self.prompt = [sum(tokens for _, tokens in call.path) for call in calls]
        self.readers: list[list[int]] = [[] for _ in calls]
        for index, call in enumerate(calls):
            for before in call.after:
                self.readers[before].append(index)
        self.chain = self._chains()

    def shared(self, one: int, other: int) -> float:
        """Prompt tokens that two calls begin with alike."""
        total = 0.0
        for (mine, tokens), (theirs, _) in zip(self.calls[one].path, self.calls[other].path, strict=False):
            if mine != theirs:
                break
            total += tokens
        return total

    def usage(self, index: int, before: int | None) -> float:
        """Token steps of a call after another on its worker (u in the paper)."""
        output = self.calls[index].output
        new = self.prompt[index] - (0.0 if before is None else self.shared(before, index))
        return (output * new + output * (output + 1) / 2) / self.cache

    def delay(self, index: int) -> float:
        """Token steps between a call's end and the earliest begin of what reads its answer (d in the paper)."""
        return self.calls[index].output

    def makespan(self, workers: Sequence[Sequence[int]]) -> float:
        """Token step at which the last call has ended; infinite where workers wait for each other."""
        ends = self.ends(workers)
        return float("inf") if len(ends) < sum(map(len, workers)) else max(ends.values(), default=0.0)

    def ends(self, workers: Sequence[Sequence[int]]) -> dict[int, float]:
        """Token step at which each call has ended; without those that wait forever for another worker."""
        ends: dict[int, float] = {}
        positions, free = [0] * len(workers), [0.0] * len(workers)
        moved = True
        while moved:
            moved = False
            for worker, order in enumerate(workers):
                while positions[worker] < len(order):
                    index = order[positions[worker]]
                    if any(before not in ends for before in self.calls[index].after):
                        break
                    release = max((ends[before] + self.delay(before) for before in self.calls[index].after), default=0)
                    last = order[positions[worker] - 1] if positions[worker] else None
                    ends[index] = free[worker] = max(free[worker], release) + self.usage(index, last)
                    positions[worker] += 1
                    moved = True
        return ends

    def listed(self, order: Sequence[int], workers: int) -> float:
        """Makespan where whoever is free takes the first call of an order that is ready."""
        rank = {index: number for number, index in enumerate(order)}
        missing = [len(call.after) for call in self.calls]
        release = [0.0] * len(self.calls)
        coming = [(0.0, index) for index, count in enumerate(missing) if not count]
        ready: list[tuple[int, int]] = []
        free: list[tuple[float, int, int | None]] = [(0.0, worker, None) for worker in range(workers)]
        end = 0.0
        for _ in order:
            begin, worker, last = heapq.heappop(free)
            if not ready:
                begin = max(begin, coming[0][0])
            while coming and coming[0][0] <= begin:
                index = heapq.heappop(coming)[1]
                heapq.heappush(ready, (rank[index], index))
            index = heapq.heappop(ready)[1]
            end = max(end, ends := begin + self.usage(index, last))
            heapq.heappush(free, (ends, worker, index))
            for reader in self.readers[index]:
                release[reader] = max(release[reader], ends + self.delay(index))
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(coming, (release[reader], reader))
        return end

    def _chains(self) -> list[float]:
        """Token steps of the longest chain that begins with each call, as if nothing were shared."""
        chain = [0.0] * len(self.calls)
        for index in reversed(self.topological()):
            behind = max((chain[reader] for reader in self.readers[index]), default=-self.delay(index))
            chain[index] = self.usage(index, None) + self.delay(index) + behind
        return chain

    def topological(self) -> list[int]:
        """Indices, each after those it reads."""
        missing = [len(call.after) for call in self.calls]
        order = [index for index, count in enumerate(missing) if not count]
        for index in order:
            for reader in self.readers[index]:
                missing[reader] -= 1
                if not missing[reader]:
                    order.append(reader)
        return order


def schedule(
    calls: Sequence[PlannedCall], workers: int, cache: float, *, seed: int = 0, moves: int | None = None
) -> BatchSchedule:
    """A good schedule of calls on some workers.

    Args:
        cache: tokens that a worker's cache holds.
        seed: of the moves that are tried.
        moves: how many; default: 12,000 for at most 64 calls, none for more.
    """
    costs = Costs(calls, cache)
    candidates = [_listed(costs, workers, weight) for weight in _WEIGHTS]
    best = min((costs.makespan(orders), number, orders) for number, orders in enumerate(candidates))
    chosen, makespan = best[2], best[0]
    if moves is None:
        moves = _MOVES if len(calls) < _IMPROVED_BELOW else 0
    if moves and calls:
        draw = random.Random(seed)
        begun = [(costs.makespan(orders), orders) for orders in candidates]
        tried = [_improved(costs, orders, ends, moves // len(begun), draw) for ends, orders in begun]
        chosen, makespan = min(tried, key=lambda pair: pair[1])
    return BatchSchedule(tuple(map(tuple, chosen)), makespan)


def _listed(costs: Costs, workers: int, weight: float) -> list[list[int]]:
    """List scheduling: a call is chosen for the worker that is free first, and goes where it ends first."""
    calls = costs.calls
    by_path = sorted(range(len(calls)), key=lambda index: [node for node, _ in calls[index].path])
    place = {index: number for number, index in enumerate(by_path)}  # neighbours share most
    missing = [len(call.after) for call in calls]
    release = [0.0] * len(calls)
    coming = [(0.0, index) for index, count in enumerate(missing) if not count]
    ready: list[int] = []
    longest: list[tuple[float, int]] = []
    done = [False] * len(calls)
    orders: list[list[int]] = [[] for _ in range(workers)]
    free = [0.0] * workers
    for _ in range(len(calls)):
        worker = min(range(workers), key=free.__getitem__)
        now = free[worker]
        while coming and (coming[0][0] <= now or not ready):
            now = max(now, coming[0][0])
            _, index = heapq.heappop(coming)
            insort(ready, place[index])
            heapq.heappush(longest, (-costs.chain[index], index))
        while done[longest[0][1]]:
            heapq.heappop(longest)
        last = orders[worker][-1] if orders[worker] else None
        near = {longest[0][1]}
        if last is not None:
            position = bisect_left(ready, place[last])
            near |= {by_path[ready[other]] for other in (position - 1, position) if 0 <= other < len(ready)}
        usages = {index: costs.usage(index, last) for index in near}
        index = min(usages, key=lambda index: (usages[index] - weight * costs.chain[index], index))
        done[index] = True
        ready.pop(bisect_left(ready, place[index]))
        ends = [
            max(free[number], release[index]) + costs.usage(index, order[-1] if order else None)
            for number, order in enumerate(orders)
        ]
        end = min(ends)
        worker = ends.index(end)
        orders[worker].append(index)
        free[worker] = end
        for reader in costs.readers[index]:
            release[reader] = max(release[reader], end + costs.delay(index))
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(coming, (release[reader], reader))
    return orders


def _improved(
    costs: Costs, orders: list[list[int]], makespan: float, moves: int, draw: random.Random
) -> tuple[list[list[int]], float]:
    """Move single calls, or swap two, while that ends earlier; at first a worse state is kept now and then."""
    best, least, now = [list(order) for order in orders], makespan, makespan
    for tried in range(moves):
        moved = [list(order) for order in orders]
        worker = draw.choice([number for number, order in enumerate(moved) if order])
        position = draw.randrange(len(moved[worker]))
        to = draw.randrange(len(moved))
        if draw.random() < 0.5 or not moved[to]:
            index = moved[worker].pop(position)
            moved[to].insert(draw.randrange(len(moved[to]) + 1), index)
        else:
            other = draw.randrange(len(moved[to]))
            moved[worker][position], moved[to][other] = moved[to][other], moved[worker][position]
        ends = costs.makespan(moved)
        if ends <= now * (1 + 0.5 * max(0.0, 1 - 2 * tried / moves) * draw.random()):
            orders, now = moved, ends
            if ends < least:
                best, least = [list(order) for order in moved], ends
    return best, least


def paths(tree: PromptNode) -> dict[str, tuple[tuple[tuple[int, bool], float], ...]]:
    """The path of each call in a tree, by structural hash.

    Returns:
        Of each piece its number and whether rows differ there or before it, and its tokens.
    """
    by_call: dict[str, tuple[tuple[tuple[int, bool], float], ...]] = {}
    waiting: list[tuple[PromptNode, tuple[tuple[tuple[int, bool], float], ...]]] = [(tree, ())]
    number = 0
    while waiting:
        node, path = waiting.pop()
        for piece in node.pieces:
            of_row = piece.of_row or (bool(path) and path[-1][0][1])
            path = (*path, ((number, of_row), piece.tokens))
            number += 1
        by_call.update(dict.fromkeys(node.calls, path))
        waiting.extend((child, path) for child in reversed(node.children.values()))
    return by_call


def planned_calls(plan: Plan, tree: PromptNode, rows: int) -> tuple[list[PlannedCall], list[tuple[int, str]]]:
    """The calls of some rows, row by row, with the tokens that fields and answers have on average; and their labels.

    A label is the row and the call's structural hash.
    """
    path = paths(tree)
    before = callers(plan)
    labels = [(row, key) for row in range(rows) for key in before]
    index = {label: number for number, label in enumerate(labels)}
    output = {node.key: node.operator.output_tokens for node in plan.calls if isinstance(node.operator, Call)}
    calls = [
        PlannedCall(
            tuple(((piece, row if of_row else -1), tokens) for (piece, of_row), tokens in path[key]),
            output[key],
            tuple(index[row, other] for other in before[key]),
        )
        for row, key in labels
    ]
    return calls, labels


def callers(plan: Plan) -> dict[str, list[str]]:
    """For each call, those whose answers it reads, directly or through operators that ask no model."""
    read: dict[str, frozenset[str]] = {}
    callers_of: dict[str, list[str]] = {}
    for node in plan.nodes:
        below = frozenset[str]().union(*(read[part.key] for part in node.parts))
        if isinstance(node.operator, Call):
            callers_of[node.key] = sorted(below)
            below = frozenset({node.key})
        read[node.key] = below
    return callers_of


def depths(plan: Plan) -> dict[str, int]:
    """For each call, how many calls come before it on the longest path."""
    depth_of: dict[str, int] = {}
    for key, before in callers(plan).items():
        depth_of[key] = max((depth_of[other] + 1 for other in before), default=0)
    return depth_of


@dataclass(frozen=True)
class SoftOrder:
    """The order of a plan's calls over many rows. What is not ready does not hold up the rest.

    Attributes:
        places: for each call, by structural hash, its inner sequence and its place there. A sequence runs row by row;
            sequences run one after the other, over all rows.
        rows: numbers of the rows, those that begin alike next to each other.
        positions: of single calls, by number of the row and structural hash, where there are so few that `schedule` is
            fast enough; they precede `places`.
    """

    places: Mapping[str, tuple[int, int]]
    rows: Sequence[int]
    positions: Mapping[tuple[int, str], int] = field(default_factory=dict)

    def place(self, row: int, rank: int, call: str) -> tuple[int, ...]:
        """Where a call of a row stands, whose place among the rows is `rank`; the least goes first."""
        if self.positions:
            return (self.positions[row, call],)
        sequence, place = self.places.get(call, (0, 0))
        return sequence, rank, place


def soft_order(
    plan: Plan, tree: PromptNode, rows: Sequence[Mapping[str, Any]], *, workers: int | None = None
) -> SoftOrder:
    """The soft order of a plan's calls.

    Groups of calls (`_grouped`), which suit caches that hold more than the cost model knows of, yield to operator by
    operator where that is clearly better in the cost model, over some rows. So the order is none worse.

    A small batch is compared as a whole, also with row by row and what moves of calls make of these, and a smaller one
    with orders of single calls, as that of `schedule`; on one worker and two where nobody says how many there are.
    """
    ordered = _rows_in_order(plan, tree, rows)
    if not plan.calls:
        return SoftOrder({}, ordered)
    count = len(plan.calls) * len(rows)
    whole = 0 < count <= _SIMULATED
    trial = _Trial(plan, tree, len(rows) if whole else max(2, _SIMULATED // len(plan.calls)), workers, whole)
    depth = depths(plan)
    keys = sorted(depth, key=lambda key: (depth[key], key))
    row_by_row: Sequences = (tuple(keys),)
    candidates = [_grouped(plan, tree, depth), tuple((key,) for key in keys), *([row_by_row] if whole else [])]
    chosen = trial.best(candidates)
    places = {key: (number, place) for number, keys in enumerate(chosen) for place, key in enumerate(keys)}
    if not 0 < count <= _SCHEDULED or (single := trial.single(chosen)) is None:
        return SoftOrder(places, ordered)
    return SoftOrder(places, ordered, {(ordered[row], key): place for place, (row, key) in enumerate(single)})


Sequences = tuple[tuple[str, ...], ...]
"""Calls by structural hash: the inner sequences of a soft order."""


class _Trial:
    """Orders of the calls of some rows, compared by the time that workers take, who may be one or two.

    Args:
        whole: these are all rows of the batch, so other orders than the given ones are tried.
    """

    def __init__(self, plan: Plan, tree: PromptNode, rows: int, workers: int | None, whole: bool) -> None:
        calls, self._labels = planned_calls(plan, tree, rows)
        self._whole = whole
        self._costs = Costs(calls, _SMALL_CACHE if whole else _LARGE_CACHE)
        self._workers = (1, 2) if workers is None else (workers,)
        self._draw = random.Random(0)

    def best(self, candidates: Sequence[Sequences]) -> Sequences:
        """The best of some orders and those that moves make of them; the first, unless another is clearly better."""
        first, *_ = candidates
        keys = [key for keys in first for key in keys]
        orders: Iterable[Sequences] = candidates
        if self._whole and len(keys) <= _ALL_BELOW:
            orders = _all_orders(keys)
        least, best = min((self._taken(self._order(order)), order) for order in orders)
        for _ in range(_MOVED if self._whole and len(keys) > _ALL_BELOW else 0):
            moved = _moved(best, self._draw)
            if (taken := self._taken(self._order(moved))) <= least:
                least, best = taken, moved
        return first if self._taken(self._order(first)) <= _CLEARLY * least else best

    def single(self, chosen: Sequences) -> list[tuple[int, str]] | None:
        """All calls one by one, if that is clearly better: in the order of `schedule` or the soft one, with moves."""
        costs, soft = self._costs, self._order(chosen)
        ends = costs.ends(schedule(costs.calls, self._workers[-1], costs.cache, moves=_MOVED).workers)
        least, best = min((self._taken(order), order) for order in (soft, sorted(ends, key=ends.__getitem__)))
        for _ in range(_MOVED):
            moved = list(best)
            moved.insert(self._draw.randrange(len(moved)), moved.pop(self._draw.randrange(len(moved))))
            if (taken := self._taken(moved)) <= least:
                least, best = taken, moved
        return [self._labels[index] for index in best] if self._taken(soft) > _CLEARLY * least else None

    def _taken(self, order: Sequence[int]) -> float:
        return sum(count * self._costs.listed(order, count) for count in self._workers)

    def _order(self, sequences: Sequences) -> list[int]:
        place = {key: (number, index) for number, keys in enumerate(sequences) for index, key in enumerate(keys)}
        position = [(place[key][0], row, place[key][1]) for row, key in self._labels]
        return sorted(range(len(position)), key=position.__getitem__)


def _all_orders(keys: Sequence[str]) -> Iterator[Sequences]:
    for order in permutations(keys):
        for cuts in range(2 ** (len(order) - 1)):
            ends = [cut for cut in range(1, len(order)) if cuts >> (cut - 1) & 1]
            yield tuple(order[begin:end] for begin, end in zip([0, *ends], [*ends, len(order)], strict=True))


def _moved(order: Sequences, draw: random.Random) -> Sequences:
    """The order with one call in another place, of its sequence, another one or one of its own."""
    moved = [list(keys) for keys in order]
    keys = draw.choice(moved)
    key = keys.pop(draw.randrange(len(keys)))
    if draw.random() < 0.5:
        moved.insert(draw.randrange(len(moved) + 1), [key])
    else:
        keys = draw.choice(moved)
        keys.insert(draw.randrange(len(keys) + 1), key)
    return tuple(tuple(keys) for keys in moved if keys)


def _grouped(plan: Plan, tree: PromptNode, depth: Mapping[str, int]) -> Sequences:
    """Sequences of the calls that go on from one placeholder of the row, and so share a prefix of their own.

    Groups whose calls read each other's answers back and forth, as in a debate, are one sequence too, else the first
    of them would run over all rows before the next, and no row's prompts would be in the cache any more.
    """
    calls = callers(plan)
    groups = _groups(tree)
    group_of = {key: number for number, group in enumerate(groups) for key in group}
    reads = {(group_of[before], group_of[key]) for key, sources in calls.items() for before in sources}
    edges = np.array(sorted(reads), dtype=np.int64).reshape(-1, 2)
    graph = coo_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(len(groups), len(groups)))
    _, component = connected_components(graph, connection="strong")
    sequences: dict[int, list[str]] = {}
    for key, number in group_of.items():
        sequences.setdefault(component[number], []).append(key)
    ordered = sorted(sequences.values(), key=lambda keys: (min(depth[key] for key in keys), min(keys)))
    return tuple(tuple(sorted(keys, key=lambda key: (depth[key], key))) for keys in ordered)


def _rows_in_order(plan: Plan, tree: PromptNode, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Numbers of the rows, those whose fields begin alike next to each other."""
    fields = _fields(plan, tree)
    begins = [tuple(_begin(guessed_text(row.get(name))) for name in fields) for row in rows]
    return sorted(range(len(rows)), key=lambda number: (begins[number], number))


def _groups(tree: PromptNode) -> list[list[str]]:
    """Calls that share a placeholder of the row, and each of the others by itself."""
    groups: list[list[str]] = []
    waiting: list[tuple[PromptNode, list[str] | None]] = [(tree, None)]
    while waiting:
        node, group = waiting.pop()
        if group is None and any(piece.of_row for piece in node.pieces):
            group = []
            groups.append(group)
        if node.calls and group is None:
            groups.extend([key] for key in node.calls)
        elif group is not None:
            group.extend(node.calls)
        waiting.extend((child, group) for child in node.children.values())
    return [group for group in groups if group]


def _begin(text: str) -> tuple[str, bytes]:
    """What rows are compared by: a text's beginning, and what tells whether two that begin alike are the same."""
    rest = text[_COMPARED:].encode(errors="surrogatepass")
    return text[:_COMPARED], hashlib.blake2b(rest, digest_size=8).digest() if rest else b""


def _fields(plan: Plan, tree: PromptNode) -> list[str]:
    """Fields of the rows in the order in which prompts have them."""
    names = {node.key: node.operator.field for node in plan.nodes if isinstance(node.operator, Given)}
    fields = dict[str, None]()
    for node in tree.walk():
        for piece in node.pieces:
            if piece.filled_by in names:
                fields.setdefault(names[piece.filled_by])
    return list(fields)
