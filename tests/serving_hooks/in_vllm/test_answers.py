"""What the engine learns from answers that the HTTP server parses, and that no client notices."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from fastapi.testclient import TestClient

from presage.serving_hooks.vllm.http import answers, plugin
from presage.serving_hooks.workflows.identity import scoped
from presage.serving_hooks.workflows.observed import REQUEST

CHAT = "/v1/chat/completions"
SENT = {"workflow_type": "review", "workflow_id": "r1", "agent": "main", "step": 4}


class Engine:
    """A client of an engine, which notes what it is told of answers."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.fails = False
        self.engine_core = self

    async def generate(self, prompt: str, sampling_params: Any, request_id: str, **more: Any) -> AsyncIterator[str]:
        yield prompt

    async def call_utility_all_async(self, name: str, method: str, args: tuple[Any, ...]) -> list[Any]:
        if self.fails:
            raise RuntimeError("the engine is gone")
        self.told.append((method, *args))
        return [True]


def choice(**of: Any) -> dict[str, Any]:
    return {"index": 0, "finish_reason": None, **of}


def calls(*names: str | None) -> list[dict[str, Any]]:
    return [{"index": i, "function": {"name": name, "arguments": "{}"}} for i, name in enumerate(names)]


def event(*choices: dict[str, Any]) -> str:
    return f"data: {json.dumps({'choices': choices}, separators=(',', ':'))}\n\n"


def server(content: str | list[str], kind: str = "application/json", status: int = 200, *keys: str, **settings: Any):
    """vLLM's chat route with this response, in these parts if it is streamed, and ours."""
    app, engine, routes = FastAPI(), Engine(), plugin.WorkflowRoutes()
    app.state.args = SimpleNamespace(api_key=list(keys) or None, additional_config={"presage": settings})

    async def chat(request: Request) -> Response:
        sent = await request.json()
        for _ in range(sent.pop("requests", 1)):
            engine.generate("p", SimpleNamespace(extra_args=sent), "r", session_id=request.headers.get("X-Session-ID"))
        if isinstance(content, str):
            return Response(content, status, media_type=kind)

        async def parts() -> AsyncIterator[str]:
            for part in content:
                yield part

        return StreamingResponse(parts(), status, media_type=kind)

    app.add_api_route(CHAT, chat, methods=["POST"])
    app.add_api_route("/v1/completions", chat, methods=["POST"])
    routes.attach_router(app)
    asyncio.run(routes.init_state(engine, app.state, app.state.args))
    return TestClient(app), engine


WHOLE = json.dumps(
    {"choices": [choice(finish_reason="tool_calls", message={"content": "", "tool_calls": calls("grep", "read")})]}
)
STREAM = [
    event(choice(delta={"role": "assistant", "content": ""})),
    event(choice(delta={"content": 'a "finish_reason":"stop" in a text'})),
    event(choice(delta={"tool_calls": calls("grep")})) + event(choice(delta={"tool_calls": calls(None)})),
    event(choice(delta={"tool_calls": calls("read")}))[:30],
    event(choice(delta={"tool_calls": calls("read")}))[30:],
    event(choice(delta={}, finish_reason="tool_calls")),
    event(),
    "data: [DONE]\n\n",
]


@pytest.mark.parametrize(
    ("content", "kind"), [(WHOLE, "application/json"), (STREAM, "text/event-stream; charset=utf-8")]
)
def test_the_engine_is_told_once_and_the_client_gets_every_byte(content: Any, kind: str) -> None:
    http, engine = server(content, kind)
    with http:
        assert http.post(CHAT, json=SENT).text == "".join(content)
    assert engine.told == [("step_answered", "review", "r1", "main", 4, "tool_calls", ["grep", "read"], 0)]


def test_an_answer_without_tools_is_told_with_none_of_them() -> None:
    with (parts := server(json.dumps({"choices": [choice(finish_reason="stop", message={"content": "x"})]})))[0]:
        parts[0].post(CHAT, json={"workflow_type": "t"}, headers={"X-Session-ID": "s1"})
    assert parts[1].told == [("step_answered", "t", "s1", "", None, "stop", [], 0)]


def test_a_workflow_is_that_of_the_requests_tenant() -> None:
    http, engine = server(WHOLE, "application/json", 200, "one", "two")
    with http:
        http.post(CHAT, json=SENT, headers={"Authorization": "Bearer two"})
    assert engine.told[0][2] == scoped("key-1", "r1")


@pytest.mark.parametrize(
    ("sent", "path", "settings"),
    [
        ({"agent": "main"}, CHAT, {"infer_workflows": False}),
        (SENT, "/v1/completions", {}),
        (SENT, CHAT, {"answers": False}),
    ],
)
def test_what_is_no_step_or_not_asked_for_is_not_read(sent: Any, path: str, settings: Any) -> None:
    http, engine = server(WHOLE, "application/json", 200, **settings)
    with http:
        assert http.post(path, json=sent).text == WHOLE
    assert engine.told == []


def test_the_answer_to_an_unnamed_request_is_told_by_a_name_that_no_client_chooses() -> None:
    http, engine = server(WHOLE)
    with http:
        for _ in range(2):
            http.post(CHAT, json={"agent": "main", REQUEST: "mine"})
    names = [told[1] for told in engine.told]
    assert engine.told == [("request_answered", name, "tool_calls", ["grep", "read"], 0) for name in names]
    assert len({*names, "mine"}) == 3


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("no json", "application/json"),
        ('{"choices": 3}', "application/json"),
        (WHOLE, "text/html"),
        (json.dumps({"choices": [choice(index=1, finish_reason="stop")]}), "application/json"),
        (["data: {broken\n\n"], "text/event-stream"),
        (['data: {"error": "x"}\n\n'], "text/event-stream"),
        (["data: {" + "x" * answers.LONGEST, "x", "x\n"], "text/event-stream"),
        (
            json.dumps({"choices": [choice(finish_reason="stop", message={"content": "x" * answers.LONGEST})]}),
            "application/json",
        ),
    ],
)
def test_what_cannot_be_read_is_passed_on_and_counted(content: Any, kind: str) -> None:
    http, engine = server(content, kind)
    with http:
        assert http.post(CHAT, json=SENT).text == "".join(content)
        assert http.post(CHAT, json=SENT).text == "".join(content)
    assert engine.told == []


def test_lost_answers_are_told_with_the_next_one_that_is_read() -> None:
    http, engine = server(WHOLE)
    with http:
        http.post(CHAT, json={**SENT, "requests": 2})  # the engine was asked for two
        engine.fails = True
        assert http.post(CHAT, json=SENT).text == WHOLE
        engine.fails = False
        http.post(CHAT, json=SENT)
    assert [told[-1] for told in engine.told] == [2]


def test_errors_of_the_server_are_no_answers() -> None:
    http, engine = server(WHOLE, "application/json", 500)
    with http:
        http.post(CHAT, json=SENT)
        assert http.get(CHAT).status_code == 405
    assert engine.told == []


def test_an_engine_that_does_not_take_answers_holds_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_WAITING", 0)
    http, engine = server(WHOLE)
    with http:
        assert http.post(CHAT, json=SENT).text == WHOLE
    assert engine.told == []


@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_that_leaves_loses_no_answer(leaves: bool) -> None:
    coming = iter([{"type": "http.request", "body": b"{}"}, {"type": "http.disconnect"}])
    told: list[tuple[Any, ...]] = []

    async def report(*of: Any) -> None:
        told.append(of)

    async def receive() -> Any:
        return next(coming)

    async def send(message: Any) -> None: ...

    async def route(scope: Any, receive: Any, send: Any) -> None:
        answers.generates(SimpleNamespace(extra_args=SENT), None)
        for _ in range(2 if leaves else 1):
            await receive()
        json_kind = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": json_kind})
        await send({"type": "http.response.body", "body": b"null"})  # vLLM's answer to a cancelled request

    async def answered(scope: Any, receive: Any, send: Any) -> None:
        await (whole if told_of else route)(scope, receive, send)

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        answers.generates(SimpleNamespace(extra_args=SENT), None)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": WHOLE.encode()})

    async def both() -> None:
        nonlocal told_of
        middleware, scope = answers.AnswerMiddleware(answered, report), {"type": "http", "method": "POST", "path": CHAT}
        await middleware(scope, receive, send)
        told_of = True
        await middleware(scope, receive, send)
        await asyncio.sleep(0)

    told_of = False
    asyncio.run(both())
    assert [one[-1] for one in told] == [0 if leaves else 1], "lost answers come with the next one that is read"
