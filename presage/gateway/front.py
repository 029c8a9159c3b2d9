"""The HTTP front: takes requests of OpenAI's and Anthropic's APIs, asks for decisions, and proxies to servers.

Bodies and answers pass unchanged, byte for byte, but for what a dialect adds to a request, ids and priorities that are
not the client's to choose, and the event with token counts that the gateway asks for in a stream. A request is decided
on before it is forwarded; an answer is read after each part has been sent. No text is logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any

import aiohttp
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from presage.errors import ConfigurationError
from presage.gateway.bodies import Bodies, ClientLeft, Slots, parsed_body, top_of_body
from presage.gateway.client_keys import ClientKeys
from presage.gateway.config import GatewayConfig
from presage.gateway.decisions import Decisions
from presage.gateway.dialects import (
    DIALECTS,
    ORDER_HEADERS,
    answer_headers,
    for_messages,
    isolated,
    with_rank,
    without_client_order,
)
from presage.gateway.dialects.answer import HEADER as FORECAST_HEADER
from presage.gateway.forward import (
    UNREACHABLE,
    Forwarder,
    RawHeaders,
    Upstream,
    back_headers,
    encoded,
    is_encoded,
    is_stream,
    listed_models,
)
from presage.gateway.metrics import GatewayMetrics
from presage.gateway.outcomes import outcome_report
from presage.gateway.prefill.ahead import PrefillAhead
from presage.gateway.refusal import Message, Refusal, Send
from presage.gateway.request_forecasts import GatewayDecision
from presage.gateway.routes import ROUTE_TYPE, ResponseHomes, RouteTypes, check_route, check_shared, model_in
from presage.gateway.streams import UsageFilter
from presage.gateway.tolerance import REFUSED, Additions, Tolerance
from presage.gateway.upstreams import Upstreams
from presage.serving_hooks import admin
from presage.serving_hooks.answer_reader import AnswerReader
from presage.serving_hooks.identity.request import PATHS, ApiRequest
from presage.serving_hooks.mode_names import ADMIN_KEY_HEADER
from presage.serving_hooks.page import overview_page
from presage.serving_hooks.problems import with_problems
from presage.serving_hooks.status import as_json, of_tenant
from presage.serving_hooks.workflows.identity import scoped

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger(__name__)


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
        self.draining = False
        self.clock = clock
        self.keys, self.bodies, self.slots = ClientKeys(config.keys()), Bodies(config.limits), Slots(config.limits)
        self._admin_key = admin.admin_key(config.forecasts.admin_key_variable)
        self.forwarder = Forwarder(config.limits, self.keys)
        self._tolerance, self._homes = Tolerance(clock), ResponseHomes()
        self.ahead: PrefillAhead | None = None
        if config.prefill_ahead is not None:
            self.ahead = PrefillAhead(config.prefill_ahead, decisions, self.upstreams, self.forwarder, metrics, clock)

    def app(self) -> Starlette:
        """The application with all routes."""
        routes = [
            *(Route(path, _Endpoint(self, self._decided), methods=["POST"]) for path in PATHS),
            Route("/v1/outcomes", _Endpoint(self, self._outcome), methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/", overview_page, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/v1/workflows", self._workflows, methods=["GET"]),
            Route("/v1/workflows/agents", self._agents, methods=["GET"]),
            Route("/v1/workflows/status", self._status, methods=["GET"]),
            Route("/v1/workflows/mode", self._mode, methods=["GET", "POST"]),
            Route("/v1/workflows/{workflow_id:path}/explain", self._explain, methods=["GET"]),
            Route("/v1/workflows/{workflow_id:path}/end", self._end, methods=["POST"]),
            Route("/v1/workflows/{workflow_id:path}/pause", self._pause, methods=["POST"]),
            Route("/{path:path}", _Endpoint(self, self._passed_on)),
        ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(RouteTypes, types=self.config.workflow_type.routes)],
            lifespan=self._lifespan,
            exception_handlers={404: _not_found, Refusal: _refused},
        )

    @property
    def in_flight(self) -> int:
        """Requests whose body is here, and whose answer is not whole."""
        return self.slots.taken

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
        tenant = self.keys.tenant(headers)
        self.slots.check(tenant)
        async with self.bodies.held(receive, tenant) as raw:
            with self.slots.held(tenant):
                body = parsed_body(raw, self.config.limits)
                if tenant:
                    self._homes.check(tenant, body.get("previous_response_id"))
                of_route = scope.get(ROUTE_TYPE, "")
                request = ApiRequest(PATHS[scope["path"]], body, headers, tenant, self.clock(), of_route)
                await self._answered(scope, receive, send, request, raw)

    async def _answered(self, scope: Scope, receive: Receive, send: Send, request: ApiRequest, raw: bytes) -> None:
        """Decides on a request, and proxies it to a server, or to another one where the first gives no answer."""
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
        self, decision: GatewayDecision, upstream: Upstream, raw: bytes, additions: Additions = "all"
    ) -> tuple[bytes, Mapping[str, str], Mapping[str, str]]:
        """Body and headers as the upstream gets them, and headers to add to those."""
        request = decision.request
        body, headers = self._own(request.body, request.headers, request.tenant)
        added: Mapping[str, str] = {}
        if decision.model != request.model:
            body = {**body, "model": decision.model}
        if additions != "none":
            try:
                if decision.annotation is not None and decision.acts:
                    body, added = DIALECTS[upstream.settings.dialect](body, headers, decision.annotation)
                elif decision.neutral_rank is not None:
                    body = with_rank(body, upstream.settings.dialect, decision.neutral_rank)
                if request.endpoint == "messages":
                    body, added = for_messages(body, added)
            except Exception as error:
                self.metrics.failed("annotations", type(error).__name__)
        if wants_usage(request) and additions == "all":
            options = request.body.get("stream_options")
            body = {**body, "stream_options": {**(options if isinstance(options, dict) else {}), "include_usage": True}}
        return encoded(raw, request.body, body), headers, added

    def _own(
        self, body: Mapping[str, Any], headers: Mapping[str, str], tenant: str
    ) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        """Body and headers without what a client may not ask for, its ids as those of its tenant."""
        body, headers = isolated(body, headers, tenant, self.decisions.names)
        if self.config.client_priority:
            return body, headers
        return without_client_order(body), {name: of for name, of in headers.items() if name not in ORDER_HEADERS}

    async def _opened(
        self, scope: Scope, decision: GatewayDecision, upstream: Upstream, raw: bytes
    ) -> tuple[aiohttp.ClientResponse, bool]:
        """The response to a request, and whether the gateway has asked for token counts.

        A server that refuses what the gateway adds gets the request without it, and from then on all further ones.
        """
        key = upstream.name, decision.model, decision.request.endpoint
        response, sent = None, None
        for additions in self._tolerance.to_try(key):
            body, headers, added = self.annotated(decision, upstream, raw, additions)
            if response is not None:
                if sent == (body, added):
                    continue
                response.close()
            sent = body, added
            try:
                response = await self.forwarder.open(
                    upstream, "POST", _target(scope, None, self.keys), headers, body, added
                )
            except Refusal as refusal:
                self.metrics.upstream_failed(upstream.name, refusal.code)
                raise
            if response.status not in REFUSED:
                self._tolerance.takes(key, additions)
                break
        assert response is not None
        return response, additions == "all" and wants_usage(decision.request)

    async def _forwarded(
        self, scope: Scope, send: Send, decision: GatewayDecision, upstream: Upstream, raw: bytes
    ) -> AnswerReader | None:
        """Proxies one request; returns its whole answer, None if it is no success.

        Nothing is sent before a part of the answer has come, so another server can still be asked.
        """
        began, request = self.clock(), decision.request
        self.upstreams.sent(decision, upstream)
        response, asked = await self._opened(scope, decision, upstream, raw)
        try:
            good = 200 <= response.status < 300
            answer = AnswerReader(request.endpoint, is_stream(response.headers, request.streams))
            filtered = UsageFilter() if good and asked and answer.streamed else None
            if is_encoded(response.headers):  # though it was asked not to
                answer.failed, filtered = True, None
            back = back_headers(response, (b"content-length",) if filtered else ())
            if FORECAST_HEADER in request.headers:
                back += _forecast(decision)
            left = response.content_length if filtered is None else None
            parts = response.content.iter_any()
            part = await self._first(parts, upstream)
            await send({"type": "http.response.start", "status": response.status, "headers": back})
            while part:
                passed, events = (part, None) if filtered is None else filtered.passed(part)
                left = None if left is None else left - len(part)
                if passed:
                    await send({"type": "http.response.body", "body": passed, "more_body": left != 0})
                if not answer.first:
                    self.upstreams.monitor.first_token(upstream.name, decision.id)
                    self.metrics.first_token(upstream.name, self.clock() - began)
                answer.add(part, events)
                if request.endpoint == "responses" and answer.response_id is not None:
                    self._homes.note(request.tenant, answer.response_id, upstream)
                part = await anext(parts, b"")
            if left != 0:
                passed, events = (b"", None) if filtered is None else filtered.rest()
                answer.add(b"", events)
                await send({"type": "http.response.body", "body": passed, "more_body": False})
            answer.end()
            if request.endpoint == "responses" and answer.response_id is not None:
                self._homes.note(request.tenant, answer.response_id, upstream)
            self.metrics.answered(upstream.name, response.status, self.clock() - began)
            if good and answer.is_error:
                self.metrics.upstream_failed(upstream.name, "error in its answer")
            return answer if good and not answer.is_error else None
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
        """A request to another route of the API: to the server that has its response or its model, else to the first.

        It is not decided on; priorities and ids are the client's as little as elsewhere.
        """
        path, sent = scope["path"], _headers(scope)
        check_route(path)
        preflight = scope["method"] == "OPTIONS"  # a browser sends no key with it
        tenant = "" if preflight else self.keys.tenant(sent)
        self.slots.check(tenant)
        async with self.bodies.held(receive, tenant) as raw, _ClientWatch(receive):
            with self.slots.held(tenant):
                body = top_of_body(raw, self.config.limits)
                new, headers = self._own(body, sent, tenant)
                home = self._homes.of(tenant, path)
                if tenant and home is None:
                    check_shared(scope["method"], path)
                upstream = home or self.upstreams.of_model(body.get("model") or model_in(path))
                target = _target(scope, scope.get("raw_path"), self.keys)
                await self._pass_on(scope["method"], target, headers, encoded(raw, body, new), upstream, send)

    async def _pass_on(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes, upstream: Upstream, send: Send
    ) -> None:
        response = await self.forwarder.open(upstream, method, target, headers, body, {})
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
        tenant = self.keys.tenant(_headers(scope))
        self.slots.check(tenant)
        async with self.bodies.held(receive, tenant) as raw:
            report = outcome_report(parsed_body(raw, self.config.limits), tenant)
        if not self.decisions.recorder.status().on:
            raise Refusal(404, "Outcomes are recorded with steps; start the gateway with --record FOLDER.", "not_found")
        new = self.decisions.reportable.report(tenant, report)
        await JSONResponse({"recorded": True, "repeated": not new})(scope, receive, send)

    async def _models(self, request: Request) -> Response:
        """The models of all upstreams; the answer of a single upstream as it is."""
        headers = _headers(request.scope)
        self.keys.tenant(headers)
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

    async def _ready(self, _: Request) -> Response:
        """Whether a server behind takes requests."""
        if self.draining:
            return PlainTextResponse("draining\n", 503)
        if not self.upstreams.any_serves():
            return PlainTextResponse("no server behind the gateway answers\n", 503)
        return PlainTextResponse("ready\n")

    async def _metrics(self, _: Request) -> Response:
        page = self.metrics.page(self.in_flight, len(self.decisions.table))
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _status(self, request: Request) -> Response:
        tenant = self.keys.tenant(_headers(request.scope))
        shown = of_tenant(as_json(self.decisions.status()), tenant, self.decisions.table.types_of(tenant))
        return JSONResponse(
            {
                "in_flight": self.in_flight,
                "draining": self.draining,
                **self.upstreams.status(),
                "tables": {
                    **self.decisions.debug_state(),
                    **(self.ahead.debug_state() if self.ahead is not None else {}),
                },
                "engines": [with_problems(shown)],
            }
        )

    async def _workflows(self, request: Request) -> Response:
        """A page of the workflows of the caller's tenant."""
        tenant, asked = self.keys.tenant(_headers(request.scope)), request.query_params
        first, most = (asked.get(name, default) for name, default in (("first", "0"), ("most", "50")))
        if not all(number.isascii() and number.isdigit() and len(number) < 10 for number in (first, most)):
            raise Refusal(400, "`first` and `most` are numbers from 0.", "invalid_page")
        return JSONResponse({"engines": [self.decisions.overview.workflows(tenant, int(first), int(most))]})

    async def _agents(self, request: Request) -> Response:
        """The agents of the caller's tenant."""
        return JSONResponse({"engines": [self.decisions.overview.agents(self.keys.tenant(_headers(request.scope)))]})

    async def _mode(self, request: Request) -> Response:
        """Shows the modes, or sets one; for whoever has the admin key."""
        if self._admin_key is None:
            raise Refusal(404, f"Start the gateway with {self.config.forecasts.admin_key_variable} set.", "not_found")
        if refused := admin.refusal(request.headers.get(ADMIN_KEY_HEADER), self._admin_key):
            raise Refusal(*refused, "invalid_admin_key")
        modes = self.decisions.modes
        if request.method == "POST":
            async with self.bodies.held(request.receive, "") as raw:
                asked = parsed_body(raw, self.config.limits)
            try:
                self.decisions.set_mode(asked["mode"], asked.get("policy"), asked.get("workflow_type"))
            except (ConfigurationError, KeyError, TypeError) as error:
                raise Refusal(422, f"No such mode: {error}.", "invalid_mode") from None
        return JSONResponse({"engines": [asdict(modes.status())]})

    async def _explain(self, request: Request) -> Response:
        """Explains a workflow of the caller's tenant."""
        workflow_id, workflow_type = self._named(request)
        found = self.decisions.explain(workflow_type, workflow_id)
        if not any(found[key] for key in ("alive", "forecasts", "decisions")):
            raise Refusal(404, "The gateway does not know this workflow; give its workflow_type.", "not_found")
        return JSONResponse({"engines": [found]})

    async def _end(self, request: Request) -> Response:
        """Ends a workflow of the caller's tenant."""
        return JSONResponse({"ended": self.decisions.end(*self._named(request))})

    async def _pause(self, request: Request) -> Response:
        """Keeps a workflow of the caller's tenant until its next request."""
        return JSONResponse({"paused": self.decisions.pause(*self._named(request))})

    def _named(self, request: Request) -> tuple[str, str]:
        """The workflow that a path names, within the caller's tenant, and its type."""
        tenant = self.keys.tenant(_headers(request.scope))
        kind = request.query_params.get("workflow_type", "")
        return scoped(tenant, request.path_params["workflow_id"][:256]), kind[:256]


class _Endpoint:
    """A route whose handler speaks ASGI, within the gateway's limits."""

    def __init__(self, front: Front, handler: Handler) -> None:
        self._front, self._handler = front, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front, limits, begun = self._front, self._front.config.limits, False

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            async with asyncio.timeout(limits.silence_s):
                await send(message)

        try:
            if front.draining:
                raise _shutting_down()
            await self._handler(scope, receive, sent)
        except Refusal as refusal:
            front.metrics.refused(refusal.code)
            await refusal.send(send)
        except aiohttp.ClientError:
            pass  # the server broke off: uvicorn closes the connection, so the client sees that the answer is not whole
        except (ClientLeft, TimeoutError):
            front.metrics.refused("client left")
        except asyncio.CancelledError:  # the gateway ends, and `drain_s` is over
            front.metrics.refused("overloaded")
            if not begun:
                await _shutting_down().send(send)
        except Exception as error:
            front.metrics.failed("front", type(error).__name__)
            _log.error("a request failed: %s", type(error).__name__)
            if begun:
                return  # as above
            await Refusal(500, "The gateway failed; retry.", "internal_error").send(send)


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


def _shutting_down() -> Refusal:
    return Refusal(503, "The gateway is shutting down. Retry later.", "overloaded", [(b"retry-after", b"1")])


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


def _target(scope: Scope, raw_path: bytes | None, keys: ClientKeys) -> str:
    """Path and query; the path as it came, if it is given, and the query without keys."""
    path = str(scope["path"]) if raw_path is None else raw_path.decode("latin-1")
    query = keys.without(scope["query_string"].decode("latin-1"))
    return f"{path}?{query}" if query else path


def wants_usage(request: ApiRequest) -> bool:
    """Whether the gateway asks for token counts that the client has not asked for."""
    if not request.streams or request.endpoint not in ("chat", "completions"):
        return False
    options = request.body.get("stream_options")
    return options is None or (isinstance(options, dict) and not options.get("include_usage"))


async def _not_found(request: Request, _: Exception) -> Response:
    return JSONResponse(Refusal(404, f"There is no {request.url.path[:200]!r} here.", "not_found").error, 404)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return JSONResponse(error.error, error.status)
