"""Interpretation of span attributes, in all conventions.

A wrong type is reported to the caller, which decides whether to stop. Error messages never contain values, because an
attribute may hold a prompt. `PLAN` maps each known attribute to its use, so the cost grows with the attributes of a
span, not with all known names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from presage.datasets.adapters.spans.conventions import (
    KINDS,
    MESSAGE_EVENTS,
    MESSAGES,
    NAMES,
    USAGE,
    Meaning,
    Naming,
    Role,
)
from presage.datasets.schema.messages import finish_reason, from_json, plain, split_system, unflattened

_KIND, _STRING, _COUNT, _OBJECT, _TEXT, _REASONS = range(6)  # the first two are strings
_TYPES: Final = {
    "input_tokens": _COUNT,
    "output_tokens": _COUNT,
    "cached_input_tokens": _COUNT,
    "finish_reason": _REASONS,
    "usage": _OBJECT,
    "metadata": _OBJECT,
}


class _Use(NamedTuple):
    """Use of an attribute: its field, its rank among the names of that field (0 is the best), the expected type."""

    field: str
    rank: int
    wanted: int
    json: bool


PLAN: Final = {
    name: _Use(field, rank, wanted, name.startswith("mlflow."))
    for field, names, wanted in (
        ("kind", KINDS, _KIND),
        *((field, names, _TYPES.get(field, _STRING)) for field, names in NAMES.items()),
        *((field, names, _TEXT) for field, names in MESSAGES.items()),
    )
    for rank, name in enumerate(names)
}
"""Every attribute that is read."""
FLATTENED: Final = tuple(name for name in PLAN if name.endswith("."))
"""Prefixes of messages spread over attributes."""

_LARGEST: Final = 2**31 - 1
_OPERATIONS: Final = ("invoke_agent ", "invoke_workflow ", "execute_tool ")
_OTHER_NAMES: Final = frozenset({"graph_path", "metadata", "node", "agent_id"})  # fallback names of an agent
_INSIDE_AGENTS: Final = frozenset({"agent", "model", "call_model", "tools"})  # nodes of LangGraph's ready-made agents
_AS_FOUND: Final = Meaning._fields[Meaning._fields.index("node") : Meaning._fields.index("system_prompt")]
_WITH_TEXT: Final = (Role.LLM, Role.TOOL, Role.AGENT)

Found = dict[str, Any]
"""Attributes by name; flattened messages under their prefix, as (rest of the name, value) pairs."""

Problem = Callable[[str, str, str], None]
"""Called for a wrong value with the attribute, the problem and a short reason for counting."""


def keep(found: Found, key: str, value: Any) -> None:
    """Add an attribute that is in the plan; drop any other."""
    if key in PLAN:
        found[key] = value
    elif key.startswith(FLATTENED):
        prefix = next(prefix for prefix in FLATTENED if key.startswith(prefix))
        found.setdefault(prefix, []).append((key[len(prefix) :], value))


def keep_event(found: Found, name: str, attributes: dict[str, Any]) -> None:
    """Add the attributes of an event: one message, or repeated attributes of the span itself."""
    role = MESSAGE_EVENTS.get(name)
    if role is None:
        for key, value in attributes.items():
            if key not in found:
                keep(found, key, value)
        return
    content = from_json(attributes.get("gen_ai.event.content", attributes))
    content = content if isinstance(content, dict) else {"content": content}
    message = {key: from_json(value) for key, value in content.items()}
    messages = found.setdefault(MESSAGES["output" if role == "output" else "input"][0], [])
    if isinstance(messages, list):
        messages.append({"role": "assistant" if role == "output" else role, **message})


def interpret(found: Found, name: str, problem: Problem) -> Meaning:
    """The meaning of the attributes of the span called `name`."""
    values: dict[str, Any] = {}
    ranks: dict[str, int] = {}  # of the names that were not the best
    texts = False
    for key, value in found.items():
        field, rank, wanted, json = PLAN[key]
        if value is None or value == "" or (field in values and ranks.get(field, 0) < rank):
            continue
        if json:
            value = from_json(value)
        if wanted <= _STRING:
            if not isinstance(value, str):
                problem(key, f"type {type(value).__name__}, expected a string", "of a wrong type")
                continue
            if wanted == _KIND:
                value = KINDS[key].get(value.lower(), Role.OTHER)
        elif wanted == _COUNT:
            value = _whole(key, value, problem)
        elif wanted == _REASONS:
            value = _first_reason(key, value, problem)
            if value is None:
                continue
        else:
            texts = texts or wanted == _TEXT
        values[field] = value
        if rank:
            ranks[field] = rank
    # Older conventions had no operation names: a span with a provider and a model is a request.
    role = values.get("kind", Role.LLM if "provider" in values and "model" in values else Role.OTHER)
    naming, label = _named(role, values, name)
    if "usage" in values:
        _take_usage(values, problem)
    system = input_text = output_text = None
    if texts and role in _WITH_TEXT:
        system, input_text, output_text = _texts(values)
    if texts and role is Role.LLM and "finish_reason" not in values:
        values["finish_reason"] = _reason_in_output(found)
    return Meaning._make((role, naming, label, *map(values.get, _AS_FOUND), system, input_text, output_text))


def _named(role: Role, values: dict[str, Any], name: str) -> tuple[Naming, str]:
    """How well the span names an agent, and the name."""
    own = name
    if name.startswith(_OPERATIONS):
        own = name.split(" ", 1)[1]
    if role is Role.TOOL:
        return Naming.EXPLICITLY, values.get("tool", own)
    agent = values.get("agent")
    if agent is None and not values.keys().isdisjoint(_OTHER_NAMES):
        path = values.get("graph_path") or _langgraph_path(values.get("metadata"))
        agent = _langgraph_agent(path) or values.get("node") or values.get("agent_id")
    if agent is not None:
        return Naming.EXPLICITLY, agent
    if role in (Role.AGENT, Role.CHAIN, Role.WORKFLOW):
        return Naming.EXPLICITLY if role is Role.AGENT else Naming.WEAKLY, values.get("entity", own)
    return Naming.NOT, own


def _langgraph_path(metadata: Any) -> Any:
    """The path of a run in a LangGraph, which LangChain's callbacks write into the metadata of every nested run."""
    metadata = from_json(metadata)
    if not isinstance(metadata, dict):
        return None
    return metadata.get("langgraph_checkpoint_ns") or metadata.get("langgraph_node")


def _langgraph_agent(path: Any) -> str | None:
    """The agent of a path like `researcher:1f0c…|agent:77ab…`: the innermost named node."""
    if not isinstance(path, str) or not path:
        return None
    nodes = [part.split(":", 1)[0] for part in path.split("|")]
    while len(nodes) > 1 and nodes[-1] in _INSIDE_AGENTS:
        nodes.pop()
    return nodes[-1] or None


def _take_usage(values: dict[str, Any], problem: Problem) -> None:
    """Token counts of a usage object, unless separate attributes give them."""
    key, usage = NAMES["usage"][0], values["usage"]
    if not isinstance(usage, dict):
        problem(key, f"type {type(usage).__name__}, expected an object", "of a wrong type")
        return
    for field, inner in USAGE.items():
        if field not in values and usage.get(inner) is not None:
            values[field] = _whole(f"{key}.{inner}", usage[inner], problem)


def _whole(key: str, value: Any, problem: Problem) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        problem(key, f"type {type(value).__name__}, expected a whole number", "of a wrong type")
        return None
    if not 0 <= value <= _LARGEST:
        problem(key, "negative or past 32 bits; expected a count of tokens", "out of range")
        return None
    return value


def _first_reason(key: str, value: Any, problem: Problem) -> str | None:
    """The finish reason of the first choice with one: from a string, or from an array with one entry a choice."""
    value = from_json(value)
    for reason in value if isinstance(value, list) else [value]:
        if reason is not None and not isinstance(reason, str):
            problem(key, f"type {type(reason).__name__}, expected a string or an array of them", "of a wrong type")
            return None
        if reason:
            return reason
    return None


def _reason_in_output(found: Found) -> str | None:
    """The finish reason inside the model's response; a text that cannot contain one is not decoded."""
    for name in MESSAGES["output"]:
        value = found.get(name)
        if value is None or (isinstance(value, str) and "_reason" not in value):
            continue
        reason = finish_reason(_nested(value))
        if reason is not None:
            return reason
    return None


def _texts(values: dict[str, Any]) -> tuple[str | None, str | None, str | None]:
    given, produced = _nested(values.get("input")), _nested(values.get("output"))
    system, input_text = split_system(given) if given is not None else (None, None)
    if "system" in values:
        system = plain(values["system"]) or system
    return system, input_text, plain(produced) if produced is not None else None


def _nested(value: Any) -> Any:
    """Flattened messages as nested ones; anything else unchanged."""
    return unflattened(value) if isinstance(value, list) and value and isinstance(value[0], tuple) else value
