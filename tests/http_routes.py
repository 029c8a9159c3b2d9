"""vLLM's routes with ours around them, and an engine behind them that keeps what it is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.vllm.http import plugin
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.metadata import check, read
from presage.serving_hooks.workflows.observed import Observed, observed

CHAT = "/v1/chat/completions"


class Served:
    """vLLM's routes with ours around them, before an engine that keeps what it is asked.

    Attributes:
        bodies: as the routes read them.
        counts, examples: of the requests so far, as the scheduler counts them.
    """

    def __init__(self, *keys: str, **settings: Any) -> None:
        self.counts, self.bodies = EventCounts(), []
        self._asked: list[Any] = []
        app, routes = FastAPI(), plugin.WorkflowRoutes()
        app.state.args = SimpleNamespace(api_key=list(keys) or None, additional_config={"presage": settings})
        engine: Any = SimpleNamespace(generate=self._generate, engine_core=None)
        self._engine = engine

        async def answer(request: Request) -> list[str]:
            body = await request.body()
            self.bodies.append(body)
            try:
                parsed = json.loads(body)
            except (ValueError, RecursionError):
                parsed = None  # vLLM answers 400
            sent = parsed if isinstance(parsed, dict) else {}
            params = SimpleNamespace(extra_args=sent.get("vllm_xargs"))
            session = sent.get("session_id") or request.headers.get("x-session-id")
            return [part async for part in engine.generate("p", params, "r", session_id=session)]

        for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/invocations"):
            app.add_api_route(path, answer, methods=["POST"])
        routes.attach_router(app)
        asyncio.run(routes.init_state(engine, app.state, app.state.args))
        self.http = TestClient(app)

    async def _generate(self, prompt: str, params: Any, name: str, session_id: object = None) -> AsyncIterator[str]:
        self._asked.append((params.extra_args, session_id))
        yield prompt

    def generate(self, extra_args: Any) -> Any:
        """The extra arguments that the engine is asked with, outside of an HTTP request."""

        async def asked() -> None:
            async for _ in self._engine.generate("p", SimpleNamespace(extra_args=extra_args), "r"):
                pass

        asyncio.run(asked())
        return self._asked.pop()[0]

    def ask(self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None, path: str = CHAT) -> Step | None:
        """The step that the scheduler reads from this request."""
        extra, session = self.sent(body, headers, path)
        step = read(extra, session, self.counts)
        check(extra, session, self.counts)
        return step

    def observe(
        self, body: Mapping[str, Any] | bytes = b"", headers: Mapping[str, str] | None = None, path: str = CHAT
    ) -> Observed:
        """What the scheduler reads that the server observed of this request."""
        return observed(self.sent(body, headers, path)[0], self.counts)

    def sent(self, body: Mapping[str, Any] | bytes, headers: Mapping[str, str] | None, path: str) -> tuple[Any, Any]:
        """(extra_args, session id) that the engine is asked with."""
        given = body if isinstance(body, bytes) else json.dumps({"model": "m", "messages": [], **body}).encode()
        self.http.post(path, content=given, headers=headers).raise_for_status()
        return self._asked.pop()

    @property
    def left_out(self) -> dict[str, str]:
        """The example of each kind of metadata that was left out."""
        return {f"{field}: {reason}": key for (field, reason), key in self.counts.examples.items()}
