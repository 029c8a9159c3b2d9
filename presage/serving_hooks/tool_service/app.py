"""The tool service over HTTP: `POST /events` for webhooks, `POST /acquire` and `/release` for agents, `GET /status`."""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from presage.errors import WebhookError
from presage.serving_hooks.lifecycle.receiver import WebhookReceiver
from presage.serving_hooks.tool_service.config import ToolServiceConfig
from presage.serving_hooks.tool_service.service import NotAvailable, ToolService

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 3600.0
_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _Acquire(msgspec.Struct, forbid_unknown_fields=True):
    tool: str
    workflow_type: Annotated[str, msgspec.Meta(max_length=256)]
    workflow_id: _Id
    tenant: Annotated[str, msgspec.Meta(max_length=256)] = ""
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_WAIT_S)] = 120.0


class _Release(msgspec.Struct, forbid_unknown_fields=True):
    id: _Id


def build(config: ToolServiceConfig, now: Callable[[], float] = time.time) -> Starlette:
    """The application; its tools are found again as it starts, and stay as it stops.

    Raises:
        PresageError: as `ToolService`, or the secret of webhooks has another form.
    """
    secret, token = os.environ.get(config.secret_variable), os.environ.get(config.token_variable)
    receiver = WebhookReceiver(secret, now=now) if secret else None
    service = ToolService(config, now)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    async def events(request: Request) -> Response:
        if receiver is None:
            told = f"no events are taken: set {config.secret_variable} to the secret of the sender"
            return JSONResponse({"error": told}, 403)
        try:
            with receiver.received(request.headers, await request.body()) as new:
                for event in new:
                    service.hear(event)
        except WebhookError as error:
            return JSONResponse({"error": str(error)}, 400)
        return Response(status_code=204)

    async def acquire(request: Request) -> Response:
        asked = msgspec.json.decode(await request.body(), type=_Acquire)
        key = asked.tenant, asked.workflow_type, asked.workflow_id
        return JSONResponse(await service.acquire(asked.tool, key, asked.timeout_s))

    async def release(request: Request) -> Response:
        service.release(msgspec.json.decode(await request.body(), type=_Release).id)
        return Response(status_code=204)

    async def resources(request: Request) -> Response:
        return JSONResponse({"resources": service.shown()})

    async def status(request: Request) -> Response:
        return JSONResponse(service.status())

    def guarded(endpoint: Any) -> Any:
        async def answer(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return JSONResponse({"error": f"give the token of {config.token_variable}"}, 401)
            try:
                found: Response = await endpoint(request)
            except NotAvailable as error:
                return JSONResponse({"error": str(error)}, error.status)
            except msgspec.MsgspecError as error:
                return JSONResponse({"error": f"the body is not what is wanted: {error}"}, 400)
            return found

        return answer

    routes = [
        Route("/events", events, methods=["POST"]),
        Route("/acquire", guarded(acquire), methods=["POST"]),
        Route("/release", guarded(release), methods=["POST"]),
        Route("/resources", guarded(resources)),
        Route("/status", guarded(status)),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def serve(config: ToolServiceConfig) -> None:
    """Serves until it is told to stop.

    Raises:
        PresageError: as `build`.
        SystemExit: the address cannot be listened on.
    """
    app = build(config)
    host, port = config.address
    logger.info("the tool service listens on %s and keeps its tools in %s", config.listen, config.folder)
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)
