"""Readers of span formats: documents to spans, spans to the steps of workflows.

A trace is a workflow, unless it has a conversation (session) id: then all traces of that conversation are one. Spans
are partitioned by trace, so each tree is complete in its partition. If a trace alone does not determine the workflow of
its steps, they are spilled again by workflow id, and `PendingConversations` numbers them after all traces are read:

- steps of a conversation, whose traces may lie in any partition;
- steps of a trace without a root or workflow name: its type is inferred from the other traces;
- steps of a trace whose first span links to others, or that is linked to: it may continue another's workflow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.adapters.files.tables import frame_rows, table_rows
from presage.datasets.adapters.files.text import Decode, Documents, Place, files_of
from presage.datasets.adapters.spans import tree
from presage.datasets.adapters.spans.conventions import CONTINUED, COPIED, LINKS_DOUBTED, LINKS_MISSING
from presage.datasets.adapters.spans.documents import decode, take_mlflow, take_spans
from presage.datasets.adapters.spans.intake import Intake, Partitions
from presage.datasets.adapters.spans.steps import (
    NOT_WHOLE,
    SPOILED,
    StepRows,
    TraceColumns,
    row_ranges,
    text_bytes,
    with_cached_tokens,
    with_values,
)
from presage.datasets.schema import conform, trace_schema
from presage.datasets.schema.source import Origin, RowError, Source, Workflow, named
from presage.errors import TraceError

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

_MANY: Final = 2
OVERLAP: Final = "trace that overlaps others of its session: a workflow of its own"
_OF_WORKFLOW: Final = ("workflow_type", "workflow_id", "complete", "success", "step", "parent_steps")


class _Trace(NamedTuple):
    """A pending trace, and its rows in the partition."""

    workflow_id: str
    facts: tree.TraceFacts
    rows: list[int]


class PendingConversations:
    """Steps that wait for other traces, in `waiting`, or in `linked` those of traces with links to or from others.

    `notices` counts what becomes of them.
    """

    def __init__(self, waiting: Partitions, linked: Partitions, notices: Counter[str]) -> None:
        self.linked = linked
        self._waiting = waiting
        self._notices = notices
        self._facts: dict[str, tree.TraceFacts] = {}  # of the traces in `linked`
        self._empty: set[str] = set()  # those without a step
        self._keys: list[NDArray[np.int64]] = []
        self._types: dict[str, set[str]] = {}  # of each service, up to `_MANY`
        self._named: dict[str, set[str | None]] = {}  # `gen_ai.workflow.name` of each service, up to `_MANY`

    def learn(self, facts: tree.TraceFacts, linked: bool, empty: bool) -> None:
        """Record the workflow type of a trace under its service; the facts of one with links, and if it has no step."""
        if linked:
            self._facts[facts.trace] = facts
            if empty:
                self._empty.add(facts.trace)
        if facts.workflow is None and not facts.rooted:
            return
        for seen, value in ((self._types, facts.known_type), (self._named, facts.workflow)):
            values: set[Any] = seen.setdefault(facts.service or tree.UNKNOWN_SERVICE, set())
            if len(values) < _MANY:
                values.add(value)

    def add(self, rows: pa.Table) -> None:
        """Store rows of `StepRows.tables`, and marks of traces that lost spans."""
        self._keys.append(rows["key"].drop_null().to_numpy())
        self._waiting.add(rows, "workflow_id")

    def workflows(self) -> Iterator[tuple[pa.Table, set[Workflow]]]:
        """For each partition, the rows of its workflows, and the spoiled workflows, whose rows are omitted."""
        followed = self._followed()
        for rows in self.linked:
            given = zip(
                *((name, *facts) for name, facts in map(followed.__getitem__, rows["trace"].to_pylist())), strict=True
            )
            self.add(with_values(rows, zip(("workflow_id", *tree.TraceFacts._fields), given, strict=True)))
        copies = self._copies()
        for rows in self._waiting:
            yield self._joined(rows, copies)

    def _followed(self) -> dict[str, tuple[str, tree.TraceFacts]]:
        """The workflow id of each trace with links, and its facts, where `links` is now the trace that it continues."""
        traces, empty = self._facts, self._empty
        followed: dict[str, tuple[str, tree.TraceFacts]] = {}
        before: dict[str, str] = {}
        doubted: set[str] = set()
        for trace, facts in traces.items():
            links = (facts.links or "").split()
            here = [linked for linked in links if linked in traces and (linked not in empty or traces[linked].links)]
            if len(links) == 1 and here:
                before[trace] = links[0]
            elif links and trace not in empty:
                self._notices[LINKS_DOUBTED if here else LINKS_MISSING] += 1
                doubted.update([trace, *here] if here else ())
        for trace in sorted(traces):
            path = {trace: None}  # back to the first, or around a circle
            while trace not in followed and (trace := before.get(trace, "")) and trace not in path:
                path[trace] = None
            for link in reversed(path):
                facts, last = traces[link], before.get(link, "")
                name, first = followed.get(last, (facts.workflow_id, facts))
                if link in followed:
                    continue
                if facts.session not in (None, name) or None is not facts.workflow != first.workflow is not None:
                    self._notices[LINKS_DOUBTED] += 1
                    doubted |= {link, last}
                elif first is not facts:
                    self._notices[CONTINUED] += link not in empty
                    last = (first.links or "") if last in empty else last
                    of_first = {field: getattr(first, field) for field in ("workflow", "service", "top", "rooted")}
                    followed[link] = name, facts._replace(links=last, opened=0, **of_first)
                    continue
                followed[link] = facts.workflow_id, facts._replace(links=None)
        return {
            trace: (name, facts._replace(whole=facts.whole and trace not in doubted))
            for trace, (name, facts) in followed.items()
        }

    def _copies(self) -> dict[int, str]:
        """For each key that several steps have the trace of the original: of the session that began first, then ended
        first."""
        keys = np.sort(np.concatenate([np.empty(0, np.int64), *self._keys]))
        several = pa.array(np.unique(keys[1:][keys[1:] == keys[:-1]]))
        sessions: dict[str, tuple[int, int, str]] = {}
        copies: dict[int, set[tuple[str, int, str]]] = {}
        for rows in self._waiting if len(several) else ():
            columns = [rows[name].to_pylist() for name in ("workflow_id", "begin", "end", "trace", "key")]
            shared = pc.is_in(rows["key"], several).to_pylist()
            for name, begin, end, trace, key, is_shared in zip(*columns, shared, strict=True):
                first, last, _ = sessions.get(name, (begin, end, name))
                sessions[name] = min(first, begin), max(last, end), name
                if is_shared:
                    copies.setdefault(key, set()).add((name, begin, trace))
        return {
            key: min(holders, key=lambda holder: (sessions[holder[0]], holder))[-1] for key, holders in copies.items()
        }

    def _joined(self, table: pa.Table, copies: Mapping[int, str]) -> tuple[pa.Table, set[Workflow]]:
        copied = [False] * len(table)
        if copies:
            places = zip(table["key"].to_pylist(), table["trace"].to_pylist(), strict=True)
            copied = [copies.get(key, trace) != trace for key, trace in places]
        groups, bad = self._groups(table, copied)
        self._notices[COPIED] += sum(copied)
        names = ("step", "start", "ended", "leaf", "unanswered", "parent_steps")
        columns = {name: table.column(name).to_pylist() for name in names}
        rows: list[int] = []
        joined: list[tuple[Any, ...]] = []
        for key, traces in groups.items():
            if key in bad or not any(trace.rows for trace in traces):
                continue
            in_order, waited, failed = _numbered([trace for trace in traces if trace.rows], columns, copied)
            self._notices[tree.FAILED_ATTEMPT] += failed
            last = traces[-1].facts  # it may have resumed what stopped before
            complete = all(trace.facts.whole for trace in traces) and not last.stopped
            of_workflow = (*key, complete, False if last.failed else None)
            rows += in_order
            joined += [(*of_workflow, step, parents) for step, parents in enumerate(waited)]
        kept = table.take(pa.array(rows, pa.int64()))
        return with_values(kept, zip(_OF_WORKFLOW, zip(*joined, strict=True), strict=bool(joined))), bad

    def _groups(self, table: pa.Table, copied: list[bool]) -> tuple[dict[Workflow, list[_Trace]], set[Workflow]]:
        """The traces of each workflow in start order, and the workflows that lost spans.

        Roots that overlap share an id that is no conversation's, so each is a workflow.
        """
        columns = [table.column(name).to_pylist() for name in ("workflow_id", "step", *tree.TraceFacts._fields)]
        traces: dict[str, _Trace] = {}
        lost: set[str] = set()
        for row, (workflow_id, step, trace, *values) in enumerate(zip(*columns, strict=True)):
            collected = traces.get(trace)
            if collected is None:
                collected = traces[trace] = _Trace(workflow_id, tree.TraceFacts(trace, *values), [])
            if step == SPOILED:
                lost.add(trace)
            elif step != NOT_WHOLE:
                collected.rows.append(row)
        applications: dict[tuple[str, str | None, str], list[_Trace]] = {}
        for collected in sorted(
            traces.values(), key=lambda collected: (collected.facts.begin, collected.workflow_id, collected.facts.trace)
        ):
            if collected.rows and all(map(copied.__getitem__, collected.rows)):
                continue
            named, service = collected.facts.workflow, collected.facts.service or tree.UNKNOWN_SERVICE
            if named is None and not collected.facts.rooted:
                named = _only(self._named, service)
            applications.setdefault((collected.workflow_id, named, service if named is None else ""), []).append(
                collected
            )
        groups: dict[Workflow, list[_Trace]] = {}
        bad: set[Workflow] = set()
        for (workflow_id, named, service), together in applications.items():
            opened = sorted((facts.opened, facts.end % tree.NEVER_ENDED) for _, facts, _ in together if facts.opened)
            apart = any(end > begin for (_, end), (begin, _) in pairwise(opened))
            self._notices[OVERLAP] += len(together) * apart
            for members in [[lone] for lone in together] if apart else [together]:
                top = next((member.facts.top for member in members if member.facts.top is not None), None)
                type_of = named or top or _only(self._types, service) or service
                workflow = (type_of, members[0].facts.trace if apart else workflow_id)
                groups.setdefault(workflow, []).extend(members)
                if any(member.facts.trace in lost for member in members):
                    bad.add(workflow)
        for members in groups.values():
            members.sort(key=lambda member: member.facts.begin)
        return groups, bad


def _only(seen: dict[str, set[Any]], service: str) -> str | None:
    values = seen.get(service, set())
    return next(iter(values)) if len(values) == 1 else None


def _numbered(
    traces: list[_Trace], columns: Mapping[str, list[Any]], copied: list[bool]
) -> tuple[list[int], list[tuple[int, ...]], int]:
    """The rows of a workflow in order, the steps that each waited for, and how many were failed attempts.

    The columns count steps within traces. No steps are copies, and a request that ended a trace without an answer where
    another trace went on. A trace that continues another by a link waits for what had ended there, else for what began
    there last.
    """
    step, start, parents, leaf = (columns[name] for name in ("step", "start", "parent_steps", "leaf"))
    unanswered = columns["unanswered"]
    waits: dict[int, tuple[int, ...]] = {}
    stands: dict[int, tuple[int, ...]] = {}  # what is no step, for what it waited for
    siblings = tree.Siblings(-1, ())
    order: list[tuple[int, int, int, int]] = []
    rows_of: dict[str | None, list[int]] = {}
    failed = 0
    for place, (_, facts, own_rows) in enumerate(traces):
        rows = sorted(own_rows, key=step.__getitem__)
        given = siblings.waited_for(facts.begin)
        if facts.links in rows_of:
            before = [row for row in rows_of[facts.links] if start[row] < facts.begin]
            done = [row for row in before if columns["ended"][row] <= facts.begin]
            followed_by = {parent for row in done for parent in waits[row]}
            given = tuple(row for row in done if row not in followed_by)[-tree.MOST_PARENTS :] or tuple(before[-1:])
        for row in rows:
            waited = tuple(rows[parent] for parent in parents[row])
            if stands and waited:
                waited = tuple(
                    dict.fromkeys(stand_in for before in waited for stand_in in stands.get(before, (before,)))
                )
            waits[row] = waited or given
            attempt = unanswered[row] and leaf[row] and place < len(traces) - 1
            failed += attempt
            if attempt or copied[row]:
                stands[row] = waits[row]
            else:
                order.append((start[row], place, step[row], row))
        rows_of[facts.trace] = [row for row in rows if row not in stands]
        last = dict.fromkeys(stand_in for row in rows if leaf[row] for stand_in in stands.get(row, (row,)))
        if last:
            siblings.ended(facts.begin, facts.end, tuple(last), place)
    in_order = [row for *_, row in sorted(order)]
    number = {row: i for i, row in enumerate(in_order)}
    return in_order, [tuple(sorted(map(number.__getitem__, waits[row]))) for row in in_order], failed


_PARTITION_BYTES: Final = 32 * 2**20
_FEWEST, _MOST = 4, 256
_GZIP_SAVES: Final = 10
_REPORT_BYTES: Final = 8 * 2**20


def _read(
    take: Callable[[Any, Place, Intake], None],
    decode: Decode,
    path: Path | Sequence[Path],
    skip_bad: bool = False,
    parents_elsewhere: bool = False,
) -> Iterator[Source]:
    paths = [path] if isinstance(path, Path) else path
    files = [file for each in paths for file in files_of(each)]
    count = _partitions_for(files)
    with Partitions(count) as spill, Partitions(count) as requests:
        lined = len(files) == 1
        intake = Intake([*map(str, files)], spill, requests, skip_bad, lined=lined, parents_elsewhere=parents_elsewhere)
        workflows = SpanWorkflows(named(paths), intake)
        reading = Documents(files, intake.torn, decode, table_rows)
        reported = 0
        for place, document in reading:
            take(document, place, intake)
            if reading.read_bytes - reported >= _REPORT_BYTES:
                yield workflows.source(None, read_bytes=reading.read_bytes - reported)
                reported = reading.read_bytes
        yield workflows.source(None, read_bytes=reading.read_bytes - reported)
        yield from workflows.sources()


read_spans: Final = partial(_read, take_spans, decode)
"""Read OTLP JSON lines or single spans, plain or gzip; see `JoiningReader`.

With `skip_bad`, the workflow of a bad span is spoiled, and so are the workflows that an unreadable line names. With
`parents_elsewhere`, a trace whose first spans all have one parent that is not there is complete where they ended.
Raises TraceError, which names the file and the line or span, for what is bad or no tree, and if there is no step at
all, and OutputError if the disk of temporary files is full."""

read_mlflow: Final = partial(_read, take_mlflow, msgspec.json.decode)
"""Read exported MLflow traces, plain or gzip; as `read_spans`."""


def read_span_frame(frame: pd.DataFrame, name: str, skip_bad: bool = False) -> Iterator[Source]:
    """Read a data frame of spans, as Phoenix gives it; as `read_spans`."""
    with Partitions(_FEWEST) as spill, Partitions(_FEWEST) as requests:
        intake = Intake([name], spill, requests, skip_bad, lined=True)
        for number, row in frame_rows(frame):
            take_spans(row, Place(0, number), intake)
        yield from SpanWorkflows(name, intake).sources()


def _partitions_for(files: list[Path]) -> int:
    """Number of partitions that keeps each within tens of megabytes; a TraceError if a file does not exist."""
    try:
        size = sum(file.stat().st_size * (_GZIP_SAVES if file.suffix == ".gz" else 1) for file in files)
    except OSError as error:
        raise TraceError(f"{error.filename}: cannot be read ({error.strerror or error}): check the path") from error
    return min(_MOST, max(_FEWEST, size // _PARTITION_BYTES))


class SpanWorkflows:
    """Assembles the workflows of what `intake` took of the source called `name`.

    If it skips bad spans, traces that are not trees, and workflows that lost a span, are skipped.
    """

    def __init__(self, name: str, intake: Intake) -> None:
        self._name = name
        self._intake = intake
        self._rows = self._spoiled = 0

    def sources(self) -> Iterator[Source]:
        """All workflows in chunks of bounded size; call after the last span was added.

        Raises TraceError if spans are not a tree, or none is a step, and OutputError if the disk is full.
        """
        self._intake.complete()
        spans = self._intake.partitions
        with Partitions(spans.count) as waiting, Partitions(spans.count) as linked:
            conversations = PendingConversations(waiting, linked, self._intake.notices)
            for table in spans:
                yield from self._partition(table, conversations)
            for table, spoiled in conversations.workflows():
                yield self.source(None, frozenset(spoiled))
                for start, stop in row_ranges(text_bytes(table)):
                    yield self.source(table.slice(start, stop - start))
        bad = bool(self._intake.skipped)
        yield self.source(None)
        if not bad and not self._rows and not self._spoiled and not self._intake.lost:
            if not self._intake.spans and self._intake.other_signals:
                raise TraceError(
                    f"{self._name}: logs or metrics of OpenTelemetry, and no spans: steps are read from traces, so "
                    "export these too (Claude Code: its beta tracing); see docs/traces.md"
                )
            raise TraceError(
                f"{self._name}: {self._intake.spans} spans, but not one request to a model and no tool call among them "
                '(no span with gen_ai.operation.name "chat", openinference.span.kind "LLM" or mlflow.spanType '
                '"CHAT_MODEL"): instrument the client or framework that calls the model; see docs/traces.md'
            )

    def source(self, table: pa.Table | None, spoiled: frozenset[Workflow] = frozenset(), read_bytes: int = 0) -> Source:
        """A conforming chunk, empty without a table; carries the skip counts since the last one."""
        if table is None:
            table = trace_schema().empty_table().append_column("line", pa.array([], pa.int64()))
        lines = table.column("line").to_numpy() if self._intake.lined else None
        origin = Origin.of(self._name, table.num_rows, lines, first=self._rows + 1)
        self._rows += table.num_rows
        self._spoiled += len(spoiled)
        skipped, notices = dict(self._intake.skipped), dict(+self._intake.notices)
        self._intake.skipped.clear()
        self._intake.notices.clear()
        return Source(conform(table, origin), origin, skipped, spoiled, read_bytes, notices)

    def _partition(self, table: pa.Table, conversations: PendingConversations) -> Iterator[Source]:
        """The workflows that are complete in this partition; the other steps go to the conversations."""
        table = with_cached_tokens(table)
        columns = TraceColumns(table)
        now, later, linked = StepRows(), StepRows(), StepRows()
        spoiled: set[Workflow] = set()
        for begin, stop in pairwise(columns.bounds):
            first = columns.first_span(begin, stop)
            if first == stop:
                continue  # only markers of lost spans, so nothing could be mistaken for a workflow
            steps = self._steps(columns, first, stop)
            facts = columns.facts(first, stop, steps)
            with_links = bool(facts.links) or facts.trace in self._intake.linked
            conversations.learn(facts, with_links, empty=steps is not None and not steps.row)
            home = linked if with_links else later if facts.waits else now
            if begin < first or steps is None:
                if home is now:
                    spoiled.add((facts.known_type, facts.workflow_id))
                else:
                    home.add_mark(first, facts, SPOILED)
            elif steps.row:
                home.add(steps, first, facts)
            elif facts.session is not None and not facts.whole:
                home.add_mark(first, facts, NOT_WHOLE)
        order = columns.order
        del columns
        for rows in later.tables(table, order, keyed=True):
            conversations.add(rows)
        for rows in linked.tables(table, order, keyed=True):
            conversations.linked.add(rows, "trace")
        if spoiled:
            yield self.source(None, frozenset(spoiled))
        for rows in now.tables(table, order):
            yield self.source(rows)

    def _steps(self, columns: TraceColumns, first: int, stop: int) -> tree.TraceSteps | None:
        """The steps of a trace; None if its spans are not a tree, and bad spans are skipped."""
        try:
            steps = tree.steps_of(columns.spans(first, stop))
        except RowError as error:
            if not self._intake.skip_bad:
                place = self._intake.at(*columns.place(first + error.row))
                raise TraceError(f"{place}: {error}") from None
            self._intake.skipped[f"trace with a {error.reason}"] += 1
            return None
        self._intake.notices.update(steps.notes)
        return steps
