"""Plain JSONL, one step a line, plain or gzip; the keys are the columns of the trace.

msgspec decodes a batch of lines into typed rows. It rejects the first bad line without always naming the reason, so the
standard library parses such a batch again, line by line: ten times slower, but its errors name line, column and
expected type. Arrow's own JSON reader reads two objects on a line as two rows and cannot name a line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from presage.datasets.adapters.files.tables import Batch, array_of, sources, wrong_type
from presage.datasets.adapters.files.text import DamagedGzipError, not_utf8, numbered_lines, whole_characters
from presage.datasets.schema import COLUMN_TYPES, KNOWN_COLUMNS, REQUIRED, misspelt, refuse_misspelt, require_columns
from presage.datasets.schema.columns import KINDS
from presage.datasets.schema.messages import fields
from presage.datasets.schema.source import Origin, RowError, Source

_BATCH_ROWS: Final = 8192
_BATCH_BYTES: Final = 32 * 2**20
_TEXTS: Final = ("system_prompt", "input_text", "output_text")
_TYPES: Final = {name: KINDS[column].json | None for name, column in COLUMN_TYPES.items()}
_TypedRow: Final = msgspec.defstruct("_TypedRow", [(name, type_, None) for name, type_ in _TYPES.items()], gc=False)
_DECODE: Final = msgspec.json.Decoder(_TypedRow).decode
_FIELDS: Final = {name: attrgetter(name) for name in COLUMN_TYPES}


def read_jsonl(path: Path, skip_bad: bool = False) -> Iterator[Source]:
    """Read a JSONL trace, plain or gzip, a batch of lines at a time; see `Reader`."""
    return sources(_batches(path), str(path), skip_bad)


class _Row(NamedTuple):
    """The object of a line; of a bad one what is known of it, the problem, and a short reason for counting."""

    values: dict[str, Any]
    problem: str = ""
    reason: str = ""


_Line = bytes | _Row


def _batches(path: Path) -> Iterator[Batch]:
    numbers: list[int] = []
    lines: list[_Line] = []
    size = number = position = 0

    def batch() -> Batch:
        origin = Origin.of(str(path), len(lines), np.array(numbers, np.int64))
        return Batch(_JsonRows(lines, str(path)), origin, position)

    try:
        with numbered_lines(path) as (opened, read_bytes):
            for number, line in opened:
                if line.isspace() or not line:
                    continue
                numbers.append(number)
                lines.append(line)
                size += len(line)
                if len(lines) == _BATCH_ROWS or size >= _BATCH_BYTES:
                    position = read_bytes()
                    yield batch()
                    numbers, lines, size = [], [], 0
            position = read_bytes()
    except DamagedGzipError as error:
        numbers.append(max(1, number))
        lines.append(_Row({}, *error.args))
    if lines:
        yield batch()


@dataclass
class _JsonRows:
    lines: Sequence[_Line]
    name: str
    parsed: list[_Row] | None = None

    def table(self, start: int, stop: int, origin: Origin) -> pa.Table:
        if self.parsed is None:
            if (typed := self._typed(start, stop, origin)) is not None:
                return typed
            self.parsed = [_parsed(line) for line in self.lines]
            keys = set[str]().union(*(row.values for row in self.parsed if not row.problem))
            refuse_misspelt(keys, self.name, REQUIRED)
            if misspelt(keys, set(REQUIRED) - keys, KNOWN_COLUMNS):
                require_columns(sorted(keys), self.name, REQUIRED, KNOWN_COLUMNS)
        for place, row in enumerate(self.parsed[start:stop]):
            if row.problem:
                raise RowError(f"{origin.at(place)}: {row.problem}", row=place, reason=row.reason)
        rows = [row.values for row in self.parsed[start:stop]]
        present = set[str]().union(*rows) & KNOWN_COLUMNS | set(REQUIRED)
        columns = {name: [row.get(name) for row in rows] for name in sorted(present)}
        for name, values in columns.items():
            _check_types(values, name, origin)
        return _table(columns, origin)

    def workflow(self, row: int) -> tuple[object, object]:
        parsed = self.parsed[row] if self.parsed is not None else _parsed(self.lines[row])
        return parsed.values.get("workflow_type"), parsed.values.get("workflow_id")

    def _typed(self, start: int, stop: int, origin: Origin) -> pa.Table | None:
        """The columns, decoded fast; None if a line needs the slow path."""
        try:
            rows = [_DECODE(line) for line in self.lines[start:stop]]  # type: ignore[arg-type]
            columns = {name: list(map(field, rows)) for name, field in _FIELDS.items()}
            if any(None in columns[name] for name in REQUIRED):
                return None  # a key may be misspelt
            return _table(
                {n: values for n, values in columns.items() if values.count(None) < len(values) or n in REQUIRED},
                origin,
            )
        except (msgspec.MsgspecError, TypeError, UnicodeError, RecursionError, RowError):
            return None


def _table(columns: Mapping[str, list[Any]], origin: Origin) -> pa.Table:
    return pa.table({name: array_of(values, name, origin, from_pandas=False) for name, values in columns.items()})


def _check_types(values: Sequence[Any], name: str, origin: Origin) -> None:
    """Raise for values that Arrow would accept but the schema does not, such as true for 1."""
    for row, value in enumerate(values):
        try:
            msgspec.convert(value, _TYPES[name])
        except msgspec.ValidationError:
            if not isinstance(value, list) or not pa.types.is_list(COLUMN_TYPES[name]):
                raise wrong_type(value, row, name, origin) from None
            message = f"expected {KINDS[COLUMN_TYPES[name]].words} only: repair it"
            raise origin.bad(row, name, message, f"{name} of a wrong type") from None


def _parsed(line: _Line) -> _Row:
    if isinstance(line, _Row):
        return line
    try:
        row = _object(line.decode())
    except UnicodeDecodeError as error:
        return _Row(_torn(line), not_utf8(error), "no UTF-8")
    except (ValueError, RecursionError) as error:
        detail = f"{error.msg} at character {error.colno}" if isinstance(error, json.JSONDecodeError) else "unreadable"
        return _Row({}, f"not JSON ({detail}); expected one JSON object a line: repair the line", "no JSON")
    if isinstance(row, dict):
        return _Row(row)
    problem = f"a JSON {type(row).__name__}; expected one JSON object a line: repair the line"
    return _Row({}, problem, "no JSON object")


def _object(text: str) -> Any:
    """The JSON value of a line. NaN becomes None, and half a surrogate pair at the end of a cut text U+FFFD."""
    row = json.loads(text)
    if not isinstance(row, dict):
        return row
    whole = whole_characters(text)
    if whole != text:
        mended = json.loads(whole)
        row |= {column: mended[column] for column in _TEXTS if column in row}
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}


def _torn(line: bytes) -> dict[str, Any]:
    """The values of a line with invalid UTF-8, unless the invalid bytes are in the name of its workflow."""
    with suppress(ValueError, RecursionError):
        row = fields(json.loads(line.decode(errors="replace")))
        if "\ufffd" not in f"{row.get('workflow_type')}{row.get('workflow_id')}":
            return row
    return {}
