"""The gateway as an external processor of Envoy: decides on requests that Envoy forwards.

Envoy (`envoy.service.ext_proc.v3.ExternalProcessor`) opens a stream for each HTTP request, and sends headers and bodies
as they pass. Once the body of a request is whole, Envoy is told the body and headers that a front of the gateway would
send to the upstream, and, if there are several, which one that is: as the Gateway API inference extension tells it, in
the header `x-gateway-destination-endpoint` and in the metadata of `envoy.lb`. Answers are read as they pass.

Bodies come whole (`BUFFERED`) or in parts that are held here until the last one (`FULL_DUPLEX_STREAMED`). From
`STREAMED` bodies, whose first parts have gone by then, workflows are only recognised and recorded.

If anything fails, the body is too large or no JSON, or the model is unknown, Envoy continues with the request as it
came. Only an API key that is missing, on a gateway with keys, is refused. Messages that Envoy sends, and their numbers,
are those of Envoy 1.36.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from presage.gateway.bodies import parsed_body
from presage.gateway.client_keys import KEY_HEADERS
from presage.gateway.dialects import ORDER_HEADERS, answer_headers
from presage.gateway.dialects.answer import HEADER as FORECAST_HEADER
from presage.gateway.forward import is_encoded, is_stream
from presage.gateway.front import Front, wants_usage
from presage.gateway.hosts.grpc_messages import messages, serve_method
from presage.gateway.refusal import Refusal
from presage.gateway.request_forecasts import GatewayDecision
from presage.gateway.streams import UsageFilter
from presage.serving_hooks.answer_reader import AnswerReader
from presage.serving_hooks.event_stream import StreamEvent
from presage.serving_hooks.identity.request import PATHS, ApiRequest
from presage.serving_hooks.identity.sent_names import NAME_HEADERS

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION: Final = "x-gateway-destination-endpoint"
MESSAGES: Final = messages(
    "envoy.service.ext_proc.v3",
    {
        "ProcessingRequest": "2 request_headers HttpHeaders, 3 response_headers HttpHeaders, 4 request_body HttpBody, "
        "5 response_body HttpBody, 6 request_trailers HttpTrailers, 7 response_trailers HttpTrailers, "
        "10 observability_mode bool, 11 protocol_config ProtocolConfiguration",
        "ProtocolConfiguration": "1 request_body_mode int32, 2 response_body_mode int32",
        "HttpHeaders": "1 headers HeaderMap, 3 end_of_stream bool",
        "HttpBody": "1 body bytes, 2 end_of_stream bool",
        "HttpTrailers": "1 trailers HeaderMap",
        "ProcessingResponse": "1 request_headers Changed, 2 response_headers Changed, 3 request_body Changed, "
        "4 response_body Changed, 5 request_trailers TrailersResponse, 6 response_trailers TrailersResponse, "
        "7 immediate_response ImmediateResponse, 8 dynamic_metadata Struct",
        "Changed": "1 response CommonResponse",  # HeadersResponse and BodyResponse
        "TrailersResponse": "1 header_mutation HeaderMutation",
        "CommonResponse": "2 header_mutation HeaderMutation, 3 body_mutation BodyMutation, 5 clear_route_cache bool",
        "HeaderMutation": "1 set_headers HeaderValueOption*, 2 remove_headers string*",
        "BodyMutation": "1 body bytes, 2 clear_body bool, 3 streamed_response StreamedBodyResponse",
        "StreamedBodyResponse": "1 body bytes, 2 end_of_stream bool",
        "ImmediateResponse": "1 status HttpStatus, 2 headers HeaderMutation, 3 body bytes, 5 details string",
        "HttpStatus": "1 code int32",
        "HeaderMap": "1 headers HeaderValue*",
        "HeaderValue": "1 key string, 2 value string, 3 raw_value bytes",
        "HeaderValueOption": "1 header HeaderValue, 3 append_action int32",
        "Struct": "1 fields StructField*",
        "StructField": "1 key string, 2 value Value",
        "Value": "3 string_value string, 5 struct_value Struct",
    },
)
_Response: Final = MESSAGES["ProcessingResponse"]
_NO_BODY, _FULL_DUPLEX = 0, 4
_OVERWRITE: Final = 2
_PART: Final = 62_000
"""Bytes of one part in FULL_DUPLEX_STREAMED, where Envoy's limit is 64 KiB."""
_OVERHEAD: Final = 2**20
_OWN_HEADERS: Final = frozenset((*NAME_HEADERS, *ORDER_HEADERS, *KEY_HEADERS))
"""Headers of clients that a server does not always get."""

Headers = Sequence[tuple[str, str]]


class ExternalProcessor:
    """Answers Envoy's streams with the decisions of a gateway."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def process(self, requests: AsyncIterator[Any], _: Any) -> AsyncIterator[Any]:
        """Answers `Process`, one stream for each HTTP request."""
        exchange = _Exchange(self._front)
        try:
            async for message in requests:
                for answer in await exchange.answers(message):
                    yield answer
        finally:
            exchange.close()


class _Exchange:
    """One HTTP request and its response."""

    def __init__(self, front: Front) -> None:
        self._front, self._clock = front, front.clock
        self._began = self._clock()
        self._headers: dict[str, str] = {}
        self._tenant = ""
        self._hidden: list[str] = []  # headers that no server gets
        self._duplex_in = self._duplex_out = False
        self._unread = False  # the response's body is not sent
        self._body: bytearray | None = None  # None: not, or no longer, of interest
        self._parts = 0
        self._held = False  # headers and body wait here until the body is whole
        self._decision: GatewayDecision | None = None
        self._asked_usage = False
        self._usage: UsageFilter | None = None
        self._answer: AnswerReader | None = None
        self._status = 0

    async def answers(self, message: Any) -> list[Any]:
        """What Envoy is told for a message."""
        kind = next((field.name for field, _ in message.ListFields() if field.number < 8), "")
        try:
            answers = await self._answers(kind, message)
        except Refusal as refusal:
            self._front.metrics.refused(refusal.code)
            answers = [_refused(refusal)] if refusal.status == 401 else self._as_it_came(kind, message)
        except Exception as error:
            self._front.metrics.failed("ext_proc", type(error).__name__)
            self.close()
            answers = self._as_it_came(kind, message)
        return [] if message.observability_mode else answers

    def close(self) -> None:
        """The request fails, if it has no whole answer yet."""
        decision, self._decision = self._decision, None
        if decision is not None:
            self._front.decisions.failed(decision)
            self._front.upstreams.ended(decision, None)

    async def _answers(self, kind: str, message: Any) -> list[Any]:
        if kind == "request_headers":
            return self._begun(message)
        if kind == "request_body" and self._body is not None:
            return await self._more(self._body, message.request_body)
        if kind == "request_trailers" and self._held and self._body is not None:
            return [*(await self._decided(bytes(self._body), ends=False)), *self._unchanged(kind, message)]
        if kind == "response_headers" and self._decision is not None:
            return self._responded(self._decision, message.response_headers)
        if kind == "response_body":
            return self._passed(bytes(message.response_body.body), message.response_body.end_of_stream)
        if kind == "response_trailers":
            self._finished()
        return self._unchanged(kind, message)

    def _begun(self, message: Any) -> list[Any]:
        self._headers = _headers(message.request_headers)
        modes = message.protocol_config
        self._duplex_in = modes.request_body_mode == _FULL_DUPLEX
        self._duplex_out = modes.response_body_mode == _FULL_DUPLEX
        self._unread = message.HasField("protocol_config") and modes.response_body_mode == _NO_BODY
        self._hidden = [name for name, value in self._headers.items() if self._front.keys.in_header(name, value)]
        self._tenant = self._front.keys.tenant(self._headers)
        decides = self._path in PATHS and self._headers.get(":method") == "POST"
        if decides and not message.request_headers.end_of_stream:
            self._body, self._held = bytearray(), self._duplex_in
        return [] if self._held else self._unchanged("request_headers", message)

    @property
    def _path(self) -> str:
        return self._headers.get(":path", "").partition("?")[0]

    async def _more(self, body: bytearray, part: Any) -> list[Any]:
        body += part.body
        self._parts += 1
        if len(body) > self._front.config.limits.body_mb * 2**20:
            raise Refusal(413, "", "request_too_large")
        if part.end_of_stream:
            return await self._decided(bytes(body), ends=True)
        return [] if self._held else [_changed("request_body")]

    async def _decided(self, raw: bytes, ends: bool) -> list[Any]:
        """The body is whole."""
        front = self._front
        headers = {name: value for name, value in self._headers.items() if not name.startswith(":")}
        request = ApiRequest(
            PATHS[self._path], parsed_body(raw, front.config.limits), headers, self._tenant, self._began
        )
        decision = self._decision = front.decisions.arrived(request)
        if self._parts > 1 and not self._held:  # the headers, and parts of the body, have gone
            self._body = None
            return [_changed("request_body")]
        upstream = await front.upstreams.choose(decision)
        sent, kept, added = front.annotated(decision, upstream, raw)
        wanted = front.forwarder.headers(kept, upstream, added)
        new = [(name, value) for name, value in wanted if headers.get(name) != value]
        names = {name for name, _ in wanted}
        gone = [name for name in headers if name in _OWN_HEADERS and name not in names]
        if sent != raw:
            new.append(("content-length", str(len(sent))))
        place = urlsplit(upstream.settings.url).netloc if len(front.upstreams.all) > 1 else ""
        if self._held:
            first = _changed("request_headers", new, gone)
            answers = [first, *_streamed("request_body", sent, ends)]
        else:
            first = _changed("request_body", new, gone, None if sent == raw else sent)
            answers = [first]
        if place:
            _send_to(first, "request_headers" if self._held else "request_body", place)
        front.upstreams.sent(decision, upstream)
        front.metrics.decided(self._clock() - self._began)
        self._asked_usage = wants_usage(request)
        self._body, self._held = None, False
        return answers

    def _responded(self, decision: GatewayDecision, response: Any) -> list[Any]:
        fields = _headers(response)
        status = fields.get(":status", "")
        self._status = int(status) if status.isdecimal() else 0
        answer = self._answer = AnswerReader(decision.request.endpoint, is_stream(fields, decision.request.streams))
        answer.failed = is_encoded(fields)
        if self._asked_usage and self._status == 200 and answer.streamed and not answer.failed:
            self._usage = UsageFilter()
        told: Headers = ()
        if FORECAST_HEADER in self._headers and decision.annotation is not None:
            told = list(answer_headers(decision.annotation, decision.facts()).items())
        if response.end_of_stream or self._unread:
            self._finished()
        return [_changed("response_headers", told, ["content-length"] if self._usage is not None else [])]

    def _passed(self, part: bytes, ends: bool) -> list[Any]:
        passed, events = part, None
        if self._usage is not None:
            passed, events = self._usage.passed(part)
            if ends:
                rest, last = self._usage.rest()
                passed, events = passed + rest, events + last
        try:
            self._read(part, events, ends)
        except Exception as error:
            self._front.metrics.failed("ext_proc", type(error).__name__)
            self.close()
        if self._duplex_out:
            return _streamed("response_body", passed, ends)
        return [_changed("response_body", body=None if passed == part else passed)]

    def _read(self, part: bytes, events: list[StreamEvent] | None, ends: bool) -> None:
        decision, answer = self._decision, self._answer
        if decision is None or answer is None:
            return
        if part and not answer.first and decision.upstream:
            self._front.upstreams.monitor.first_token(decision.upstream, decision.id)
            self._front.metrics.first_token(decision.upstream, self._clock() - self._began)
        answer.add(part, events)
        if ends:
            self._finished()

    def _finished(self) -> None:
        """The response is whole."""
        decision, answer = self._decision, self._answer
        if decision is None or answer is None:
            return
        answer.end()
        if self._status != 200 or answer.is_error:
            self.close()
        else:
            self._decision = None
            self._front.decisions.answered(decision, answer)
            self._front.upstreams.ended(decision, answer)
        upstream = decision.upstream or "chosen by Envoy"
        self._front.metrics.answered(upstream, self._status, self._clock() - self._began)

    def _as_it_came(self, kind: str, message: Any) -> list[Any]:
        """Envoy continues with a message, and with what was held before it."""
        body, self._body = self._body, None
        if not self._held:
            return self._unchanged(kind, message)
        self._held = False
        ends = kind == "request_body" and message.request_body.end_of_stream
        held = [_changed("request_headers", (), self._hidden), *_streamed("request_body", bytes(body or b""), ends)]
        return held if kind == "request_body" else [*held, *self._unchanged(kind, message)]

    def _unchanged(self, kind: str, message: Any) -> list[Any]:
        """Envoy continues with a message."""
        if kind == "request_headers":
            return [_changed(kind, (), self._hidden)]
        if (kind == "request_body" and self._duplex_in) or (kind == "response_body" and self._duplex_out):
            part = getattr(message, kind)
            return _streamed(kind, bytes(part.body), part.end_of_stream)
        answer = _Response()
        if kind:
            getattr(answer, kind).SetInParent()
        return [answer] if kind else []


def _headers(message: Any) -> dict[str, str]:
    """Headers by names in lower case; the first of several with one name."""
    headers: dict[str, str] = {}
    for header in message.headers.headers:
        value = header.raw_value.decode("latin-1") if header.HasField("raw_value") else header.value
        headers.setdefault(header.key.lower(), value)
    return headers


def _send_to(answer: Any, kind: str, place: str) -> None:
    """Names the upstream, host:port, in a header and in the metadata, and lets Envoy route anew."""
    response = getattr(answer, kind).response
    _set(response.header_mutation, DESTINATION, place)
    response.clear_route_cache = True
    where = answer.dynamic_metadata.fields.add(key="envoy.lb").value.struct_value
    where.fields.add(key=DESTINATION).value.string_value = place


def _changed(kind: str, new: Headers = (), gone: Sequence[str] = (), body: bytes | None = None) -> Any:
    """Envoy continues, with headers set and removed, and another body if one is given."""
    answer = _Response()
    response = getattr(answer, kind).response
    response.SetInParent()
    for name, value in new:
        _set(response.header_mutation, name, value)
    if gone:
        response.header_mutation.remove_headers.extend(gone)
    if body:
        response.body_mutation.body = body
    elif body is not None:
        response.body_mutation.clear_body = True
    return answer


def _set(mutation: Any, name: str, value: str) -> None:
    header = mutation.set_headers.add(append_action=_OVERWRITE).header
    header.key, header.raw_value = name, value.encode("latin-1", "replace")


def _streamed(kind: str, body: bytes, ends: bool) -> list[Any]:
    """A body in parts, the last of which may end the stream."""
    answers = []
    for start in range(0, max(1, len(body)), _PART):
        answer = _Response()
        part = getattr(answer, kind).response.body_mutation.streamed_response
        part.body, part.end_of_stream = body[start : start + _PART], ends and start + _PART >= len(body)
        answers.append(answer)
    return answers


def _refused(refusal: Refusal) -> Any:
    answer = _Response()
    immediate = answer.immediate_response
    immediate.status.code, immediate.body = refusal.status, msgspec.json.encode(refusal.error)
    _set(immediate.headers, "content-type", "application/json")
    return answer


@asynccontextmanager
async def serving(front: Front, address: str) -> AsyncIterator[int]:
    """Answers Envoy on an address, host:port, beside the front; gives the port.

    Raises:
        RuntimeError: the address cannot be listened on.
    """
    request, most = MESSAGES["ProcessingRequest"], front.config.limits.body_mb * 2**20 + _OVERHEAD
    processor = ExternalProcessor(front)
    server, port = await serve_method(
        address, SERVICE, "Process", processor.process, request, streams=True, most_bytes=most
    )
    try:
        yield port
    finally:
        await server.stop(front.config.limits.drain_s)
