"""Interpretation of span attributes, in all dialects.

A value of a wrong type or out of range is dropped and reported to the caller, which counts it. No report contains a
value, because an attribute may hold a prompt. `PLAN` maps each known attribute to its use, so the cost grows with the
attributes of a span, not with all known names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, NamedTuple

from presage.datasets.adapters.spans.conventions import Flag, Meaning, Naming, Role
from presage.datasets.adapters.spans.dialects import DIALECTS, MESSAGE_EVENTS, USAGE
from presage.datasets.schema.messages import fields, finish_reason, from_json, plain, split_system, unflattened

OPERATIONS: Final = ("gen_ai.operation.name", "ai.operationId")
_LARGEST: Final = 2**31 - 1
_HTTP_ERROR: Final = 400
_MOST_NAMES: Final = 10_000  # whose meaning is remembered
_MISSING: Final = frozenset({"none", "null", "undefined", "nan", "n/a"})  # what runtimes print for no value
_OWN_NAME: Final = re.compile(
    r"(?P<operation>invoke_agent|invoke_workflow|execute_tool|agent_run|tool_call|Agent:|Tool:|running tool:?"
    r"|Agent run:|OpenAI Agents trace:|Function:) [\[']?(?P<name>.+?)[\]']?$"
)
_BY_NAME: Final = {
    "invoke_agent": Role.AGENT,
    "invoke_workflow": Role.WORKFLOW,
    "execute_tool": Role.TOOL,
    "OpenAI Agents trace:": Role.WORKFLOW,  # Logfire's spans of the OpenAI Agents SDK
    "Function:": Role.TOOL,
}
NO_REQUEST: Final = re.compile(
    r"(?:embed|rerank|moderat|transcri|whisper|speech|image|dall-e|memory|count_?tokens|fine_?tun)\w*", re.IGNORECASE
)
"""What operations, or models, are called that are no requests to an agent's model."""
_MERGED: Final = frozenset({"(merged)", "(merged tools)"})  # Google ADK's span around tools that ran at once
_OTHER_NAMES: Final = frozenset({"graph_path", "metadata", "node", "agent_id"})  # fallback names of an agent
_INSIDE_AGENTS: Final = frozenset({"agent", "model", "call_model", "tools"})  # nodes of LangGraph's ready-made agents
_CONVERSATIONS: Final = ("session_id", "thread_id", "conversation_id")  # keys of the metadata of a LangChain run
_AS_FOUND: Final = Meaning._fields[Meaning._fields.index("node") : Meaning._fields.index("flags")]
_REQUESTS: Final = (Role.LLM, Role.AGENT, Role.MAYBE)
_NAMING: Final = (Role.AGENT, Role.NODE, Role.JUDGE, Role.CHAIN, Role.WORKFLOW)
_WITH_TEXT: Final = (*_REQUESTS, Role.TOOL)
_TYPE, _RANGE = "of a wrong type", "out of range"
_ERROR, _UNANSWERED, _PAUSED, _OUTSIDE = map(int, (Flag.ERROR, Flag.UNANSWERED, Flag.PAUSED, Flag.OUTSIDE))
_PAUSES: Final = re.compile(
    r"(?:^|\.)(?:Graph|Node|Parent)?Interrupt(?:$|\()|CallDeferred|ApprovalRequired|HumanInputRequired"
)
_PAUSED_STATE: Final = "__interrupt__"  # the key of a graph's output under which LangGraph says what it waits for
_LOOKS_KNOWN: Final = re.compile(
    r"tokens?(?![a-z])|session|conversation|thread_?id|(?:agent|tool|node)[._]?name$", re.IGNORECASE
)
_LOOKS_ELSE: Final = re.compile(
    r"max|k8s|avg|total|reasoning|thought|audio|image|accepted|rejected|per_?second|time_to|token[._]type|_token$|cost"
    r"|aggregated|established_tokens|baggage_conflict|crew\.token_usage|client\.token\.usage"
    r"|langsmith\.(?:trace\.session|metadata\.(?!.*(?:thread|session_id|conversation)))|parameters|schema|logprob",
    re.IGNORECASE,
)
Found = dict[str, Any]
"""Attributes by name; flattened messages under their prefix, as (rest of the name, value) pairs."""

Problem = Callable[[str, str], None]
"""Called for a value that is dropped with the attribute and a short reason for counting."""


def keep(found: Found, key: str, value: Any) -> str | None:
    """Add an attribute that is in the plan; drop any other, and return the name under which that is counted, if any."""
    if key in PLAN:
        found[key] = value
        return None
    prefix, name = other(key)
    if prefix is not None:
        found.setdefault(prefix, []).append((key[len(prefix) :], value))
    return name


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
    messages = found.setdefault(_MESSAGES["output" if role == "output" else "input"][0], [])
    if isinstance(messages, list):
        messages.append({"role": "assistant" if role == "output" else role, **message})


@lru_cache(_MOST_NAMES)
def other(key: str) -> tuple[str | None, str | None]:
    """Of an attribute that is not in the plan: the prefix, if it is part of a message, and the name under which it is
    counted as not read, if it looks like tokens, a tool, an agent or a session."""
    prefix = next((prefix for prefix in FLATTENED if key.startswith(prefix)), None)
    if prefix is not None:
        return prefix, None
    looks = _LOOKS_KNOWN.search(key) is not None and _LOOKS_ELSE.search(key) is None
    return None, re.sub(r"\d+", "N", key) if looks else None


def is_pause(kind: Any) -> bool:
    """Whether the type or message of an exception says that a run waits for somebody outside."""
    return isinstance(kind, str) and _PAUSES.search(kind[:200]) is not None


def interpret(found: Found, name: str, problem: Problem, flags: int = 0) -> Meaning:
    """The meaning of the attributes of the span called `name`; `flags` is what is known of it otherwise."""
    values: dict[str, Any] = {}
    ranks: dict[str, int] = {}
    outside, unknown_operation = False, ""
    if "events" in found:
        events = from_json(found.pop("events"))
        for event in events if isinstance(events, list) else []:
            if isinstance(event, dict) and event.get("event.name") in MESSAGE_EVENTS:
                keep_event(found, event["event.name"], event)
    for key, value in found.items():
        field, rank, read, json, outside_here = PLAN[key]
        if value is None or value == "" or ranks.get(field, rank) < rank:
            continue
        if json:
            value = from_json(value)
        value = _name(value) if read is _as_name and type(value) is str else read(key, value, problem)
        if value is None:
            if key in OPERATIONS:
                unknown_operation = str(found[key])
            continue
        if field == "input_tokens":
            outside = outside_here
        values[field], ranks[field] = value, rank
    if "usage" in values:
        outside = _take_usage(values, problem) or outside
    if "metadata" in values:
        values["metadata"] = from_json(values["metadata"])
        if "session" not in values:
            thread = next(filter(None, map(fields(values["metadata"]).get, _CONVERSATIONS)), None)
            values["session"] = _as_name("metadata", thread, problem) if thread is not None else None
    if "{name" in name and "template_name" in values:  # Logfire calls spans by their templates: "Function: {name}"
        name = re.sub(r"\{name(?:!r)?\}", lambda _: values["template_name"], name)
    role = values["kind"] if "kind" in values else _judged(values, name, unknown_operation)
    if role is Role.NODE and ("model" in values or "output_tokens" in values):
        role = Role.AGENT
    elif role is Role.LLM and name.endswith("._prepare_chat_with_tools"):
        role = Role.CHAIN  # LlamaIndex's, before the request
    elif role is Role.AGENT and values.get("provider") == "langgraph":
        role = Role.CHAIN  # OpenLLMetry's, beside the span that has the graph's steps
    elif role is Role.TOOL and values.get("tool", _own_name(name)[1]) in _MERGED:
        role = Role.OTHER
    naming, label = _named(role, values, name)
    if role is Role.TOOL and "call" in values:  # models give the calls of one answer the same id
        values["call"] = f"{values['call']} {label}"
    system = input_text = output_text = None
    if not values.keys().isdisjoint(_MESSAGES):
        if role in _WITH_TEXT:
            system, input_text, output_text = _texts(values)
        elif isinstance(values.get("output"), str) and _PAUSED_STATE in values["output"]:
            flags |= _PAUSED
        if role is Role.LLM and "finish_reason" not in values:
            values["finish_reason"] = _reason_in_output(found)
    if role not in _REQUESTS:  # it repeats the counts of what is inside
        for field in USAGE:
            values.pop(field, None)
    elif _settle(values, outside):
        flags |= _OUTSIDE
    if "error" in values or values.get("http_status", 0) >= _HTTP_ERROR:
        flags |= _PAUSED if is_pause(values.get("error")) else _ERROR
    if flags & (_ERROR | _UNANSWERED):
        answered = output_text or values.get("output_tokens") is not None
        flags = flags & ~_UNANSWERED if answered or role not in _REQUESTS else flags | _UNANSWERED
    found_values = map(values.get, _AS_FOUND)
    return Meaning._make((role, naming, label, *found_values, flags, system, input_text, output_text))


def _judged(values: dict[str, Any], name: str, unknown_operation: str) -> Role:
    """The role of a span whose operation is missing or unknown, by its name and by what it carries."""
    operation = _own_name(name)[0]
    if operation in _BY_NAME:
        return _BY_NAME[operation]
    if "tool" in values:
        return Role.TOOL
    if NO_REQUEST.search(f"{unknown_operation or name} {values.get('model')}"):
        return Role.OTHER
    if operation.lower().startswith("agent"):
        return Role.NODE
    if "model" in values and "provider" in values:
        return Role.MAYBE if unknown_operation else Role.LLM
    if "output_tokens" in values and (unknown_operation or "agent" not in values):
        return Role.MAYBE
    return Role.NODE if "agent" in values and not unknown_operation else Role.OTHER


def _named(role: Role, values: dict[str, Any], name: str) -> tuple[Naming, str]:
    """How well the span names an agent, and the name."""
    if role is Role.TOOL:
        return Naming.EXPLICITLY, values.get("tool") or values.get("entity") or _own_name(name)[1]
    agent = values.get("agent")
    if agent is None and not values.keys().isdisjoint(_OTHER_NAMES):
        run = fields(values.get("metadata"))  # LangChain's callbacks write the path into that of every nested run
        path = values.get("graph_path") or run.get("langgraph_checkpoint_ns") or run.get("langgraph_node")
        agent = _langgraph_agent(path) or values.get("node") or values.get("agent_id")
    if agent is not None and not agent.isdecimal():  # a number counts the calls of a graph
        return Naming.WEAKLY if role is Role.WORKFLOW else Naming.EXPLICITLY, agent
    if role in _NAMING:
        label = values.get("entity") or _own_name(name)[1]
        if label in _BY_NAME:  # a turn of an agent, called by its operation alone
            return Naming.NOT, label
        return Naming.WEAKLY if role in (Role.CHAIN, Role.WORKFLOW) else Naming.EXPLICITLY, label
    return Naming.NOT, _own_name(name)[1]


@lru_cache(_MOST_NAMES)
def _own_name(span: str) -> tuple[str, str]:
    """The operation in the name of a span, "" if there is none, and what it names."""
    match = _OWN_NAME.match(span)
    return (match["operation"], _stripped(match["name"])) if match is not None else ("", _stripped(span))


def _stripped(name: str) -> str:
    """A name without blanks around it, and with one for each line break inside."""
    return " ".join(name.split()) if not name.isprintable() or name != name.strip() else name


def _langgraph_agent(path: Any) -> str | None:
    """The agent of a path like `researcher:1f0c…|agent:77ab…`: the innermost named node."""
    if not isinstance(path, str):
        return None
    nodes = [node for part in path.split("|") if not (node := part.split(":", 1)[0]).isdecimal()]
    agent = next((node for node in reversed(nodes) if node not in _INSIDE_AGENTS), nodes[0] if nodes else "")
    return _stripped(agent) or None


def _take_usage(values: dict[str, Any], problem: Problem) -> bool:
    """Token counts of a usage object, unless separate attributes give them; whether it gave an `input` apart from the
    cache, as Langfuse's does."""
    usage = from_json(values["usage"])
    if not isinstance(usage, dict):
        problem("usage", _TYPE)
        return False
    outside = "input_tokens" not in values and "input" in usage
    for details in [part for part in usage.values() if isinstance(part, dict)]:
        usage = {**details, **usage}
    for field, keys in USAGE.items():
        for key in keys.split():
            if values.get(field) is None and usage.get(key) is not None:
                values[field] = _count(f"usage.{key}", usage[key], problem)
    return outside


def _settle(values: dict[str, Any], outside: bool) -> bool:
    """Make the token counts whole, or unknown; whether cached tokens were counted outside of the input.

    More cached tokens than input proves that the input leaves them out, and so does a total that has room for them;
    the output may likewise leave out what the model thought (Gemini). No request is empty and no answer is: 0 is what
    an instrumentation writes that was told no usage.
    """
    given, made, total = values.get("input_tokens"), values.get("output_tokens"), values.get("total_tokens")
    thought = values.get("reasoning_tokens") or 0
    cache = (values.get("cached_input_tokens") or 0) + (values.get("cache_written_tokens") or 0)
    apart = False
    if given is not None and cache:
        left_out = outside and total != given + (made or 0)
        room = total is not None and given + cache + (made or 0) <= total != given + (made or 0) + thought
        apart = cache > given or left_out or room
        if apart:
            values["input_tokens"] = min(given + cache, _LARGEST)
    elif given == 0:
        values["input_tokens"] = None
    if made is not None and thought and (thought > made or total == (values.get("input_tokens") or 0) + made + thought):
        values["output_tokens"] = min(made + thought, _LARGEST)
    elif made == 0:
        values["output_tokens"] = None
    return apart


@lru_cache(_MOST_NAMES)
def _name(value: str) -> str | None:
    value = _stripped(value)
    return value if value and value.lower() not in _MISSING else None


def _as_name(key: str, value: Any, problem: Problem) -> str | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return _name(value)
    problem(key, _TYPE)
    return None


def _count(key: str, value: Any, problem: Problem) -> int | None:
    if isinstance(value, str):
        if value.strip().lower() in _MISSING:
            return None
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int:
        problem(key, _TYPE)
    elif 0 <= value <= _LARGEST:
        return value
    elif value != -1:  # unknown, in the word of many
        problem(key, _RANGE)
    return None


def _first_reason(key: str, value: Any, problem: Problem) -> str | None:
    """The finish reason of the first choice with one: from a string, or from an array with one entry a choice."""
    value = from_json(value)
    if isinstance(value, str) and value.startswith("["):
        value = re.findall(r"[\w.-]+", value)  # an array as Python prints it
    for reason in value if isinstance(value, list) else [value]:
        if reason is not None and not isinstance(reason, str):
            problem(key, _TYPE)
            return None
        if reason and reason.lower() not in _MISSING:
            return reason.removeprefix("FinishReason.")
    return None


def _reason_in_output(attributes: Found) -> str | None:
    """The finish reason inside the model's response; a text that cannot contain one is not decoded."""
    for name in _MESSAGES["output"]:
        value = attributes.get(name)
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


def _role(key: str, value: Any, problem: Problem) -> Role | None:
    if isinstance(value, str):
        roles = KINDS[key]
        return roles.get(value.strip().lower().removeprefix("openinferencespankindvalues."))
    problem(key, _TYPE)
    return None


class _Use(NamedTuple):
    """Use of an attribute: its field, its rank among the names of that field (0 is the best), what reads its value."""

    field: str
    rank: int
    read: Callable[[str, Any, Problem], Any]
    json: bool
    outside: bool  # its dialect counts cached tokens outside of the input


_READ: Final[Mapping[str, Callable[[str, Any, Problem], Any]]] = {
    **dict.fromkeys((*USAGE, "http_status"), _count),
    **dict.fromkeys(("usage", "metadata", "system", "input", "output"), lambda key, value, problem: value),
    "kind": _role,
    "finish_reason": _first_reason,
    "call": lambda key, value, problem: value if isinstance(value, str) else None,
}
"""How the values of fields are read; those of others are names."""


def _plan() -> dict[str, _Use]:
    plan: dict[str, _Use] = {}
    ranks = Counter[str]()
    for dialect in DIALECTS:
        for field, names in (("kind", " ".join(dialect.kinds)), *dialect.names.items()):
            for name in names.split():
                json = name.startswith("mlflow.") or ".metadata." in name
                plan[name] = _Use(field, ranks[field], _READ.get(field, _as_name), json, dialect.cached_outside)
                ranks[field] += 1
    return plan


PLAN: Final = _plan()
"""Every attribute that is read."""
KINDS: Final = {name: roles for dialect in DIALECTS for name, roles in dialect.kinds.items()}
FLATTENED: Final = tuple(name for name in PLAN if name.endswith("."))
"""Prefixes of messages spread over attributes."""
_MESSAGES: Final = {
    field: [name for name, use in PLAN.items() if use.field == field] for field in ("system", "input", "output")
}
