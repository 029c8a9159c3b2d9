"""Reads an answer of an OpenAI- or Anthropic-compatible API part by part, streamed or not: texts, tools called, finish
reason, usage, and whether it is an error with status 200.

Its text is what ingestion reads from a span of the same answer. What cannot be read is None; nothing here raises.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from presage.datasets.schema.messages import plain
from presage.datasets.schema.names import MAX_NAME
from presage.serving_hooks.event_stream import EventReader, StreamEvent

LONGEST: Final = 2**24
"""Bytes of an answer that are read; of a longer one only the finish reason and the usage of a stream."""
MOST_CHOICES: Final = 128
MOST_TOOLS: Final = 32
_LONGEST_ID: Final = 512
_DONE: Final = b"[DONE]"
_ENDS: Final = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")

Api = Literal["chat", "completions", "responses", "messages"]


class _Chunk(msgspec.Struct):
    """What is read of a body or an event. Servers differ in types, so each value is looked at where it is used."""

    id: Any = None
    model: Any = None
    choices: Any = None
    usage: Any = None
    type: Any = None
    object: Any = None
    error: Any = None
    # of the responses API
    response: Any = None
    output: Any = None
    status: Any = None
    # of the messages API
    message: Any = None
    index: Any = None
    content: Any = None
    content_block: Any = None
    delta: Any = None
    stop_reason: Any = None

    @property
    def failed(self) -> bool:
        """Whether it is an error: of vLLM's present and earlier form, or of Anthropic's."""
        return bool(self.error) or "error" in (self.type, self.object) or self.status in ("failed", "cancelled")


_CHUNKS: Final = msgspec.json.Decoder(_Chunk)


def _decoded(data: bytes) -> _Chunk | None:
    """None for what is no JSON object."""
    try:
        return _CHUNKS.decode(data)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, RecursionError):
        try:  # takes NaN and lone surrogates, as servers may write them
            return msgspec.convert(json.loads(data), _Chunk)
        except (ValueError, RecursionError, msgspec.ValidationError):
            return None


class _Said:
    """One choice of a stream, or one block of a message."""

    __slots__ = ("content", "tools")

    def __init__(self) -> None:
        self.content: list[str] = []
        self.tools: dict[int, dict[str, Any]] = {}

    def call(self, index: int, call_id: object, name: object, arguments: object) -> None:
        """A piece of a tool call."""
        if index not in self.tools and len(self.tools) > MOST_TOOLS:
            return
        call = self.tools.setdefault(index, {"id": call_id, "name": "", "arguments": []})
        call["name"] = call["name"] or str(name or "")
        if isinstance(arguments, str):
            call["arguments"].append(arguments)

    def message(self) -> dict[str, Any]:
        calls = [
            {"id": call["id"], "function": {"name": call["name"], "arguments": "".join(call["arguments"])}}
            for call in self.tools.values()
        ]
        return {"role": "assistant", "content": "".join(self.content), "tool_calls": calls}


class AnswerReader:
    """The answer to one request.

    Args:
        streamed: whether it comes as server-sent events.

    Attributes:
        finish_reason: of the first choice.
        response_id, model: as the server names them.
        first: whether a part of the answer has come.
        failed: its text could not be read to its end.
        streamed: as given.
        is_error: the server reported an error in it.
    """

    def __init__(self, api: Api, streamed: bool) -> None:
        self._api, self.streamed = api, streamed
        self.finish_reason: str | None = None
        self.response_id: str | None = None
        self.model: str | None = None
        self.first = self.failed = self.is_error = False
        self._usage: dict[str, Any] = {}
        self._events = EventReader()
        self._body = bytearray()
        self._size = 0
        self._said: dict[int, _Said] = {}
        self._whole: list[Any] | None = None

    def add(self, part: bytes, events: Sequence[StreamEvent] | None = None) -> None:
        """A part has come.

        Args:
            events: that it completes, if the caller has split the stream already; the last ones with an empty part.
        """
        self.first = self.first or bool(part)
        self._size += len(part)
        if self.failed:
            return
        if self.streamed:
            for event in self._events.add(part) if events is None else events:
                self._event(event)
            return
        self._body += part
        if len(self._body) > LONGEST:
            self.failed = True
            self._body.clear()

    def end(self) -> None:
        """No further part comes."""
        if self.streamed:
            for event in self._events.end():
                self._event(event)
        elif not self.failed:
            chunk = _decoded(bytes(self._body))
            if chunk is None:
                self.failed = True
            else:
                self._read(chunk)
        self._body.clear()

    @property
    def messages(self) -> list[Any]:
        """The answers, one a choice, as messages of a conversation."""
        if self._whole is not None:
            return self._whole
        said = [self._said[index].message() for index in sorted(self._said)]
        if self._api != "messages" or not said:
            return said
        return [  # its blocks are one answer
            {
                "role": "assistant",
                "content": "\n".join(block["content"] for block in said if block["content"]),
                "tool_calls": [call for block in said for call in block["tool_calls"]],
            }
        ]

    @property
    def text(self) -> str | None:
        """All text of the answer; None if there is none or it could not be read."""
        return None if self.failed else plain(self.messages)

    @property
    def tools(self) -> list[str]:
        """Names of the tools that the first choice calls."""
        names: list[str] = []
        for message in self.messages[: 1 if self._api != "responses" else None]:
            if not isinstance(message, dict):
                continue
            calls = [message] if message.get("type") == "function_call" else message.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                function = call.get("function", call) if isinstance(call, dict) else {}
                name = function.get("name") if isinstance(function, dict) else None
                if isinstance(name, str) and name and len(names) < MOST_TOOLS:
                    names.append(name[:MAX_NAME])
        return names

    @property
    def input_tokens(self) -> int | None:
        """Tokens of the prompt, those in the cache included."""
        tokens = _first(self._count("prompt_tokens"), self._count("input_tokens"))
        if tokens is None or self._api != "messages":
            return tokens
        cached = (self._count("cache_read_input_tokens"), self._count("cache_creation_input_tokens"))
        return tokens + sum(count or 0 for count in cached)  # Anthropic's API counts them apart

    @property
    def output_tokens(self) -> int | None:
        """Tokens of the answer, all choices together."""
        return _first(self._count("completion_tokens"), self._count("output_tokens"))

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were in the cache."""
        if self._api == "messages":
            return self._count("cache_read_input_tokens")
        details = self._usage.get("prompt_tokens_details") or self._usage.get("input_tokens_details")
        return _whole_number(details.get("cached_tokens")) if isinstance(details, dict) else None

    def _count(self, name: str) -> int | None:
        return _whole_number(self._usage.get(name))

    def _event(self, event: StreamEvent) -> None:
        if event.name == b"error":
            self.is_error = True
        if not event.data or event.data == _DONE:
            return
        chunk = _decoded(event.data)
        if chunk is not None:  # a heartbeat, for one, is no JSON
            self._read(chunk)

    def _read(self, chunk: _Chunk) -> None:
        if chunk.failed:
            self.is_error = True
        elif self._api == "messages":
            self._message(chunk)
        elif isinstance(chunk.response, dict):  # an event of /v1/responses holds the response so far
            response = _Chunk(**{name: chunk.response.get(name) for name in _RESPONSE})
            self._take(response)
            if chunk.type in _ENDS:
                self._response(response)
        elif self._api == "responses":
            if not self.streamed:
                self._response(chunk)
        else:
            self._take(chunk)
            for choice in chunk.choices if isinstance(chunk.choices, list) else ():
                if isinstance(choice, dict):
                    self._choice(choice)

    def _take(self, chunk: _Chunk) -> None:
        """Id, model and usage: of the id the first, of the usage the latest."""
        if self.response_id is None and isinstance(chunk.id, str | int) and not isinstance(chunk.id, bool):
            self.response_id = str(chunk.id)[: _LONGEST_ID + 1]
        if self.model is None and isinstance(chunk.model, str):
            self.model = chunk.model[: MAX_NAME + 1]
        if isinstance(chunk.usage, dict):
            self._usage.update((name, value) for name, value in chunk.usage.items() if value is not None)

    def _response(self, response: _Chunk) -> None:
        self.is_error = self.is_error or response.failed
        self._take(response)
        self._whole = response.output if isinstance(response.output, list) else []
        self._ends(response.status)

    def _ends(self, reason: object) -> None:
        if isinstance(reason, str):
            self.finish_reason = reason[:MAX_NAME]

    def _choice(self, choice: Mapping[str, Any]) -> None:
        index = choice.get("index", 0)
        index = index if isinstance(index, int) else 0
        if index == 0:
            self._ends(choice.get("finish_reason"))
        if choice.get("finish_reason") == "error" or choice.get("error"):
            self.is_error = True
        said = self._room(index)
        if said is None:
            return
        if isinstance(choice.get("text"), str):
            said.content.append(choice["text"])
        given = choice.get("delta") or choice.get("message")
        if not isinstance(given, dict):
            return
        content = given.get("content")
        if content:
            said.content.append(content if isinstance(content, str) else plain([given]) or "")
        calls = given.get("tool_calls")
        for place, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            number = call.get("index", place) if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(number, int):
                said.call(number, call.get("id"), function.get("name"), function.get("arguments"))

    def _room(self, index: int) -> _Said | None:
        """The choice or block of this number; None where no more is kept."""
        if self._size > LONGEST or (index not in self._said and len(self._said) >= MOST_CHOICES):
            return None
        return self._said.setdefault(index, _Said())

    def _message(self, chunk: _Chunk) -> None:
        """An event of the messages API, or its whole answer."""
        if isinstance(chunk.message, dict):  # message_start
            self._message(_Chunk(**{name: chunk.message.get(name) for name in _MESSAGE}))
        self._take(chunk)
        self._ends(chunk.stop_reason)
        for place, block in enumerate(chunk.content if isinstance(chunk.content, list) else ()):
            self._block(place, block, whole=True)
        index = chunk.index if isinstance(chunk.index, int) else 0
        self._block(index, chunk.content_block)
        if isinstance(chunk.delta, dict):
            self._ends(chunk.delta.get("stop_reason"))
            self._block(index, chunk.delta)

    def _block(self, index: int, block: object, whole: bool = False) -> None:
        """A block of content, or a piece of one; thinking is not kept, as in the other APIs."""
        if not isinstance(block, dict) or block.get("thinking") is not None:
            return
        kind, text = block.get("type"), block.get("text")
        if isinstance(text, str) and text:
            said = self._room(index)
            if said is not None:
                said.content.append(text)
        elif kind == "input_json_delta" or (isinstance(kind, str) and kind.endswith("tool_use")):
            said = self._room(index)
            given = block.get("partial_json")
            if block.get("input") or whole:
                given = msgspec.json.encode(block.get("input")).decode()
            if said is not None:
                said.call(0, block.get("id"), block.get("name"), given)


_RESPONSE: Final = ("id", "model", "usage", "output", "status", "error")
_MESSAGE: Final = ("id", "model", "usage", "content", "stop_reason")


def _first(*counts: int | None) -> int | None:
    return next((count for count in counts if count is not None), None)


def _whole_number(value: object) -> int | None:
    """A count as servers write it."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        return None
    return int(value)
