"""Routes that are not decided on: which pass, what they carry, whose they are, and that clients may leave them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import httpx
import pytest
from served import ScriptedServer, Seen, before, eventually, gateway, served
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

CHAT: Final = "/v1/chat/completions"
TWO_KEYS: Final = "sk-first,sk-second"
EVERY_SPELLING: Final = (
    {"authorization": "Bearer sk-first"}, {"authorization": "bearer   sk-first"}, {"authorization": "sk-first"},
    {"x-api-key": "sk-first"}, {"api-key": "sk-first"}, {"x-goog-api-key": "sk-first"},
    {"x-api-key": "Bearer sk-first"}, {"authorization": "Bearer of-another", "x-api-key": "sk-first"},
    {"authorization": "Bearer sk-first", "x-api-key": "sk-first", "x-other": "Bearer sk-first"},
)  # fmt: skip
PATHS: Final = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/messages/count_tokens")


@pytest.fixture(scope="module")
def passing() -> Iterator[tuple[str, ScriptedServer]]:
    with before(well) as (url, server, _):
        yield url, server


def well(_: Seen) -> Response:
    return JSONResponse({"id": "resp_1", "status": "completed", "output": []}, headers={"x-of": "the server"})


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1?stream=true"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("POST", "/v1/messages/count_tokens"),
        ("GET", "/v1/models/meta-llama/Llama-3.1-8B"),
        ("GET", "/v1/models/meta-llama%2FLlama-3.1-8B"),
        ("GET", CHAT),
        ("OPTIONS", CHAT),
        ("HEAD", "/v1/responses/resp_1"),
        ("PUT", "/v1/of/a/later/version"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v2/rerank"),
        ("GET", "/version"),
    ],
)  # fmt: skip
def test_a_route_of_the_api_passes_as_it_came(passing: tuple[str, ScriptedServer], method: str, path: str) -> None:
    answer = httpx.request(method, passing[0] + path, content=b"not json: \xff")
    assert (answer.status_code, answer.headers["x-of"]) == (200, "the server")
    seen = passing[1].seen[-1]
    assert (seen.method, seen.content) == (method, b"not json: \xff")
    assert seen.path == path.replace("%2F", "/")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/Load_LoRA_adapter", "/v1//load_lora_adapter",
        "/v1/responses/../load_lora_adapter", "/v1/responses/%2e%2e/%2e%2e/reset_prefix_cache",
        "/v1/%6coad_lora_adapter", "/v1/x%252fy", "/v1/x%3fy", "/v1/x%23y", "/v1/x%5c..%5csleep", "/v1/x%0d%0aX-Evil:1",
        "/v1/workflows/w/end/more", "/v1/internal/model/load", "/v1", "/v1/", "/", "/sleep", "/abort_requests",
        "/invocations", "/inference/v1/generate", "/metrics/x", "/collective_rpc",
    ],
)  # fmt: skip
def test_the_administration_of_an_engine_is_reached_by_no_spelling(
    passing: tuple[str, ScriptedServer], path: str
) -> None:
    (url, server), before_it = passing, len(passing[1].seen)
    with httpx.Client() as client:
        request = client.build_request("POST", url, content=b"{}")
        request.url = request.url.copy_with(raw_path=path.encode())
        answer = client.send(request)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert len(server.seen) == before_it


@pytest.mark.parametrize("path", PATHS)
def test_priorities_and_keys_pass_no_route(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_KEYS", TWO_KEYS)
    body = {"model": "m", "priority": -9, "input": [1, 2], "prompt": "a", "messages": [], "session_id": "s"}
    body["vllm_xargs"] = {"agentic_context": '{"priority": 9, "program_id": "p"}', "session_id": "s"}
    ids = {"x-session-id": "s", "x-vllm-priority": "-9"}
    with before(well, keys_variable="GATEWAY_KEYS", modes={"default": "shadow"}) as (url, server, _):
        for keys in EVERY_SPELLING:
            answer = httpx.post(f"{url}{path}?key=sk-first&a=b", json=body, headers={**keys, **ids})
            assert answer.status_code == 200, keys
        for wrong in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer sk-first", "api-key": "sk-second"}):
            assert httpx.post(url + path, json=body, headers=wrong).status_code == 401
        assert httpx.post(url + path, json=body, headers={"x-api-key": "sk-second", **ids}).status_code == 200
        assert len(server.seen) == len(EVERY_SPELLING) + 1
        for seen in server.seen:
            assert "sk-" not in f"{seen.headers}{seen.path}{seen.body}"
            assert "priority" not in seen.body
            assert "priority" not in json.loads(seen.body["vllm_xargs"]["agentic_context"])
            assert "x-vllm-priority" not in seen.headers
        *_, first, second = server.seen
        for name in ("session_id", "vllm_xargs"):
            assert first.body[name] != second.body[name] != body[name]
        assert first.headers["x-session-id"] != second.headers["x-session-id"] != "s"


def test_a_browser_asks_before_it_has_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_KEYS", TWO_KEYS)
    with before(well, keys_variable="GATEWAY_KEYS") as (url, _, _):
        assert httpx.options(url + CHAT, headers={"origin": "http://a"}).status_code == 200
        assert httpx.get(url + "/v1/models").status_code == 401


def test_a_stored_response_is_its_tenants_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_KEYS", TWO_KEYS)
    first, second = ({"x-api-key": key} for key in TWO_KEYS.split(","))
    with before(well, keys_variable="GATEWAY_KEYS") as (url, _, _):
        made = httpx.post(url + "/v1/responses", json={"model": "m", "input": "a"}, headers=first)
        assert made.json()["id"] == "resp_1"
        for method, path in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
            for headers, status in ((second, 404), (first, 200)):
                answer = httpx.request(method, f"{url}/v1/responses/resp_1{path}", headers=headers)
                assert answer.status_code == status
        goes_on = {"model": "m", "input": "b", "previous_response_id": "resp_1"}
        assert httpx.post(url + "/v1/responses", json=goes_on, headers=second).status_code == 404
        assert httpx.post(url + "/v1/responses", json=goes_on, headers=first).status_code == 200
        for path in ("/v1/files", "/v1/batches/b", CHAT, "/v1/conversations/c"):
            assert httpx.get(url + path, headers=first).status_code == 404


def test_a_stored_response_is_asked_for_where_it_was_made() -> None:
    def numbered(number: int) -> Any:
        return lambda _: JSONResponse({"id": f"resp_{number}", "status": "completed"})

    with before(numbered(0)) as (_, first, front), before(numbered(1), ("other",)) as (_, _, other):
        urls = [made.upstreams.all[0].settings.url for made in (front, other)]
        with gateway(*urls) as (url, both):
            assert eventually(lambda: all(one.models for one in both.upstreams.all))
            assert httpx.post(url + "/v1/responses", json={"model": "other", "input": "a"}).json()["id"] == "resp_1"
            assert httpx.get(url + "/v1/responses/resp_1").json()["id"] == "resp_1"
            assert httpx.post(url + "/v1/embeddings", json={"model": "other", "input": "a"}).json()["id"] == "resp_1"
            assert httpx.get(url + "/v1/models/other").json()["id"] == "resp_1"
    assert first.seen == []


@pytest.mark.parametrize("path", [*PATHS, "/v1/of/a/later/version"])
@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_any_route_ends_its_request_at_the_server(path: str, streams: bool) -> None:
    told: list[bool] = []

    async def slow(request: Request) -> Response:
        await request.body()

        async def parts() -> AsyncIterator[bytes]:
            try:
                for _ in range(400):
                    yield b"data: 1\n\n"
                    await asyncio.sleep(0.05)
            finally:
                told.append(True)

        if streams:
            return StreamingResponse(parts(), media_type="text/event-stream")
        for _ in range(400):
            if await request.is_disconnected():
                told.append(True)
                break
            await asyncio.sleep(0.05)
        return Response()

    with (
        served(Starlette(routes=[Route("/{path:path}", slow, methods=["POST"])])) as upstream,
        gateway(upstream, upstream={"models": ["m"]}) as (url, front),
    ):
        body: dict[str, Any] = {"model": "m", "prompt": "a", "input": "a", "messages": [], "stream": streams}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + path, json=body, timeout=httpx.Timeout(5, read=0.3 if not streams else 0.01))
        assert eventually(lambda: told)
        assert eventually(lambda: front.in_flight == 0)
