"""Isolates clients by their API key: the HTTP server marks each request with its tenant.

vLLM accepts any of its keys (`--api-key A B`, or VLLM_API_KEY) and does not pass on which was used. With two or more
keys each key is a tenant, named by its place in the list, so that nothing of a key leaves this process. No other tenant
can end, read or continue a tenant's workflows (docs/security.md). Clients sharing a key are not isolated.

A middleware inside vLLM's authentication sets a context variable. The engine's client, which all of vLLM's handlers
call, writes it into the request's `extra_args`, over any value the client sent. A request that comes without a key to
a server with keys, over a route that vLLM does not guard (`/invocations`), is marked too: it belongs to no workflow.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any, Final

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

ARGUMENT: Final = "presage_tenant"
"""Key in `extra_args`; what a client writes there is discarded."""

ANONYMOUS: Final = "anonymous"
"""The tenant of a request without a key on a server that has keys; its metadata is left out."""

_TENANT: ContextVar[str] = ContextVar("presage_tenant", default="")


def keys_of(args: Any) -> list[str]:
    """The API keys of a vLLM server, as vLLM reads them."""
    given = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return [key for key in given if key]


class Tenants:
    """The API keys of a server, in the same order in each of its processes."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._known = [_digest(key) for key in dict.fromkeys(keys)]

    def of(self, authorization: str | None) -> str:
        """The tenant of an Authorization header; "" if clients are not isolated. Takes the same time for any key.

        `ANONYMOUS` if the server has keys and this is none of them.
        """
        if not self._known:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        digest, found = _digest(key), ANONYMOUS
        for place, known in enumerate(self._known):
            if hmac.compare_digest(digest, known) and scheme.lower() == "bearer":
                found = f"key-{place}" if len(self._known) > 1 else ""
        return found


class TenantMiddleware:
    """ASGI middleware that sets the tenant of a request."""

    def __init__(self, app: App, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        sent = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        # vLLM checks the first one; with two headers the tenant is ambiguous.
        header = sent[0].decode("latin-1") if len(sent) == 1 else None
        token = _TENANT.set(self._tenants.of(header))
        try:
            await self._app(scope, receive, send)
        finally:
            _TENANT.reset(token)


def tenant() -> str:
    """The tenant of the current request; "" outside of one, and if clients are not isolated."""
    return _TENANT.get()


def arguments_of(params: Any) -> dict[str, Any]:
    """The extra arguments in a request's sampling parameters, which the server adds to."""
    if not isinstance(params.extra_args, dict):
        params.extra_args = {}
    arguments: dict[str, Any] = params.extra_args
    return arguments


def mark(params: Any) -> None:
    """Writes the tenant into a request's sampling parameters, over what a client wrote."""
    arguments = arguments_of(params)
    arguments.pop(ARGUMENT, None)
    if tenant():
        arguments[ARGUMENT] = tenant()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
