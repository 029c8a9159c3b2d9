"""Names that a client sends in headers or in OpenAI's `metadata`, carried to where the engine reads them.

vLLM passes only `vllm_xargs` and the session on to the engine. A middleware keeps a request's headers and the parts of
its body; when the request is about to reach the engine, the names found there are added to its `extra_args`. The body
is not changed. `vllm_xargs` win over headers, these over the objects in the body (`metadata`, and as at the gateway
`agentic_context` and `app_metadata`). The engine judges the names as if they had come in `vllm_xargs`. Keys that a
client seems to mean for names, where nothing reads them, are reported to the engine, which counts them; they are looked
for among `MOST_KEYS` of a request, since a client may send any number.

A request that names no workflow takes along what else tells whose it is (`request_sources.py`), and one whose agent the
models do not know, which of theirs has its system prompt.

Of the body only those objects are decoded, and the keys beside them: 0.25 ms for 1 MB of messages, less than it takes
to search it for one of these keys.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, MutableMapping
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from presage.datasets.schema.names import MAX_NAME
from presage.serving_hooks.counts import EventCounts, MetadataField, Reason
from presage.serving_hooks.identity.sent_names import NAME_HEADERS, NESTED, as_object
from presage.serving_hooks.vllm.http.request_sources import READ, RequestSources, Top
from presage.serving_hooks.workflows.metadata import (
    FIELD_OF,
    LONGEST_KEY,
    MISTAKES,
    MOST_KEYS,
    Mistakes,
    given_fields,
    misspelt_keys,
    read,
)
from presage.serving_hooks.workflows.observed import KNOWN_AS, OBSERVED
from presage.serving_hooks.workflows.tenants import arguments_of, tenant
from presage.wording import nearest

LONGEST: Final = 2**22
"""Bytes of a body that is read."""
_LONGEST_OBJECT: Final = 2**16
"""Bytes of an object in it that may hold names."""
_MOST_HEADERS: Final = 256
_LONGEST_NAME: Final = 12 * MAX_NAME
"""Characters of a percent-encoded name."""

_TOP: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])

_log = logging.getLogger(__name__)


class Carriers:
    """The headers and the body of one HTTP request.

    Args:
        path: of its route.
        headers: as ASGI has them.
        sources: reads what else tells whose request it is.
    """

    def __init__(self, path: str, headers: Iterable[tuple[bytes, bytes]], sources: RequestSources) -> None:
        self._path, self._headers, self._sources = path, headers, sources
        self._parts: list[bytes] | None = [] if path in READ else None
        self._size = 0
        self._keys_left = MOST_KEYS
        self._found: tuple[dict[str, Any], Mistakes, dict[str, Any]] | None = None

    def received(self, message: MutableMapping[str, Any]) -> None:
        """A part of the body."""
        if self._parts is not None and message["type"] == "http.request":
            part = message.get("body", b"")
            self._size += len(part)
            self._parts.append(part)
            if self._size > LONGEST:
                self._parts = None

    def generates(self, params: Any, session_id: object) -> None:
        """The engine is asked for an answer: adds what the request carries to its sampling parameters."""
        arguments = arguments_of(params)
        if self._found is None:
            self._headers = list(islice(self._headers, _MOST_HEADERS))
            self._found = self._read(arguments, session_id)
            self._headers, self._parts = (), None
        names, mistakes, observed = self._found
        added = _without_given(names, arguments)
        given = given_fields(arguments, session_id) | given_fields(added, None)
        left = {field: of for field, of in mistakes.items() if field not in given}
        arguments.update(added)
        arguments.update((key, value) for key, value in ((MISTAKES, left), (OBSERVED, observed)) if value)

    def _read(self, sent: dict[str, Any], session_id: object) -> tuple[dict[str, Any], Mistakes, dict[str, Any]]:
        """Names, mistakes, and what the server observed of a request that leaves something to find out."""
        names: dict[str, Any] = {}
        mistakes = misspelt_keys(self._few(sent))
        top: Top = {}
        try:
            in_headers, more = self._in_headers()
            names, mistakes = in_headers, {**more, **mistakes}
            if self._parts:
                top = _TOP.decode(b"".join(self._parts))
                in_body, more = self._in_body(top)
                names, mistakes = {**names, **_without_given(in_body, names)}, {**more, **mistakes}
        except Exception as error:  # such as JSON that vLLM's reader takes and ours does not
            _log.debug("headers and body of a request were not read: %s", type(error).__name__)
        own = {key: sent[key] for key in (*FIELD_OF, "app_metadata") if key in sent}
        return names, mistakes, self._observed(top, {**names, **own}, session_id)

    def _few(self, keys: Iterable[str]) -> list[str]:
        """The first of these keys, while few of the request were looked at."""
        taken = list(islice(keys, self._keys_left))
        self._keys_left -= len(taken)
        return taken

    def _in_headers(self) -> tuple[dict[str, Any], Mistakes]:
        names: dict[str, Any] = {}
        mistakes: Mistakes = {}
        for raw, value in self._headers:
            header = raw[: LONGEST_KEY + 1].decode("latin-1")
            if header in NAME_HEADERS:
                text = value.decode("latin-1")
                names.setdefault(NAME_HEADERS[header], unquote(text) if len(text) <= _LONGEST_NAME else text)
            elif "workflow" in header and len(header) <= LONGEST_KEY:
                for meant in filter(None, (nearest(key, NAME_HEADERS) for key in self._few([header]))):
                    mistakes.setdefault(FIELD_OF[NAME_HEADERS[meant]], ("misspelt", header))
        return names, mistakes

    def _in_body(self, top: Top) -> tuple[dict[str, Any], Mistakes]:
        counts = EventCounts()
        names: dict[str, Any] = {}
        mistakes: Mistakes = {}
        for key in self._few(top):
            if len(key) <= LONGEST_KEY and (found := _at_top(key)):
                field, reason = found
                mistakes.setdefault(field, (reason, key))
        for place in NESTED:
            if place in top and len(memoryview(top[place])) > _LONGEST_OBJECT:
                mistakes[place] = "too long", place
            elif place in top:
                held = as_object(msgspec.json.decode(top[place]), place, counts)
                names |= _without_given({key: held[key] for key in FIELD_OF if key in held}, names)
                mistakes = {**misspelt_keys(self._few(held)), **mistakes}
        for (field, reason), key in counts.examples.items():
            mistakes[field] = reason, key
        return names, mistakes

    def _observed(self, top: Top, names: dict[str, Any], session_id: object) -> dict[str, Any]:
        step = read(names, session_id, EventCounts())
        agent, named = step.sent[1] if step is not None else "", _is_named(names, session_id)
        if named and not (agent and self._sources.agents.may_be_renamed(agent)):
            return {}
        headers: dict[str, str] = {}
        for key, value in self._headers:
            headers.setdefault(key.decode("latin-1"), value.decode("latin-1"))
        try:
            found = self._sources.read(self._path, headers, top, tenant(), session_id, agent)
            return {key: value for key, value in found.items() if key == KNOWN_AS} if named else found
        except Exception as error:
            _log.debug("what tells whose a request is was not read: %s", type(error).__name__)
            return {}


_WHOLE: Final = frozenset({"session_id", "workflow_type", "agent"})


def _is_named(names: dict[str, Any], session_id: object) -> bool:
    """Whether nothing has to be found out: a workflow is named, or a session with its type and agent."""
    return bool(names.get("workflow_id")) or given_fields(names, session_id) >= _WHOLE


def _without_given(names: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The names of fields that are not given already, also under another key."""
    fields = given_fields(given, None)
    return {key: value for key, value in names.items() if FIELD_OF[key] not in fields}


@lru_cache(maxsize=1024)
def _at_top(key: str) -> tuple[MetadataField, Reason] | None:
    """What a key at the top of a body was meant for, if it is none that vLLM or we read there."""
    if key == "session_id" or key in NESTED:
        return None
    if key == "extra_body":
        return "extra_body", "misplaced"
    if key in FIELD_OF:
        return FIELD_OF[key], "misplaced"
    if key != "vllm_xargs" and nearest(key, ("vllm_xargs",)):
        return "extra_args", "misspelt"
    return next(((field, reason) for field, (reason, _) in misspelt_keys([key]).items()), None)


_CARRIERS: ContextVar[Carriers | None] = ContextVar("presage_carriers", default=None)


def generates(params: Any, session_id: object) -> None:
    """The current HTTP request asks the engine for an answer, with these sampling parameters."""
    carriers = _CARRIERS.get()
    if carriers is not None:
        carriers.generates(params, session_id)


class CarrierMiddleware:
    """ASGI middleware that keeps what may carry names until the engine is asked."""

    def __init__(self, app: Any, sources: RequestSources) -> None:
        self._app, self._sources = app, sources

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        carriers = Carriers(path, scope["headers"], self._sources)

        async def received() -> Any:
            message = await receive()
            carriers.received(message)
            return message

        token = _CARRIERS.set(carriers)
        try:
            await self._app(scope, received, send)
        finally:
            _CARRIERS.reset(token)
