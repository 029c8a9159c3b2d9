"""Plain text from the many shapes in which instrumentations record prompts and responses.

The result is three strings: system text, all other input, and output; each is None if not recorded. A tool call is
written as `name(arguments)`, because the called name predicts the next agent. Nothing here raises: an unknown shape is
kept as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

_ROLES: Final = {"human": "user", "ai": "assistant", "developer": "system"}
_SPEAKERS: Final = frozenset({"system", "user", "human", "assistant", "ai", "tool", "function", "developer", "model"})
_CONTAINERS: Final = ("messages", "choices", "generations", "output", "input", "contents")
_CALLS: Final = frozenset({"function_call", "tool_use", "tool_call"})
_BETWEEN: Final = "\n\n"
_REASONS: Final = ("finish_reason", "stop_reason")
_AROUND_REASONS: Final = (
    "choices",
    "generations",
    "candidates",
    "message",
    "generation_info",
    "response_metadata",
    "kwargs",
)
_REASON: Final = re.compile(r"[\w.-]{1,40}")


def split_system(value: Any) -> tuple[str | None, str | None]:
    """(system text, other text) of a model's input."""
    system: list[str] = []
    other: list[str] = []
    for role, text in spoken(value, "user"):
        (system if role == "system" else other).append(text)
    return _BETWEEN.join(system) or None, _BETWEEN.join(other) or None


def routed_prompt(system: str | None, other: str | None) -> str | None:
    """What a router reads of these two: the input without the system text, whose instructions tell it nothing."""
    return other or system or None


def plain(value: Any) -> str | None:
    """All text of a value: a model's or tool's output, or system instructions."""
    return _BETWEEN.join(text for _, text in spoken(value, "assistant")) or None


def finish_reason(value: Any) -> str | None:
    """The finish reason in a response, if any: that of its first choice.

    The response may be JSON written by the model, so only a single word is accepted as a reason.
    """
    value = _numbered(from_json(value))
    if isinstance(value, list):
        inside = value
    elif isinstance(value, dict):
        for key in _REASONS:
            reason = value.get(key)
            if isinstance(reason, str) and _REASON.fullmatch(reason):
                return reason
        inside = [value[key] for key in _AROUND_REASONS if key in value]
    else:
        return None
    return next(filter(None, map(finish_reason, inside)), None)


def unflattened(pairs: Sequence[tuple[str, Any]]) -> Any:
    """Messages flattened into attributes like `0.message.content`, as nested objects."""
    root: dict[str, Any] = {}
    for key, value in pairs:
        *path, last = key.split(".")
        node = root
        for part in path:
            inner = node.setdefault(part, {})
            if not isinstance(inner, dict):  # a value and a path have the same name: keep the value
                break
            node = inner
        else:
            node.setdefault(last, value)
    return root


def from_json(value: Any) -> Any:
    """The parsed JSON of a string; any other value unchanged."""
    if isinstance(value, str) and value[:1] in ("{", "[", '"'):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:
            return value
    return value


def fields(value: Any) -> dict[str, Any]:
    """The fields of an object; none of any other value."""
    return value if isinstance(value, dict) else {}


def spoken(value: Any, role: str) -> Iterator[tuple[str, str]]:
    """(role, text) of each message in a value, in order."""
    value = _numbered(from_json(value))
    if isinstance(value, list):
        if value and all(isinstance(part, dict) and not _is_message(part) and "type" in part for part in value):
            yield from _one(role, value)  # parts of one message, as in system instructions
        else:
            for part in value:
                if _is_plain(part):
                    yield from _one(_ROLES.get(part["role"], part["role"]), part["content"])
                else:
                    yield from spoken(part, role)
    elif not isinstance(value, dict):
        yield from _one(role, value)
    elif isinstance(value.get("message"), dict | list):
        yield from spoken(value["message"], role)
    elif _is_message(value):
        speaker = str(value.get("role", value.get("type")))
        yield from _one(_ROLES.get(speaker, speaker), value)
    else:
        for key in ("instructions", "system"):
            yield from _one("system", value.get(key))
        inner = next((key for key in _CONTAINERS if value.get(key) and key != "contents"), None)
        yield from spoken(value[inner], role) if inner is not None else _one(role, value)


def _one(role: str, value: Any) -> Iterator[tuple[str, str]]:
    text = _text(value)
    if text:
        yield role, text


def _is_message(value: Mapping[str, Any]) -> bool:
    speaker = value.get("role", value.get("type"))
    return isinstance(speaker, str) and speaker in _SPEAKERS and ("role" in value or "content" in value)


def _is_plain(value: Any) -> bool:
    """Whether it is a role and a text, as nearly all messages are: these are read much faster."""
    if not isinstance(value, dict) or len(value) != 2:
        return False
    speaker = value.get("role")
    return isinstance(value.get("content"), str) and isinstance(speaker, str) and speaker in _SPEAKERS


def _text(value: Any) -> str:
    """The text of one message or one part of it."""
    value = _numbered(value)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(_text, value)))
    if not isinstance(value, dict):
        return _json(value)
    for wrapper in ("message_content", "tool_call", "function"):
        if isinstance(value.get(wrapper), dict):
            return _text(value[wrapper])
    if isinstance(value.get("name"), str) and ("arguments" in value or "args" in value):
        arguments = value.get("arguments", value.get("args"))
        return f"{value['name']}({arguments if isinstance(arguments, str) else _json(arguments)})"
    keys = ["text", "content", "contents", "parts", "response", "result", "tool_calls"]
    content = value.get("content")
    if isinstance(content, list) and any(fields(part).get("type") in _CALLS for part in content):
        keys.remove("tool_calls")  # LangChain repeats them
    texts = [_text(value[key]) for key in keys if value.get(key) is not None]
    if texts or "role" in value or value.get("type") in _SPEAKERS:
        return "\n".join(dict.fromkeys(filter(None, texts)))
    return _json(value) if value else ""


def _numbered(value: Any) -> Any:
    """A dictionary with the keys 0, 1, … as a list."""
    if isinstance(value, dict) and value and all(isinstance(key, str) and key.isdecimal() for key in value):
        return [value[key] for key in sorted(value, key=int)]
    return value


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, OverflowError):
        return ""
