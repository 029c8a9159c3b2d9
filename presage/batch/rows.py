"""The rows of a batch in a file of JSON lines. They stay in the file; a row is read when it is its turn."""

from __future__ import annotations

import codecs
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from presage.batch.plan import valid_text
from presage.errors import TraceError


def row_id(row: Mapping[str, Any], number: int) -> Any:
    """The row's `id` as it came, else its number."""
    sent = row.get("id")
    return number if sent is None else valid_text(sent) if isinstance(sent, str) else sent


class RowFile(Sequence[dict[str, Any]]):
    """The rows of a file, checked once: JSON objects, one a line, with different ids.

    Attributes:
        fields: that every row has.

    Raises:
        TraceError: the file cannot be read, or a line is no row.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begins = array("q")
        self._first = 1
        self._lacking: dict[str, int] = {}  # the first line without a field that others have
        seen: dict[str, None] = {}
        names: dict[str, int] = {}
        try:
            self._file = path.open("rb")
            self._skipped = len(codecs.BOM_UTF8) if self._file.read(3) == codecs.BOM_UTF8 else 0
            offset = self._file.seek(self._skipped)
            for number, line in enumerate(self._file, 1):
                begins, offset = offset, offset + len(line)
                if not line.strip():
                    continue
                row = self._row(line, number)
                name = str(row_id(row, len(self._begins)))
                if name in names:
                    raise TraceError(
                        f"{path}, line {number}: id {name!r} is that of line {names[name]} too; ids are unique"
                    )
                names[name] = number
                for field in seen.keys() - row.keys():
                    self._lacking.setdefault(field, number)
                for field in row.keys() - seen.keys() if self._begins else ():
                    self._lacking[field] = self._first
                if not self._begins:
                    self._first = number
                seen |= dict.fromkeys(row)
                self._begins.append(begins)
        except OSError as error:
            raise TraceError(
                f"{path}: it cannot be read ({type(error).__name__}); JSON lines in UTF-8 are wanted"
            ) from None
        if not self._begins:
            raise TraceError(f"{path}: no rows; one JSON object a line is wanted")
        self.fields = [field for field in seen if field not in self._lacking]

    def check(self, wanted: Iterable[str]) -> None:
        """Raise TraceError unless every row has these fields."""
        for field in wanted:
            if field not in self.fields:
                number = self._lacking.get(field, self._first)
                raise TraceError(f"{self._path}, line {number}: no field {field!r}, which the plan reads")

    def __len__(self) -> int:
        return len(self._begins)

    @overload
    def __getitem__(self, at: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, at: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, at: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(at, slice):
            return [self[number] for number in range(len(self))[at]]
        self._file.seek(self._begins[at])
        row: dict[str, Any] = json.loads(self._file.readline())
        return row

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError:
            raise TraceError(
                f"{self._path}, line {number}: it cannot be read; JSON lines in UTF-8 are wanted"
            ) from None
        except ValueError:
            raise TraceError(f"{self._path}, line {number}: no JSON; one object a line is wanted") from None
        if not isinstance(row, dict):
            raise TraceError(f"{self._path}, line {number}: a {type(row).__name__}; a JSON object is wanted")
        return row
