"""In which order calls run, and where: prompts that begin alike one after the other, long chains early.

Source: Helium (Wadlom et al., 2026), section 5. The cost model is the paper's. A call uses
`output × new + output (output + 1) / 2` token steps, divided by the worker's cache; `new` are the prompt tokens that it
does not share with the call before it on the same worker. What reads an answer may begin `output` token steps after its
call has ended.

Departure: instead of a schedule of single calls, which the paper makes by a greedy recursion over the tree, a run
follows a soft order: whoever is free takes the first call of it that is ready.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from presage.batch.operators import Call, Given
from presage.batch.plan import Plan
from presage.batch.prefix_tree import PromptNode, guessed_text

_SIMULATED: Final = 64
"""Calls of the rows that soft orders are compared over."""
_CLEARLY: Final = 1.01
_CACHE: Final = 400_000.0
"""Tokens of an engine for which orders are compared; there long chains of answers cost most."""
_COMPARED: Final = 512
"""Characters of a row's field. The texts of 100,000 rows would take more memory than all else."""


@dataclass(frozen=True)
class PlannedCall:
    """A call of a row.

    Attributes:
        path: what the prompt is made of from its beginning, equal where prompts are alike, and its tokens.
        output: expected tokens of its answer.
        after: indices of the calls whose answers it reads.
    """

    path: tuple[tuple[Hashable, float], ...]
    output: float
    after: tuple[int, ...]


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
    """

    places: Mapping[str, tuple[int, int]]
    rows: Sequence[int]

    def place(self, rank: int, call: str) -> tuple[int, int, int]:
        """Where a call stands, of a row whose place among the rows is `rank`; the least goes first."""
        sequence, place = self.places.get(call, (0, 0))
        return sequence, rank, place


Sequences = tuple[tuple[str, ...], ...]
"""Calls by structural hash: the inner sequences of a soft order."""


def soft_order(
    plan: Plan, tree: PromptNode, rows: Sequence[Mapping[str, Any]], *, workers: int | None = None
) -> SoftOrder:
    """The soft order of a plan's calls.

    Groups of calls (`_grouped`), which suit caches that hold more than the cost model knows of, yield to operator by
    operator where that is clearly better in the cost model, over some rows: on one worker and two where nobody says how
    many there are. So the order is none worse.
    """
    depth = depths(plan)
    grouped = _grouped(plan, tree, depth) if depth else ()
    one_by_one: Sequences = tuple((key,) for key in sorted(depth, key=lambda key: (depth[key], key)))
    chosen = grouped
    if depth and one_by_one != grouped:
        calls, labels = planned_calls(plan, tree, max(2, _SIMULATED // len(plan.calls)))
        costs = Costs(calls, _CACHE)

        def taken(order: Sequences) -> float:
            """Token steps of these rows."""
            place = _places(order)
            sort_key = [(place[key][0], row, place[key][1]) for row, key in labels]
            ranked = sorted(range(len(labels)), key=sort_key.__getitem__)
            return sum(count * costs.listed(ranked, count) for count in ((1, 2) if workers is None else (workers,)))

        chosen = grouped if taken(grouped) <= _CLEARLY * taken(one_by_one) else one_by_one
    return SoftOrder(_places(chosen), _rows_in_order(plan, tree, rows))


def _places(order: Sequences) -> dict[str, tuple[int, int]]:
    return {key: (number, place) for number, keys in enumerate(order) for place, key in enumerate(keys)}


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
