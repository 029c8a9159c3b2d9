"""Rows of a CSV file with the lines they stand on; a row that cannot be read is given with what is wrong with it.

The dialect is what pandas, spreadsheets and databases write by default: commas, quotes doubled inside quotes, line ends
of any system, a header. Python's reader is used, not Arrow's, which cannot say on which line a row stands and guesses
at types. Memory is bounded by the longest field that is allowed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from presage.datasets.adapters.lines import DamagedGzipError, not_utf8, numbered_lines
from presage.errors import TraceError

_LARGEST_FIELD: Final = 2**26
_POSITION_EVERY: Final = 1024
_OTHER_SEPARATORS: Final = {";": "semicolons", "\t": "tabs", "|": "bars"}


class CsvRow(NamedTuple):
    """One row.

    Args:
        line: the one it begins on, from 1; of text that is no UTF-8, that very line.
        fields: as they stand there; of a bad row, what could be read.
        problem: what is wrong with it; empty if nothing is.
        reason: a short phrase to count it by.
    """

    line: int
    fields: Sequence[str]
    problem: str = ""
    reason: str = ""


class CsvRows:
    """The rows below the header of a CSV file, blank lines left out.

    Iterating raises `TraceError` where the file cannot be read.

    Args:
        path: the file, plain or gzip.

    Raises:
        TraceError: there is no header that can be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.read_bytes = 0
        """Bytes on disk read so far."""
        self._not_utf8: tuple[int, str] | None = None
        csv.field_size_limit(_LARGEST_FIELD)
        self._reader = csv.reader(self._text(), strict=True)
        header = next(self._rows(), None)
        if header is None:
            raise TraceError(f"{path}: an empty file; a line with the names of the columns is wanted first")
        if header.problem:
            raise TraceError(f"{path}, line {header.line}: {header.problem}")
        self.names = header.fields
        separator = next((of for of in _OTHER_SEPARATORS if len(self.names) == 1 and of in self.names[0]), None)
        if separator is not None:
            raise TraceError(
                f"{path}: fields seem to be separated by {_OTHER_SEPARATORS[separator]}; commas are wanted: write the "
                "file with them"
            )

    def __iter__(self) -> Iterator[CsvRow]:
        width = len(self.names)
        for row in self._rows():
            if row.problem or len(row.fields) == width:
                yield row
            else:
                problem = f"{len(row.fields)} fields; {width} are wanted, one for each column: repair the line"
                yield CsvRow(row.line, row.fields, problem, "another number of fields")

    def _rows(self) -> Iterator[CsvRow]:
        while True:
            line = self._reader.line_num + 1
            try:
                fields = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                self._not_utf8 = None
                problem = f"not CSV ({error}); commas, and quotes that are doubled inside quotes, are wanted: repair it"
                yield CsvRow(line, (), problem, "no CSV")
                continue
            except DamagedGzipError as error:
                problem = f"the gzip data are {error.what} after this line: copy or write the file again"
                yield CsvRow(max(1, line - 1), (), problem, f"{error.what} gzip data after it")
                return
            if self._not_utf8 is not None:
                at, problem = self._not_utf8
                self._not_utf8 = None
                yield CsvRow(at, fields, problem, "no UTF-8")
            elif fields:
                yield CsvRow(line, fields)

    def _text(self) -> Iterator[str]:
        with numbered_lines(self._path) as lines:
            for number, line in lines:
                try:
                    text = line.decode()
                except UnicodeDecodeError as error:
                    self._not_utf8 = self._not_utf8 or (number, not_utf8(error))
                    text = line.decode(errors="replace")
                yield text
                if number % _POSITION_EVERY == 0:
                    self.read_bytes = lines.read_bytes
            self.read_bytes = lines.read_bytes
