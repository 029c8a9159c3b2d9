"""Proxies requests to the servers behind the gateway: connections, headers, and answers as they come."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec
from yarl import URL

from presage.gateway.client_keys import KEY_HEADERS, ClientKeys
from presage.gateway.config import Limits, UpstreamSettings
from presage.gateway.refusal import Refusal
from presage.serving_hooks.identity.sent_names import NAME_HEADERS

_HOP_BY_HOP: Final = frozenset(
    (
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade", "host", "content-length", "expect", "accept-encoding",
    )
)  # fmt: skip
_NOT_BACK: Final = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"proxy-authenticate", b"trailer"))

UNREACHABLE: Final = "upstream_unreachable"
"""Code of the error of a server that gave nothing of an answer, since no connection could be made or it ended."""

MOST_MODELS: Final = 1000
_IDLE_S: Final = 4.0
"""For which an idle connection is kept: vLLM closes its side after 5 s."""
_LONGEST_HEADER: Final = 65536
"""Bytes of a header of an answer."""
_LARGE: Final = 2**20
"""Bytes of a body from which on it is sent in parts."""

_log = logging.getLogger(__name__)

RawHeaders = list[tuple[bytes, bytes]]


@dataclass(eq=False)
class Upstream:
    """A server behind the gateway.

    Attributes:
        key: its API key; "" passes on the client's.
        models: that it serves; empty until it has listed them.
    """

    settings: UpstreamSettings
    key: str = ""
    models: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: UpstreamSettings) -> Upstream:
        """From its settings; its key from the environment."""
        return cls(settings, os.environ.get(settings.api_key_variable, ""), settings.models)

    @property
    def name(self) -> str:
        """In metrics and headers."""
        return self.settings.label

    def serves(self, model: str) -> bool:
        """Whether it may serve a model."""
        return not self.models or not model or model in self.models


class Forwarder:
    """Sends requests to upstreams.

    Over aiohttp: httpx takes a millisecond more of CPU a request (`benchmarks/gateway_latency.py`).

    Args:
        keys: of the gateway, which no upstream may see.
    """

    def __init__(self, limits: Limits, keys: ClientKeys) -> None:
        self._limits, self._keys = limits, keys
        self._logged: set[tuple[str, str]] = set()
        self._made: tuple[aiohttp.ClientSession, ...] = ()

    @property
    def _sessions(self) -> tuple[aiohttp.ClientSession, ...]:
        """One that keeps connections, and one that makes a new one for each request, for what failed on a kept one.

        Made in the event loop that uses them. They pass bodies as they come, and keep no cookies.
        """
        if not self._made:
            limits = self._limits
            connectors = (
                aiohttp.TCPConnector(limit=limits.requests, keepalive_timeout=_IDLE_S),
                aiohttp.TCPConnector(limit=limits.requests, force_close=True),
            )
            self._made = tuple(
                aiohttp.ClientSession(
                    connector=connector,
                    timeout=aiohttp.ClientTimeout(
                        total=None, connect=limits.connect_s, sock_connect=limits.connect_s, sock_read=limits.silence_s
                    ),
                    cookie_jar=aiohttp.DummyCookieJar(),
                    auto_decompress=False,
                    max_line_size=_LONGEST_HEADER,
                    max_field_size=_LONGEST_HEADER,
                    skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                )
                for connector in connectors
            )
        return self._made

    async def close(self) -> None:
        """Closes all connections."""
        for session in self._made:
            await session.close()

    async def open(
        self,
        upstream: Upstream,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        added: Mapping[str, str],
    ) -> aiohttp.ClientResponse:
        """Sends a request; returns once the headers of the answer have come. The caller closes the response.

        A kept connection that the server closes before it answers is what a server does with idle ones, so the request
        is sent once more on a new one.

        Raises:
            Refusal: the upstream cannot be reached, or breaks off before it answers.
        """
        url = URL(upstream.settings.url + path, encoded=True)
        sent = self.headers(headers, upstream, added)
        failed: Exception | None = None
        for session in self._sessions:
            data = body if len(body) < _LARGE else io.BytesIO(body)
            try:
                return await session.request(method, url, headers=sent, data=data, allow_redirects=False)
            except aiohttp.ClientConnectorError as error:
                failed = error
                break
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ConnectionTimeoutError) as error:
                failed = error
            except TimeoutError as error:
                late = "The server behind the gateway did not answer in time."
                raise Refusal(504, late, "upstream_timeout") from error
            except (aiohttp.ClientError, ValueError) as error:  # ValueError: a header that HTTP has no form for
                failed = error
                break
        if isinstance(failed, aiohttp.ClientSSLError):
            raise Refusal(502, self._no_tls(upstream, failed), UNREACHABLE) from failed
        if isinstance(failed, aiohttp.ServerConnectionError | aiohttp.ClientOSError):  # ends before it answers
            raise Refusal(502, "The server behind the gateway cannot be reached; retry.", UNREACHABLE) from failed
        raise Refusal(502, "The server behind the gateway broke off; retry.", "upstream_failed") from failed

    def _no_tls(self, upstream: Upstream, error: aiohttp.ClientSSLError) -> str:
        """What the client is told; the operator is told more, once."""
        untrusted = isinstance(error, aiohttp.ClientConnectorCertificateError)
        cause = getattr(error, "certificate_error", None) or error.os_error
        why = getattr(cause, "verify_message", "") or getattr(cause, "reason", "") or type(cause).__name__
        if (upstream.name, why) not in self._logged:
            self._logged.add((upstream.name, why))
            what, remedy = (
                ("its certificate is not accepted", "name its authority's certificate in SSL_CERT_FILE")
                if untrusted
                else ("it does not answer in TLS", "is its URL one of http://?")
            )
            _log.error("upstream %s: %s (%s); %s", upstream.name, what, why, remedy)
        if untrusted:
            return "The certificate of the server behind the gateway is not accepted."
        return "The server behind the gateway does not answer in TLS."

    async def models(self, upstream: Upstream, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Status and body of an upstream's /v1/models; notes which models it serves.

        Raises:
            Refusal: it cannot be reached.
        """
        response = await self.open(upstream, "GET", "/v1/models", headers, b"", {})
        try:
            body = await response.read()
        except aiohttp.ClientError as error:
            raise Refusal(502, "The server behind the gateway broke off; retry.", "upstream_failed") from error
        finally:
            response.close()
        if response.status == 200 and not upstream.settings.models:
            upstream.models = tuple(name for name, _ in listed_models(body)[:MOST_MODELS])
        return response.status, body

    def headers(
        self, headers: Mapping[str, str], upstream: Upstream, added: Mapping[str, str]
    ) -> list[tuple[str, str]]:
        """The headers of a request as an upstream gets them. Answers are asked for uncompressed: they are read here."""
        dropped = {part.strip().lower() for part in headers.get("connection", "").split(",")}
        sent = [
            (name, value)
            for name, value in headers.items()
            if name not in _HOP_BY_HOP
            and name not in dropped
            and name not in NAME_HEADERS
            and name not in added
            and not (upstream.key and name in KEY_HEADERS)
            and not self._keys.in_header(name, value)
        ]
        if upstream.key:
            sent.append(("authorization", f"Bearer {upstream.key}"))
            if "anthropic-version" in headers:
                sent.append(("x-api-key", upstream.key))
        return [*sent, ("accept-encoding", "identity"), *added.items()]


def back_headers(response: aiohttp.ClientResponse, without: Sequence[bytes] = ()) -> RawHeaders:
    """The headers of an upstream's answer as the client gets them."""
    return [(k, v) for k, v in response.raw_headers if k.lower() not in _NOT_BACK and k.lower() not in without]


def is_stream(headers: Mapping[str, str], asked: bool) -> bool:
    """Whether an answer comes as server-sent events; where it does not say, as the client has asked."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "text/event-stream" or (asked and not kind.endswith("json"))


def is_encoded(headers: Mapping[str, str]) -> bool:
    """Whether an answer is compressed."""
    return headers.get("content-encoding", "identity").strip().lower() not in ("identity", "")


def listed_models(body: bytes) -> list[tuple[str, Any]]:
    """(name, entry) of each model that an answer of /v1/models lists; empty for any other answer."""
    try:
        listed = msgspec.json.decode(body)["data"]
        return [
            (entry["id"], entry) for entry in listed if isinstance(entry, dict) and isinstance(entry.get("id"), str)
        ]
    except (msgspec.DecodeError, LookupError, TypeError):
        return []


def encoded(raw: bytes, before: Mapping[str, Any], after: Mapping[str, Any]) -> bytes:
    """The JSON of a changed body: the client's own bytes where only keys were added, else encoded anew."""
    if after is before:
        return raw
    if all(after.get(key, before) is value for key, value in before.items()):
        new = {key: value for key, value in after.items() if key not in before}
        if not new:
            return raw
        added = _encode(new)
        cut = raw.rindex(b"}")
        return raw[:cut] + (b"," if before else b"") + added[1:]
    return _encode(after)


def _encode(value: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # lone surrogates
        return json.dumps(value).encode()
