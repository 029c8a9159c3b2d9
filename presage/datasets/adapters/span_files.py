"""`--format otel` and `--format openinference`: files of spans, whichever convention names their attributes.

Both arrive as OTLP JSON lines or as dumps of single spans, and one application may write both, so the two formats are
one reader: every document is looked at for itself, and every span for all conventions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from presage.datasets.adapters.intake import Intake
from presage.datasets.adapters.otlp import decode, is_otlp, take_otlp
from presage.datasets.adapters.partitions import Partitions
from presage.datasets.adapters.source import Source, named
from presage.datasets.adapters.span_dump import is_span, take_span
from presage.datasets.adapters.text_files import Documents, Place, files_of
from presage.datasets.adapters.workflows import Workflows
from presage.errors import TraceError

_PARTITION_BYTES: Final = 32 * 2**20
_FEWEST, _MOST = 4, 256
_GZIP_SAVES: Final = 10
_REPORT_BYTES: Final = 8 * 2**20
_KINDS: Final = {list: "array", str: "string", bool: "true or false", type(None): "null"}


def read_spans(
    path: Path | Sequence[Path], *, skip_bad: bool = False, progress: Callable[[int], None] | None = None
) -> Iterator[Source]:
    """Read OTLP JSON lines or single spans, from a file or from a folder of rotated files, plain or gzip.

    Args:
        path: the file or folder; or several, over which a trace may be spread.
        skip_bad: count what is bad instead of raising. The workflow of a bad span is marked as spoiled, and so are the
            workflows that a torn line names.
        progress: called with the number of requests and tool calls seen since its last call.

    Raises:
        TraceError: a file cannot be read, a line is no JSON or no spans, a span lacks an id or a start or has an
            attribute of a wrong type, spans of a trace are no tree, or there is no step at all; names the file and the
            line or span.
        OutputError: the disk of temporary files is full.
    """

    def take(document: Any, place: Place, intake: Intake) -> None:
        if is_otlp(document):
            take_otlp(document, place, intake)
        elif is_span(document):
            take_span(document, place, intake)
        else:
            intake.refuse(
                place,
                f'{described(document)}, neither OTLP JSON (an object with "resourceSpans") nor a span (with '
                '"context"): check the format; plain JSONL is --format jsonl',
                "line that holds no spans",
            )

    return read_documents(path, take, skip_bad, progress)


def read_documents(
    path: Path | Sequence[Path],
    take: Callable[[Any, Place, Intake], None],
    skip_bad: bool,
    progress: Callable[[int], None] | None,
) -> Iterator[Source]:
    """Read JSON documents of a path that `take` hands to an intake; as `read_spans` otherwise."""
    paths = [path] if isinstance(path, Path) else path
    files = [file for one in paths for file in files_of(one)]
    with Partitions(partitions_for(files)) as spill:
        intake = Intake([str(file) for file in files], spill, skip_bad, progress, lined=len(files) == 1)
        workflows = Workflows(named(paths), intake, spill, skip_bad)
        reading = Documents(files, intake.torn, decode)
        reported = 0
        for place, document in reading:
            take(document, place, intake)
            if reading.read_bytes - reported >= _REPORT_BYTES:
                yield workflows.source(None, read_bytes=reading.read_bytes - reported)
                reported = reading.read_bytes
        intake.flush()
        yield workflows.source(None, read_bytes=reading.read_bytes - reported)
        yield from workflows.sources()


def partitions_for(files: list[Path]) -> int:
    """How many partitions keep one within tens of megabytes.

    Raises:
        TraceError: a file is not there.
    """
    size = 0
    for file in files:
        try:
            size += file.stat().st_size * (_GZIP_SAVES if file.suffix == ".gz" else 1)
        except OSError as error:
            raise TraceError(f"{file}: cannot be read ({error.strerror or error}): check the path") from error
    return min(_MOST, max(_FEWEST, size // _PARTITION_BYTES))


def described(document: Any) -> str:
    """A JSON document in words that repeat nothing of its content but its keys."""
    if is_otlp(document):
        return "OTLP JSON, which is --format otel"
    if not isinstance(document, dict):
        return f"a JSON {_KINDS.get(type(document), 'number')}"
    return f"a JSON object with the keys {', '.join(sorted(document)[:8]) or '(none)'}"
