"""Reads from chat responses why they ended and which tools they call, for the forecast of the workflow's return.

vLLM's scheduler ends an answer that calls a tool like any other; only the HTTP server, which parses the answer, knows.
A middleware looks at each part of a response to /v1/chat/completions after it has been sent, changes none, and tells
the engine once. What it cannot read costs nothing but the better forecast. Only the finish reason and the names of
tools leave it, and no text.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any, Final

from presage.datasets.schema.names import MAX_NAME
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.observed import answers_to

PATH: Final = "/v1/chat/completions"
LONGEST: Final = 2**18
"""Bytes of an answer, or of one event of a streamed one, that are read."""
MOST_TOOLS: Final = 32
MOST_WAITING: Final = 1000
"""Answers that the engine has not taken yet; further ones are lost."""

Report = Callable[[Step | str, str, list[str], int], Awaitable[Any]]
"""Tells the engine of a step's finish reason and tools, and how many answers were lost since the last report. The step
is as `answers_to` returns it."""

_log = logging.getLogger(__name__)


class Unread(Exception):  # noqa: N818  it is counted, not an error of the response
    """An answer that vLLM does not give, one that is too long, or one of several."""


class Answer:
    """The answer to one HTTP request, read part by part.

    Attributes:
        requests: what the engine was asked for it: extra arguments and session id.
        step: the step that it answers.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[object, object]] = []
        self.step: Step | str | None = None
        self.streamed: bool | None = None
        self.finish_reason: str | None = None
        self.tools: list[str] = []
        self._rest = b""

    def begin(self, message: MutableMapping[str, Any]) -> bool:
        """The response begins; returns whether it answers a step.

        Raises:
            Unread: the answer is one of several, or cannot be read.
        """
        steps = [answers_to(*request) for request in self.requests]
        if message["status"] != 200 or not any(steps):
            return False
        headers = {name.lower(): value for name, value in message["headers"]}
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip()
        self.streamed = {b"text/event-stream": True, b"application/json": False}.get(kind)
        if len(steps) > 1 or self.streamed is None or b"content-encoding" in headers:
            raise Unread
        self.step = steps[0]
        return True

    def add(self, part: bytes, last: bool) -> bool:
        """Reads a part; returns whether the answer is complete.

        Raises:
            Unread: the answer cannot be read.
        """
        self._rest += part
        if self.streamed:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                # Most events of a stream are a piece of text.
                if line.startswith(b"data: {") and (b'"finish_reason":null' not in line or b'"tool_calls"' in line):
                    self._read(line[6:])
        if len(self._rest) > LONGEST:
            raise Unread
        if last and not self.streamed:
            self._read(self._rest)
        return self.finish_reason is not None

    def _read(self, found: bytes) -> None:
        try:
            for choice in json.loads(found)["choices"]:
                if choice.get("index", 0) != 0:
                    raise Unread
                for call in (choice.get("delta") or choice.get("message") or {}).get("tool_calls") or ():
                    name = (call.get("function") or {}).get("name")
                    if name and len(self.tools) < MOST_TOOLS:
                        self.tools.append(str(name)[:MAX_NAME])
                if choice.get("finish_reason") is not None:
                    self.finish_reason = str(choice["finish_reason"])[:MAX_NAME]
        except (ValueError, LookupError, TypeError, AttributeError):
            raise Unread from None


_ANSWER: ContextVar[Answer | None] = ContextVar("presage_answer", default=None)


def generates(params: Any, session_id: object) -> None:
    """The current HTTP request asks the engine for an answer, with these sampling parameters."""
    answer = _ANSWER.get()
    if answer is not None:
        answer.requests.append((getattr(params, "extra_args", None), session_id))


class AnswerMiddleware:
    """ASGI middleware that reads answers and reports them."""

    def __init__(self, app: Any, report: Report) -> None:
        self._app, self._report = app, report
        self._waiting: set[asyncio.Task[None]] = set()
        self._lost = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one request."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or path != PATH:
            await self._app(scope, receive, send)
            return
        answer: Answer | None = Answer()

        async def received() -> MutableMapping[str, Any]:
            nonlocal answer
            message: MutableMapping[str, Any] = await receive()
            if message["type"] == "http.disconnect":
                answer = None  # the client has gone: what is still sent is no answer, and no loss
            return message

        async def passed_on(message: MutableMapping[str, Any]) -> None:
            nonlocal answer
            await send(message)
            if answer is not None and not self._goes_on(answer, message):
                answer = None

        token = _ANSWER.set(answer)
        try:
            await self._app(scope, received, passed_on)
        finally:
            _ANSWER.reset(token)

    def _goes_on(self, answer: Answer, message: MutableMapping[str, Any]) -> bool:
        """Reads a message that was sent; returns whether more of the answer is expected. Does not raise."""
        try:
            if message["type"] == "http.response.start":
                return answer.begin(message)
            last = not message.get("more_body")
            if not answer.add(message.get("body", b""), last):
                return not last
            if answer.step is not None and answer.finish_reason is not None:
                self._tell(answer.step, answer.finish_reason, answer.tools)
        except Exception:
            self._lost += 1
        return False

    def _tell(self, step: Step | str, finish_reason: str, tools: list[str]) -> None:
        if len(self._waiting) >= MOST_WAITING:
            raise Unread
        task = asyncio.get_running_loop().create_task(self._told(step, finish_reason, tools))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _told(self, step: Step | str, finish_reason: str, tools: list[str]) -> None:
        lost, self._lost = self._lost, 0
        try:
            await self._report(step, finish_reason, tools, lost)
        except Exception as error:
            self._lost += lost + 1
            _log.debug("the engine was not told of an answer: %s", type(error).__name__)
