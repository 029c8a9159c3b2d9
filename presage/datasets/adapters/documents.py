"""JSON documents out of files: one a line, or a whole file that is one document; gzip is recognised by content.

A path may be a folder: of rotated files of a collector, which are one trace, cut anywhere. Lines are read one by one,
so memory is bounded by the longest line. A file that is one pretty-printed document or one array, as people export by
hand, is parsed as a whole, and refused where that would take too much memory.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from presage.datasets.adapters.lines import BOM, GZIP, DamagedGzipError, not_utf8, numbered_lines, whole_characters
from presage.errors import TraceError

SUFFIXES: Final = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
_WHOLE_FILE_BYTES: Final = 64 * 2**20
_NO_DOCUMENT: Final = (ValueError, RecursionError)  # msgspec's, the standard library's and a decoder's of UTF-8

Decode = Callable[[bytes], Any]


class Place(NamedTuple):
    """A line of a file: the index of the file in `files_of`, the line counted from 1."""

    file: int
    line: int


class OnTorn(Protocol):
    """Told of a line that cannot be read; raises, or returns to go on with the next."""

    def __call__(self, place: Place, message: str, reason: str, line: bytes) -> None:
        """`message` says what came and what to do, `reason` is a short phrase to count by."""
        ...


def files_of(path: Path) -> list[Path]:
    """The files of a path, by name: itself, or the JSON files of a folder.

    Raises:
        TraceError: a folder without any.
    """
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES) and file.is_file())
    if not files:
        raise TraceError(
            f"{path}: a folder without {', '.join(SUFFIXES)} files; rotated files of a collector's file exporter are "
            "wanted: check the path"
        )
    return files


def first_document(path: Path) -> Any:
    """The first document of a path, to tell its format; None where the path begins with something else.

    Raises:
        TraceError: a file cannot be read, or is no UTF-8 text.
    """

    def stop(place: Place, message: str, reason: str, line: bytes) -> None:
        raise _NoDocumentError

    try:
        files = files_of(path)
    except TraceError:
        return None
    try:
        return next(iter(Documents(files, stop, _decode_any_bytes)), (None, None))[1]
    except _NoDocumentError:
        return None


class _NoDocumentError(Exception):
    """The first line is none."""


def _decode_any_bytes(text: bytes) -> Any:
    """A format is told also where a byte is no UTF-8; its reader says so then."""
    return msgspec.json.decode(text.decode(errors="replace"))


class Documents:
    """Every JSON document of some files, with its place; arrays are given element by element.

    Iterating raises `TraceError` where a file cannot be read or is no UTF-8 text, and what `on_torn` raises. NaN and
    infinity, which Python writes though JSON has none, are null; half a surrogate pair, where a text was cut, is
    U+FFFD.

    Args:
        files: what to read, in this order.
        on_torn: told of what cannot be read.
        decode: makes a document of its bytes, or raises `msgspec.DecodeError`.
    """

    def __init__(self, files: Sequence[Path], on_torn: OnTorn, decode: Decode) -> None:
        self._files = files
        self._on_torn = on_torn
        self._decode = decode
        self.read_bytes = 0
        """Bytes on disk read so far."""

    def __iter__(self) -> Iterator[tuple[Place, Any]]:
        for index, file in enumerate(self._files):
            before = self.read_bytes
            for place, document in self._documents(index, file, before):
                if isinstance(document, list):
                    yield from ((place, element) for element in document)
                else:
                    yield place, document
            self.read_bytes = before + file.stat().st_size

    def _documents(self, index: int, file: Path, before: int) -> Iterator[tuple[Place, Any]]:
        place = Place(index, 0)
        try:
            with numbered_lines(file) as lines:
                for number, line in lines:
                    place = Place(index, number)
                    self.read_bytes = before + lines.read_bytes
                    text = line.strip()
                    if not text:
                        continue
                    try:
                        yield place, self._decoded(text)
                    except _NO_DOCUMENT as error:
                        torn = isinstance(error, UnicodeDecodeError)
                        if number == 1 and not torn and (whole := self._whole(index, file, text)) is not None:
                            yield place, whole
                            return
                        self._no_document(place, error, text)
        except DamagedGzipError as error:
            message = f"the gzip data are {error.what} after this line: copy or write the file again"
            self._on_torn(place, message, f"{error.what} gzip data after it", b"")

    def _decoded(self, text: bytes) -> Any:
        try:
            return self._decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return json.loads(whole_characters(text.decode()), parse_constant=lambda _: None)

    def _no_document(self, place: Place, error: Exception, text: bytes) -> None:
        if isinstance(error, UnicodeDecodeError):
            self._on_torn(place, not_utf8(error), "no UTF-8", text)
            return
        message = "not JSON; one JSON object a line is wanted: was the file cut, or is it still written?"
        self._on_torn(place, message, "no JSON", text)

    def _whole(self, index: int, file: Path, first: bytes) -> Any:
        """The one document that a file is, given that its first line is none; None if the file is no document."""
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
            self._no_document(Place(index, line), error, text)
            return []
        except _NO_DOCUMENT:
            return None
