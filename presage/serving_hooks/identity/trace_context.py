"""W3C trace context of a request: `traceparent` and `baggage`, as instrumented clients send them.

The trace id groups requests; parent ids differ from request to request and say nothing about the agent. `tracestate`
holds the positions of tracing vendors and no names, so it is not read. Headers are untrusted: what is malformed is as
good as absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

_TRACEPARENT: Final = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_LONGEST_BAGGAGE: Final = 8192
"""Bytes that W3C Baggage asks for."""

_SESSION: Final = ("session.id", "traceloop.association.properties.session_id")
_CONVERSATION: Final = ("gen_ai.conversation.id",)
_WORKFLOW: Final = ("gen_ai.workflow.name", "traceloop.workflow.name", "service.name")
_AGENT: Final = ("gen_ai.agent.name", "agent.name")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """What the headers of tracing say; None where they say nothing sound. Names are as sent, not validated.

    Attributes:
        trace_id: 32 hexadecimal digits.
        session, workflow_type, agent: from the baggage.
        conversation: from the baggage; of one agent, so a workflow may have several (pydantic-ai's delegates).
    """

    trace_id: str | None = None
    session: str | None = None
    conversation: str | None = None
    workflow_type: str | None = None
    agent: str | None = None


_NOTHING: Final = TraceContext()


def trace_context(headers: Mapping[str, str]) -> TraceContext:
    """The trace context in headers, whose names are in lower case."""
    parent, baggage = headers.get("traceparent"), headers.get("baggage")
    if not isinstance(parent, str) and not isinstance(baggage, str):
        return _NOTHING
    traceparent = _TRACEPARENT.fullmatch(parent.strip()) if isinstance(parent, str) and len(parent) <= 512 else None
    if traceparent is not None and traceparent[1] == "00" and traceparent[3]:  # version 00 ends after the flags
        traceparent = None
    names: dict[str, str] = {}
    if isinstance(baggage, str) and len(baggage) <= _LONGEST_BAGGAGE:
        for member in baggage.split(","):
            key, _, value = member.partition(";")[0].partition("=")
            names.setdefault(key.strip(), unquote(value.strip()))
    session, conversation, workflow_type, agent = (
        next((names[key] for key in keys if names.get(key)), None)
        for keys in (_SESSION, _CONVERSATION, _WORKFLOW, _AGENT)
    )
    return TraceContext(
        traceparent[2] if traceparent is not None else None, session, conversation, workflow_type, agent
    )
