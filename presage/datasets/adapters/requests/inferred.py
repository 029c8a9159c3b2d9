"""Request logs as traces: which workflow each request continues is inferred as in an engine (`presage.continuation`).

Three passes. The first writes what is read of the lines to a temporary file, about as large as the logs unpacked. The
second goes through the requests in time order, each answer known once its request has ended, and keeps a few numbers a
request. The third makes rows of steps. The order of lines and files tells nothing, so rotated files may come in any.

An id is made of the workflow's first request, so that logs which go on since extend the workflows of a store.
"""

from __future__ import annotations

import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush
from pathlib import Path
from typing import IO, Final

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.continuation import (
    NAMED_FROM,
    REMEMBERED_S,
    UNKNOWN,
    UNKNOWN_TYPE,
    PromptedWorkflow,
    PromptIndex,
    TokenPrompt,
    chained,
    head_of,
)
from presage.datasets.adapters.files.tables import table_rows
from presage.datasets.adapters.files.text import JSON_SUFFIXES, TABLE_SUFFIXES, Documents, Place, files_of
from presage.datasets.adapters.requests.logs import LoggedRequest, NotARequestError, logged_request
from presage.datasets.adapters.requests.vllm_log import (
    CUT,
    LOG_SUFFIXES,
    NO_PROMPTS,
    UNANSWERED,
    VllmLogs,
    is_vllm_log,
)
from presage.datasets.schema import conform
from presage.datasets.schema.source import Origin, Source, named
from presage.errors import TraceError

QUIET_S: Final = 600.0
"""A workflow that was active within so many seconds of the last time in the logs may go on: it is not complete."""

EMPTY: Final = "request with an empty prompt"
TWICE: Final = "request that the logs have twice"
SINGLE: Final = "workflow of a single request: nothing in the logs goes on from it"
IDS: Final = "request with a workflow_id, which was not read, to infer workflows"

READ_SUFFIXES: Final = (*JSON_SUFFIXES, *TABLE_SUFFIXES, *LOG_SUFFIXES)

_BLOCK: Final = 16
_KEY: Final = b"the same in every process: logs hold the texts"
_CHUNK_ROWS: Final = 8192
_CHUNK_BYTES: Final = 16 * 2**20
_DIGEST: Final = 16


def read_request_logs(
    paths: Sequence[Path], workflow_type: str | None = None, skip_bad: bool = False
) -> Iterator[Source]:
    """Read logs of requests, files or folders of them, as one source; `workflow_type` is that of all workflows.

    Raises TraceError for a line that is no request, which `skip_bad` leaves out and counts, or if there is none.
    """
    name = named(paths)
    files = [file for path in paths for file in files_of(path, READ_SUFFIXES)]
    with tempfile.TemporaryFile() as file:
        spool = _Spool(file)
        skipped, notices = Counter[str](), Counter[str]()
        read = spool.fill(files, skip_bad, skipped, notices)
        order = spool.order(notices)
        if not len(order):
            reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.items())
            raise TraceError(f"{name}: no request{f' ({reasons})' if reasons else ''}; give logs with at least one")
        inferred = _infer(spool, order)
        notices[SINGLE] = sum(steps == 1 for steps in inferred.steps)
        notices = Counter({what: count for what, count in notices.items() if count})
        for table, lines in _tables(spool, order, inferred, workflow_type):
            origin = Origin.of(name, table.num_rows, lines) if len(files) == 1 else Origin.of(name, table.num_rows)
            yield Source(conform(table, origin), origin, dict(skipped), frozenset(), read, dict(notices))
            skipped, notices, read = Counter(), Counter(), 0


@dataclass
class _Spool:
    """What was read of the requests, in a file; of each its times in microseconds, its place and its digest."""

    file: IO[bytes]
    started: array[int] = field(default_factory=lambda: array("q"))
    ended: array[int] = field(default_factory=lambda: array("q"))  # or its start, if unknown
    places: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    lines: array[int] = field(default_factory=lambda: array("q"))
    digests: bytearray = field(default_factory=bytearray)

    def fill(self, files: Sequence[Path], skip_bad: bool, skipped: Counter[str], notices: Counter[str]) -> int:
        """Read the files; returns their bytes on disk."""

        def bad(place: Place, message: str, reason: str, line: bytes = b"") -> None:
            if not skip_bad:
                raise TraceError(f"{files[place.file]}, line {place.line}: {message}")
            skipped[f"line with {reason}"] += 1

        def torn(place: Place, message: str, reason: str, line: bytes) -> None:
            bad(Place(others[place.file], place.line), message, reason, line)

        logs = {number: file for number, file in enumerate(files) if is_vllm_log(file)}
        others = [number for number in range(len(files)) if number not in logs]
        vllm = VllmLogs(logs, bad)
        documents = Documents([files[number] for number in others], torn, msgspec.json.decode, table_rows)

        def requests() -> Iterator[tuple[Place, LoggedRequest]]:
            yield from vllm
            for where, document in documents:
                try:
                    yield Place(others[where.file], where.line), logged_request(document)
                except NotARequestError as error:
                    message, reason = error.args
                    torn(where, message, reason, b"")
                    continue
                if document.get("workflow_id") is not None:
                    notices[IDS] += 1

        encode, offset = msgspec.msgpack.Encoder().encode, 0
        for place, request in requests():
            try:
                packed = encode(request)
            except (UnicodeEncodeError, OverflowError):
                bad(place, "not Unicode, or a number that does not fit: repair the line", "what does not fit")
                continue
            if request.empty:
                skipped[EMPTY] += 1
                continue
            self.file.write(packed)
            self.started.append(request.started_us)
            self.ended.append(request.started_us if request.ended_us is None else request.ended_us)
            self.places.append(offset)
            self.sizes.append(len(packed))
            self.lines.append(place.line)
            self.digests += blake2b(packed, digest_size=_DIGEST).digest()
            offset += len(packed)
        if logs and not vllm.found:
            raise TraceError(f"{next(iter(logs.values()))}: {NO_PROMPTS}")
        notices[UNANSWERED], notices[CUT] = vllm.unanswered, vllm.cut
        return vllm.read_bytes + documents.read_bytes

    def order(self, notices: Counter[str]) -> NDArray[np.int64]:
        """The requests in time order, int64 [n], each once: of equal times by their content."""
        digests = np.frombuffer(bytes(self.digests), ">u8").reshape(-1, 2)
        keys = (digests[:, 1], digests[:, 0], np.asarray(self.ended), np.asarray(self.started))
        order = np.lexsort(keys).astype(np.int64)
        fresh = np.ones(len(order), bool)
        fresh[1:] = (digests[order][1:] != digests[order][:-1]).any(axis=1)
        notices[TWICE] += int((~fresh).sum())
        return order[fresh]

    def request(self, number: int) -> LoggedRequest:
        """What was read of a request."""
        self.file.seek(self.places[number])
        return _DECODE(self.file.read(self.sizes[number]))

    def digest(self, number: int) -> str:
        """Of the content of a request, its times included, as 12 hexadecimal digits."""
        return self.digests[_DIGEST * number : _DIGEST * (number + 1)].hex()[:12]


_DECODE: Final = msgspec.msgpack.Decoder(LoggedRequest).decode


@dataclass
class _Inferred:
    """The workflow of each request in time order, numbered from 0; lists by workflow.

    Attributes:
        confidence: that the request continues it; NaN for its first one.
        heads: names of its agent and of its first one, "" for none; those of requests in time order.
        first: its first request, by its place in time order.
    """

    workflow: array[int] = field(default_factory=lambda: array("q"))
    confidence: array[float] = field(default_factory=lambda: array("f"))
    heads: list[str] = field(default_factory=list)
    first: array[int] = field(default_factory=lambda: array("q"))
    steps: array[int] = field(default_factory=lambda: array("q"))
    active_us: array[int] = field(default_factory=lambda: array("q"))


def _infer(spool: _Spool, order: NDArray[np.int64]) -> _Inferred:
    index: PromptIndex[PromptedWorkflow] = PromptIndex(_KEY, _BLOCK)
    inferred, names = _Inferred(), dict[str, str]()
    numbers: dict[int, int] = {}  # of workflows by that in the index, while it knows them
    running: list[tuple[int, int, PromptedWorkflow]] = []  # (end, place in time order, its workflow)

    def answer(place: int, continued: PromptedWorkflow, request: LoggedRequest, prompt: list[int]) -> None:
        both = [*prompt, *request.answer_tokens()]
        index.answered(
            continued, TokenPrompt("", chained(both, _BLOCK), both), len(prompt), spool.ended[order[place]] / 1e6
        )

    for place, number in enumerate(order.tolist()):
        started, ended = spool.started[number], spool.ended[number]
        while running and running[0][0] <= started:
            _, earlier, continued = heappop(running)
            request = spool.request(int(order[earlier]))
            answer(earlier, continued, request, request.prompt_tokens())
        index.expire(started / 1e6 - REMEMBERED_S)
        request = spool.request(number)
        tokens = request.prompt_tokens()
        prompt = TokenPrompt("", chained(tokens, _BLOCK), tokens)
        link = index.find(prompt)
        if link is None:
            continued = PromptedWorkflow("")
            index.begin(continued)
            numbers[continued.number] = len(inferred.steps)
            inferred.first.append(place)
            inferred.steps.append(0)
            inferred.active_us.append(0)
        else:
            continued = link.workflow
        if len(numbers) > 2 * len(index) + 1000:
            numbers = {remembered.number: numbers[remembered.number] for remembered in index}
        index.asked(continued, prompt, started / 1e6, link)
        workflow = numbers[continued.number]
        inferred.workflow.append(workflow)
        inferred.confidence.append(float("nan") if link is None else link.confidence)
        inferred.steps[workflow] += 1
        inferred.active_us[workflow] = max(inferred.active_us[workflow], ended)
        system = request.system_tokens()
        head = head_of(system, least=1) if system else head_of(tokens)
        inferred.heads.append(names.setdefault(head, head))
        if ended > started:
            heappush(running, (ended, place, continued))
        else:
            answer(place, continued, request, tokens)
    return inferred


def _tables(
    spool: _Spool, order: NDArray[np.int64], inferred: _Inferred, workflow_type: str | None
) -> Iterator[tuple[pa.Table, NDArray[np.int64]]]:
    """Rows of steps, and the line of each."""
    agents = _agents(inferred)
    quiet_from = max(inferred.active_us) - QUIET_S * 1e6
    types: dict[int, str] = {}
    steps = array("q", bytes(8 * len(inferred.steps)))
    rows: list[dict[str, object]] = []
    lines: list[int] = []
    size = 0
    for place, number in enumerate(order.tolist()):
        request, workflow = spool.request(number), inferred.workflow[place]
        agent = request.agent or agents.get(inferred.heads[place], UNKNOWN)
        if workflow not in types:
            inferred_type = (
                f"{UNKNOWN_TYPE}-{agent.removeprefix('agent-')}" if agent in agents.values() else UNKNOWN_TYPE
            )
            types[workflow] = workflow_type or request.workflow_type or inferred_type
        confidence = inferred.confidence[place]
        rows.append(
            {
                "workflow_type": types[workflow],
                "workflow_id": f"inferred-{spool.digest(int(order[inferred.first[workflow]]))}",
                "step": steps[workflow],
                "agent": agent,
                "model": request.model,
                "input_tokens": request.input_tokens,
                "output_tokens": request.output_tokens,
                "cached_input_tokens": request.cached_input_tokens,
                "finish_reason": request.finish_reason,
                "started_at": request.started_us,
                "ended_at": request.ended_us,
                "system_prompt": request.system_prompt,
                "input_text": request.input_text,
                "output_text": request.answer,
                "complete": inferred.active_us[workflow] < quiet_from,
                "identity_confidence": None if confidence != confidence else confidence,
            }
        )
        steps[workflow] += 1
        if steps[workflow] == inferred.steps[workflow]:
            del types[workflow]
        lines.append(spool.lines[number])
        size += spool.sizes[number]
        if len(rows) == _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield pa.Table.from_pylist(rows, schema=_ROWS), np.array(lines, np.int64)
            rows, lines, size = [], [], 0
    if rows:
        yield pa.Table.from_pylist(rows, schema=_ROWS), np.array(lines, np.int64)


_TIME: Final = pa.timestamp("us", tz="UTC")
_ROWS: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("workflow_type", "workflow_id", "agent", "model", "finish_reason")),
        *((name, pa.int64()) for name in ("step", "input_tokens", "output_tokens", "cached_input_tokens")),
        *((name, _TIME) for name in ("started_at", "ended_at")),
        *((name, pa.large_string()) for name in ("system_prompt", "input_text", "output_text")),
        ("complete", pa.bool_()),
        ("identity_confidence", pa.float32()),
    ]
)


def _agents(inferred: _Inferred) -> dict[str, str]:
    """The names of agents by the first tokens of their prompts, of those that several workflows have."""
    pairs = set(zip(inferred.heads, inferred.workflow, strict=True))
    times = Counter(head for head, _ in pairs if head)
    return {head: f"agent-{head}" for head, workflows in times.items() if workflows >= NAMED_FROM}
