"""Numbered lines out of files of UTF-8 text, plain or gzip: what every reader of JSON and CSV stands on.

Gzip is recognised by content and a byte order mark is passed over. What is no UTF-8 text as a whole (UTF-16, a ZIP
archive or a spreadsheet, zstd) is refused at its first line. Single bytes that are no UTF-8 are left to the reader,
which may skip a line: `not_utf8` says which byte it is. Memory is bounded by the longest line.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Final

from presage.errors import PresageError, TraceError

BOM: Final = b"\xef\xbb\xbf"
GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")
_HALF_OF_A_PAIR: Final = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


class DamagedGzipError(Exception):
    """The gzip data end early or are damaged; `what` is "cut" or "damaged"."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class NumberedLines:
    """Iterates over the lines of an open file, each with its number from 1 and with the bytes that end it."""

    def __init__(self, raw: IO[bytes], lines: Iterator[tuple[int, bytes]]) -> None:
        self._raw = raw
        self._lines = lines

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return self._lines  # no generator: it would cost a tenth of what reading small rows takes

    @property
    def read_bytes(self) -> int:
        """Bytes on disk read so far; 0 of a pipe, which cannot tell."""
        return self._raw.tell() if self._raw.seekable() else 0


@contextmanager
def numbered_lines(path: Path) -> Iterator[NumberedLines]:
    """Open a file, or a pipe, to read its lines inside.

    Raises:
        TraceError: the file cannot be read or holds no UTF-8 text.
        DamagedGzipError: after the last line that can be read.
    """
    try:
        with path.open("rb") as raw:
            head = raw.peek(8)[:8]
            if _ZSTD in head:
                raise TraceError(
                    f"{path}: compressed with zstd; plain text or gzip is wanted: unpack the file, and leave "
                    "`compression` out of a collector's file exporter"
                )
            file = gzip.GzipFile(fileobj=raw) if head.startswith(GZIP) else raw
            first = file.readline()
            if first.startswith(_UTF16) or b"\0" in first:
                raise TraceError(
                    f"{path}: UTF-16 or no text at all; text in UTF-8 is wanted: save or convert the file as UTF-8 (a "
                    "spreadsheet as CSV UTF-8)"
                )
            begin = [(1, first.removeprefix(BOM))] if first else []
            yield NumberedLines(raw, chain(begin, enumerate(file, start=2)))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DamagedGzipError("cut" if isinstance(error, EOFError) else "damaged") from None
    except PresageError:
        raise
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error}): check the path") from error


def not_utf8(error: UnicodeDecodeError) -> str:
    """What to say of a line that is no UTF-8, or of the first in a file; which line it is, the caller says."""
    byte = error.start - error.object.rfind(b"\n", 0, error.start)
    return (
        f"byte {byte} of the line is no UTF-8; text in UTF-8 is wanted: save or convert the file as UTF-8 (from "
        "Windows: iconv -f windows-1252 -t utf-8)"
    )


def utf8_text(path: Path) -> str:
    """All of a small file, without a byte order mark.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no UTF-8; names the line.
    """
    data = path.read_bytes().removeprefix(BOM)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line}: {not_utf8(error)}") from None


def whole_characters(json: str) -> str:
    r"""JSON in which halves of a surrogate pair (`\ud83d` alone, where a text was cut) became U+FFFD."""
    return _HALF_OF_A_PAIR.sub(r"\\ufffd", json)
