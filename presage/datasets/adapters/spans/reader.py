"""Readers of span formats: documents to spans, spans to the steps of workflows.

A trace is a workflow, unless it has a conversation (session) id: then all traces of that conversation are one. Spans
come partitioned by trace, so a tree is whole in its partition. Steps whose workflow cannot be told from their trace
alone are spilled once more, by workflow id, and numbered by `conversations.py` when every trace has been read:

- those of a conversation, whose traces may lie in any partition;
- those of a trace without a root that does not name its workflow: its type is learnt from the other traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from presage.datasets.adapters.files.text import Decode, Documents, Place, files_of
from presage.datasets.adapters.spans.conversations import PendingConversations
from presage.datasets.adapters.spans.intake import Intake
from presage.datasets.adapters.spans.mlflow import take_mlflow
from presage.datasets.adapters.spans.otlp import decode, take_spans
from presage.datasets.adapters.spans.partitions import Partitions
from presage.datasets.adapters.spans.steps import StepRows, TraceColumns, stretches, text_bytes
from presage.datasets.adapters.spans.tree import BrokenTreeError, TraceSteps, steps_of
from presage.datasets.schema import conform, trace_schema
from presage.datasets.schema.source import Origin, Source, Workflow, named
from presage.errors import TraceError

_PARTITION_BYTES: Final = 32 * 2**20
_FEWEST, _MOST = 4, 256
_GZIP_SAVES: Final = 10
_REPORT_BYTES: Final = 8 * 2**20


def read_spans(
    path: Path | Sequence[Path], *, skip_bad: bool = False, progress: Callable[[int], None] | None = None
) -> Iterator[Source]:
    """Read OTLP JSON lines or single spans, plain or gzip; see `JoiningReader`.

    With `skip_bad`, the workflow of a bad span is spoiled, and so are the workflows that an unreadable line names.
    `progress` counts requests and tool calls.

    Raises:
        TraceError: a file cannot be read, a line is no JSON or no spans, a span lacks an id or a start or has an
            attribute of a wrong type, spans of a trace are no tree, or there is no step at all; names the file and the
            line or span.
        OutputError: the disk of temporary files is full.
    """
    return read_documents(path, take_spans, decode, skip_bad, progress)


def read_documents(
    path: Path | Sequence[Path],
    take: Callable[[Any, Place, Intake], None],
    decode: Decode,
    skip_bad: bool,
    progress: Callable[[int], None] | None,
) -> Iterator[Source]:
    """Read JSON documents; `take` hands the spans of each to the intake. Otherwise as `read_spans`."""
    paths = [path] if isinstance(path, Path) else path
    files = [file for one in paths for file in files_of(one)]
    with Partitions(partitions_for(files)) as spill:
        intake = Intake(
            [str(file) for file in files], partial(spill.add, key="trace"), skip_bad, progress, lined=len(files) == 1
        )
        workflows = SpanWorkflows(named(paths), intake, spill, skip_bad)
        reading = Documents(files, intake.torn, decode)
        reported = 0
        for place, document in reading:
            take(document, place, intake)
            if reading.read_bytes - reported >= _REPORT_BYTES:
                yield workflows.source(None, read_bytes=reading.read_bytes - reported)
                reported = reading.read_bytes
        intake.flush()
        yield workflows.source(None, read_bytes=reading.read_bytes - reported)
        yield from workflows.sources()


def partitions_for(files: list[Path]) -> int:
    """How many partitions keep one within tens of megabytes.

    Raises:
        TraceError: a file is not there.
    """
    size = 0
    for file in files:
        try:
            size += file.stat().st_size * (_GZIP_SAVES if file.suffix == ".gz" else 1)
        except OSError as error:
            raise TraceError(f"{file}: cannot be read ({error.strerror or error}): check the path") from error
    return min(_MOST, max(_FEWEST, size // _PARTITION_BYTES))


def read_mlflow(
    path: Path | Sequence[Path], *, skip_bad: bool = False, progress: Callable[[int], None] | None = None
) -> Iterator[Source]:
    """Read exported MLflow traces, plain or gzip; as `read_spans`."""
    return read_documents(path, take_mlflow, msgspec.json.decode, skip_bad, progress)


class SpanWorkflows:
    """The workflows of the spans in `spans`, where `intake` put them.

    Args:
        name: of the source, for messages.
        intake: counts what is skipped.
        spans: partitioned by trace.
        skip_bad: leave out traces that are no trees, and workflows that lost a span, instead of raising.
    """

    def __init__(self, name: str, intake: Intake, spans: Partitions, skip_bad: bool) -> None:
        self._name = name
        self._intake = intake
        self._spans = spans
        self._skip_bad = skip_bad
        self._lined = intake.lined
        self._rows = 0
        self._spoiled = 0

    def sources(self) -> Iterator[Source]:
        """All workflows in chunks of bounded size, once every span was taken in.

        Raises:
            TraceError: spans are no tree, or not one step is among them.
            OutputError: the disk of temporary files is full.
        """
        with Partitions(self._spans.count) as waiting:
            conversations = PendingConversations(waiting)
            for number in range(self._spans.count):
                table = self._spans.rows(number)
                if table is not None:
                    yield from self._partition(table, conversations)
            for table, spoiled in conversations.workflows():
                yield self.source(None, frozenset(spoiled))
                for start, stop in stretches(text_bytes(table)):
                    yield self.source(table.slice(start, stop - start))
        if self._intake.skipped:
            yield self.source(None)
        elif not self._rows and not self._spoiled and not self._intake.lost:
            raise TraceError(
                f"{self._name}: {self._intake.spans} spans, but not one request to a model and no tool call among them "
                '(no span with gen_ai.operation.name "chat", openinference.span.kind "LLM" or mlflow.spanType '
                '"CHAT_MODEL"): instrument the client or framework that calls the model; docs/traces.md says how'
            )

    def source(self, table: pa.Table | None, spoiled: frozenset[Workflow] = frozenset(), read_bytes: int = 0) -> Source:
        """A conforming chunk, empty without a table; carries what was skipped since the last one."""
        first = self._rows + 1
        if table is None:
            conforming = trace_schema().empty_table()
            lines = np.zeros(0, np.int64) if self._lined else None
        else:
            lines = table.column("line").to_numpy() if self._lined else None
            conforming = conform(table, Origin.of(self._name, table.num_rows, lines, first=first))
        self._rows += conforming.num_rows
        self._spoiled += len(spoiled)
        skipped = dict(self._intake.skipped)
        self._intake.skipped.clear()
        origin = Origin.of(self._name, conforming.num_rows, lines, first=first)
        return Source(conforming, origin, skipped, spoiled, read_bytes)

    def _partition(self, table: pa.Table, conversations: PendingConversations) -> Iterator[Source]:
        """The workflows that lie in this partition alone; the other steps go to the conversations."""
        columns = TraceColumns(table)
        now, later = StepRows(), StepRows()
        spoiled: set[Workflow] = set()
        for first, stop in zip(columns.bounds[:-1], columns.bounds[1:], strict=True):
            workflow = self._trace(columns, first, stop, now, later, conversations)
            if workflow is not None:
                spoiled.add(workflow)
        order = columns.order
        del columns
        for rows in later.tables(table, order):
            conversations.add(rows)
        if spoiled:
            yield self.source(None, frozenset(spoiled))
        for rows in now.tables(table, order):
            yield self.source(rows)

    def _trace(
        self,
        columns: TraceColumns,
        first: int,
        stop: int,
        now: StepRows,
        later: StepRows,
        conversations: PendingConversations,
    ) -> Workflow | None:
        """Add the steps of a trace to `now` or `later`; returns its workflow if it is known to be spoiled."""
        bad = columns.any_bad(first, stop)
        if bad:
            first = columns.first_span(first, stop)
            if first == stop:
                return None  # only notes of lost spans: nothing is left that could pass for a workflow
        steps: TraceSteps | None = None
        try:
            steps = steps_of(columns.spans(first, stop))
        except BrokenTreeError as error:
            if not self._skip_bad:
                place = self._intake.at(*columns.place(first + error.row))
                raise TraceError(f"{place}: {error.message}") from None
            self._intake.skipped[f"trace with a {error.reason}"] += 1
            bad = True
        facts = columns.facts(first, stop, steps)
        conversations.learn(facts)
        if bad or steps is None:
            if not facts.waits:
                return facts.known_type, facts.workflow_id
            later.add_spoiled(first, facts)
        elif steps.row:
            (later if facts.waits else now).add(steps, first, facts)
        return None
