"""Where a request may carry names of its workflow and agent, the best place first.

Our own headers, which end here (`presage/client.py` sends them, percent-encoded); `vllm_xargs`, `app_metadata` (Pythia)
and `agentic_context` (vLLM's router), at the top or in `extra_body`, each an object or, as vLLM's own fields want it, a
JSON string; then OpenAI's `metadata`. What the names are and which are sound is `workflows/metadata.py`'s business.
`user` names a person and no workflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from presage.serving_hooks.counts import EventCounts, MetadataField
from presage.serving_hooks.identity.anthropic_messages import session_of_user
from presage.serving_hooks.identity.request import ApiRequest
from presage.serving_hooks.workflows.metadata import NAME_KEYS, SentNames, name, names, table

NAME_HEADERS: Final[Mapping[str, str]] = {
    "x-presage-workflow-type": "workflow_type",
    "x-presage-workflow-id": "workflow_id",
    "x-presage-agent": "agent",
    "x-presage-step": "step",
    "x-presage-workflow-end": "workflow_end",
}
SESSION_HEADERS: Final = ("x-session-id", "session-id", "session_id", "conversation_id", "x-claude-code-session-id")
"""The first is that of vLLM, its router and Ray Serve; the next ones are Codex', the last one is Claude Code's."""
_LONGEST_JSON: Final = 2**16
_XARGS: Final = "vllm_xargs"
NESTED: Final[tuple[MetadataField, ...]] = ("agentic_context", "app_metadata", "metadata")
"""Fields of a body whose objects may hold names."""


def sent_names(request: ApiRequest, counts: EventCounts) -> SentNames:
    """The names that a request carries."""
    headers = request.headers
    merged: dict[str, Any] = {key: unquote(headers[name]) for name, key in NAME_HEADERS.items() if name in headers}
    for place in _places(request.body, counts):
        for key in NAME_KEYS:
            if key in place and merged.get(key) is None:
                merged[key] = place[key]
    return names(merged, counts) if merged else _NONE


def sent_session(request: ApiRequest, counts: EventCounts) -> str | None:
    """The session or conversation that a request names beside these: in a header or a field of its API."""
    body = request.body
    conversation = body.get("conversation")
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    for session in (
        *map(request.headers.get, SESSION_HEADERS),
        body.get("session_id"),
        conversation,
        session_of_user(body),
    ):
        if session is not None:
            session = name(session, "session_id", counts)
            if session is not None:
                return session
    return None


_NONE: Final = SentNames()


def _places(body: Mapping[str, Any], counts: EventCounts) -> Iterator[Mapping[str, Any]]:
    if len(body) < 3:  # a model and its input
        return
    for outer in (body, body.get("extra_body")):
        if not isinstance(outer, dict):
            continue
        xargs = as_object(outer.get(_XARGS), "extra_args", counts)
        if xargs:
            yield xargs
        for holder in (xargs, outer):
            for key in NESTED:
                if key in holder:
                    yield as_object(holder[key], key, counts)


def as_object(value: Any, field: MetadataField, counts: EventCounts) -> Mapping[str, Any]:
    """An object that a client sent as such or as a JSON string; empty if it is anything else."""
    if isinstance(value, str) and value[:1] == "{" and len(value) <= _LONGEST_JSON:
        with suppress(msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            value = msgspec.json.decode(value)
    return table(value, field, counts)
