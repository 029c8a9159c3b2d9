"""Bodies of requests: how many bytes the gateway holds, who holds them, and how much there is to walk through.

Whoever sends slowly holds a connection and what has come, and no place among the requests in flight. Where there is no
room, the body that has been arriving for longest makes it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import msgspec

from presage.gateway.config import Limits
from presage.gateway.dialects.isolation import HOLDERS, IDS
from presage.gateway.refusal import Message, Refusal
from presage.serving_hooks.identity.request import is_tokens

Receive = Callable[[], Awaitable[Message]]

_CLOSE: Final = [(b"connection", b"close")]
_RETRY: Final = [(b"retry-after", b"1")]
_WALKED: Final = ("messages", "input", "system", "instructions", "prompt")  # the prompt last
_FIELDS: Final = 16
"""Of an object, which count as one entry."""
_READ: Final = frozenset((*HOLDERS, *IDS, "model", "priority", "request_id", "previous_response_id", "user_id"))
"""What is read of a body that is passed on."""
_OBJECT: Final = 5
"""Values that an object or a list counts as, by the time that it takes to make one."""
_MANY: Final = 10_000
_TOKENS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[,\[{]', re.DOTALL)
"""Texts, of which the last one may lack its end, and what begins or parts values."""
_TOP: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ClientLeft(Exception):  # noqa: N818  it is counted, not an error
    """The client closed its connection before its request was answered."""


@dataclass(eq=False)
class _Arriving:
    tenant: str
    deadline: asyncio.Timeout | None = None
    size: int = 0
    pushed_out: bool = False


class Bodies:
    """The bodies of all requests, from their first byte to the end of the answer."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._most = limits, limits.bodies_mb * 2**20
        self._arriving: dict[_Arriving, None] = {}  # the first has been arriving for longest
        self._sizes: Counter[str] = Counter()

    @property
    def size(self) -> int:
        """Bytes held."""
        return self._sizes.total()

    @asynccontextmanager
    async def held(self, receive: Receive, tenant: str) -> AsyncIterator[bytes]:
        """The whole body of a request, which counts as long as this lasts.

        Raises:
            Refusal: it is too large, too slow, or there is no room.
            ClientLeft: the client left.
        """
        body = _Arriving(tenant)
        try:
            yield await self._read(receive, body)
        finally:
            self._forget(body)

    async def _read(self, receive: Receive, body: _Arriving) -> bytes:
        parts: list[bytes] = []
        self._arriving[body] = None
        try:
            async with asyncio.timeout(self._limits.body_s) as body.deadline:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    part = message.get("body", b"")
                    self._grow(body, len(part))
                    parts.append(part)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            if body.pushed_out:
                raise _full() from None
            raise Refusal(408, "The body did not arrive in time.", "request_timeout", _CLOSE) from None
        finally:
            del self._arriving[body]

    def _grow(self, body: _Arriving, more: int) -> None:
        if body.pushed_out:
            raise _full()
        if body.size + more > self._limits.body_mb * 2**20:
            raise Refusal(413, f"The request is larger than {self._limits.body_mb} MiB.", "request_too_large", _CLOSE)
        share = self._limits.tenant_share * self._most
        if body.tenant and self._sizes[body.tenant] + more > share:
            raise Refusal(
                429, "Requests of this key hold too many bytes. Retry later.", "rate_limited", _CLOSE + _RETRY
            )
        while self.size + more > self._most:
            oldest = next((other for other in self._arriving if other.size and other is not body), None)
            if oldest is None or oldest.deadline is None:
                raise _full()
            oldest.pushed_out = True
            self._forget(oldest)
            oldest.deadline.reschedule(0.0)
        body.size += more
        self._sizes[body.tenant] += more

    def _forget(self, body: _Arriving) -> None:
        self._sizes[body.tenant] -= body.size
        body.size = 0
        if not self._sizes[body.tenant]:
            del self._sizes[body.tenant]


def _full() -> Refusal:
    return Refusal(503, "Too many bytes of requests are held here. Retry later.", "overloaded", _CLOSE + _RETRY)


class Slots:
    """The requests in flight."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._of: Counter[str] = Counter()
        self.taken = 0

    def check(self, tenant: str) -> None:
        """Raises Refusal if another request of this tenant has no place now."""
        most = self._limits.requests
        if self.taken >= most:
            raise Refusal(503, "Too many requests are in flight. Retry later.", "overloaded", _RETRY)
        if tenant and self._of[tenant] >= max(1, most * self._limits.tenant_share):
            raise Refusal(429, "Too many requests of this key are in flight. Retry later.", "rate_limited", _RETRY)

    @contextmanager
    def held(self, tenant: str) -> Iterator[None]:
        """A place for a request whose body is here; raises Refusal if there is none."""
        self.check(tenant)
        self.taken += 1
        self._of[tenant] += 1
        try:
            yield
        finally:
            self.taken -= 1
            self._of[tenant] -= 1
            if not self._of[tenant]:
                del self._of[tenant]


def parsed_body(raw: bytes, limits: Limits) -> dict[str, Any]:
    """A body as an object.

    Raises:
        Refusal: it is none, or holds more than the event loop, which serves all, may walk through.
    """
    bound = _most_values(raw)
    if bound > limits.values and _holds_more(raw, limits.values):
        raise _too_many(f"{limits.values:,} values", "values")
    collects = bound > _MANY and gc.isenabled()
    if collects:
        gc.disable()  # it would look at what is decoded again and again: 10 times the time
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        try:
            body = json.loads(raw)  # takes NaN and lone surrogates, as vLLM does
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"The body is not valid JSON: {type(error).__name__}.", "invalid_json") from None
    finally:
        if collects:
            gc.enable()
    if not isinstance(body, dict):
        raise Refusal(400, f"The body is a JSON {type(body).__name__}; send an object.", "invalid_json")
    if bound > limits.messages:
        _check_entries(body, limits.messages)
    return body


def top_of_body(raw: bytes, limits: Limits) -> dict[str, Any]:
    """A body that is passed on, as an object of which only what the gateway reads is parsed; empty if it is none.

    Raises:
        Refusal: it has more keys than the event loop may walk through.
    """
    if raw.count(b":") > limits.values:
        raise _too_many(f"{limits.values:,} keys", "values")
    try:
        body: dict[str, Any] = dict(_TOP.decode(raw))
        for name in _READ & body.keys():
            if _most_values(memoryview(body[name]).tobytes()) > limits.messages:
                raise _too_many(f"{limits.messages:,} values in {name}", "messages")
            body[name] = msgspec.json.decode(body[name])
    except (msgspec.DecodeError, RecursionError):
        return {}
    return body


def _most_values(raw: bytes) -> int:
    """A bound of the values in a JSON text: those of its texts count too."""
    return raw.count(b",") + _OBJECT * (raw.count(b"[") + raw.count(b"{"))


def _holds_more(raw: bytes, most: int) -> bool:
    """Whether a JSON text that may hold more than so many values does, outside of its texts.

    It does if it has a tenth as many texts, commas and brackets: no more of them are looked at.
    """
    return next(islice(_TOKENS.finditer(raw), most // 10, None), None) is not None


def _check_entries(body: Mapping[str, Any], most: int) -> None:
    """Raises Refusal if the prompt has more than `most` messages and parts; looks at no more than that."""
    left = most
    values = [body[name] for name in _WALKED if isinstance(body.get(name), list | dict)]
    if is_tokens(body.get("prompt")):
        values.pop()
    while values:
        value = values.pop()
        left -= len(value) if isinstance(value, list) else max(0, len(value) - _FIELDS)
        if left < 0:
            raise _too_many(f"{most:,} messages and parts", "messages")
        inside = value if isinstance(value, list) else value.values()
        values += [inner for inner in inside if isinstance(inner, list | dict)]


def _too_many(what: str, setting: str) -> Refusal:
    message = f"The request has more than {what}, the limit of this gateway ([limits] {setting}); send fewer."
    return Refusal(413, message, "request_too_large")
