"""An OpenAI-compatible server without a model: for trying the gateway, its demo and its tests.

It decodes as many requests at once as it has slots, each token in a fixed time, and the waiting ones by `priority`, the
lower first, as vLLM does. Its answers are words drawn from the prompt's digest, or what `reply` gives: a text, or a
message with tool calls.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from hashlib import blake2b
from secrets import token_hex
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from presage.datasets.schema.messages import split_system

_WORDS: Final = ("plan", "read", "find", "check", "write", "test", "fix", "merge", "note", "call", "done", "next")
_TOKEN_CHARACTERS: Final = 4
MOST_TOKENS: Final = 64

Reply = Callable[[Mapping[str, Any]], str | Mapping[str, Any]]
"""The answer to the body of a request: its text, or a message of the chat API, `{"content": …, "tool_calls": […]}`."""


class SimulatedEngine:
    """One engine.

    Args:
        slots: requests decoded at once.
        token_s: seconds of a token.
        prefill_s: seconds of a thousand prompt characters.
        reply: makes answers; by default they depend on the prompt alone.

    Attributes:
        seen: bodies and headers of the requests so far, for tests; the latest 1,000.
        aborted: requests whose client left.
    """

    def __init__(
        self,
        models: Sequence[str] = ("simulated",),
        *,
        slots: int = 4,
        token_s: float = 0.002,
        prefill_s: float = 0.002,
        reply: Reply | None = None,
    ) -> None:
        self.models = tuple(models)
        self.seen: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.aborted = 0
        self._free, self._token_s, self._prefill_s = slots, token_s, prefill_s
        self._reply = reply or _words
        self._queue: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._name = token_hex(4)
        self._running = 0

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/responses", self._responses, methods=["POST"]),
            Route("/v1/models", self._list, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/health", lambda _: Response(status_code=200), methods=["GET"]),
        ]
        return Starlette(routes=routes)

    async def _chat(self, request: Request) -> Response:
        body = await self._taken(request)
        if isinstance(body, Response):
            return body
        message = _message(self._reply(body))
        choices = range(max(1, int(body.get("n") or 1)))
        usage = _usage(body.get("messages"), _written(message), len(choices))
        head = {"id": f"chatcmpl-{self._id()}", "model": body["model"], "created": 0}
        if body.get("stream"):
            return self._stream(self._chat_events(body, head, message, choices, usage))
        await self._decode(body, _written(message))
        found = [{"index": i, "message": message, "finish_reason": _finish_reason(message)} for i in choices]
        return JSONResponse({**head, "object": "chat.completion", "choices": found, "usage": usage})

    async def _chat_events(
        self,
        body: Mapping[str, Any],
        head: Mapping[str, Any],
        message: Mapping[str, Any],
        choices: range,
        usage: Mapping[str, int],
    ) -> AsyncIterator[bytes]:
        head = {**head, "object": "chat.completion.chunk"}
        async for part in self._decoded(body, _written(message)):
            for i in choices if message["content"] else ():
                delta = {"role": "assistant", "content": part}
                yield _event({**head, "choices": [{"index": i, "delta": delta, "finish_reason": None}]})
        for i, delta in itertools.product(choices, _call_deltas(message)):
            yield _event({**head, "choices": [{"index": i, "delta": delta, "finish_reason": None}]})
        for i in choices:
            yield _event({**head, "choices": [{"index": i, "delta": {}, "finish_reason": _finish_reason(message)}]})
        if _wants_usage(body):
            yield _event({**head, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    async def _completions(self, request: Request) -> Response:
        body = await self._taken(request)
        if isinstance(body, Response):
            return body
        text = _written(_message(self._reply(body)))
        head = {"id": f"cmpl-{self._id()}", "object": "text_completion", "model": body["model"], "created": 0}
        usage = _usage(body.get("prompt"), text, 1)
        if not body.get("stream"):
            await self._decode(body, text)
            choice = {"index": 0, "text": text, "finish_reason": "stop"}
            return JSONResponse({**head, "choices": [choice], "usage": usage})

        async def events() -> AsyncIterator[bytes]:
            async for part in self._decoded(body, text):
                yield _event({**head, "choices": [{"index": 0, "text": part, "finish_reason": None}]})
            yield _event({**head, "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
            if _wants_usage(body):
                yield _event({**head, "choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"

        return self._stream(events())

    async def _responses(self, request: Request) -> Response:
        body = await self._taken(request)
        if isinstance(body, Response):
            return body
        message = _message(self._reply(body))
        text = _written(message)
        counted = _usage([body.get("instructions"), body.get("input")], text, 1)
        usage = {
            "input_tokens": counted["prompt_tokens"], "output_tokens": counted["completion_tokens"],
            "total_tokens": counted["total_tokens"], "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }  # fmt: skip
        whole = {
            "id": f"resp_{self._id()}", "object": "response", "created_at": 0, "status": "completed",
            "model": body["model"], "output": _items(message), "usage": usage,
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        }  # fmt: skip
        if not body.get("stream"):
            await self._decode(body, text)
            return JSONResponse(whole)

        async def events() -> AsyncIterator[bytes]:
            number = itertools.count()
            started = {**whole, "status": "in_progress", "output": [], "usage": None}
            begun = {"type": "response.created", "response": started, "sequence_number": next(number)}
            yield b"event: response.created\n" + _event(begun)
            async for part in self._decoded(body, text):
                if not message["content"]:
                    continue
                delta = {"type": "response.output_text.delta", "delta": part, "sequence_number": next(number)}
                yield b"event: response.output_text.delta\n" + _event(
                    {**delta, "item_id": "msg", "output_index": 0, "content_index": 0}
                )
            done = {"type": "response.completed", "response": whole, "sequence_number": next(number)}
            yield b"event: response.completed\n" + _event(done)

        return self._stream(events())

    def _id(self) -> str:
        """Of an answer; two engines have different ones."""
        return f"{self._name}{next(self._order)}"

    async def _taken(self, request: Request) -> dict[str, Any] | Response:
        """The body of a request, or the error that it gets."""
        try:
            body = json.loads(await request.body())
        except ValueError:
            return _error(400, "the body is not valid JSON")
        if not isinstance(body, dict) or body.get("model") not in self.models:
            return _error(404, "the model does not exist")
        self.seen = [*self.seen[-999:], (body, dict(request.headers))]
        return body

    async def _decode(self, body: Mapping[str, Any], text: str) -> None:
        async for _ in self._decoded(body, text):
            pass

    async def _decoded(self, body: Mapping[str, Any], text: str) -> AsyncIterator[str]:
        """The parts of an answer, each after its time; begins once there is a slot."""
        await self._slot(body.get("priority", 0))
        try:
            characters = len(str(body.get("messages") or body.get("prompt") or body.get("input") or ""))
            await asyncio.sleep(self._prefill_s * characters / 1000)
            for word in text.split(" "):
                await asyncio.sleep(self._token_s)
                yield f"{word} "
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise
        finally:
            self._running -= 1
            self._free += 1
            self._next()

    async def _slot(self, priority: Any) -> None:
        waits: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        rank = float(priority) if isinstance(priority, int | float) else 0.0
        heapq.heappush(self._queue, (rank, next(self._order), waits))
        self._next()
        await waits

    def _next(self) -> None:
        while self._free and self._queue:
            _, _, waits = heapq.heappop(self._queue)
            if not waits.done():
                self._free -= 1
                self._running += 1
                waits.set_result(None)

    def _stream(self, events: AsyncIterator[bytes]) -> Response:
        return StreamingResponse(events, media_type="text/event-stream")

    async def _list(self, _: Request) -> Response:
        data = [{"id": model, "object": "model", "created": 0, "owned_by": "simulated"} for model in self.models]
        return JSONResponse({"object": "list", "data": data})

    async def _metrics(self, _: Request) -> Response:
        model = f'model_name="{self.models[0]}"'
        waiting = sum(not one[2].done() for one in self._queue)
        return PlainTextResponse(
            f"vllm:num_requests_running{{{model}}} {self._running}\n"
            f"vllm:num_requests_waiting{{{model}}} {waiting}\n"
            f"vllm:kv_cache_usage_perc{{{model}}} 0.0\n"
        )


def _words(body: Mapping[str, Any]) -> str:
    """Words that depend on the prompt alone."""
    given = str(body.get("messages") or body.get("prompt") or body.get("input")).encode("utf-8", "replace")
    digest = blake2b(given, digest_size=MOST_TOKENS).digest()
    limit = body.get("max_tokens") or body.get("max_completion_tokens") or body.get("max_output_tokens")
    count = min(int(limit or 4 + digest[0] % 28), MOST_TOKENS)
    return " ".join(_WORDS[byte % len(_WORDS)] for byte in digest[:count])


def _message(reply: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of the chat API."""
    given = {"content": reply} if isinstance(reply, str) else reply
    return {"role": "assistant", "content": None, **given}


def _written(message: Mapping[str, Any]) -> str:
    """What the engine decodes: the text, else the calls."""
    if message["content"]:
        return str(message["content"])
    return " ".join(f"{call['function']['name']} {call['function']['arguments']}" for call in _calls(message))


def _calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def _finish_reason(message: Mapping[str, Any]) -> str:
    return "tool_calls" if _calls(message) else "stop"


def _call_deltas(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tool calls as a stream brings them: first the name, then the arguments in two parts."""
    found: list[dict[str, Any]] = []
    for index, call in enumerate(_calls(message)):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        half = len(arguments) // 2
        head = {"index": index, "id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}}
        rest = [{"index": index, "function": {"arguments": part}} for part in (arguments[:half], arguments[half:])]
        found += [{"tool_calls": [part]} for part in (head, *rest)]
    return found


def _items(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The message as output items of the responses API."""
    found: list[dict[str, Any]] = []
    if message["content"]:
        content = [{"type": "output_text", "text": message["content"], "annotations": []}]
        found.append({"type": "message", "id": "msg", "role": "assistant", "status": "completed", "content": content})
    for call in _calls(message):
        item = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
        found.append({**item, **call["function"]})
    return found


def _usage(prompt: Any, text: str, choices: int) -> dict[str, int]:
    system, other = split_system(prompt)
    read = max(1, sum(len(one) for one in (system, other) if one) // _TOKEN_CHARACTERS)
    made = choices * len(text.split(" "))
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def _wants_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)
