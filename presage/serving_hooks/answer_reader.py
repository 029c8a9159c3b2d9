"""Reads an answer of an OpenAI-compatible API part by part, streamed or not: texts, tools called, finish reason, usage.

Its text is what ingestion reads from a span of the same answer. What cannot be read is None; nothing here raises.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from presage.datasets.schema.messages import plain
from presage.datasets.schema.names import MAX_NAME

LONGEST_EVENT: Final = 2**20
"""Bytes of one event of a stream."""
LONGEST: Final = 2**24
"""Bytes of an answer that are read; of a longer one only the finish reason and the usage of a stream."""
MOST_CHOICES: Final = 128
MOST_TOOLS: Final = 32

Api = Literal["chat", "completions", "responses"]


class Usage(msgspec.Struct):
    """Token counts as the server gives them; None if it does not."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None
    input_tokens_details: dict[str, Any] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str | None = None
    model: str | None = None
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    type: str | None = None
    response: dict[str, Any] | None = None
    output: list[Any] | None = None
    status: str | None = None


_CHUNKS: Final = msgspec.json.Decoder(_Chunk, strict=False)


class _Said:
    """One choice of a stream."""

    __slots__ = ("content", "tools")

    def __init__(self) -> None:
        self.content: list[str] = []
        self.tools: dict[int, dict[str, Any]] = {}

    def message(self) -> dict[str, Any]:
        calls = [
            {"id": of["id"], "function": {"name": of["name"], "arguments": "".join(of["arguments"])}}
            for of in self.tools.values()
        ]
        return {"role": "assistant", "content": "".join(self.content), "tool_calls": calls}


class AnswerReader:
    """The answer to one request.

    Args:
        streamed: whether it comes as server-sent events.

    Attributes:
        finish_reason: of the first choice.
        usage: token counts.
        response_id, model: as the server names them.
        first: whether a part of the answer has come.
        failed: it could not be read to its end.
    """

    def __init__(self, api: Api, streamed: bool) -> None:
        self._api, self._streamed = api, streamed
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.response_id: str | None = None
        self.model: str | None = None
        self.first = self.failed = False
        self._rest = bytearray()
        self._size = 0
        self._said: dict[int, _Said] = {}
        self._whole: list[Any] | None = None

    def add(self, part: bytes) -> None:
        """A part has come."""
        self.first = self.first or bool(part)
        self._size += len(part)
        if self.failed:
            return
        self._rest += part
        if self._streamed:
            *events, rest = self._rest.split(b"\n")
            self._rest = rest
            for event in events:
                if event.startswith(b"data:") and not event.startswith(b"data: [DONE]"):
                    self._read(bytes(event[5:]))
        if len(self._rest) > (LONGEST_EVENT if self._streamed else LONGEST):
            self.failed = True
            self._rest.clear()

    def end(self) -> None:
        """No further part comes."""
        if not self._streamed and not self.failed:
            self._read(bytes(self._rest))
        self._rest.clear()

    @property
    def messages(self) -> list[Any]:
        """The answers, one a choice, as messages of a conversation."""
        if self._whole is not None:
            return self._whole
        return [self._said[index].message() for index in sorted(self._said)]

    @property
    def text(self) -> str | None:
        """All text of the answer; None if there is none or it could not be read."""
        return None if self.failed else plain(self.messages)

    @property
    def tools(self) -> list[str]:
        """Names of the tools that the first choice calls."""
        found: list[str] = []
        for message in self.messages[: 1 if self._api != "responses" else None]:
            if not isinstance(message, dict):
                continue
            calls = [message] if message.get("type") == "function_call" else message.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                of = call.get("function", call) if isinstance(call, dict) else {}
                name = of.get("name") if isinstance(of, dict) else None
                if isinstance(name, str) and name and len(found) < MOST_TOOLS:
                    found.append(name[:MAX_NAME])
        return found

    @property
    def input_tokens(self) -> int | None:
        """Tokens of the prompt."""
        of = self.usage
        return None if of is None else of.prompt_tokens if of.prompt_tokens is not None else of.input_tokens

    @property
    def output_tokens(self) -> int | None:
        """Tokens of the answer, all choices together."""
        of = self.usage
        return None if of is None else of.completion_tokens if of.completion_tokens is not None else of.output_tokens

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were in the cache."""
        of = self.usage
        details = None if of is None else of.prompt_tokens_details or of.input_tokens_details
        cached = (details or {}).get("cached_tokens")
        return cached if isinstance(cached, int) and not isinstance(cached, bool) else None

    def _read(self, event: bytes) -> None:
        try:
            chunk = _CHUNKS.decode(event)
        except (msgspec.DecodeError, RecursionError):
            self.failed = True
            return
        if chunk.response is not None:  # an event of /v1/responses holds the response so far
            if chunk.type in ("response.completed", "response.incomplete", "response.failed"):
                self._response(chunk.response)
            return
        if self._api == "responses":
            if not self._streamed:
                self._take(chunk.id, chunk.model, chunk.usage)
                self._whole, self.finish_reason = chunk.output or [], chunk.status
            return
        self._take(chunk.id, chunk.model, chunk.usage)
        for choice in chunk.choices or ():
            self._choice(choice)

    def _take(self, response_id: str | None, model: str | None, usage: Usage | None) -> None:
        self.response_id = self.response_id or response_id
        self.model = self.model or model
        self.usage = usage or self.usage

    def _response(self, response: dict[str, Any]) -> None:
        try:
            whole = msgspec.convert(response, _Chunk, strict=False)
        except msgspec.ValidationError:
            self.failed = True
            return
        self._take(whole.id, whole.model, whole.usage)
        self._whole, self.finish_reason = whole.output or [], whole.status

    def _choice(self, choice: _Choice) -> None:
        if choice.index == 0 and choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason[:MAX_NAME]
        if self._size > LONGEST or (choice.index not in self._said and len(self._said) >= MOST_CHOICES):
            self.failed = self._size > LONGEST and not self._streamed
            return
        said = self._said.setdefault(choice.index, _Said())
        if choice.text:
            said.content.append(choice.text)
        given = choice.delta or choice.message or {}
        content = given.get("content")
        if content:
            said.content.append(content if isinstance(content, str) else plain([given]) or "")
        calls = given.get("tool_calls")
        for place, call in enumerate(calls if isinstance(calls, list) else ()):
            of = call.get("function") if isinstance(call, dict) else None
            index = call.get("index", place) if isinstance(call, dict) else None
            if not isinstance(of, dict) or not isinstance(index, int) or len(said.tools) > MOST_TOOLS:
                continue
            known = said.tools.setdefault(index, {"id": call.get("id"), "name": "", "arguments": []})
            known["name"] = known["name"] or str(of.get("name") or "")
            if isinstance(of.get("arguments"), str):
                known["arguments"].append(of["arguments"])
