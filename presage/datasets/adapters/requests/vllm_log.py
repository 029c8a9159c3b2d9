"""vLLM's own log as requests: what `vllm serve --enable-log-requests --enable-log-outputs` writes at the level DEBUG.

    (APIServer pid=1) DEBUG 11-26 23:00:00 [request_logger.py:45] Request chatcmpl-8 details: prompt: 'Hi', …
    (APIServer pid=1) INFO 11-26 23:00:01 [request_logger.py:91] Generated response chatcmpl-8: output: 'Ho', …

A line may stand in JSON (`message`, `log`), as vLLM's JSON logging and containers write it, or behind the time that a
container adds. Without one the time is vLLM's, which has no year and no zone: the year is that of the file's last
change or the one before it, the zone is taken for UTC, and events of one second keep the order of their lines.

Prompts are in the details and in JSON bodies, both from DEBUG on; in bodies the system prompt stands apart.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

from presage.datasets.adapters.files.text import TABLE_SUFFIXES, DamagedGzipError, OnTorn, Place, numbered_lines
from presage.datasets.adapters.requests.logs import PROMPTS, REQUESTS, LoggedRequest, NotARequestError, prompt_of
from presage.datasets.schema.columns import utc_us

LOG_SUFFIXES: Final = (".log", ".log.gz")

NO_PROMPTS: Final = (
    "lines of vLLM's log, but no prompt; expected one in the details of each request: start vLLM with "
    "--enable-log-requests --enable-log-outputs and VLLM_LOGGING_LEVEL=DEBUG"
)
UNANSWERED: Final = "request without an answer in vLLM's log (--enable-log-outputs)"
CUT: Final = "request whose prompt is as long as the longest of vLLM's log: --max-log-len may have cut it"

_LINE: Final = re.compile(
    r"(?:Received request|Request|Generated response) (?P<id>\S+?)(?: \(streaming (?P<part>delta|complete)\))?"
    r"(?P<what>: params: | details: prompt: |: prompt: | JSON body: | details: output_token_ids: |: output: )"
)
_IDS: Final = r"(None|\[[\d, ]*\])"
_TEXT: Final = r"""(None|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_PROMPT: Final = re.compile(rf"{_TEXT}, (?:.*, )?prompt_token_ids: {_IDS}(?:, |$)")
_OUTPUT: Final = re.compile(rf"{_TEXT}(?:, output_token_ids: {_IDS})?, finish_reason: (\S+)$")
"""Both also as vLLM wrote them when token ids stood at the level INFO, in the same line."""
_ADAPTER: Final = re.compile(r"lora_request: LoRARequest\(.*?lora_name='([^']+)'")
_API: Final = re.compile(r"(?:chatcmpl-|resp_)(?P<one>.+)|cmpl-(?P<several>.+)-\d+")
"""What vLLM puts around the id of a request: its API, and of completions the number of the prompt."""
_ISO: Final = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?")
_MONTH_AND_DAY: Final = re.compile(r"(?<![\d-])(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?!\d)")
_BODY: Final = " JSON body: "
_MESSAGES: Final = ("message", "log", "msg")
_TIMES: Final = ("asctime", "time", "timestamp", "@timestamp")
_SNIFFED: Final = 2000
"""Lines within which a server's log has told of a request."""
_MOST_OPEN: Final = 4096
"""Requests that wait for their answer at a time; of more, the first ones have none."""


def is_vllm_log(path: Path) -> bool:
    """Whether a file is such a log, judged by its first lines."""
    if path.name.endswith(TABLE_SUFFIXES):
        return False
    try:
        with numbered_lines(path) as (lines, _):
            for _, line in islice(lines, _SNIFFED):
                text, _ = _unwrapped(line)
                if text is None:  # JSON of another kind
                    return False
                if _LINE.search(text):
                    return True
    except DamagedGzipError:
        pass
    return False


class VllmLogs:
    """Iterates over the requests of vLLM's logs with the places of their prompts.

    Files, by the numbers of their places, are read in the order of their first times, since an answer may stand in the
    next one. `bad` is called for a line that cannot be used; `read_bytes` are those on disk so far.

    Attributes:
        found: requests with a prompt.
        unanswered: those without an answer.
    """

    def __init__(self, files: Mapping[int, Path], bad: OnTorn) -> None:
        self.read_bytes, self.found, self.unanswered = 0, 0, 0
        self._lengths = Counter[int]()  # of prompts that may have been cut
        self._bad = bad
        self._files = sorted(files.items(), key=lambda numbered_file: _first_us(numbered_file[1]))
        self._open: OrderedDict[str, _Request] = OrderedDict()

    def __iter__(self) -> Iterator[tuple[Place, LoggedRequest]]:
        for number, path in self._files:
            before, place = self.read_bytes, Place(number, 0)
            clock = _Clock(path)
            try:
                with numbered_lines(path) as (lines, read_bytes):
                    for line_number, line in lines:
                        place = Place(number, line_number)
                        self.read_bytes = before + read_bytes()
                        yield from self._line(place, line, clock)
            except DamagedGzipError as error:
                message, reason = error.args
                self._bad(place, message, reason, b"")
            self.read_bytes = before + path.stat().st_size
        while self._open:
            yield from self._close(self._open.popitem(last=False)[1])

    @property
    def cut(self) -> int:
        """Prompts that are as long as the longest, if these are many."""
        longest = self._lengths[max(self._lengths, default=0)]
        return longest if longest >= 3 and 10 * longest >= self.found else 0

    def _line(self, place: Place, line: bytes, clock: _Clock) -> Iterator[tuple[Place, LoggedRequest]]:
        text, time = _unwrapped(line)
        match = _LINE.search(text) if text is not None else None
        if text is None or match is None:
            return
        moment = clock.read(time if time is not None else text[: match.start()])
        if moment is None:
            self._bad(place, "no time before the message; expected the log as vLLM writes it", "no time", line)
            return
        key, rest = _key(match["id"]), text[match.end() :].rstrip("\r\n")
        if match["what"].endswith(("output_token_ids: ", "output: ")):
            request = self._open.get(key)
            if request is not None and request.reply(match["what"], match["part"], rest, moment):
                yield from self._close(self._open.pop(key))
            return
        request = self._open.get(key)
        if request is not None and match["what"] in request.told:  # an aborted one, whose id came again
            yield from self._close(self._open.pop(key))
            request = None
        if request is None:
            request = self._open[key] = _Request(place, moment)
        request.ask(match["what"], rest)
        if len(self._open) > _MOST_OPEN:
            yield from self._close(self._open.popitem(last=False)[1])

    def _close(self, request: _Request) -> Iterator[tuple[Place, LoggedRequest]]:
        made = request.made()
        if made is None:
            return
        self.found += 1
        self.unanswered += made.answer is None and made.answer_ids is None
        if made.prompt_ids and request.prompt_size in (None, len(made.prompt_ids)):  # vLLM cuts both alike
            self._lengths[len(made.prompt_ids)] += 1
        yield request.place, made


class _Request:
    """What the lines so far tell of a request."""

    def __init__(self, place: Place, started_us: int) -> None:
        self.place, self._started_us = place, started_us
        self.told: set[str] = set()
        self.prompt_size: int | None = None  # characters
        self._said: list[tuple[str, str]] = []
        self._from_body = False
        self._prompt_ids: list[int] | None = None
        self._answer_ids: list[int] | None = None
        self._answer: str | None = None
        self._ended_us: int | None = None
        self._adapter: str | None = None
        self._reason: str | None = None

    def ask(self, what: str, rest: str) -> None:
        """A line about the prompt."""
        self.told.add(what)
        if what == _BODY:
            try:
                self._said, _ = prompt_of(msgspec.json.decode(rest))
                self._from_body = True
            except (msgspec.DecodeError, NotARequestError, AttributeError):
                return  # cut, or of another API
            return
        if adapter := _ADAPTER.search(rest):
            self._adapter = adapter[1]
        match = _PROMPT.match(rest) if what.endswith("prompt: ") else None
        if match is not None:
            prompt, self._prompt_ids = _text(match[1]), _ids(match[2])
            self.prompt_size = len(prompt) if prompt else None
            if prompt and not self._from_body:
                self._said = [("", prompt)]

    def reply(self, what: str, part: str | None, rest: str, moment: int) -> bool:
        """A line about the answer; returns whether it is the last one of the first choice."""
        if what.endswith("output_token_ids: "):
            ids = _ids(rest)
            if ids is not None:
                self._answer_ids = [*(self._answer_ids or ()), *ids] if part == "delta" else ids
            return False
        match = _OUTPUT.match(rest)
        if part == "delta" or match is None:
            return False
        self._answer, self._ended_us = _text(match[1]), moment
        if match[2] is not None:
            self._answer_ids = _ids(match[2])
        self._reason = match[3] if match[3] not in ("None", "streaming_complete") else None
        return True

    def made(self) -> LoggedRequest | None:
        """The request; None if the log has no prompt of it.

        Neither if it has a body alone: a client that sends ids of its own has another one in the details.
        """
        if (not self._said and not self._prompt_ids) or self.told == {_BODY}:
            return None
        counts = (len(ids) if ids else None for ids in (self._prompt_ids, self._answer_ids))
        return LoggedRequest(
            self._started_us,
            self._ended_us,
            self._said,
            self._answer,
            self._prompt_ids or None,
            self._answer_ids,
            None,
            None,
            self._adapter,
            self._reason,
            *counts,
        )


class _Clock:
    """Times of a file's lines, in microseconds since 1970, each a little later than the one before in its second."""

    def __init__(self, path: Path) -> None:
        self._changed = datetime.fromtimestamp(path.stat().st_mtime, UTC) + timedelta(days=1)
        self._last = 0

    def read(self, prefix: str) -> int | None:
        """The time in what stands before a message; None if there is none."""
        if match := _ISO.search(prefix):
            try:
                moment = utc_us(match[0].replace(",", "."))
            except (ValueError, OverflowError):
                return None
        elif match := _MONTH_AND_DAY.search(prefix):
            moment = self._of_year(*map(int, match.groups()))
            if moment < 0:
                return None
        else:
            return None
        if 0 <= self._last - moment < 10**6:
            moment = self._last + 1
        self._last = moment
        return moment

    def _of_year(self, month: int, day: int, hour: int, minute: int, second: int) -> int:
        for year in range(self._changed.year, self._changed.year - 9, -1):  # the 29th of February is in few
            try:
                moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
            except ValueError:
                continue
            if moment <= self._changed:
                return round(moment.timestamp()) * 10**6
        return -1


def _first_us(path: Path) -> int:
    clock = _Clock(path)
    try:
        with numbered_lines(path) as (lines, _):
            for _, line in islice(lines, _SNIFFED):
                text, time = _unwrapped(line)
                moment = clock.read(time if time is not None else (text or "")[:200])
                if moment is not None:
                    return moment
    except DamagedGzipError:
        pass
    return 0


def _unwrapped(line: bytes) -> tuple[str | None, str | None]:
    """The text of a line, and its time where JSON around it has one; None for JSON without a message."""
    if not line.lstrip().startswith(b"{"):
        return line.decode(errors="replace"), None
    try:
        document: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return line.decode(errors="replace"), None
    if not isinstance(document, dict) or any(name in document for name in (*PROMPTS, *REQUESTS)):
        return None, None
    text = next((document[name] for name in _MESSAGES if isinstance(document.get(name), str)), None)
    return text, next((document[name] for name in _TIMES if isinstance(document.get(name), str)), None)


def _key(name: str) -> str:
    """The id of a request as its JSON body has it."""
    match = _API.fullmatch(name)
    return name if match is None else match["one"] or match["several"]


def _text(literal: str) -> str | None:
    """A text as Python writes it; of one that was cut, nothing."""
    try:
        value = ast.literal_eval(literal)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _ids(literal: str) -> list[int] | None:
    listed = literal.strip().removesuffix(".")
    if not (listed.startswith("[") and listed.endswith("]")):
        return None
    return [int(token) for token in listed[1:-1].split(",") if token.strip()]
