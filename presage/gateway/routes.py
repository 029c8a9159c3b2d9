"""Routes that are passed on without being decided on, whose stored responses they may reach, and routes with types.

All below /v1 and /v2 pass but what administers an engine. With several tenants a server takes the gateway for one
client, so they pass only where nothing of another client can be reached: routes that keep nothing, and responses of the
tenant's own.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from presage.gateway.forward import Upstream
from presage.gateway.refusal import Refusal

_OTHERS: Final = frozenset(
    ("/pooling", "/classify", "/score", "/rerank", "/tokenize", "/detokenize", "/version"),
)
_ROOTS: Final = ("v1", "v2")
_ADMINISTRATION: Final = frozenset(
    ("load_lora_adapter", "unload_lora_adapter", "workflows", "outcomes", "internal", "admin", "config")
)
"""Segments of paths below the roots: of engines, and of other gateways of ours behind this one."""
_SEGMENT: Final = re.compile(r"(?!\.{1,2}$)[^/\\?#%\x00-\x20\x7f]+")
"""Once decoded: whatever a server may take for something else is no route here."""
_KEEPS_NOTHING: Final = frozenset(
    (
        "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/moderations", "/v2/rerank", "/v2/embed",
        "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/chat/completions/render",
        "/v1/completions/render", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
        "/v1/images/generations", "/v1/images/edits", *_OTHERS,
    )
)  # fmt: skip
_RESPONSES: Final = "/v1/responses/"
_MODELS: Final = "/v1/models/"
MOST_RESPONSES: Final = 20_000


def check_route(path: str) -> None:
    """Raises Refusal for a path, decoded, that is not passed on."""
    segments = path[1:].split("/")
    below = len(segments) > 1 and segments[0] in _ROOTS and all(map(_SEGMENT.fullmatch, segments))
    if path not in _OTHERS and (not below or _ADMINISTRATION & {segment.lower() for segment in segments}):
        raise Refusal(404, f"There is no {path[:200]!r} here.", "not_found")


def check_shared(method: str, path: str) -> None:
    """Raises Refusal where a request of one tenant could reach what the server keeps of another."""
    reads = method in ("GET", "HEAD") and (path == "/version" or path.startswith(_MODELS))
    if not reads and method != "OPTIONS" and not (method == "POST" and path in _KEEPS_NOTHING):
        message = "Not passed on here: clients have keys of their own, and the servers behind do not tell them apart."
        raise Refusal(404, message, "not_found")


def model_in(path: str) -> str:
    """The model that a path names; "" if it names none."""
    return path.removeprefix(_MODELS) if path.startswith(_MODELS) else ""


ROUTE_TYPE: Final = "presage.workflow_type"
"""Key in the scope of a request for the workflow type of its route."""


class RouteTypes:
    """ASGI middleware that takes the beginning of a path that has a workflow type off it.

    Args:
        types: by beginning, such as /research.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], types: Mapping[str, str]) -> None:
        self._app = app
        self._types = sorted(types.items(), key=lambda route: -len(route[0]))

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Handles one request."""
        path = scope.get("path", "")
        for beginning, workflow_type in self._types:
            raw = scope.get("raw_path") or path.encode()
            if path.startswith(f"{beginning}/") and raw.startswith(beginning.encode()):
                left = {"path": path[len(beginning) :], "raw_path": raw[len(beginning) :]}
                scope = {**scope, **left, ROUTE_TYPE: workflow_type}
                break
        await self._app(scope, receive, send)


class ResponseHomes:
    """Which server keeps a stored response, and whose it is; the latest ones."""

    def __init__(self) -> None:
        self._homes: OrderedDict[tuple[str, str], Upstream] = OrderedDict()

    def note(self, tenant: str, response_id: str, upstream: Upstream) -> None:
        """An answer has this id."""
        self._homes[tenant, response_id] = upstream
        self._homes.move_to_end((tenant, response_id))
        if len(self._homes) > MOST_RESPONSES:
            self._homes.popitem(last=False)

    def of(self, tenant: str, path: str) -> Upstream | None:
        """The server of the response in a path; None if it is no tenant's own."""
        return self._homes.get((tenant, path.removeprefix(_RESPONSES).partition("/")[0]))

    def check(self, tenant: str, response_id: object) -> None:
        """Raises Refusal for a response that is not the tenant's."""
        if isinstance(response_id, str) and (tenant, response_id) not in self._homes:
            raise Refusal(404, "There is no such previous response of this key here.", "previous_response_not_found")
