"""The spans of one trace as steps: which spans are steps, their agents, their order, and their dependencies.

docs/traces.md ("How spans become steps") says which spans are steps, who acted, and how clocks are adjusted.

Order. Steps are numbered in start order, of equal starts the first to end first, then in the order of span ids, in
which the rows are given.

Dependencies. Among the children of one span, a child waits for those that ended before it started, except those
followed by another of them; the step waits for their last steps. If no sibling ended before, it waits for what its
parent waited for; what runs inside an LLM step waits for that step. So overlapping children are a fan-out, and the next
child after them is the join. A node of an agent graph that names its parent node waits for the last steps of that node
instead, if it has run before.
"""

from __future__ import annotations

import functools
import heapq
import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from presage.datasets.adapters.spans.conventions import Flag, Naming, Role
from presage.datasets.schema.source import RowError

# Plain numbers: these are compared once for every span.
_OTHER, _LLM, _TOOL, _AGENT, _CHAIN, _WORKFLOW, _NODE, _MAYBE, _ = map(int, Role)
_TRANSPARENT: Final = (_OTHER, _CHAIN)
_PASSING: Final = (*_TRANSPARENT, _LLM, _MAYBE)
_STEPS_IF_EMPTY: Final = (_AGENT, _MAYBE)
_OUTER: Final = (_WORKFLOW, _CHAIN, _AGENT, _NODE)
_CALLS: Final = (_LLM, _TOOL)
_REQUESTED: Final = (*_CALLS, _MAYBE)
FAILED_ATTEMPT: Final = "failed attempt, which is no step"
PAUSED: Final = "trace that paused: not complete"
ROOT_FAILED: Final = "trace whose root failed: not complete"
ROOT_MISSING: Final = "trace whose root is missing: not complete"
"""Notices; but for the first, of a whole trace."""
_ERROR, _UNANSWERED, _PAUSED, _LOST = map(int, (Flag.ERROR, Flag.UNANSWERED, Flag.PAUSED, Flag.LOST))
_EXPLICITLY, _WEAKLY = int(Naming.EXPLICITLY), int(Naming.WEAKLY)
NEVER_ENDED: Final = 2**63 - 1
"""The end of a span that has not ended, as a time."""
_NONE: Final[list[int]] = []  # the children of most spans
UNKNOWN_SERVICE: Final = "unknown_service"  # default of OpenTelemetry's SDKs
MOST_PARENTS: Final = 256
"""Most parents of a join; it keeps those that ended last. Without a bound, n spans could have n²/4 dependencies."""

Steps = tuple[int, ...]
"""Rows of steps."""


@dataclass(frozen=True)
class TraceSpans:
    """The spans of one trace, column by column; names as in `SPAN_SCHEMA`.

    Ids, services and nodes are encoded as numbers, -1 for none: a trace may have millions of spans. `end` is
    `NEVER_ENDED` for a span that has not ended. `contents` gives what each of some rows holds but ids and places.
    """

    span: Sequence[int]
    parent: Sequence[int]
    remote: Sequence[bool]
    role: Sequence[int]
    naming: Sequence[int]
    service: Sequence[int]
    node: Sequence[int]
    node_parent: Sequence[int]
    call: Sequence[int]
    flags: Sequence[int]
    start: Sequence[int]
    end: Sequence[int]
    contents: Callable[[Sequence[int]], list[tuple[Any, ...]]]


@dataclass(frozen=True)
class TraceSteps:
    """The steps of one trace, in order. Rows are indices into `TraceSpans`; steps count from 0 in this trace."""

    row: list[int]  # the span of each step
    agent: list[int]  # the span that names its agent
    wrapper: list[int]  # an LLM span around this step alone, which may have attributes that it lacks; -1 for none
    parents: list[Steps]  # the steps it waited for
    started: list[int]  # nanoseconds since 1970, clocks adjusted
    ended: list[int]  # likewise; `NEVER_ENDED` if unknown
    leaf: list[bool]  # whether nothing in this trace waited for it
    end: int  # when the root and every step had ended, nanoseconds since 1970
    root: int | None  # the span the trace began with; None if it is missing
    top: int | None  # the outermost workflow, chain or agent span under the root; None without a root or such a span
    whole: bool  # nothing is missing: the root, or all below one parent elsewhere, is present and has ended
    stopped: bool  # it paused, or its root failed: more was to come
    failed: bool  # its root failed
    notes: Counter[str] = field(default_factory=Counter)  # what was no step or was mended, by what it was


class TraceFacts(NamedTuple):
    """Properties of a whole trace."""

    trace: str  # its id
    session: str | None  # the conversation id
    workflow: str | None  # `gen_ai.workflow.name`
    service: str | None
    top: str | None  # name of the outermost workflow, chain or agent span, if the root is present
    links: str | None  # the ids of the traces that the root links to, separated by blanks
    whole: bool  # as in `TraceSteps`, as the next two
    stopped: bool
    failed: bool
    rooted: bool  # the root is present
    begin: int  # nanoseconds since 1970, as the next two
    end: int
    opened: int  # when the root began; 0 if the root is missing or a step itself

    @property
    def workflow_id(self) -> str:
        """The conversation, else the trace."""
        return self.session or self.trace

    @property
    def known_type(self) -> str:
        """The workflow type, as far as this trace determines it."""
        return self.workflow or self.top or self.service or UNKNOWN_SERVICE

    @property
    def waits(self) -> bool:
        """Whether other traces are needed to determine the workflow."""
        return self.session is not None or (self.workflow is None and not self.rooted)


def steps_of(spans: TraceSpans) -> TraceSteps:
    """The steps of a trace; raises RowError if spans are each other's parents."""
    return _Tree(spans).steps()


class _Tree:
    def __init__(self, spans: TraceSpans) -> None:
        self.spans = spans
        n = len(spans.span)
        self.children: list[list[int]] = [_NONE] * n
        self.start = list(spans.start)
        self.end = list(map(max, spans.start, spans.end))
        self.root: int | None = None
        self.tops: list[int] = []
        self.last: list[int] = []  # what ends last: the root, or all spans below one parent elsewhere
        self.notes: Counter[str] = Counter()
        rows = self._link()
        calls = [call for call in spans.call if call >= 0]
        self.calls_again = len(set(calls)) < len(calls)
        self.twins: set[int] = set()
        self.order = self._lay_out()
        if len(self.order) + len(self.twins) < len(rows):
            raise self._cycle(rows)
        if self.twins:
            self.notes["span exported twice with another id"] += len(self.twins)

    def _link(self) -> dict[int, int]:
        """Parents to children; the row of each span id."""
        spans = self.spans
        rows: dict[int, int] = {}
        reports: dict[int, list[int]] = {}
        for row, span in enumerate(spans.span):
            if (first := rows.setdefault(span, row)) != row:
                reports.setdefault(span, [first]).append(row)
        for span, several in reports.items():
            rows[span] = self._last_of(several)
            self.notes["span reported again: its last report counts"] += len(several) - 1
        orphans = []
        for row in rows.values():
            parent = spans.parent[row]
            if parent < 0:
                self.tops.append(row)
            elif (above := rows.get(parent)) is not None:
                self._adopt(above, row)
            else:
                orphans.append(row)
        if self.tops:
            self.root = min(self.tops, key=self.start.__getitem__)
            self.last = [self.root]
            for row in orphans:  # a span in between was lost
                self._adopt(self.root, row)
            return rows
        if all(map(spans.remote.__getitem__, orphans)) and len({spans.parent[row] for row in orphans}) == 1:
            self.last = orphans  # the caller's spans were exported elsewhere
            self.root = orphans[0] if len(orphans) == 1 else None
        self.tops = orphans
        return rows

    def _last_of(self, reports: list[int]) -> int:
        """The report of a span that ended, or else the one that knows most: a choice by content alone."""
        ends, contents = self.spans.end, self.spans.contents(reports)
        by_knowledge = [
            (ends[row] != NEVER_ENDED, ends[row], sum(value is not None for value in content), str(content), row)
            for row, content in zip(reports, contents, strict=True)
        ]
        return max(by_knowledge)[-1]

    def _adopt(self, parent: int, row: int) -> None:
        if not self.children[parent]:
            self.children[parent] = []
        self.children[parent].append(row)

    def _lay_out(self) -> list[int]:
        """Adjust clocks and sort children from the top down; the rows in tree order."""
        service, start = self.spans.service, self.start
        shift = [0] * len(start)
        self.tops = self._sorted(self.tops)
        order: list[int] = []
        waiting = self.tops[::-1]
        while waiting:
            row = waiting.pop()
            order.append(row)
            below = self.children[row]
            if not below:
                continue
            if len(below) > 1:
                self.children[row] = below = self._sorted(below)
            own = service[row]
            if shift[row] or start[below[0]] < start[row] or any(service[child] != own for child in below):
                self._adjust(row, below, shift)
                below.sort(key=start.__getitem__)  # stable: those moved to the same start keep their order
            waiting.extend(reversed(below))
        return order

    def _sorted(self, rows: list[int]) -> list[int]:
        """Siblings by start, then by end, without twins, whose children go to the first of them."""
        start, end, role, call = self.start, self.end, self.spans.role, self.spans.call
        rows.sort(key=start.__getitem__)
        tie = len(set(map(start.__getitem__, rows))) < len(rows)
        if not tie and not self.calls_again:
            return rows
        twins: dict[int, int] = {}
        calls: dict[tuple[int, int], int] = {}
        for row in rows:
            if call[row] >= 0 and role[row] in _CALLS:
                first_call = calls.setdefault((role[row], call[row]), row)
                if first_call != row and start[row] < end[first_call]:
                    twins[row] = first_call
        alike: dict[tuple[int, int, int], list[int]] = {}
        if tie:
            rows.sort(key=lambda row: (start[row], end[row]))
            for row in rows:
                if end[row] > start[row]:
                    alike.setdefault((start[row], end[row], role[row]), []).append(row)
        for several in (group for group in alike.values() if len(group) > 1):
            first: dict[Any, int] = {}
            for row, content in zip(several, self.spans.contents(several), strict=True):
                if (first_call := first.setdefault(content, row)) != row:
                    twins[row] = first_call
        for row, original in twins.items():
            for child in self.children[row]:
                self._adopt(original, child)
        self.twins.update(twins)
        return [row for row in rows if row not in twins] if twins else rows

    def _adjust(self, row: int, below: list[int], shift: list[int]) -> None:
        """Move the children of a row, those of one service together; `shift` is how far each row was moved, ns."""
        service, start, end = self.spans.service, self.start, self.end
        together: dict[int, list[int]] = {}
        for child in below:
            together.setdefault(service[child], []).append(child)
        for name, children in together.items():
            first = min(start[child] for child in children)
            if name == service[row]:
                moved = max(shift[row], start[row] - first)
            else:
                moved = _skew(start[row], end[row], first, max(end[child] for child in children))
            for child in children if moved else ():
                shift[child] = moved
                start[child] += moved
                if end[child] != NEVER_ENDED:
                    end[child] += moved

    def _cycle(self, rows: dict[int, int]) -> RowError:
        reached = self.twins.union(self.order)
        row = next(row for row in rows.values() if row not in reached)
        passed: set[int] = set()
        while row not in passed:
            passed.add(row)
            row = rows[self.spans.parent[row]]
        message = "it is its own ancestor; expected a tree of spans: export the trace again"
        return RowError(message, row=row, reason="cycle of spans")

    def steps(self) -> TraceSteps:
        seen = functools.reduce(operator.or_, self.spans.flags) if any(self.spans.flags) else 0
        ended = all(self.end[row] != NEVER_ENDED for row in self.last)
        is_step, wraps = self._which()
        agent, wrapper = self._whose(wraps)
        waits = self._walk(is_step)
        rows = sorted((row for row in self.order if is_step[row]), key=self.start.__getitem__)  # ties in tree order
        step = [-1] * len(is_step)
        for place, row in enumerate(rows):
            step[row] = place
        parents = [tuple(sorted(map(step.__getitem__, waits[row]))) for row in rows]
        del waits, step
        waited = {parent for before in set(parents) for parent in before}
        outer = (row for row in self.order if self.spans.role[row] in _OUTER)
        failed = any(map(self._failed, self.last))
        paused = bool(seen & _PAUSED)
        self.notes.update({PAUSED: paused, ROOT_FAILED: failed, ROOT_MISSING: bool(rows) and not self.last})
        return TraceSteps(
            row=rows,
            agent=[agent[row] for row in rows],
            wrapper=[wrapper[row] if self.spans.role[row] == _LLM else -1 for row in rows],
            parents=parents,
            started=[self.start[row] for row in rows],
            ended=[self.end[row] for row in rows],
            leaf=[place not in waited for place in range(len(rows))],
            end=max((self.end[row] for row in (*rows, self.root) if row is not None), default=0),
            root=self.root,
            top=None if self.root is None else next(outer, None),
            whole=bool(self.last) and ended and not seen & _LOST,
            stopped=paused or failed,
            failed=failed,
            notes=self.notes,
        )

    def _failed(self, row: int) -> bool:
        """Whether a span failed, or what ended last in it: frameworks leave the span around a failed agent as it is."""
        role, children = self.spans.role, self.children
        while not self.spans.flags[row] & _ERROR:
            inside = (child for child in children[row] if role[child] or children[child])
            row = max(inside, key=self.end.__getitem__, default=-1)
            if row < 0 or role[row] in _REQUESTED:
                return False
        return True

    def _which(self) -> tuple[list[bool], list[int]]:
        """Whether each row is a step, and the number of requests that each LLM span wraps; from the leaves up.

        An LLM step that has not ended when the first step inside it begins, ends there."""
        role, children, flags = self.spans.role, self.children, self.spans.flags
        size = len(role)
        is_step, tried = [False] * size, [False] * size  # tried: there is a failed attempt below
        requests = [0] * size  # LLM steps below without an agent or tool in between
        first = [NEVER_ENDED] * size  # when the first step below begins
        final = -1  # the last call
        if any(flags):
            final = max((row for row in self.order if role[row] in _CALLS), key=self.start.__getitem__, default=-1)
        for row in reversed(self.order):
            kind, wrapped, begins = role[row], 0, NEVER_ENDED
            for child in children[row]:
                began = self.start[child] if is_step[child] else first[child]
                if began < begins:
                    begins = began
                if tried[child]:
                    tried[row] = True
                if role[child] in _PASSING:
                    wrapped += requests[child]
            first[row], requests[row] = begins, wrapped
            empty = begins == NEVER_ENDED
            if kind == _LLM and not wrapped:
                if flags[row] & _UNANSWERED and row != final:
                    tried[row] = True
                    self.notes[FAILED_ATTEMPT] += 1
                    continue
                is_step[row], requests[row] = True, 1
                if begins < self.end[row]:
                    self.end[row] = max(begins, self.start[row])
                    self.notes["request that was open around its tools: it ends when the first begins"] += 1
            elif kind == _TOOL:
                is_step[row] = empty and not flags[row] & _PAUSED
            elif kind in _STEPS_IF_EMPTY and empty and not tried[row]:
                is_step[row], requests[row] = True, int(kind == _MAYBE)
            elif kind == _NODE and empty:
                self.notes["agent without a request, which is no step"] += 1
        wraps = [count if role[row] == _LLM and not is_step[row] else 0 for row, count in enumerate(requests)]
        return is_step, wraps

    def _whose(self, wraps: list[int]) -> tuple[list[int], list[int]]:
        """For each row, the row that names its agent, and the LLM span that wraps it alone or -1; from the top down."""
        role, naming = self.spans.role, self.spans.naming
        strong, weak, wrapper = ([-1] * len(role) for _ in range(3))
        agent = list(range(len(role)))
        for row in self.order:
            if naming[row] == _EXPLICITLY:
                strong[row] = row
            elif naming[row] == _WEAKLY:
                weak[row] = row
            agent[row] = strong[row] if strong[row] >= 0 else weak[row] if weak[row] >= 0 else row
            hands_down = row if wraps[row] == 1 else -1
            if hands_down < 0 and role[row] in _TRANSPARENT:
                hands_down = wrapper[row]
            for child in self.children[row]:
                strong[child], weak[child], wrapper[child] = strong[row], weak[row], hands_down
        return agent, wrapper

    def _walk(self, is_step: Sequence[bool]) -> dict[int, Steps]:
        """The steps that each step waited for."""
        children, node, node_parent = self.children, self.spans.node, self.spans.node_parent
        waits: dict[int, Steps] = {}
        graph = any(node >= 0 for node in node_parent)
        ran: dict[int, list[tuple[int, Steps]]] = {}  # (end, last steps) of each run of a node, in tree order
        around: list[int] = []  # enclosing nodes, which a graph also names as parents
        stack = [Siblings(-1, ())]
        while True:
            frame = stack[-1]
            row = frame.row
            below = self.tops if row < 0 else children[row]
            if frame.at < len(below):
                row = below[frame.at]
                frame.at += 1
                if not children[row] and not is_step[row]:
                    continue
                given = frame.waited_for(self.start[row])
                if graph:
                    parent = node_parent[row]
                    if parent >= 0 and parent != node[row] and parent not in around:
                        runs = reversed(ran.get(parent, []))
                        given = next((last for end, last in runs if end <= self.start[row]), given)
                    if node[row] >= 0:
                        around.append(node[row])
                if is_step[row]:
                    waits[row] = given
                    if not children[row] and not graph:
                        frame.ended(self.start[row], self.end[row], (row,), frame.at)
                        continue
                stack.append(Siblings(row, (row,) if is_step[row] else given))
                continue
            if row < 0:
                return waits
            stack.pop()
            last: Steps = (row,) if is_step[row] else ()
            if frame.running or frame.done:
                last = frame.waited_for(math.inf)
            # Work inside a span after its end counts as the span: a step waits for what has ended.
            end = max(self.end[row], frame.latest)
            if graph and node[row] >= 0:
                around.pop()
                if last:
                    ran.setdefault(node[row], []).append((end, last))
            if last:  # a span without steps is transparent: the next one waits for what came before it
                stack[-1].ended(self.start[row], end, last, stack[-1].at)


def _skew(parent_start: int, parent_end: int, start: int, end: int) -> int:
    """Offset that corrects the clock of children against their parent's, nanoseconds."""
    room = (parent_end - parent_start) - (end - start)
    if NEVER_ENDED in (parent_end, end) or room < 0:
        return max(0, parent_start - start)
    return 0 if parent_start <= start and end <= parent_end else parent_start + room // 2 - start


class Siblings:
    """The children of one span, visited in start order."""

    __slots__ = ("answer", "at", "done", "latest", "row", "running")

    def __init__(self, row: int, given: Steps) -> None:
        self.row = row
        self.at = 0
        self.latest = 0  # latest end of all
        self.running: list[tuple[int, int, int, Steps]] = []  # (end, place, start, last steps), a heap
        self.done: list[tuple[int, int, int, Steps]] = []  # not followed by another, by end
        self.answer = given  # dependencies of a child if no sibling ended before it

    def ended(self, start: int, end: int, last: Steps, place: int) -> None:
        """Record a child with steps: its times, its last steps, and its position among its siblings."""
        self.latest = max(self.latest, end)
        heapq.heappush(self.running, (end, place, start, last))

    def waited_for(self, now: float) -> Steps:
        """The last steps of all siblings that ended by `now`, except those followed by one that ended too."""
        running, done = self.running, self.done
        if not running or running[0][0] > now:
            return self.answer
        if len(running) == 1 and (not done or (len(done) == 1 and done[0][0] <= running[0][2])):
            done[:] = [running.pop()]  # sequential, the common case
            self.answer = done[0][3]
            return self.answer
        while running and running[0][0] <= now:
            done.append(heapq.heappop(running))
        if len(done) > 1:
            last = max(done, key=lambda sibling: (sibling[2], sibling[1]))
            done[:] = [sibling for sibling in done if sibling[0] > last[2] or sibling is last][-MOST_PARENTS:]
        if len(done) == 1:
            self.answer = done[0][3]
        else:
            self.answer = tuple([step for sibling in done for step in sibling[3]][-MOST_PARENTS:])
        return self.answer
