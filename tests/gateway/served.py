"""Servers on free ports of this machine, for the tests of the gateway."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from presage.gateway.config import gateway_config
from presage.gateway.front import Front
from presage.gateway.serve import build


@contextmanager
def served(app: Any, **options: Any) -> Iterator[str]:
    """The URL of an application, served by uvicorn in a thread of its own."""
    listening = socket.socket(proto=socket.IPPROTO_TCP)  # with another one asyncio leaves Nagle's algorithm on
    listening.bind(("127.0.0.1", 0))
    settings: dict[str, Any] = {"log_level": "error", "lifespan": "on", "timeout_graceful_shutdown": 5, **options}
    server = uvicorn.Server(uvicorn.Config(app, **settings))
    thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[listening]),), daemon=True)
    thread.start()
    for _ in range(6000):
        if server.started or not thread.is_alive():
            break
        threading.Event().wait(0.01)
    assert server.started
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()


WITHOUT_MODELS = {"next_agent": None, "remaining_length": None, "return_time": None, "profile": None, "reload_s": None}
"""Settings of forecasts: online counts alone."""


class Seen(NamedTuple):
    """A request that a server got."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.content)
        return found


class ScriptedServer:
    """Answers each request by a function; keeps what it got, but for polls."""

    def __init__(self, answer: Callable[[Seen], Response], models: tuple[str, ...] = ("m",)) -> None:
        self.seen: list[Seen] = []
        self._answer, self._models = answer, models

    def app(self) -> Starlette:
        polls = [Route(path, lambda _: Response(), methods=["GET"]) for path in ("/health", "/metrics")]
        models = Route("/v1/models", self._list, methods=["GET"])
        return Starlette(routes=[*polls, models, Mount("/", self._any)])

    async def _list(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name} for name in self._models]})

    async def _any(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        path = scope["path"] + (f"?{request.url.query}" if request.url.query else "")
        seen = Seen(request.method, path, dict(request.headers), await request.body())
        self.seen.append(seen)
        await self._answer(seen)(scope, receive, send)


@contextmanager
def before(
    answer: Callable[[Seen], Response], models: tuple[str, ...] = ("m",), **given: Any
) -> Iterator[tuple[str, ScriptedServer, Front]]:
    """A gateway before a scripted server."""
    server = ScriptedServer(answer, models)
    with served(server.app()) as upstream, gateway(upstream, **given) as (url, front):
        yield url, server, front


def eventually(holds: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether something becomes true; generous, since machines are busy."""
    for _ in range(int(seconds / 0.02)):
        if holds():
            return True
        threading.Event().wait(0.02)
    return bool(holds())


@contextmanager
def gateway(*urls: str, **given: Any) -> Iterator[tuple[str, Front]]:
    """A gateway before these servers, and its front."""
    forecasts = {**WITHOUT_MODELS, **given.pop("forecasts", {})}
    upstreams = [{"url": url, **given.pop("upstream", {})} for url in urls]
    front = build(gateway_config({"upstreams": upstreams, "forecasts": forecasts, **given}, "test"))
    with served(front.app()) as url:
        yield url, front
