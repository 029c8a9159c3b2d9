"""The HTTP front: takes requests of an OpenAI-compatible API, asks for decisions, and proxies to the servers behind.

Bodies and answers pass unchanged, byte for byte, but for what a dialect adds to a request, and for the event with token
counts that the gateway asks for in a stream. A request is decided on before it is forwarded; an answer is read after
each part has been sent. No text is logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any, Final

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from presage.errors import ConfigurationError
from presage.serving_hooks import admin
from presage.serving_hooks.answer_reader import AnswerReader
from presage.serving_hooks.gateway.config import GatewayConfig
from presage.serving_hooks.gateway.decisions import Decisions, GatewayDecision
from presage.serving_hooks.gateway.dialects import DIALECTS, ORDER_HEADERS, answer_headers, without_client_order
from presage.serving_hooks.gateway.dialects.answer import HEADER as FORECAST_HEADER
from presage.serving_hooks.gateway.forward import (
    UNREACHABLE,
    Forwarder,
    RawHeaders,
    Upstream,
    back_headers,
    encoded,
    listed_models,
)
from presage.serving_hooks.gateway.metrics import GatewayMetrics
from presage.serving_hooks.gateway.outcomes import outcome_report
from presage.serving_hooks.gateway.prefill.ahead import PrefillAhead
from presage.serving_hooks.gateway.refusal import Message, Refusal, Send
from presage.serving_hooks.gateway.request import PATHS, ApiRequest
from presage.serving_hooks.gateway.streams import UsageFilter
from presage.serving_hooks.gateway.upstreams import Upstreams
from presage.serving_hooks.mode_names import ADMIN_KEY_HEADER
from presage.serving_hooks.status import as_json
from presage.serving_hooks.workflows.identity import scoped
from presage.serving_hooks.workflows.tenants import ANONYMOUS, Tenants

PASSED_ON: Final = (
    "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/messages", "/pooling", "/classify", "/score", "/rerank",
    "/tokenize", "/detokenize", "/version",
)  # fmt: skip
"""Further paths that are proxied as they are; all others, such as an engine's administration, are not there."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger(__name__)


class ClientLeft(Exception):  # noqa: N818  it is counted, not an error
    """The client closed its connection before its request was answered."""


class Front:
    """The ASGI application of the gateway.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: GatewayConfig,
        decisions: Decisions,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.config, self.decisions, self.metrics = config, decisions, metrics
        self.upstreams = Upstreams(config, decisions, metrics, clock)
        self.in_flight = 0
        self.draining = False
        self.clock = clock
        self._tenants, self._keyed = Tenants(config.keys()), bool(config.keys_variable)
        self._admin_key = admin.admin_key(config.forecasts.admin_key_variable)
        self.forwarder = Forwarder(config.limits, self._keyed)
        self.ahead: PrefillAhead | None = None
        if config.prefill_ahead is not None:
            self.ahead = PrefillAhead(config.prefill_ahead, decisions, self.upstreams, self.forwarder, metrics, clock)

    def app(self) -> Starlette:
        """The application with all routes."""
        routes = [
            *(Route(path, _Endpoint(self, self._decided), methods=["POST"]) for path in PATHS),
            *(Route(path, _Endpoint(self, self._passed_on), methods=["GET", "POST"]) for path in PASSED_ON),
            Route("/v1/outcomes", _Endpoint(self, self._outcome), methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/v1/workflows/status", self._status, methods=["GET"]),
            Route("/v1/workflows/mode", self._mode, methods=["GET", "POST"]),
            Route("/v1/workflows/{workflow_id:path}/explain", self._explain, methods=["GET"]),
            Route("/v1/workflows/{workflow_id:path}/end", self._end, methods=["POST"]),
        ]
        return Starlette(
            routes=routes, lifespan=self._lifespan, exception_handlers={404: _not_found, Refusal: _refused}
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self.upstreams.start()
        ticking = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            self.draining = True
            ticking.cancel()
            with suppress(asyncio.CancelledError):
                await ticking
            if self.ahead is not None:
                await self.ahead.close()
            await self.upstreams.close()
            await self.forwarder.close()
            self.decisions.close()

    async def _tick(self) -> None:
        """Every second: workflows expire, programs are weighed, and upstreams that have not listed models are asked."""
        while True:
            await self.upstreams.ask_models(self.forwarder)
            self.decisions.tick()
            self.upstreams.tick()
            if self.ahead is not None:
                self.ahead.tick()
            await asyncio.sleep(1.0)

    async def _decided(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request that is decided on, forwarded, and whose answer is read."""
        headers = _headers(scope)
        tenant = self.tenant(headers)
        raw = await self._body(receive)
        request = ApiRequest(PATHS[scope["path"]], parsed_body(raw), headers, tenant, self.clock())
        decision = self.decisions.arrived(request)
        if self.ahead is not None:
            self.ahead.arrived(decision)
        answer: AnswerReader | None = None
        try:
            async with _ClientWatch(receive):
                upstream = await self.upstreams.choose(decision)
                self.metrics.decided(self.clock() - request.at_s)
                try:
                    answer = await self._forwarded(scope, send, decision, upstream, raw)
                except Refusal as refusal:
                    if refusal.code != UNREACHABLE:
                        raise
                    self.upstreams.ended(decision, None, unreachable=True)
                    other = await self.upstreams.choose(decision, without=upstream)
                    if other is upstream:
                        raise
                    answer = await self._forwarded(scope, send, decision, other, raw)
        finally:
            if self.ahead is not None:
                self.ahead.answered(decision, answer)
            if answer is None:
                self.decisions.failed(decision)
            else:
                self.decisions.answered(decision, answer)
            self.upstreams.ended(decision, answer)
            if self.ahead is not None:
                self.ahead.left(decision, answer)

    def annotated(
        self, decision: GatewayDecision, upstream: Upstream, raw: bytes
    ) -> tuple[bytes, Mapping[str, str], Mapping[str, str]]:
        """Body and headers as the upstream gets them, and headers to add to those."""
        before, headers = decision.request.body, decision.request.headers
        body: Mapping[str, Any] = before
        added: Mapping[str, str] = {}
        if not self.config.client_priority:
            body = without_client_order(body)
            headers = {name: value for name, value in headers.items() if name not in ORDER_HEADERS}
        if decision.model != decision.request.model:
            body = {**body, "model": decision.model}
        if decision.annotation is not None and decision.acts:
            try:
                body, added = DIALECTS[upstream.settings.dialect](body, headers, decision.annotation)
            except Exception as error:
                self.metrics.failed("annotations", type(error).__name__)
        if wants_usage(decision.request):
            options = before.get("stream_options")
            body = {**body, "stream_options": {**(options if isinstance(options, dict) else {}), "include_usage": True}}
        return encoded(raw, before, body), headers, added

    async def _forwarded(
        self, scope: Scope, send: Send, decision: GatewayDecision, upstream: Upstream, raw: bytes
    ) -> AnswerReader | None:
        """Proxies one request; returns its whole answer, None if it is no success.

        Nothing is sent before a part of the answer has come, so another server can still be asked.
        """
        began, request = self.clock(), decision.request
        body, headers, added = self.annotated(decision, upstream, raw)
        self.upstreams.sent(decision, upstream)
        try:
            response = await self.forwarder.open(upstream, "POST", _target(scope), headers, body, added)
        except Refusal as refusal:
            self.metrics.upstream_failed(upstream.name, refusal.code)
            raise
        try:
            good = response.status == 200
            answer = AnswerReader(request.endpoint, request.streams)
            filtered = UsageFilter() if good and wants_usage(request) else None
            back = back_headers(response, (b"content-length",) if filtered else ())
            if FORECAST_HEADER in request.headers:
                back += _forecast(decision)
            left = response.content_length if filtered is None else None
            parts = response.content.iter_any()
            part = await self._first(parts, upstream)
            await send({"type": "http.response.start", "status": response.status, "headers": back})
            while part:
                passed = part if filtered is None else filtered.passed(part)
                left = None if left is None else left - len(part)
                if passed:
                    await send({"type": "http.response.body", "body": passed, "more_body": left != 0})
                if not answer.first:
                    self.upstreams.monitor.first_token(upstream.name, decision.id)
                    self.metrics.first_token(upstream.name, self.clock() - began)
                answer.add(part)
                part = await anext(parts, b"")
            if left != 0:
                rest = filtered.rest() if filtered is not None else b""
                await send({"type": "http.response.body", "body": rest, "more_body": False})
            answer.end()
            self.metrics.answered(upstream.name, response.status, self.clock() - began)
            return answer if good else None
        except aiohttp.ClientError as error:
            self.metrics.upstream_failed(upstream.name, type(error).__name__)
            raise
        finally:
            response.close()

    async def _first(self, parts: AsyncIterator[bytes], upstream: Upstream) -> bytes:
        """The first part of an answer; empty if it has none."""
        try:
            return await anext(parts, b"")
        except aiohttp.ClientError as error:
            self.metrics.upstream_failed(upstream.name, type(error).__name__)
            raise Refusal(502, "The server behind the gateway broke off; retry.", UNREACHABLE) from error

    async def _passed_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request that is proxied as it is, to the upstream of its model or the first."""
        headers = _headers(scope)
        self.tenant(headers)
        raw = await self._body(receive)
        model: object = ""
        with suppress(Refusal):
            model = parsed_body(raw).get("model")
        upstream = next((one for one in self.upstreams.all if model in one.models), self.upstreams.all[0])
        response = await self.forwarder.open(upstream, scope["method"], _target(scope), headers, raw, {})
        try:
            start = {"type": "http.response.start", "status": response.status, "headers": back_headers(response)}
            await send(start)
            async for part in response.content.iter_any():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            response.close()

    async def _outcome(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Records whether an answer, or a workflow of the caller's tenant, was right."""
        tenant = self.tenant(_headers(scope))
        report = outcome_report(parsed_body(await self._body(receive)), tenant)
        if not self.decisions.recorder.status().on:
            raise Refusal(404, "Outcomes are recorded with steps; start the gateway with --record FOLDER.", "not_found")
        new = self.decisions.reportable.report(tenant, report)
        await JSONResponse({"recorded": True, "repeated": not new})(scope, receive, send)

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The tenant of a request; "" without tenants."""
        tenant = self._tenants.of(headers.get("authorization"))
        if self._keyed and tenant == ANONYMOUS:
            raise Refusal(401, "Send a valid API key of this gateway.", "invalid_api_key")
        return tenant

    async def _body(self, receive: Receive) -> bytes:
        """The whole body of a request."""
        most = self.config.limits.body_mb * 2**20
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.config.limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    size += len(message.get("body", b""))
                    if size > most:
                        limit = f"The request is larger than {self.config.limits.body_mb} MiB."
                        raise Refusal(413, limit, "request_too_large", [(b"connection", b"close")])
                    parts.append(message.get("body", b""))
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise Refusal(
                408, "The body did not arrive in time.", "request_timeout", [(b"connection", b"close")]
            ) from None

    async def _models(self, request: Request) -> Response:
        """The models of all upstreams; the answer of a single upstream as it is."""
        headers = _headers(request.scope)
        self.tenant(headers)
        listed: dict[str, Any] = {}
        single = len(self.upstreams.all) == 1 and not self.upstreams.pools
        for upstream in self.upstreams.all:
            try:
                status, body = await self.forwarder.models(upstream, headers)
            except Refusal:
                if single:
                    raise
                continue
            if single:
                return Response(body, status, media_type="application/json")
            for name, entry in listed_models(body):
                listed.setdefault(name, entry)
        for name in self.upstreams.pools:
            listed[name] = {"id": name, "object": "model", "created": 0, "owned_by": "presage"}
        return JSONResponse({"object": "list", "data": list(listed.values())})

    async def _health(self, _: Request) -> Response:
        return PlainTextResponse("draining\n" if self.draining else "ok\n", 503 if self.draining else 200)

    async def _metrics(self, _: Request) -> Response:
        page = self.metrics.page(self.in_flight, len(self.decisions.table))
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _status(self, request: Request) -> Response:
        self.tenant(_headers(request.scope))
        return JSONResponse(
            {
                "in_flight": self.in_flight,
                "draining": self.draining,
                **self.upstreams.status(),
                "tables": {
                    **self.decisions.debug_state(),
                    **(self.ahead.debug_state() if self.ahead is not None else {}),
                },
                "engines": [as_json(self.decisions.status())],
            }
        )

    async def _mode(self, request: Request) -> Response:
        """Shows the modes, or sets one; for whoever has the admin key."""
        if self._admin_key is None:
            raise Refusal(404, f"Start the gateway with {self.config.forecasts.admin_key_variable} set.", "not_found")
        if refused := admin.refusal(request.headers.get(ADMIN_KEY_HEADER), self._admin_key):
            raise Refusal(*refused, "invalid_admin_key")
        modes = self.decisions.modes
        if request.method == "POST":
            asked = parsed_body(await request.body())
            try:
                modes.set(asked["mode"], asked.get("policy"), asked.get("workflow_type"))
            except (ConfigurationError, KeyError, TypeError) as error:
                raise Refusal(422, f"No such mode: {error}.", "invalid_mode") from None
        return JSONResponse({"engines": [asdict(modes.status())]})

    async def _explain(self, request: Request) -> Response:
        """Explains a workflow of the caller's tenant."""
        tenant = self.tenant(_headers(request.scope))
        name, kind = request.path_params["workflow_id"], request.query_params.get("workflow_type", "")
        found = self.decisions.explain(kind[:256], scoped(tenant, name[:256]))
        if not any(found[key] for key in ("alive", "forecasts", "decisions")):
            raise Refusal(404, "The gateway does not know this workflow; give its workflow_type.", "not_found")
        return JSONResponse({"engines": [found]})

    async def _end(self, request: Request) -> Response:
        """Ends a workflow of the caller's tenant."""
        tenant = self.tenant(_headers(request.scope))
        name, kind = request.path_params["workflow_id"], request.query_params.get("workflow_type", "")
        return JSONResponse({"ended": self.decisions.end(scoped(tenant, name[:256]), kind[:256])})


class _Endpoint:
    """A route whose handler speaks ASGI, within the gateway's limits."""

    def __init__(self, front: Front, handler: Handler) -> None:
        self._front, self._handler = front, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front, limits = self._front, self._front.config.limits
        if front.draining or front.in_flight >= limits.requests:
            busy = "The gateway is shutting down." if front.draining else "Too many requests are in flight."
            await Refusal(503, f"{busy} Retry later.", "overloaded", [(b"retry-after", b"1")]).send(send)
            return
        front.in_flight += 1
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            async with asyncio.timeout(limits.silence_s):
                await send(message)

        try:
            await self._handler(scope, receive, sent)
        except Refusal as refusal:
            front.metrics.refused(refusal.code)
            await refusal.send(send)
        except aiohttp.ClientError:
            pass  # the server broke off: uvicorn closes the connection, so the client sees that the answer is not whole
        except (ClientLeft, TimeoutError):
            front.metrics.refused("client left")
        except Exception as error:
            front.metrics.failed("front", type(error).__name__)
            _log.error("a request failed: %s", type(error).__name__)
            if begun:
                return  # as above
            await Refusal(500, "The gateway failed; retry.", "internal_error").send(send)
        finally:
            front.in_flight -= 1


class _ClientWatch:
    """Within it, a client that closes its connection ends the request: raises ClientLeft."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._left = receive, False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watching = asyncio.create_task(self._watch())

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._watching.cancel()
        if self._left and kind is not None and issubclass(kind, asyncio.CancelledError) and not self._task.uncancel():
            raise ClientLeft

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._task.cancel()


def _forecast(decision: GatewayDecision) -> RawHeaders:
    """What a client that asked for it is told: forecast, model and upstream."""
    if decision.annotation is None:
        return []
    told = answer_headers(decision.annotation, decision.facts())
    return [(name.encode(), value.encode("ascii", "replace")) for name, value in told.items()]


def _headers(scope: Scope) -> dict[str, str]:
    """Headers by names in lower case; the first of several with one name."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        try:
            text = value.decode()  # as the upstream's client encodes it again
        except UnicodeDecodeError:
            text = value.decode("latin-1")
        found.setdefault(name.decode("latin-1").lower(), text)
    return found


def _target(scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    return f"{scope['path']}?{query}" if query else str(scope["path"])


def parsed_body(raw: bytes) -> dict[str, Any]:
    """A body as an object; raises Refusal."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        try:
            body = json.loads(raw)  # takes NaN and lone surrogates, as vLLM does
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"The body is not valid JSON: {type(error).__name__}.", "invalid_json") from None
    if not isinstance(body, dict):
        raise Refusal(400, f"The body is a JSON {type(body).__name__}; send an object.", "invalid_json")
    return body


def wants_usage(request: ApiRequest) -> bool:
    """Whether the gateway asks for token counts that the client has not asked for."""
    if not request.streams or request.endpoint == "responses":
        return False
    options = request.body.get("stream_options")
    return options is None or (isinstance(options, dict) and not options.get("include_usage"))


async def _not_found(request: Request, _: Exception) -> Response:
    return JSONResponse(Refusal(404, f"There is no {request.url.path[:200]!r} here.", "not_found").error, 404)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return JSONResponse(error.error, error.status)
