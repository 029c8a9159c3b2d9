"""Traces of plain requests, for replay: arrival times and lengths, without workflows or text.

JSON lines: `timestamp` (milliseconds), `input_length`, `output_length` (tokens) and optionally `hash_ids`, one for each
512 tokens of the prompt, equal if these and all earlier tokens are equal (Qin et al., "Mooncake", FAST 2025). CSV:
`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`, as in the Azure LLM inference traces (Patel et al., "Splitwise", ISCA
2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import msgspec

from presage.datasets.adapters.files.text import CsvRow, CsvRows, Documents, Place, first_document
from presage.datasets.schema import KNOWN_COLUMNS, require_columns
from presage.errors import TraceError

HASH_TOKENS: Final = 512
"""Tokens of a prompt per hash id; the last id may cover fewer."""

_CSV_SUFFIXES: Final = (".csv", ".csv.gz")
_CSV: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_LENGTHS: Final = ("input_length", "output_length")

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """One request."""

    arrives_s: float  # seconds after the first request of the trace
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()  # of the prompt; empty if not recorded


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e18)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None


def holds_requests(path: Path) -> bool:
    """Whether a file is a trace of plain requests, judged by its first line."""
    if path.is_dir() or path.name.endswith(".parquet"):
        return False
    if path.name.endswith(_CSV_SUFFIXES):
        names = set(CsvRows(path).names)
        return not names.isdisjoint(_CSV) or names.isdisjoint(KNOWN_COLUMNS)
    first = first_document(path)
    return isinstance(first, dict) and "timestamp" in first and any(name in first for name in _LENGTHS)


def read_requests(paths: Sequence[Path]) -> list[PlainRequest]:
    """All requests of some files, in order of arrival.

    Raises TraceError if a file cannot be read, a line is malformed (the message names it), or there is no request.
    """
    requests: list[PlainRequest] = []
    for path in paths:
        requests += _csv(path) if path.name.endswith(_CSV_SUFFIXES) else _lines(path)
    if not requests:
        raise TraceError(f"no request in {', '.join(map(str, paths))}: give a file with at least one")
    first = min(request.arrives_s for request in requests)
    shifted = (
        PlainRequest(request.arrives_s - first, request.input_tokens, request.output_tokens, request.hash_ids)
        for request in requests
    )
    return sorted(shifted, key=lambda request: request.arrives_s)


def _lines(path: Path) -> Iterator[PlainRequest]:
    def torn(place: Place, message: str, reason: str, line: bytes) -> None:
        raise TraceError(f"{path}, line {place.line}: {message}")

    for place, document in Documents([path], torn, msgspec.json.decode):
        try:
            line = msgspec.convert(document, _Line)
        except msgspec.ValidationError as error:
            raise TraceError(f"{path}, line {place.line}: {_in_words(error)}") from None
        ids = tuple(line.hash_ids or ())
        if len(ids) > -(-line.input_length // HASH_TOKENS):
            raise TraceError(
                f"{path}, line {place.line}: {len(ids)} hash_ids for {line.input_length} tokens; expected one for "
                f"each {HASH_TOKENS} tokens: correct the line"
            )
        yield PlainRequest(line.timestamp / 1e3, line.input_length, line.output_length, ids)


def _in_words(error: msgspec.ValidationError) -> str:
    text = str(error)
    missing = next((name for name in _LENGTHS if f"`{name}`" in text and "missing" in text), None)
    if missing:
        return f"no {missing}: without sizes of prompts and outputs neither cache nor time can be replayed; record them"
    if "`timestamp`" in text and "missing" in text:
        return "no timestamp, so when requests came cannot be replayed; record it"
    return f"{text[0].lower()}{text[1:]}; correct the line"


def _csv(path: Path) -> Iterator[PlainRequest]:
    rows = CsvRows(path)
    require_columns(rows.names, str(path), _CSV, _CSV)
    for row in rows:
        if row.problem:
            raise TraceError(f"{path}, line {row.line}: {row.problem}")
        yield _row(path, row, dict(zip(rows.names, row.fields, strict=True)))


def _row(path: Path, csv_row: CsvRow, row: dict[str, str]) -> PlainRequest:
    column = _CSV[0]
    try:
        came = datetime.fromisoformat(row[column])
        sizes = []
        for column in _CSV[1:]:
            size = int(row[column])
            if not 0 <= size < 2**31:
                raise ValueError
            sizes.append(size)
    except ValueError:
        wanted = "a time such as 2024-05-10 00:00:00.009930" if column == _CSV[0] else "a number of tokens"
        raise TraceError(
            f"{path}, line {csv_row.line}: {column} is malformed; expected {wanted}: correct the line"
        ) from None
    return PlainRequest((came if came.tzinfo else came.replace(tzinfo=UTC)).timestamp(), sizes[0], sizes[1])
