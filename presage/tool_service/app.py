"""The tool service over HTTP: `POST /events` for webhooks, `POST /acquire` and `/release` for agents, `GET /status`."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Annotated, Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from presage.errors import ConfigurationError, WebhookError
from presage.serving_hooks.lifecycle.receiver import WebhookReceiver
from presage.tool_service.config import ToolServiceConfig
from presage.tool_service.service import NotAvailable, ToolService

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 3600.0
_MOST_BYTES = 65_536
_MOST_BYTES_OF_EVENTS = 64 * 1024 * 1024
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
    tokens = {tenant: os.environ.get(variable, "") for tenant, variable in config.tenants.items()}
    if missing := [tenant for tenant, of_tenant in tokens.items() if not of_tenant]:
        raise ConfigurationError(
            f"tenant {missing[0]!r} has no token: set {config.tenants[missing[0]]}, or take the tenant out"
        )
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
            with receiver.received(request.headers, await _body(request, _MOST_BYTES_OF_EVENTS)) as new:
                for event in new:
                    service.hear(event)
        except WebhookError as error:
            return JSONResponse({"error": str(error)}, 400)
        return Response(status_code=204)

    async def acquire(request: Request, tenant: str | None) -> Response:
        asked = msgspec.json.decode(await _body(request, _MOST_BYTES), type=_Acquire)
        if tenant is not None and asked.tenant not in ("", tenant):
            return JSONResponse({"error": "the token is that of another tenant"}, 403)
        asked.tenant = asked.tenant if tenant is None else tenant
        key = asked.tenant, asked.workflow_type, asked.workflow_id
        work = asyncio.create_task(service.acquire(asked.tool, key, asked.timeout_s))
        left = asyncio.create_task(_left(request))
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(work.result()) if work.done() else Response(status_code=499)
        finally:
            left.cancel()
            work.cancel()
            await asyncio.gather(work, left, return_exceptions=True)

    async def release(request: Request, tenant: str | None) -> Response:
        service.release(msgspec.json.decode(await _body(request, _MOST_BYTES), type=_Release).id, tenant)
        return Response(status_code=204)

    async def resources(request: Request, tenant: str | None) -> Response:
        return JSONResponse({"resources": service.shown(tenant)})

    async def status(request: Request, tenant: str | None) -> Response:
        return JSONResponse(service.status())  # counts by tool, of all tenants together

    def guarded(endpoint: Any) -> Any:
        async def answer(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode()
            if "origin" in request.headers:  # a page in a browser of this machine
                return JSONResponse({"error": "pages of browsers are not served"}, 403)
            operator = hmac.compare_digest(given, f"Bearer {token}".encode()) if token else not tokens
            theirs = [name for name, own in tokens.items() if hmac.compare_digest(given, f"Bearer {own}".encode())]
            if not operator and not theirs:
                return JSONResponse({"error": f"give the token of {config.token_variable}, or a tenant's"}, 401)
            try:
                response: Response = await endpoint(request, None if operator else theirs[0])
            except NotAvailable as error:
                return JSONResponse({"error": str(error)}, error.status)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                return JSONResponse({"error": f"the body is not what is wanted: {error}"}, 400)
            return response

        return answer

    routes = [
        Route("/events", events, methods=["POST"]),
        Route("/acquire", guarded(acquire), methods=["POST"]),
        Route("/release", guarded(release), methods=["POST"]),
        Route("/resources", guarded(resources)),
        Route("/status", guarded(status)),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


async def _body(request: Request, most: int) -> bytes:
    """The body, of so many bytes at most."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise HTTPException(413, f"the body has more than {most} bytes")
    return bytes(body)


async def _left(request: Request) -> None:
    """Returns once the client has gone away; its body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def serve(config: ToolServiceConfig) -> None:
    """Serves until it is told to stop.

    Raises:
        PresageError: as `build`, the address cannot be listened on, or it is no local one and there is no token.
    """
    host, port = config.address
    if not os.environ.get(config.token_variable) and not config.tenants and not _is_local(host):
        raise ConfigurationError(
            f"listen is {config.listen}, where anybody could start tools; set {config.token_variable}, or listen on "
            "127.0.0.1"
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise ConfigurationError(f"{config.listen} cannot be listened on ({error.strerror}); give another") from None
    app = build(config)
    logger.info("the tool service listens on %s and keeps its tools in %s", config.listen, config.folder)
    if not os.environ.get(config.secret_variable):
        logger.warning(
            "no events are taken, so nothing is prepared ahead, nor removed at an end: set %s to their sender's secret",
            config.secret_variable,
        )
    settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    uvicorn.Server(settings).run(sockets=[listening])


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
