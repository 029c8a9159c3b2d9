"""Receives the spans of every format: checks each, counts the bad ones, and writes the rest to disk by trace."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.datasets.adapters.files.text import Place
from presage.datasets.adapters.spans.attributes import KINDS, NO_REQUEST, PLAN, Found, interpret
from presage.datasets.adapters.spans.conventions import SPAN_SCHEMA, TWIN, Flag, Meaning, Role
from presage.datasets.adapters.spans.twins import may_have_twin, nested
from presage.datasets.schema.columns import hashes, utc_us
from presage.errors import OutputError, TraceError


class Partitions:
    """A temporary folder of rows partitioned by a key; a context manager.

    Spans, and steps that wait for other traces, may not fit in memory. Each `add` writes one Arrow file, so only the
    current rows are in memory and no file stays open. Files are memory-mapped, so unused columns cost nothing. They may
    hold private text: only the owner can access the folder, and it is removed on exit. Iterating gives the rows of each
    partition that has any, in the order they were written.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._folder = Path(tempfile.mkdtemp(prefix="presage-"))
        self._runs: list[tuple[Path, list[int]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, rows: pa.Table, key: str) -> None:
        """Write rows, those with equal strings in column `key` to one partition; raises OutputError if the disk is
        full."""
        if not rows.num_rows:
            return
        homes = hashes(rows.column(key)) % np.uint64(self.count)
        order = np.argsort(homes, kind="stable")
        bounds = np.searchsorted(homes[order], np.arange(self.count + 1)).tolist()
        rows = rows.take(pa.array(order)).combine_chunks()
        path = self._folder / f"{len(self._runs)}.arrow"
        try:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
                writer.write_table(rows)
        except OSError as error:
            raise OutputError(
                f"temporary files in {self._folder.parent}: {error.strerror or error}; free space there, or set TMPDIR "
                "to a larger disk"
            ) from error
        self._runs.append((path, bounds))

    def __iter__(self) -> Iterator[pa.Table]:
        for number in range(self.count):
            parts = [
                pa.ipc.open_file(pa.memory_map(str(path))).read_all().slice(bounds[number], size)
                for path, bounds in self._runs
                if (size := bounds[number + 1] - bounds[number])
            ]
            if parts:
                yield pa.concat_tables(parts)


_BATCH_SPANS: Final = 16384
_BATCH_BYTES: Final = 32 * 2**20
_GENAI: Final = re.compile(r"(?:gen_ai|llm|ai|traceloop|langsmith|langfuse|openinference)\.|mlflow\.span|gcp\.v")
_NO_STEP: Final = (Role.OTHER, Role.JUDGE)
_OF_ANY_SPAN: Final = frozenset({"provider", "session", "workflow"})  # read from a span of any kind
_MOST_NAMES: Final = 100
_TRACE_IDS: Final = re.compile(rb'"(?:traceId|trace_id)"\s*:\s*"(?:0x)?([^"]{1,64})"')
SIGNALS: Final = frozenset({"resourceSpans", "resourceLogs", "resourceMetrics", "resourceProfiles"})
"""Keys of OTLP JSON, one a signal."""
_JSON_KINDS: Final = {list: "array", str: "string", bool: "true or false", type(None): "null"}
_LATEST_S: Final = 10**11  # in seconds this is the year 5138, in milliseconds 1973


@dataclass
class Intake:
    """Collects spans as rows of `SPAN_SCHEMA` in `partitions`, by trace.

    Those that may have a twin wait in `requests`, by what was asked, until all are there.

    `names` are those of the files being read, for messages; `lined` is whether the line of a span identifies where it
    was read: False for several files, or none. With `parents_elsewhere`, a parent that is not there is no loss. With
    `skip_bad`, bad spans are counted in `skipped` by reason, and their trace is marked. `notices` counts what was not
    read, or was mended, by what it was.
    """

    names: Sequence[str]
    partitions: Partitions
    requests: Partitions
    skip_bad: bool
    lined: bool
    parents_elsewhere: bool = False
    lost: int = 0
    spans: int = 0
    other_signals: bool = False  # logs or metrics were among what was read
    skipped: Counter[str] = field(default_factory=Counter)
    notices: Counter[str] = field(default_factory=Counter)
    linked: set[str] = field(default_factory=set)  # traces that the first spans of others link to
    _batch: list[tuple[Any, ...]] = field(default_factory=list)
    _bytes: int = 0
    _last: str | None = None
    _torn: Place | None = None

    def at(self, place: Place, span: str | None = None) -> str:
        """`"spans.json, line 17, span 00f067aa0ba902b7"`; without the line for a live store, which has none."""
        line = f", line {place.line}" if place.line else ""
        return f"{self.names[place.file]}{line}{f', span {span}' if span else ''}"

    def torn(self, place: Place, message: str, reason: str, line: bytes) -> None:
        """Handle a line that is not JSON: traces named in it, and those before and after it, may have lost spans."""
        self.refuse(place, message, f"line with {reason}")
        for trace in {trace_id.decode(errors="replace") for trace_id in _TRACE_IDS.findall(line)}:
            self._lost(trace, place)
        self._torn = place

    def refuse(self, place: Place, message: str, reason: str, trace: Any = None) -> None:
        """Reject a span or a document."""
        if not self.skip_bad:
            raise TraceError(f"{self.at(place)}: {message}")
        self.skipped[reason] += 1
        self._lost(trace if isinstance(trace, str) and trace else self._last, place)

    def missing_trace(self, place: Place, trace: Any, start: int | None, found: Found, service: str | None) -> None:
        """Name a trace whose spans its store has lost, and let its conversation know that it is not whole."""
        named = isinstance(trace, str) and len(self.notices) < _MOST_NAMES
        self.notices[f"trace whose spans are lost: {trace if named else 'more'}"] += 1
        self.take(place, found, ids=(trace, "lost", None), name="", times=(start, None), service=service)

    def take(
        self,
        place: Place,
        found: Found,
        *,
        ids: tuple[Any, Any, Any],
        name: Any,
        times: tuple[int | None, int | None],
        service: str | None,
        remote: bool = False,
        flags: int = 0,
        unread: Iterable[str] = (),
        links: Iterable[str] = (),
    ) -> None:
        """Add one span: raw ids (of its trace, its own, its parent's), start and end in nanoseconds since 1970,
        attributes filtered by `attributes.keep`, the names it returned, and the traces that the span links to."""
        (trace, span, parent), (start, end) = ids, times
        for what, value in (("trace id", trace), ("span id", span)):
            if not isinstance(value, str) or not value:
                self.refuse(place, f"a span without a {what}: export the spans again", f"span without a {what}", trace)
                return
        if start is None:
            message = "no start time; expected nanoseconds since 1970: export the spans again"
            self.refuse(place, f"span {span}: {message}", "span without a start time", trace)
            return
        name = name if isinstance(name, str) else ""
        meaning = interpret(found, name, self._dropped, flags)
        if end is not None and end < start:
            end = start
            self.notices["span that ends before it starts: its end is its start"] += 1
        if meaning.flags or unread or meaning.role in _NO_STEP:
            self._notice(meaning, found, name, unread)
        if not isinstance(parent, str) or not parent.strip("0"):
            parent = None
        if self._torn is not None:
            self._lost(trace, self._torn)
            self._torn = None
        self._last = trace
        self.spans += 1
        for text in (meaning.system_prompt, meaning.input_text, meaning.output_text):
            self._bytes += len(text) if text else 0
        remote = remote or self.parents_elsewhere
        others = sorted({*links} - {trace, ""}) if parent is None or remote else []
        self.linked.update(others)
        self._add((trace, span, parent, remote, service, start, end, " ".join(others) or None, *place, *meaning))

    def _dropped(self, attribute: str, reason: str) -> None:
        self.notices[f"value dropped: {attribute} {reason}"] += 1

    def _notice(self, meaning: Meaning, attributes: Found, name: str, unread: Iterable[str]) -> None:
        """Count what is lost with a span, if it has to do with models, agents or tools."""
        if meaning.flags & Flag.LOST:
            self.notices["span that lost attributes: its workflow is not complete"] += 1
        for key in unread:
            self.notices[f"attribute not read: {key}"] += 1
        if meaning.role not in _NO_STEP:
            self.notices["span with an error"] += bool(meaning.flags & Flag.ERROR)
        elif any(_GENAI.match(key) and PLAN[key].field not in _OF_ANY_SPAN for key in attributes):
            said = {key: attributes[key].strip() for key in KINDS if isinstance(attributes.get(key), str)}
            kind = next((word for key, word in said.items() if word.lower() in KINDS[key]), None)
            operation = next(iter(said.values()), "no operation")
            if kind is None and (none := NO_REQUEST.search(f"{' '.join(said.values()) or name} {meaning.model}")):
                kind = none[0].lower()
            called = re.sub(r"[0-9a-fA-F]*\d[0-9a-fA-F]*", "N", name)[:60]
            what = f"span of a kind that is no step: {kind}" if kind else f"span not read: {operation}, {called}"
            if what not in self.notices and len(self.notices) >= _MOST_NAMES:
                what = "span not read: more"
            self.notices[what] += 1

    def flush(self) -> None:
        """Write the buffered spans to disk."""
        if self._batch:
            columns = zip(*self._batch, strict=True)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, SPAN_SCHEMA, strict=True)]
            spans = pa.Table.from_arrays(arrays, schema=SPAN_SCHEMA)
            apart = may_have_twin(spans)
            if pc.any(apart).as_py():  # filters copy texts
                self.requests.add(spans.filter(apart), "input_text")
                spans = spans.filter(pc.invert(apart))
            self.partitions.add(spans, "trace")
            self._batch, self._bytes = [], 0

    def complete(self) -> None:
        """Bring all spans to `partitions`, after the last one was taken."""
        self.flush()
        for requests in self.requests:
            rows, twins = nested(requests)
            self.notices[TWIN] += twins
            self.partitions.add(rows, "trace")

    def _add(self, record: tuple[Any, ...]) -> None:
        """Buffer one span, its fields in the order of `SPAN_SCHEMA`."""
        self._batch.append(record)
        if len(self._batch) == _BATCH_SPANS or self._bytes >= _BATCH_BYTES:
            self.flush()

    def _lost(self, trace: str | None, place: Place) -> None:
        self.lost += 1
        if trace is not None:
            self._add((trace, None, None, False, None, 0, None, None, *place, *Meaning()))


def described(document: Any) -> str:
    """Describe a JSON document without any of its content but its keys."""
    if isinstance(document, dict) and not SIGNALS.isdisjoint(document):
        return "OTLP JSON, which is --format otel"
    if not isinstance(document, dict):
        return f"a JSON {_JSON_KINDS.get(type(document), 'number')}"
    return f"a JSON object with the keys {', '.join(sorted(document)[:8]) or '(none)'}"


def time_ns(value: Any) -> int | None:
    """A time in nanoseconds since 1970; raises ValueError if the value is not a time."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return utc_us(value) * 1000
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("no time")
    for scale in (10**9, 10**6, 10**3):
        if abs(value) < _LATEST_S * (10**9 // scale):
            return round(value * scale)
    return int(value)
