"""Requests of Anthropic's messages API (`/v1/messages`, Claude Code) as conversations of OpenAI's chat API.

So identity, forecasts and records read one form. Thinking is left out, as reasoning is in the other APIs; so is the
block of Claude Code's system prompt that differs in each request, which vLLM drops too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_ATTRIBUTION: Final = "x-anthropic-billing-header"
_THINKING: Final = ("thinking", "redacted_thinking")
_LONGEST_USER: Final = 4096
_SESSION: Final = re.compile(r"(?:_session_|\"session_id\"\s*:\s*\")([0-9a-f-]{36})(?![\w-])")


def chat_messages(body: Mapping[str, Any]) -> Any:
    """The messages of a request, the system prompt first; what has no such shape stays as it is."""
    given = body.get("messages")
    if not isinstance(given, list):
        return given
    system = _without_attribution(body.get("system"))
    messages = [{"role": "system", "content": system}] if system else []
    for message in given:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            messages += _of_blocks(message, content)
        else:
            messages.append(message)
    return messages


def session_of_user(body: Mapping[str, Any]) -> str | None:
    """The session that Claude Code writes into `metadata.user_id`; None for the name of a person."""
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    match = _SESSION.search(user) if isinstance(user, str) and len(user) <= _LONGEST_USER else None
    return None if match is None else match[1]


def _of_blocks(message: Mapping[str, Any], blocks: list[Any]) -> list[dict[str, Any]]:
    """The results of tools as messages of their own, then the rest with its tool calls."""
    results, content, calls = [], [], []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in _THINKING:
            continue
        if isinstance(kind, str) and kind.endswith("tool_result"):
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        elif isinstance(kind, str) and kind.endswith("tool_use"):
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "function": function})
        else:
            content.append(block)
    if content or calls or not results:
        results.append({**message, "content": content, **({"tool_calls": calls} if calls else {})})
    return results


def _without_attribution(system: Any) -> Any:
    if isinstance(system, list):
        return [block for block in system if not _is_attribution(block.get("text") if isinstance(block, dict) else "")]
    return None if _is_attribution(system) else system


def _is_attribution(text: Any) -> bool:
    return isinstance(text, str) and text.startswith(_ATTRIBUTION)
