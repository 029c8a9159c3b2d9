"""Rows of outcomes out of files: one object a line of JSONL, Parquet, or CSV (gzip is recognised by content).

A row is a prompt, a model and whether the model solved it, and optionally the task, output tokens and cost; other
columns are ignored. Files are read in portions, so memory is bounded whatever their size. No message shows a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import pyarrow as pa

from presage.datasets.adapters.tabular import open_parquet, row_batches
from presage.datasets.adapters.text_files import SUFFIXES as JSON_SUFFIXES
from presage.datasets.adapters.text_files import CsvRows, Documents, Place
from presage.datasets.outcomes.schema import normalise
from presage.datasets.schema import listed
from presage.errors import TraceError

REQUIRED: Final = ("prompt", "model", "correct")
OPTIONAL: Final = ("task", "output_tokens", "cost")
PARQUET: Final = ".parquet"
CSV: Final = (".csv", ".csv.gz")
NO_LABEL: Final = "no label"


class OutcomeRow(NamedTuple):
    """One row, checked; NaN where a number is unknown."""

    prompt: str
    key: str
    model: str
    correct: float
    task: str | None
    output_tokens: float
    cost: float


class OnBad(Protocol):
    """Told of a row that cannot be taken; raises, or returns to go on with the next."""

    def __call__(self, message: str, reason: str) -> None:
        """`message` names file, row and column; `reason` is a short phrase to count by."""
        ...


class _BadRowError(Exception):
    """What is wrong with a row: column, message, reason."""

    def __init__(self, column: str, message: str, reason: str) -> None:
        self.column, self.message, self.reason = column, message, reason


def files_of(path: Path) -> list[Path]:
    """The files of a path, by name: itself, or the JSON, Parquet and CSV files of a folder.

    Raises:
        TraceError: a folder without any, or a name that says none of these.
    """
    suffixes = (*JSON_SUFFIXES, PARQUET, *CSV)
    if not path.is_dir():
        if not path.name.endswith(suffixes):
            raise TraceError(f"{path}: outcomes are read from {', '.join(suffixes)} files: rename or convert the file")
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith(suffixes) and file.is_file())
    if not files:
        raise TraceError(f"{path}: a folder without {', '.join(suffixes)} files: check the path")
    return files


def outcome_rows(file: Path, on_bad: OnBad) -> Iterator[OutcomeRow | None]:
    """The rows of a file; None for a row whose `correct` is null.

    Raises:
        TraceError: the file cannot be read, or lacks a column that is required; and what `on_bad` raises.
    """
    if file.name.endswith(PARQUET):
        rows = _parquet(file)
    else:
        rows = _csv(file, on_bad) if file.name.endswith(CSV) else _json(file, on_bad)
    for place, row in rows:
        try:
            yield _checked(row)
        except _BadRowError as bad:
            column = f', column "{bad.column}"' if bad.column else ""
            on_bad(f"{file}, {place}{column}: {bad.message}", bad.reason)


def _json(file: Path, on_bad: OnBad) -> Iterator[tuple[str, Any]]:
    def torn(place: Place, message: str, reason: str, line: bytes) -> None:
        on_bad(f"{file}, line {place.line}: {message}", f"line with {reason}")

    for place, document in Documents([file], torn, msgspec.json.decode):
        yield f"line {place.line}", document


def _csv(file: Path, on_bad: OnBad) -> Iterator[tuple[str, Any]]:
    rows = CsvRows(file)
    _check_columns(file, rows.names)
    for row in rows:
        if row.problem:
            on_bad(f"{file}, line {row.line}: {row.problem}", f"line with {row.reason}")
            continue
        found: dict[str, Any] = dict(zip(rows.names, row.fields, strict=True))
        meant = {name: _meant(found[name]) for name in ("correct", "output_tokens", "cost") if name in found}
        yield f"line {row.line}", found | meant | {"task": found.get("task") or None}


def _meant(field: str) -> bool | float | str | None:
    """What a field of CSV means that is no text; a string where it means nothing known."""
    word = field.strip().lower()
    if word in ("true", "false"):
        return word == "true"
    try:
        return float(word) if word else None
    except ValueError:
        return field


def _check_columns(file: Path, names: Sequence[str]) -> None:
    if missing := [name for name in REQUIRED if name not in names]:
        raise TraceError(
            f'{file}: no column "{missing[0]}"; found: {listed(names)}; the columns prompt, model and correct are '
            "wanted: rename them"
        )
    if twice := [name for name in (*REQUIRED, *OPTIONAL) if names.count(name) > 1]:
        raise TraceError(f'{file}: column "{twice[0]}" stands there twice, one is wanted: drop or rename the other')


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with open_parquet(file) as opened:
            names = opened.schema_arrow.names
            _check_columns(file, names)
            row = 0
            for table, _ in row_batches(opened, [name for name in (*REQUIRED, *OPTIONAL) if name in names]):
                for found in table.to_pylist():
                    row += 1
                    yield f"row {row}", found
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, TraceError):
            raise
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(f"{file}: cannot be read as Parquet ({detail[:200]}): copy or write the file again") from error


def _checked(row: Any) -> OutcomeRow | None:
    if not isinstance(row, Mapping):
        raise _BadRowError(
            "", f"a JSON {type(row).__name__}; one JSON object a line is wanted: repair it", "no JSON object"
        )
    for column in REQUIRED:
        if column not in row:
            raise _BadRowError(
                column, "missing; prompt, model and correct are wanted in every row: add it", f"no {column}"
            )
    prompt, model = _text(row, "prompt"), _text(row, "model")
    key = normalise(prompt)
    if not key:
        raise _BadRowError(
            "prompt", "no text but white space; the text of the request is wanted: drop the row", "no text"
        )
    tokens, cost = _amount(row, "output_tokens"), _amount(row, "cost")
    task = None if row.get("task") is None else _text(row, "task")
    if row["correct"] is None or row["correct"] != row["correct"]:  # NaN of a float column without pandas' nulls
        return None
    return OutcomeRow(prompt, key, model, _label(row["correct"]), task, tokens, cost)


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise _BadRowError(
            column, f"type {type(value).__name__}; a string is wanted: convert it", f"{column} of a wrong type"
        )
    if not value:
        raise _BadRowError(column, "an empty string; text is wanted: drop the row or fill it in", f"no {column}")
    return value


def _label(value: Any) -> float:
    if not isinstance(value, bool | int | float):
        what = f"type {type(value).__name__}"
    elif not 0 <= value <= 1:  # not of NaN either
        what = f"{value}"
    else:
        return float(value)
    raise _BadRowError(
        "correct", f"{what}; 0 or 1, or a share of tries between them, is wanted: correct it", "label not 0..1"
    )


def _amount(row: Mapping[str, Any], column: str) -> float:
    value = row.get(column)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _BadRowError(
            column, f"type {type(value).__name__}; a number is wanted: convert it", f"{column} of a wrong type"
        )
    if not 0 <= value < math.inf:
        raise _BadRowError(
            column, f"{value}; a finite number, 0 or more, is wanted: correct it", f"{column} out of range"
        )
    return float(value)
