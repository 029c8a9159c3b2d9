"""Servers on free ports of this machine, for the tests of the gateway."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from presage.serving_hooks.gateway.config import gateway_config
from presage.serving_hooks.gateway.front import Front
from presage.serving_hooks.gateway.serve import build


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


@contextmanager
def gateway(*urls: str, **given: Any) -> Iterator[tuple[str, Front]]:
    """A gateway before these servers, and its front."""
    forecasts = {**WITHOUT_MODELS, **given.pop("forecasts", {})}
    upstreams = [{"url": url, **given.pop("upstream", {})} for url in urls]
    front = build(gateway_config({"upstreams": upstreams, "forecasts": forecasts, **given}, "test"))
    with served(front.app()) as url:
        yield url, front
