"""UTF-8 text files, plain or gzip, as numbered lines, JSON documents or CSV rows.

Gzip is detected by content; a byte order mark is skipped. A file in another encoding or archive format raises at its
first line; a single line with invalid UTF-8 is left to the reader, which may skip it. JSON documents are one a line, or
a whole file is one document or array. CSV is the dialect of pandas, spreadsheets and databases; it is read with
Python's reader, because Arrow's cannot name lines and guesses types. Memory is bounded by the longest line or CSV
field.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from presage.errors import PresageError, TraceError

BOM: Final = b"\xef\xbb\xbf"
GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")
_HALF_OF_A_PAIR: Final = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


class DamagedGzipError(Exception):
    """The gzip data end early or are damaged after a line; the arguments are a message and a phrase for counting."""


@contextmanager
def numbered_lines(path: Path) -> Iterator[tuple[Iterator[tuple[int, bytes]], Callable[[], int]]]:
    """Context manager that opens a file or a pipe: its lines as (number from 1, bytes including the line ending), and
    what tells the bytes on disk read so far, 0 for a pipe.

    Raises TraceError if the file cannot be read or is not UTF-8 text, DamagedGzipError after the last readable line.
    """
    try:
        with path.open("rb") as raw:
            head = raw.peek(8)[:8]
            if _ZSTD in head:
                raise TraceError(
                    f"{path}: compressed with zstd; expected plain text or gzip: unpack the file, and leave "
                    "`compression` out of a collector's file exporter"
                )
            file = gzip.GzipFile(fileobj=raw) if head.startswith(GZIP) else raw
            first = file.readline()
            if first.startswith(_UTF16) or b"\0" in first:
                raise TraceError(
                    f"{path}: UTF-16 or not text at all; expected text in UTF-8: save or convert the file as UTF-8 (a "
                    "spreadsheet as CSV UTF-8)"
                )
            begin = [(1, first.removeprefix(BOM))] if first else []
            # No generator, which would add a tenth to the time of reading small rows.
            yield chain(begin, enumerate(file, start=2)), lambda: raw.tell() if raw.seekable() else 0
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        what = "cut" if isinstance(error, EOFError) else "damaged"
        message = f"the gzip data are {what} after this line: copy or write the file again"
        raise DamagedGzipError(message, f"{what} gzip data after it") from None
    except PresageError:
        raise
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error}): check the path") from error


def not_utf8(error: UnicodeDecodeError) -> str:
    """The message for a line with invalid UTF-8; the caller adds the line number."""
    byte = error.start - error.object.rfind(b"\n", 0, error.start)
    return (
        f"byte {byte} of the line is not UTF-8; expected text in UTF-8: save or convert the file as UTF-8 (from "
        "Windows: iconv -f windows-1252 -t utf-8)"
    )


def whole_characters(json: str) -> str:
    r"""JSON with U+FFFD in place of half a surrogate pair (`\ud83d` alone, where a text was cut)."""
    return _HALF_OF_A_PAIR.sub(r"\\ufffd", json)


JSON_SUFFIXES: Final = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
_WHOLE_FILE_BYTES: Final = 64 * 2**20
_NOT_JSON: Final = "not JSON; expected one JSON object a line: was the file cut, or is it still written?"
_NO_DOCUMENT: Final = (ValueError, RecursionError)  # msgspec's, the standard library's and a decoder's of UTF-8

TABLE_SUFFIXES: Final = (".csv", ".csv.gz", ".parquet")
Decode = Callable[[bytes], Any]
Rows = Callable[[Path], Iterator[tuple[int, dict[str, Any]]]]


class Place(NamedTuple):
    """A line of a file: the index of the file in `files_of`, the line counted from 1."""

    file: int
    line: int


OnTorn = Callable[[Place, str, str, bytes], None]
"""Called with an unreadable line: its place, a message that names problem and remedy, a short phrase for counting, and
its bytes. It raises to stop, or returns to continue."""


def files_of(path: Path, suffixes: tuple[str, ...] = JSON_SUFFIXES) -> list[Path]:
    """The files of a path, sorted: itself, or those of a folder with a suffix; raises TraceError without any."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith(suffixes) and file.is_file())
    if not files:
        raise TraceError(f"{path}: a folder without {', '.join(suffixes)} files: check the path")
    return files


def first_document(path: Path) -> Any:
    """The first document of a path, for format detection; None if its first line is not a document.

    Raises TraceError if a file cannot be read, or is not UTF-8 text.
    """

    def stop(*_: object) -> None:
        raise LookupError

    try:
        files = files_of(path)
    except TraceError:
        return None
    # Even if a byte is not UTF-8: the format's reader raises then.
    reading = Documents(files, stop, lambda text: msgspec.json.decode(text.decode(errors="replace")))
    try:
        return next(iter(reading), (None, None))[1]
    except LookupError:
        return None


@dataclass
class Documents:
    """Iterates over the JSON documents of files with their places; arrays yield their elements.

    Raises `TraceError` if a file cannot be read or is not UTF-8 text, and whatever `on_torn` raises. `decode` parses
    the bytes of a document, or raises `msgspec.DecodeError`; NaN and infinity become null, half a surrogate pair
    U+FFFD. The documents of a table are its rows, which `rows` gives with their lines.
    """

    files: Sequence[Path]
    on_torn: OnTorn
    decode: Decode
    rows: Rows | None = None
    read_bytes: int = 0  # on disk so far

    def __iter__(self) -> Iterator[tuple[Place, Any]]:
        for index, file in enumerate(self.files):
            before = self.read_bytes
            for place, document in self._documents(index, file, before):
                if isinstance(document, list):
                    yield from ((place, element) for element in document)
                else:
                    yield place, document
            self.read_bytes = before + file.stat().st_size

    def _documents(self, index: int, file: Path, before: int) -> Iterator[tuple[Place, Any]]:
        place = Place(index, 0)
        if self.rows is not None and file.name.endswith(TABLE_SUFFIXES):
            yield from ((Place(index, number), row) for number, row in self.rows(file))
            return
        try:
            with numbered_lines(file) as (lines, read_bytes):
                for number, line in lines:
                    place = Place(index, number)
                    self.read_bytes = before + read_bytes()
                    text = line.strip()
                    if not text:
                        continue
                    try:
                        yield place, self._decoded(text)
                    except UnicodeDecodeError as error:
                        self.on_torn(place, not_utf8(error), "no UTF-8", text)
                    except _NO_DOCUMENT:
                        if number == 1 and (whole := self._whole(index, file, text)) is not None:
                            yield place, whole
                            return
                        self.on_torn(place, _NOT_JSON, "no JSON", text)
        except DamagedGzipError as error:
            message, reason = error.args
            self.on_torn(place, message, reason, b"")

    def _decoded(self, text: bytes) -> Any:
        try:
            return self.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return json.loads(whole_characters(text.decode()), parse_constant=lambda _: None)

    def _whole(self, index: int, file: Path, first: bytes) -> Any:
        """The file as one document, if its first line is not one; None if the file is not one either."""
        if first[:1] not in (b"{", b"["):
            return None
        with file.open("rb") as raw:
            packed = raw.peek(2)[:2] == GZIP
            text = (gzip.GzipFile(fileobj=raw) if packed else raw).read(_WHOLE_FILE_BYTES + 1)
        if len(text) > _WHOLE_FILE_BYTES:
            return None
        text = text.removeprefix(BOM)
        try:
            return self._decoded(text)
        except UnicodeDecodeError as error:
            try:
                json.loads(text.decode(errors="replace"))
            except _NO_DOCUMENT:
                return None
            line = text.count(b"\n", 0, error.start) + 1
            self.on_torn(Place(index, line), not_utf8(error), "no UTF-8", text)
            return []
        except _NO_DOCUMENT:
            return None


_LARGEST_FIELD: Final = 2**26
_POSITION_EVERY: Final = 1024
_OTHER_SEPARATORS: Final = {";": "semicolons", "\t": "tabs", "|": "bars"}


class CsvRow(NamedTuple):
    """One row, with its readable fields as written, and its first line, from 1; for invalid UTF-8, that of the bytes.

    `problem` is empty for a good row, `reason` a short phrase for counting.
    """

    line: int
    fields: Sequence[str]
    problem: str = ""
    reason: str = ""


class CsvRows:
    """The rows below the header of a CSV file, plain or gzip, without blank lines.

    Raises TraceError if the header is missing or unreadable, and while iterating, if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.read_bytes = 0  # on disk so far
        self._not_utf8: tuple[int, str] | None = None
        csv.field_size_limit(_LARGEST_FIELD)
        self._reader = csv.reader(self._text(), strict=True)
        header = next(self._rows(), None)
        if header is None:
            raise TraceError(f"{path}: an empty file; expected a first line with the column names")
        if header.problem:
            raise TraceError(f"{path}, line {header.line}: {header.problem}")
        self.names = header.fields
        separator = next(
            (candidate for candidate in _OTHER_SEPARATORS if len(self.names) == 1 and candidate in self.names[0]), None
        )
        if separator is not None:
            raise TraceError(
                f"{path}: fields seem to be separated by {_OTHER_SEPARATORS[separator]}; expected commas: write the "
                "file with commas"
            )

    def __iter__(self) -> Iterator[CsvRow]:
        width = len(self.names)
        for row in self._rows():
            if row.problem or len(row.fields) == width:
                yield row
            else:
                problem = f"{len(row.fields)} fields; expected {width}, one for each column: repair the line"
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
                problem = f"not CSV ({error}); expected commas, and doubled quotes inside quotes: repair it"
                yield CsvRow(line, (), problem, "no CSV")
                continue
            except DamagedGzipError as error:
                yield CsvRow(max(1, line - 1), (), *error.args)
                return
            if self._not_utf8 is not None:
                at, problem = self._not_utf8
                self._not_utf8 = None
                yield CsvRow(at, fields, problem, "no UTF-8")
            elif fields:
                yield CsvRow(line, fields)

    def _text(self) -> Iterator[str]:
        with numbered_lines(self._path) as (lines, read_bytes):
            for number, line in lines:
                try:
                    text = line.decode()
                except UnicodeDecodeError as error:
                    self._not_utf8 = self._not_utf8 or (number, not_utf8(error))
                    text = line.decode(errors="replace")
                yield text
                if number % _POSITION_EVERY == 0:
                    self.read_bytes = read_bytes()
            self.read_bytes = read_bytes()
