"""The ids that a client sends itself, made its tenant's own: no server joins two tenants by an id that both have sent.

Done in every mode and for every dialect, since servers read ids whatever the gateway adds. Work is bounded: of the
places below each key is looked up, and nothing is walked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import quote, unquote

from presage.gateway.dialects.names import ID_HEADERS, SafeNames
from presage.gateway.dialects.vllm_router import read_context

IDS: Final = (
    "session_id", "workflow_id", "conversation_id", "program_id", "task_id", "parent_program_id", "parent_id",
    "root_program_id", "root_id", "trajectory_id", "parent_trajectory_id",
)  # fmt: skip
HOLDERS: Final = (
    "vllm_xargs", "app_metadata", "agentic_context", "metadata", "extra_body", "nvext", "agent_context",
    "session_control",
)  # fmt: skip
_DEEPEST: Final = 3
_BAGGAGE: Final = ("session.id", "gen_ai.conversation.id", "traceloop.association.properties.session_id")
_LONGEST: Final = 8192
_SESSION_OF_USER: Final = re.compile(r"(session(?:_id)?[\"_: ]{1,4})([0-9a-f-]{36})")
"""In Anthropic's `metadata.user_id`, as Claude Code writes it."""


def isolated(
    body: Mapping[str, Any], headers: Mapping[str, str], tenant: str, names: SafeNames
) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Body and headers with the client's ids as ids of its tenant; both as they are without tenants.

    Args:
        headers: names in lower case.
    """
    if not tenant:
        return body, headers
    own = partial(names.of, tenant)
    changed = {name: own(headers[name]) for name in ID_HEADERS if headers.get(name)}
    baggage = headers.get("baggage")
    if baggage:
        changed["baggage"] = ",".join(_member(part, own) for part in baggage[:_LONGEST].split(","))
    new_body = _own_ids(body, own, 0)
    if isinstance(body.get("request_id"), str):  # vLLM stores a response under it
        new_body = {**new_body, "request_id": own(body["request_id"])}
    return new_body, {**headers, **changed} if changed else headers


def _own_ids(fields: Mapping[str, Any], own: Any, depth: int) -> Mapping[str, Any]:
    """The same mapping if it holds no ids."""
    changed: dict[str, Any] = {}
    for name in IDS:
        value = fields.get(name)
        if isinstance(value, str | int) and value != "" and not isinstance(value, bool):
            changed[name] = own(str(value))
    user = fields.get("user_id")
    if isinstance(user, str) and len(user) <= _LONGEST and "session" in user:
        changed["user_id"] = _SESSION_OF_USER.sub(lambda match: match[1] + _uuid(own(match[2])), user)
    for name in HOLDERS if depth < _DEEPEST else ():
        value = fields.get(name)
        held = read_context(value)
        inner = _own_ids(held, own, depth + 1) if held else held
        if inner is not held:
            changed[name] = json.dumps(inner) if isinstance(value, str) else inner
    return {**fields, **changed} if changed else fields


def _member(member: str, own: Any) -> str:
    """A member of W3C baggage."""
    pair, semicolon, properties = member.partition(";")
    key, equals, value = pair.partition("=")
    if key.strip() not in _BAGGAGE or not value.strip():
        return member
    return f"{key}{equals}{quote(own(unquote(value.strip())))}{semicolon}{properties}"


def _uuid(name: str) -> str:
    """The digest of a name, in the form of a UUID."""
    digest = name.rpartition("~")[2]
    return "-".join((digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:32]))
