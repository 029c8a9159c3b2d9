"""Answers of Anthropic's messages API, whole and as its events."""

import json
from typing import Any

MESSAGE = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "tool_use",
    "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a.py"}},
        {"type": "tool_use", "id": "toolu_2", "name": "list", "input": {}},
    ],
    "usage": {
        "input_tokens": 7, "cache_read_input_tokens": 9000, "cache_creation_input_tokens": 5, "output_tokens": 42,
    },
}  # fmt: skip


def message_events(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The events in which Anthropic's API streams a message, tool calls and text in two pieces."""
    begun = {**message, "content": [], "stop_reason": None, "usage": {**message["usage"], "output_tokens": 1}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}, {"type": "ping"}]
    for index, block in enumerate(message["content"]):
        kind = block["type"]
        field = {"thinking": "thinking", "text": "text", "tool_use": "input"}[kind]
        whole = json.dumps(block[field]) if kind == "tool_use" else block[field]
        empty = {**block, field: {} if kind == "tool_use" else ""}
        names = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
        delta, key = names.get(kind, ("input_json_delta", "partial_json"))
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        for piece in (whole[:3], whole[3:]):
            events.append({"type": "content_block_delta", "index": index, "delta": {"type": delta, key: piece}})
        events.append({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    counts = {"output_tokens": message["usage"]["output_tokens"]}
    return [*events, {"type": "message_delta", "delta": ended, "usage": counts}, {"type": "message_stop"}]
