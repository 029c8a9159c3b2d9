"""Tells clients apart by their API key, in the server that speaks HTTP, and marks their requests for the engine.

vLLM lets anybody in who has one of its keys (`--api-key A B`, or VLLM_API_KEY) and forgets which. With two keys or more
each is a tenant, named by its place in that list, so that nothing of a key leaves this process: its workflows are its
own, and nobody else can end, read or continue them (docs/security.md). With one key, or none, all are one.

A middleware inside vLLM's authentication notes the tenant for whatever its request makes the server do (a context
variable: handlers, and the tasks they start, inherit it), and the engine's client, which all of vLLM's handlers call,
writes it into the request's `extra_args`, over whatever the client has put there. So no body is read or changed, and
every route that generates is covered. What comes without a key, over a route that vLLM does not guard, is a tenant too.
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
"""Of `extra_args`; what a client writes there is thrown away."""

NOBODY: Final = "anonymous"

_TENANT: ContextVar[str] = ContextVar("presage_tenant", default="")


def keys_of(args: Any) -> list[str]:
    """The API keys of a vLLM server, as vLLM reads them."""
    given = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return [key for key in given if key]


class Tenants:
    """The API keys of a server.

    Args:
        keys: in the order in which every process of the server has them.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        distinct = list(dict.fromkeys(keys))
        self._known = [_digest(key) for key in distinct] if len(distinct) > 1 else []

    def of(self, authorization: str | None) -> str:
        """The tenant of an Authorization header; "" where nobody is told apart. Takes as long for any key."""
        if not self._known:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        digest, found = _digest(key), NOBODY
        for place, known in enumerate(self._known):
            if hmac.compare_digest(digest, known) and scheme.lower() == "bearer":
                found = f"key-{place}"
        return found


class NotesTenant:
    """ASGI middleware: whatever a request makes the server do is its tenant's.

    Args:
        app: what comes after it.
        tenants: who there is.
    """

    def __init__(self, app: App, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        said = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        # vLLM looks at the first one; two are two keys, and which is meant is nobody's to guess.
        header = said[0].decode("latin-1") if len(said) == 1 else None
        token = _TENANT.set(self._tenants.of(header))
        try:
            await self._app(scope, receive, send)
        finally:
            _TENANT.reset(token)


def tenant() -> str:
    """Of the request that is being answered; "" outside of one, and where nobody is told apart."""
    return _TENANT.get()


def mark(params: Any) -> None:
    """Writes the tenant into what the engine is told of a request; without one, takes out what a client wrote."""
    extra = getattr(params, "extra_args", None)
    known = dict(extra) if isinstance(extra, dict) else {}
    known.pop(ARGUMENT, None)
    if tenant():
        known[ARGUMENT] = tenant()
    if known or extra:
        params.extra_args = known


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
