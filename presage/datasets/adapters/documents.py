"""JSON documents out of files: one a line, or a whole file that is one document; gzip is recognised by content.

A path may be a folder: of rotated files of a collector, which are one trace, cut anywhere. Lines are read one by one,
so memory is bounded by the longest line. A file that is one pretty-printed document or one array, as people export by
hand, is parsed as a whole, and refused where that would take too much memory.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from presage.errors import TraceError

SUFFIXES: Final = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
_WHOLE_FILE_BYTES: Final = 64 * 2**20
_BOM: Final = b"\xef\xbb\xbf"
_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"

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
    """The first document of a path, to tell its format; None where there is none that can be read."""

    def stop(place: Place, message: str, reason: str, line: bytes) -> None:
        raise TraceError(message)

    try:
        return next(iter(Documents(files_of(path), stop, msgspec.json.decode)), (None, None))[1]
    except TraceError:
        return None


class Documents:
    """Every JSON document of some files, with its place; arrays are given element by element.

    Iterating raises `TraceError` where a file cannot be read or is compressed with zstd, and what `on_torn` raises.

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
            with file.open("rb") as raw:
                head = raw.peek(8)[:8]
                if _ZSTD in head:
                    raise TraceError(
                        f"{file}: compressed with zstd; plain or gzip JSON lines are wanted: leave `compression` out "
                        "of the file exporter, or unpack the file"
                    )
                packed = head.startswith(_GZIP)
                for number, line in enumerate(gzip.GzipFile(fileobj=raw) if packed else raw, start=1):
                    place = Place(index, number)
                    self.read_bytes = before + raw.tell()
                    text = (line.removeprefix(_BOM) if number == 1 else line).strip()
                    if not text:
                        continue
                    try:
                        document = self._decode(text)
                    except msgspec.DecodeError:
                        if number == 1 and (whole := self._whole(text, file, packed)) is not None:
                            yield place, whole
                            return
                        message = (
                            "not JSON; one JSON object a line is wanted: was the file cut, or is it still written?"
                        )
                        self._on_torn(place, message, "no JSON", text)
                        continue
                    yield place, document
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            what = "cut" if isinstance(error, EOFError) else "damaged"
            message = f"the gzip data are {what} after this line: copy or write the file again"
            self._on_torn(place, message, f"{what} gzip data after it", b"")
        except OSError as error:
            raise TraceError(f"{file}: cannot be read ({error.strerror or error}): check the path") from error

    def _whole(self, first: bytes, file: Path, packed: bool) -> Any:
        """The one document that a file is, given that its first line is none; None if the file is no document."""
        if first[:1] not in (b"{", b"["):
            return None
        with file.open("rb") as raw:
            text = (gzip.GzipFile(fileobj=raw) if packed else raw).read(_WHOLE_FILE_BYTES + 1)
        if len(text) > _WHOLE_FILE_BYTES:
            return None
        try:
            return self._decode(text.removeprefix(_BOM))
        except msgspec.DecodeError:
            return None
