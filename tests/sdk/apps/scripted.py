"""A scripted model server, and the record of what an application really did; runs where the SDK is installed.

    python app_langgraph.py FOLDER openinference [SCENARIO ...]

The server speaks OpenAI's chat completions and responses, and Anthropic's messages, on a free port of this machine. It
gives the answers of a script in order and notes each request; the application notes each call of a tool. Each scenario
leaves its spans, as a collector writes them, in `SCENARIO.json`, and what happened, with the requests as they came, in
`SCENARIO.truth`. Needs opentelemetry's SDK and its OTLP encoder alone.

After an instrumentation's name `+http` adds OpenTelemetry's instrumentation of the HTTP client, which sends the trace
along.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

MODEL = "gpt-scripted"


@dataclass
class Answer:
    """What the model answers next: a text, or calls of tools. `when` is a part of the request it waits for."""

    agent: str
    text: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    usage: bool = True
    status: int = 200
    cached: int = 0
    when: str = ""


class World:
    """The model server, the spans, and the truth of one scenario."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(resource=Resource({"service.name": "scripted"}))
        self.processor = SimpleSpanProcessor(self.exporter)
        self.provider.add_span_processor(self.processor)
        self.flush: Callable[[], Any] = self.provider.force_flush
        self.answers: list[Answer] = []
        self.events: list[dict[str, Any]] = []
        self.workflow = 0
        self.lock = threading.Lock()
        self.requests = 0
        self.unexpected: list[str] = []
        self.wire: list[dict[str, Any]] = []
        self._instrument_http()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def _instrument_http(self) -> None:
        name, plus, _ = sys.argv[2].partition("+http")
        if plus:
            from opentelemetry.instrumentation.httpx import HTTPX2ClientInstrumentor

            sys.argv[2] = name
            HTTPX2ClientInstrumentor().instrument(tracer_provider=self.provider)

    def script(self, *answers: Answer) -> None:
        self.answers += answers

    def tool(self, name: str) -> None:
        """Note that a tool was called."""
        with self.lock:
            self.events.append({"workflow": self.workflow, "kind": "tool", "agent": name, "tool": name})

    def next_answer(self, request: dict[str, Any], responses: bool) -> tuple[int, Answer]:
        """The answer to a request, which is noted, and its number."""
        text = json.dumps(request)
        with self.lock:
            found = next((one for one in self.answers if one.when in text), None)
            if found is None:
                self.unexpected.append(text[:2000])
                return 0, Answer("nobody", status=400)
            told = found.usage and found.status == 200
            if request.get("stream") and not responses:
                told = told and bool((request.get("stream_options") or {}).get("include_usage"))
            self.answers.remove(found)
            self.requests += 1
            number = self.requests
            event = {
                "workflow": self.workflow,
                "kind": "llm",
                "agent": found.agent,
                "model": request.get("model"),
                "input": 1000 + number if told else None,
                "output": 10 + number if told else None,
                "cached": found.cached if told else None,
                "calls": [name for name, _ in found.calls],
                "failed": found.status != 200,
                "at_once": bool(found.when),
            }
            self.events.append(event)
            return number, found

    def finish(self, name: str, folder: Path, raised: str | None) -> None:
        """Write spans and truth of one scenario."""
        self.flush()
        spans = self.exporter.get_finished_spans()
        self.exporter.clear()
        document = MessageToDict(encode_spans(list(spans)), use_integers_for_enums=True)
        for resource in document.get("resourceSpans", []):
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    for key in ("traceId", "spanId", "parentSpanId"):
                        if key in span:
                            span[key] = base64.b64decode(span[key]).hex()
        (folder / f"{name}.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
        truth = {"events": self.events, "raised": raised, "unused": len(self.answers), "unexpected": self.unexpected}
        truth["wire"] = self.wire
        (folder / f"{name}.truth").write_text(json.dumps(truth), encoding="utf-8")
        self.answers, self.events, self.unexpected, self.wire, self.workflow = [], [], [], [], 0


def run_all(scenarios: dict[str, Callable[[World], None]], world: World) -> None:
    """Run the scenarios into the folder that the command line names, each alone; a scenario may raise."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, scenario in scenarios.items():
        if len(sys.argv) > 3 and name not in sys.argv[3:]:
            continue
        raised = None
        try:
            scenario(world)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"[:500]
        world.finish(name, folder, raised)


def _handler(world: World) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._json(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            path = self.path.partition("?")[0]
            if not path.endswith(("/completions", "/responses", "/messages")):
                self._json(200, {})  # an exporter beside ours
                return
            request = json.loads(body)
            responses = path.endswith("/responses")
            number, answer = world.next_answer(request, responses)
            headers = {name.lower(): value for name, value in self.headers.items()}
            sent = {
                "workflow": world.workflow,
                "agent": answer.agent,
                "path": path,
                "headers": headers,
                "body": request,
            }
            world.wire.append(sent)
            time.sleep(0.002)
            if answer.status != 200:
                self._json(answer.status, {"error": {"message": "scripted failure", "type": "server_error"}})
                return
            make = _response if responses else _message if path.endswith("/messages") else _completion
            whole = make(number, answer, request)
            if not request.get("stream"):
                self._json(200, whole)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for line in _response_events(whole) if responses else _chunks(whole, request):
                self.wfile.write(line.encode())
                self.wfile.flush()
            self.close_connection = True

        def _json(self, status: int, document: dict[str, Any]) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def _completion(number: int, answer: Answer, request: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{number}_{i}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for i, (name, arguments) in enumerate(answer.calls)
        ]
    reason = "tool_calls" if answer.calls else "stop"
    whole = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
    }
    if answer.usage:
        whole["usage"] = {
            "prompt_tokens": 1000 + number,
            "completion_tokens": 10 + number,
            "total_tokens": 1010 + 2 * number,
            "prompt_tokens_details": {"cached_tokens": answer.cached},
        }
    return whole


def _message(number: int, answer: Answer, request: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": request["model"],
        "content": [{"type": "text", "text": answer.text}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 1000 + number, "output_tokens": 10 + number},
    }


def _chunks(whole: dict[str, Any], request: dict[str, Any]) -> Iterator[str]:
    base = {key: whole[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    [choice] = whole["choices"]

    def chunk(delta: dict[str, Any], reason: str | None = None) -> str:
        return _event({**base, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    yield chunk({"role": "assistant", "content": None if choice["message"].get("tool_calls") else ""})
    for word in (choice["message"]["content"] or "").split():
        yield chunk({"content": word + " "})
    for i, call in enumerate(choice["message"].get("tool_calls", [])):
        yield chunk({"tool_calls": [{"index": i, **call}]})
    yield chunk({}, choice["finish_reason"])
    if "usage" in whole and (request.get("stream_options") or {}).get("include_usage"):
        yield _event({**base, "choices": [], "usage": whole["usage"]})
    yield "data: [DONE]\n\n"


def _event(document: dict[str, Any], name: str | None = None) -> str:
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(document)}\n\n"


def _response(number: int, answer: Answer, request: dict[str, Any]) -> dict[str, Any]:
    output: list[dict[str, Any]] = [
        {
            "type": "function_call",
            "id": f"fc_{number}_{i}",
            "call_id": f"call_{number}_{i}",
            "name": name,
            "arguments": json.dumps(arguments),
            "status": "completed",
        }
        for i, (name, arguments) in enumerate(answer.calls)
    ]
    if answer.text:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed"}
        output.append(message | {"content": [part]})
    usage = {
        "input_tokens": 1000 + number,
        "input_tokens_details": {"cached_tokens": answer.cached, "cache_write_tokens": 0},
        "output_tokens": 10 + number,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 1010 + 2 * number,
    }
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed",
        "model": request["model"],
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": request.get("tools", []),
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "temperature": 1.0,
        "top_p": 1.0,
        "usage": usage if answer.usage else None,
    }


def _response_events(whole: dict[str, Any]) -> Iterator[str]:
    number = 0

    def event(kind: str, **more: Any) -> str:
        nonlocal number
        number += 1
        return _event({"type": kind, "sequence_number": number, **more}, kind)

    yield event("response.created", response={**whole, "status": "in_progress", "output": [], "usage": None})
    for i, item in enumerate(whole["output"]):
        yield event("response.output_item.added", output_index=i, item=item)
        if item["type"] == "message":
            at = {"item_id": item["id"], "output_index": i, "content_index": 0}
            yield event("response.output_text.delta", **at, delta=item["content"][0]["text"], logprobs=[])
            yield event("response.output_text.done", **at, text=item["content"][0]["text"], logprobs=[])
        else:
            at = {"item_id": item["id"], "output_index": i}
            yield event("response.function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"])
        yield event("response.output_item.done", output_index=i, item=item)
    yield event("response.completed", response=whole)
