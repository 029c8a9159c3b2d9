"""What each step of a span tree waited for; the rule stands in `span_tree.py`."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MOST_PARENTS: Final = 256
"""A join of more branches names the ones that ended last: without a bound, n spans could wait for n²/4 others."""

Steps = tuple[int, ...]
"""Rows of steps."""


@dataclass(frozen=True)
class LaidOut:
    """A tree of spans whose clocks were adjusted; columns by row.

    Args:
        tops: the rows without a parent, in start order.
        children: the rows under each, in start order.
        start, end: nanoseconds since 1970.
        is_step: which rows are steps.
        node, node_parent: place in the agent graph, -1 for none.
    """

    tops: Sequence[int]
    children: Sequence[Sequence[int] | None]
    start: Sequence[int]
    end: Sequence[int]
    is_step: Sequence[bool]
    node: Sequence[int]
    node_parent: Sequence[int]


def waits_of(tree: LaidOut) -> dict[int, Steps]:
    """The steps that each step waited for."""
    return _Walk(tree).walk()


class Siblings:
    """The children of one span while they are gone through in start order."""

    __slots__ = ("answer", "at", "done", "latest", "row", "running")

    def __init__(self, row: int, given: Steps) -> None:
        self.row = row
        self.at = 0
        self.latest = 0  # end of any
        self.running: list[tuple[int, int, int, Steps]] = []  # (end, place, start, last steps), a heap
        self.done: list[tuple[int, int, int, Steps]] = []  # those that no other follows, by end
        self.answer = given  # what a child waits for where no sibling ended before it

    def ended(self, start: int, end: int, last: Steps, place: int) -> None:
        """Note a child with steps: its times, its last steps, and its place among its siblings."""
        self.latest = max(self.latest, end)
        heapq.heappush(self.running, (end, place, start, last))

    def waited_for(self, now: float) -> Steps:
        """The last steps of what ended by `now`, without what was followed by something that has ended too."""
        running, done = self.running, self.done
        if not running or running[0][0] > now:
            return self.answer
        if len(running) == 1 and (not done or (len(done) == 1 and done[0][0] <= running[0][2])):
            done[:] = [running.pop()]  # one after the other, as nearly always
            self.answer = done[0][3]
            return self.answer
        while running and running[0][0] <= now:
            done.append(heapq.heappop(running))
        if len(done) > 1:
            last = max(done, key=_by_start)
            done[:] = [sibling for sibling in done if sibling[0] > last[2] or sibling is last][-MOST_PARENTS:]
        if len(done) == 1:
            self.answer = done[0][3]
        else:
            self.answer = tuple([step for sibling in done for step in sibling[3]][-MOST_PARENTS:])
        return self.answer


def _by_start(sibling: tuple[int, int, int, Steps]) -> tuple[int, int]:
    return sibling[2], sibling[1]


class _Walk:
    """One walk over a tree that finds what each step waited for."""

    def __init__(self, tree: LaidOut) -> None:
        self.tree = tree
        self.waits: dict[int, Steps] = {}
        self.graph = any(node >= 0 for node in tree.node_parent)
        self.ran: dict[int, list[tuple[int, Steps]]] = {}  # (end, last steps) of each run of a node, in tree order
        self.open: list[int] = []  # the nodes around, which a graph names as parents too

    def walk(self) -> dict[int, Steps]:
        """What each step waited for."""
        tree, is_step, children = self.tree, self.tree.is_step, self.tree.children
        stack = [Siblings(-1, ())]
        while True:
            frame = stack[-1]
            below = tree.tops if frame.row < 0 else children[frame.row] or ()
            if frame.at < len(below):
                row = below[frame.at]
                frame.at += 1
                if children[row] is None and not is_step[row]:
                    continue
                given = frame.waited_for(tree.start[row])
                if self.graph:
                    given = self._by_graph(row, given)
                if is_step[row]:
                    self.waits[row] = given
                    if children[row] is None and not self.graph:
                        frame.ended(tree.start[row], tree.end[row], (row,), frame.at)
                        continue
                stack.append(Siblings(row, (row,) if is_step[row] else given))
                continue
            row = frame.row
            if row < 0:
                return self.waits
            stack.pop()
            last: Steps = (row,) if is_step[row] else ()
            if frame.running or frame.done:
                last = frame.waited_for(math.inf)
            # What goes on inside a span after its end counts as the span: a step waits for what has ended.
            end = max(tree.end[row], frame.latest)
            if self.graph and tree.node[row] >= 0:
                self._leave(row, end, last)
            if last:  # a span without steps hands on nothing: what comes next waits for what came before it
                stack[-1].ended(tree.start[row], end, last, stack[-1].at)

    def _by_graph(self, row: int, given: Steps) -> Steps:
        """What a span waits for by its place in the agent graph, else `given`."""
        node, parent = self.tree.node[row], self.tree.node_parent[row]
        if parent >= 0 and parent != node and parent not in self.open:
            now = self.tree.start[row]
            given = next((last for end, last in reversed(self.ran.get(parent, [])) if end <= now), given)
        if node >= 0:
            self.open.append(node)
        return given

    def _leave(self, row: int, end: int, last: Steps) -> None:
        self.open.pop()
        if last:
            self.ran.setdefault(self.tree.node[row], []).append((end, last))
