"""Hostile clients and servers on raw sockets: nothing is smuggled, injected, kept or lost."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from served import WITHOUT_MODELS, eventually, gateway, served

from presage.gateway import heads
from presage.gateway.config import gateway_config
from presage.gateway.front import Front
from presage.gateway.serve import build
from presage.gateway.simulated_engine import SimulatedEngine

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "simulated", "messages": [{"role": "user", "content": "Plan a trip to the sea."}]}
ANSWER = json.dumps({"id": "a", "choices": [{"index": 0, "message": {"role": "assistant", "content": "So."}}]}).encode()


class RawServer:
    """Answers each HTTP/1.1 request alike, and keeps the heads and bodies that it got; none of the monitor's."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                body = await reader.readexactly(int(size or 0))
                if not head.startswith((b"GET /health ", b"GET /metrics ", b"GET /v1/models ")):
                    self.heads.append(head)
                    self.bodies.append(body)
                writer.write(self.answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


def whole(content: bytes = ANSWER, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 200 OK", b"Content-Type: application/json", b"Content-Length: %d" % len(content), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


@contextmanager
def raw(answer: bytes = b"") -> Iterator[tuple[str, RawServer]]:
    server, loop = RawServer(answer or whole()), asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(server.serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", server
    finally:
        asyncio.run_coroutine_threadsafe(closed(listening), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def closed(listening: asyncio.Server) -> None:
    """Stops listening, and ends what is served."""
    listening.close()
    serving = asyncio.all_tasks() - {asyncio.current_task()}
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)


def connected(url: str) -> socket.socket:
    of = urlsplit(url)
    return socket.create_connection((of.hostname, of.port), timeout=30)


def send(url: str, request: bytes) -> bytes:
    """What comes back until the server closes, or waits for more."""
    with connected(url) as client:
        client.sendall(request)
        client.settimeout(1.5)
        found = b""
        try:
            while part := client.recv(65536):
                found += part
        except (TimeoutError, ConnectionError):
            pass
        return found


def post(*headers: bytes, body: bytes = json.dumps(BODY).encode(), length: bool = True) -> bytes:
    lines = [b"POST %s HTTP/1.1" % CHAT.encode(), b"Host: a", b"Content-Type: application/json", *headers]
    if length:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


INNER = b"POST /v1/load_lora_adapter HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(json.dumps(BODY)), json.dumps(BODY).encode())


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(b"Transfer-Encoding: chunked", body=CHUNKED + INNER),  # a length and chunks
        post(b"Transfer-Encoding: chunked", body=CHUNKED + INNER, length=False),
        post(b"Transfer-Encoding: xchunked", body=CHUNKED + INNER),
        post(b"Transfer-Encoding:\x0bchunked", body=CHUNKED + INNER),
        post(b"Content-Length: 2", body=json.dumps(BODY).encode() + INNER),  # two lengths
        post(b"Content-Length: -1", body=json.dumps(BODY).encode() + INNER, length=False),
        post(b"Content-Length: 0", body=INNER, length=False),
        post(b"X-A: b\r\n Transfer-Encoding: chunked", body=json.dumps(BODY).encode()),  # folded
        post(b"X-A: b\nTransfer-Encoding: chunked", body=CHUNKED + INNER),
        post(b"X-A: b\rContent-Length: 0", body=json.dumps(BODY).encode()),
        post(b"X-A\x00: b"),
        post(b"Connection: content-length, transfer-encoding, x-a", b"X-A: b"),
        post(b"Expect: 100-continue"),
        post(b"Upgrade: h2c", b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAMAAABkAAQAAP__"),
    ],
)
def test_the_server_behind_sees_whole_requests_to_the_api_and_no_other(request_bytes: bytes) -> None:
    with raw() as (upstream, server), gateway(upstream, upstream={"models": ["simulated"]}) as (url, front):
        send(url, request_bytes)
        assert httpx.post(url + CHAT, json=BODY).json() == json.loads(ANSWER), "others are served as before"
        assert all(head.startswith(b"POST %s HTTP/1.1\r\n" % CHAT.encode()) for head in server.heads)
        assert not any(b"transfer-encoding" in head.lower() for head in server.heads)
        assert {json.dumps(json.loads(body)) for body in server.bodies} == {json.dumps(BODY)}
        assert 1 <= len(server.heads) <= 2
        assert eventually(lambda: front.in_flight == 0)


@pytest.mark.parametrize("dialect", ["vllm", "presage", "vllm-router", "llm-d", "dynamo", "sys_annotations"])
def test_names_put_no_lines_into_a_head(dialect: str) -> None:
    evil = "a\r\nX-Evil: 1\r\n\r\nGET /metrics HTTP/1.1"
    quoted = "a%0d%0aX-Evil%3a%201%0d%0a%0d%0aGET%20/metrics"
    headers = {f"X-Presage-{name}": quoted for name in ("Workflow-Type", "Workflow-Id", "Agent")}
    headers |= {"X-Session-ID": quoted, "baggage": f"session.id={quoted},gen_ai.agent.name={quoted}"}
    names = {"workflow_type": evil, "workflow_id": evil, "agent": evil}
    with raw() as (upstream, server):
        settings = {"models": ["simulated"], "dialect": dialect}
        with gateway(upstream, upstream=settings) as (url, front):
            for body in ({**BODY, "vllm_xargs": names}, {**BODY, "metadata": names}, BODY):
                answer = httpx.post(url + CHAT, json={**body, "user": evil}, headers=headers)
                assert answer.json() == json.loads(ANSWER)
            told = httpx.post(url + CHAT, json=BODY, headers={**headers, "X-Presage-Forecast": "1"}).headers
            assert eventually(lambda: front.decisions.table.debug_state()["requests"] == 0)
    assert len(server.heads) == 4
    assert all(head.startswith(b"POST ") for head in server.heads)
    assert not any(line.lower().startswith(b"x-evil") for head in server.heads for line in head.split(b"\r\n"))
    assert "x-evil" not in told


def test_a_client_that_takes_no_answer_is_left() -> None:
    flood = b"data: " + b"x" * 65536 + b"\n\n"
    parts = b"%x\r\n%s\r\n" % (len(flood), flood)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    with raw(head + parts * 400 + b"0\r\n\r\n") as (upstream, _):
        limits = {"silence_s": 0.5}
        with gateway(upstream, upstream={"models": ["simulated"]}, limits=limits) as (url, front):
            with connected(url) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.sendall(post(body=json.dumps({**BODY, "stream": True}).encode()))
                assert eventually(lambda: front.in_flight == 1)
                assert eventually(lambda: front.in_flight == 0)
            assert eventually(lambda: front.decisions.table.debug_state()["requests"] == 0)


def test_a_client_that_closes_one_half_or_all_frees_what_it_held() -> None:
    engine = SimulatedEngine(token_s=0.05)
    with served(engine.app()) as upstream, gateway(upstream) as (url, front):
        asked = post(body=json.dumps({**BODY, "stream": True, "max_tokens": 64}).encode())
        for close in (lambda one: one.shutdown(socket.SHUT_WR), lambda one: one.close()):
            client = connected(url)
            client.sendall(asked)
            assert eventually(lambda: front.in_flight == 1)
            close(client)
            assert eventually(lambda: front.in_flight == 0)
            client.close()
        cut = connected(url)
        cut.sendall(asked[: len(asked) // 2])
        cut.close()
        assert eventually(lambda: front.decisions.table.debug_state()["requests"] == 0)
        assert httpx.post(url + CHAT, json={**BODY, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 9\r\n\r\nabcdefghi",
        b"HTTP/1.1 200 OK\r\nX-A: b\x00c\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: " + b"b" * 200_000 + b"\r\nContent-Length: 2\r\n\r\n{}",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"HTTP/1.1 999\r\n\r\n",
    ],
)
def test_a_server_that_speaks_no_sound_http_is_an_error_for_its_client_alone(answer: bytes) -> None:
    with raw(answer) as (upstream, _), gateway(upstream, upstream={"models": ["simulated"]}) as (url, front):
        found = send(url, post(b"Connection: close"))
        assert found == b"" or found.startswith((b"HTTP/1.1 502", b"HTTP/1.1 999")), found[:80]
        assert httpx.get(url + "/health").text == "ok\n"
        assert eventually(lambda: front.in_flight == 0)
        assert eventually(lambda: front.decisions.table.debug_state()["requests"] == 0)


def test_a_head_without_an_end_is_bounded_in_bytes_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "HEAD_S", 0.5)
    engine = SimulatedEngine(token_s=0.0)
    with served(engine.app()) as upstream, served(front_of(upstream).app(), http=heads.BoundedHeads) as url:
        for line in (b"X-A: " + b"a" * 65_536, b"".join(b"X-%d: a\r\n" % number for number in range(10_000))):
            with connected(url) as client, suppress(ConnectionError):
                client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n")
                for _ in range(64):
                    client.sendall(line)
                pytest.fail("16 MB of a head were taken")
        with connected(url) as slow:
            slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n")
            assert slow.recv(100) == b""
        with httpx.Client() as client:
            for _ in range(3):  # on one connection
                sent = {"x-long": "a" * 60_000}
                assert client.post(url + CHAT, json={**BODY, "note": "x" * 10**6}, headers=sent).status_code == 200


def front_of(upstream: str) -> Front:
    forecasts = {**WITHOUT_MODELS}
    return build(gateway_config({"upstreams": [{"url": upstream}], "forecasts": forecasts}, "test"))
