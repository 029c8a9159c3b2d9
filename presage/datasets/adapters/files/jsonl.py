"""Plain JSONL, one object a line, one line a step; `.gz` is recognised by content.

Keys are the columns of the trace, and `task_id`, `start_time`, `end_time`; others are dropped. States are arrays of
numbers. NaN, which `json.dumps` writes for what pandas lacks, is no value. A batch of lines is decoded by msgspec
straight into typed rows. msgspec refuses the first bad line, not always with the reason, so the standard library reads
that batch again line by line: that costs ten times as much, and names the line, the column and what was wanted. Arrow's
own JSON reader takes two objects on a line for two rows, and cannot say which line was wrong. Memory is
bounded by a batch of lines.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from presage.datasets.adapters.files.text import DamagedGzipError, not_utf8, numbered_lines, whole_characters
from presage.datasets.schema import (
    KNOWN_COLUMNS,
    REQUIRED,
    STATE_COLUMNS,
    concat,
    conform,
    refuse_misspelt,
    state_sizes,
    trace_schema,
)
from presage.datasets.schema.columns import REFUSALS, first_refused
from presage.datasets.schema.source import Origin, RowError, Source, Workflow, salvage
from presage.errors import TraceError

_BATCH_ROWS: Final = 8192
_BATCH_BYTES: Final = 32 * 2**20

_TEXTS: Final = ("system_prompt", "input_text", "output_text")
_NUMBERS: Final = frozenset({int, float})
# The Python types json.loads may give for each column, what to call them, and the Arrow type of the raw column.
_STRING: Final = (frozenset({str}), "a string", pa.large_string())
_WHOLE: Final = (_NUMBERS, "a whole number", None)
_TIME: Final = (_NUMBERS | {str}, "a time (ISO 8601, or epoch seconds)", None)
_TRUTH: Final = (_NUMBERS | {bool}, "true or false", None)
_KINDS: Final[dict[str, tuple[frozenset[type], str, pa.DataType | None]]] = {
    **dict.fromkeys(
        ("workflow_type", "workflow_id", "agent", "task", "task_id", "kind", "model", "finish_reason"),
        _STRING,
    ),
    **dict.fromkeys(_TEXTS, _STRING),
    **dict.fromkeys(("step", "input_tokens", "output_tokens", "cached_input_tokens", "state_layer"), _WHOLE),
    **dict.fromkeys(("start_time", "end_time", "started_at", "ended_at"), _TIME),
    **dict.fromkeys(("success", "complete"), _TRUTH),
    **dict.fromkeys(("parent_steps", *STATE_COLUMNS), (frozenset({list}), "an array of numbers", None)),
}

_Row = dict[str, Any]
_Lines = list[tuple[int, bytes]]
"""(number from 1, line)."""


class _TypedRow(msgspec.Struct, gc=False):
    """A line whose values all have the types of `_KINDS`."""

    workflow_type: str | None = None
    workflow_id: str | None = None
    step: int | float | None = None
    agent: str | None = None
    task: str | None = None
    task_id: str | None = None
    kind: str | None = None
    model: str | None = None
    input_tokens: int | float | None = None
    output_tokens: int | float | None = None
    cached_input_tokens: int | float | None = None
    finish_reason: str | None = None
    start_time: int | float | str | None = None
    end_time: int | float | str | None = None
    started_at: int | float | str | None = None
    ended_at: int | float | str | None = None
    system_prompt: str | None = None
    input_text: str | None = None
    output_text: str | None = None
    state_layer: int | float | None = None
    success: bool | int | float | None = None
    complete: bool | int | float | None = None
    parent_steps: list[int] | None = None
    prefill_state: list[int | float] | None = None
    completion_state: list[int | float] | None = None


_DECODE: Final = msgspec.json.Decoder(_TypedRow).decode
_FIELDS: Final = {column: attrgetter(column) for column in _TypedRow.__struct_fields__}


def read_jsonl(
    path: Path, *, skip_bad: bool = False, progress: Callable[[int], None] | None = None
) -> Iterator[Source]:
    """Read a JSONL trace, a batch of lines at a time.

    Args:
        path: the file, plain or gzip.
        skip_bad: count lines that are bad instead of raising. Their workflow is marked as spoiled; where a line does
            not tell its workflow (no JSON, a cut file), that is the workflow of the line before it.
        progress: called with the number of steps read since its last call.

    Raises:
        TraceError: the file cannot be read, its gzip data are cut or damaged, a line is no JSON object, or a value is
            missing or has a wrong type; names the line and the column.
    """
    reader = _JsonlReader(path, skip_bad)
    for batch in reader.batches():
        source = reader.take(batch)
        if progress is not None:
            progress(source.table.num_rows)
        yield source


class _JsonlReader:
    """The state of one reading: what was skipped since the last chunk, the widths of the states, the last workflow."""

    def __init__(self, path: Path, skip_bad: bool) -> None:
        self.path = path
        self.name = str(path)
        self.skip_bad = skip_bad
        self.skipped: Counter[str] = Counter()
        self.spoiled: set[Workflow] = set()
        self.sizes: tuple[int | None, int | None] = (None, None)
        self.last: Workflow | None = None
        self.position = 0
        self.reported = 0

    def batches(self) -> Iterator[_Lines]:
        """Batches of lines that are not blank; the last may be empty, where only the end of the file was bad."""
        batch: _Lines = []
        size = number = 0
        try:
            with numbered_lines(self.path) as lines:
                for number, line in lines:
                    if line.isspace() or not line:
                        continue
                    batch.append((number, line))
                    size += len(line)
                    if len(batch) == _BATCH_ROWS or size >= _BATCH_BYTES:
                        self.position = lines.read_bytes
                        yield batch
                        batch, size = [], 0
                self.position = lines.read_bytes
        except DamagedGzipError as error:
            if not self.skip_bad:
                message = (
                    f"{self.name}: the gzip data are {error.what} after line {number}: copy or write the file again"
                )
                raise TraceError(message) from None
            yield batch
            batch = []
            self.skipped[f"file with {error.what} gzip data"] += 1
            self._spoil(self.last)
        if batch or self.skipped:
            yield batch

    def take(self, batch: _Lines) -> Source:
        """A batch as a chunk."""
        try:
            numbers, table = self._typed(batch)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, RowError):
            numbers, table = self._line_by_line(batch)
        source = Source(
            table,
            Origin.of(self.name, len(numbers), np.asarray(numbers, np.int64)),
            dict(self.skipped),
            frozenset(self.spoiled),
            self.position - self.reported,
        )
        self.skipped.clear()
        self.spoiled.clear()
        self.reported = self.position
        return source

    def _typed(self, batch: _Lines) -> tuple[list[int], pa.Table]:
        rows = [_DECODE(line) for _, line in batch]
        columns = {}
        for column, field in _FIELDS.items():
            values = list(map(field, rows))
            if column in REQUIRED or values.count(None) < len(values):
                columns[column] = values
        numbers = [number for number, _ in batch]
        table = self._build(numbers, columns)
        if rows:
            self.last = (str(rows[-1].workflow_type), str(rows[-1].workflow_id))
        return numbers, table

    def _line_by_line(self, batch: _Lines) -> tuple[list[int], pa.Table]:
        """The same, slowly: raises for the first bad line, or skips it."""
        parsed = [(number, row) for number, line in batch if (row := self._parse(number, line)) is not None]
        numbers, rows = [number for number, _ in parsed], [row for _, row in parsed]
        refuse_misspelt(set().union(*rows), self.name, REQUIRED)

        def build(start: int, stop: int) -> pa.Table:
            part = rows[start:stop]
            present = set().union(*part) & KNOWN_COLUMNS | set(REQUIRED)
            columns = {column: [row.get(column) for row in part] for column in sorted(present)}
            return self._build(numbers[start:stop], columns)

        if not self.skip_bad:
            return numbers, build(0, len(rows))

        def on_bad(row: int, error: RowError) -> None:
            self.skipped[f"line with {error.reason}"] += 1
            self._spoil(_workflow(rows[row]) or (_workflow(rows[row - 1]) if row else None))

        stretches = salvage(len(rows), build, on_bad)
        if not stretches:
            return [], trace_schema().empty_table()
        table = concat([part for _, _, part in stretches], [self.name] * len(stretches))
        return [number for start, stop, _ in stretches for number in numbers[start:stop]], table

    def _parse(self, number: int, line: bytes) -> _Row | None:
        """The object on a line; None if the line is bad and skipped."""
        try:
            row = _object(line.decode())
        except UnicodeDecodeError as error:
            self.last = _workflow_of_torn(line) or self.last
            problem, reason = not_utf8(error), "no UTF-8"
        except (ValueError, RecursionError) as error:
            detail = (
                f"{error.msg} at character {error.colno}" if isinstance(error, json.JSONDecodeError) else "unreadable"
            )
            problem, reason = f"not JSON ({detail}); one JSON object a line is wanted: repair the line", "no JSON"
        else:
            if isinstance(row, dict):
                self.last = _workflow(row)
                return row
            problem = f"a JSON {type(row).__name__}; one JSON object a line is wanted: repair the line"
            reason = "no JSON object"
        if not self.skip_bad:
            raise TraceError(f"{self.name}, line {number}: {problem}")
        self.skipped[f"line with {reason}"] += 1
        self._spoil(self.last)
        return None

    def _spoil(self, workflow: Workflow | None) -> None:
        if workflow is not None:
            self.spoiled.add(workflow)

    def _build(self, numbers: list[int], values: Mapping[str, list[Any]]) -> pa.Table:
        origin = Origin.of(self.name, len(numbers), np.asarray(numbers, np.int64))
        table = pa.table({name: self._column(name, of, origin) for name, of in values.items()})
        table = conform(table, origin, self.sizes)
        found = state_sizes(table.schema)
        self.sizes = (self.sizes[0] or found[0], self.sizes[1] or found[1])
        return table

    def _column(self, column: str, values: list[Any], origin: Origin) -> pa.Array:
        allowed, wanted, arrow_type = _KINDS[column]
        found = set(map(type, values)) - {type(None)}
        if not found <= allowed:
            row = next(i for i, value in enumerate(values) if value is not None and type(value) not in allowed)
            message = f"type {type(values[row]).__name__}; {wanted} is wanted: convert it"
            raise origin.bad(row, column, message, f"{column} of a wrong type")
        if column in STATE_COLUMNS:
            for row, value in enumerate(values):
                if value and not set(map(type, value)) <= _NUMBERS:
                    message = "an array of numbers only is wanted: repair it"
                    raise origin.bad(row, column, message, f"{column} not of numbers")
        if column == "parent_steps":
            for row, value in enumerate(values):
                if value and not set(map(type, value)) <= {int}:
                    message = "holds something that is no whole number; an array of step numbers is wanted: convert it"
                    raise origin.bad(row, column, message, f"{column} of a wrong type")
        raw_type = _raw_type(column, found) if arrow_type is None else arrow_type
        try:
            return pa.array(values, raw_type)
        except REFUSALS:
            row = first_refused(values, raw_type)
            message = f"the value does not fit {wanted} (too large, or text that is no valid Unicode): correct it"
            raise origin.bad(row, column, message, f"{column} does not fit") from None


def _workflow(row: _Row) -> Workflow | None:
    workflow_type, workflow_id = row.get("workflow_type"), row.get("workflow_id")
    return (workflow_type, workflow_id) if isinstance(workflow_type, str) and isinstance(workflow_id, str) else None


def _object(text: str) -> Any:
    """The JSON value of a line; where it is an object, NaN is no value, and texts that were cut inside a character
    have U+FFFD there.
    """
    row = json.loads(text)
    if not isinstance(row, dict):
        return row
    whole = whole_characters(text)
    if whole != text:
        mended = json.loads(whole)
        row |= {column: mended[column] for column in _TEXTS if column in row}
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}


def _workflow_of_torn(line: bytes) -> Workflow | None:
    """The workflow of a line with bytes that are no UTF-8, unless they stand in its name."""
    try:
        row = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    workflow = _workflow(row) if isinstance(row, dict) else None
    return None if workflow is None or "\ufffd" in "".join(workflow) else workflow


def _raw_type(column: str, found: set[type]) -> pa.DataType:
    """The Arrow type of values of these types."""
    if column == "parent_steps":
        return pa.list_(pa.int64())
    if column in STATE_COLUMNS:
        return pa.list_(pa.float64())
    if str in found:
        return pa.string()
    if _KINDS[column] is _TRUTH and found <= {bool}:
        return pa.bool_()
    # 3.0 is a whole number, 3.5 is refused by the cast to the schema.
    return pa.float64() if found & {float, bool} else pa.int64()
