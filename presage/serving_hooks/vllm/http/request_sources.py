"""What tells whose request it is where its client names no workflow, read in the HTTP server's process.

An engine sees token ids alone. This process sees headers and body: ids of sessions, traces, cached prompts and earlier
responses, and what recognises the agent, its system prompt and the names of its tools. They are read by the gateway's
code (`identity`), so an agent has one name before and behind a gateway. Ids and names go to the engine
(`workflows/observed.py`), which decides whose request it is; texts are neither stored nor logged.

`user`, `safety_identifier` and a `metadata.user_id` without a session name a person, who has many workflows: they are
not read.

Of the body only what is named here is decoded; of the messages the roles, and the contents that are system prompt:
0.3 ms for 1 MB. A system prompt that is not known yet is masked on the event loop: less than 1 ms, and a thread would
hold the interpreter for as long.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypedDict

import msgspec

from presage.features.agent_fingerprint import LONGEST_SYSTEM
from presage.features.agent_names import AgentNames, Name
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.identity.agents import MOST_TOOLS, Agents
from presage.serving_hooks.identity.identifier import CONFIDENCE
from presage.serving_hooks.identity.request import PATHS, ApiRequest, Endpoint
from presage.serving_hooks.identity.sent_names import sent_session
from presage.serving_hooks.identity.trace_context import TraceContext, trace_context
from presage.serving_hooks.identity.turns import MOST_TURNS, is_unique, system_text
from presage.serving_hooks.vllm.http.texts import follow
from presage.serving_hooks.workflows.metadata import name
from presage.serving_hooks.workflows.observed import KNOWN_AS
from presage.serving_hooks.workflows.tenants import ANONYMOUS

MESSAGES: Final = "/v1/messages"
"""vLLM's route of Anthropic's API."""
READ: Final[Mapping[str, Endpoint]] = {**PATHS, MESSAGES: "responses"}
"""Routes whose bodies are read. Of Anthropic's, `system` stands for the `instructions` of the responses API, and the
`messages` for its `input`."""

_SYSTEM: Final = ("system", "developer")
_ATTRIBUTION: Final = "x-anthropic-billing-header"
"""Begins a block of Claude Code's system prompt that differs in each request; vLLM drops it too."""
_LONGEST_ID: Final = 2**12
"""Bytes of JSON of a value that holds an id."""
_LONGEST_SYSTEM: Final = 2**16
"""Bytes of JSON after which no further system message is read."""
_IDS: Final = ("session_id", "conversation", "prompt_cache_key", "previous_response_id", "metadata")
_SESSION_OF_USER: Final = re.compile(r"user_[0-9a-f]+_account_[0-9a-f-]*_session_([0-9a-f-]{36})")

Top = Mapping[str, msgspec.Raw]
"""The values of a body by their keys, not decoded."""


class _Message(TypedDict, total=False):
    role: Any
    content: msgspec.Raw


class _Function(TypedDict, total=False):
    name: Any
    type: Any


class _Tool(_Function, total=False):
    function: _Function


_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_MESSAGE: Final = msgspec.json.Decoder(_Message)
_TOOL: Final = msgspec.json.Decoder(_Tool)
_ANY: Final = msgspec.json.Decoder()

_log = logging.getLogger(__name__)


class RequestSources:
    """Reads requests, on one thread.

    Args:
        names: of agents by their fingerprints, from a file.
        given_type: the workflow type that the settings give to a request, by its headers and its tenant.

    Attributes:
        agents: whose requests they are.
    """

    def __init__(
        self,
        names: AgentNames | None = None,
        given_type: Callable[[Mapping[str, str], str], str | None] = lambda headers, tenant: None,
    ) -> None:
        self.agents, self._given_type = Agents(names), given_type

    def read(
        self, path: str, headers: Mapping[str, str], top: Top, tenant: str, session_id: object, agent: str = ""
    ) -> dict[str, Any]:
        """What a request tells, as `workflows/observed.py` reads it; nothing of what is not sound.

        Args:
            path: of the HTTP request; of a route that is not in READ only the headers are read.
            headers: by names in lower case.
            session_id: what vLLM itself found for one.
            agent: as the client names it.
        """
        if tenant == ANONYMOUS:  # whoever they are, they are not one client
            return {}
        endpoint = READ.get(path)
        body = {} if endpoint is None else _body(path, endpoint, top)
        request = ApiRequest(endpoint or "chat", body, headers, tenant)
        trace, unsound = trace_context(headers), EventCounts()
        told, workflow_type, known_as = self._agent(request, trace, unsound, agent)
        cache_key = body.get("prompt_cache_key")
        found = {
            "session": name(session_id, "session_id", unsound)
            or sent_session(request, unsound)
            or _session_of_user(body.get("metadata"))
            or name(trace.session, "session_id", unsound),
            "trace": trace.trace_id,
            "conversation": name(trace.conversation, "session_id", unsound),
            "cache_key": cache_key if isinstance(cache_key, str) and is_unique(cache_key) else None,
            "response": name(body.get("previous_response_id"), "session_id", unsound),
            "agent": told,
            "workflow_type": workflow_type,
            KNOWN_AS: known_as,
        }
        return {source: value for source, value in found.items() if value is not None}

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return self.agents.debug_state()

    def _agent(
        self, request: ApiRequest, trace: TraceContext, unsound: EventCounts, sent: str
    ) -> tuple[list[str | float] | None, str | None, Name | None]:
        """([agent, confidence], workflow type, name for `known_as`); None for what nothing tells."""
        system = system_text(request, LONGEST_SYSTEM)
        known = self.agents.recognise(request.tenant, system, request.tools)
        workflow_type = name(trace.workflow_type, "workflow_type", unsound)
        workflow_type = workflow_type or self._given_type(request.headers, request.tenant)
        if known.confidence:
            workflow_type = workflow_type or known.workflow_type or f"app-{known.key}"
        named = name(trace.agent, "agent", unsound)
        known_as = known.known_as if self.agents.may_be_renamed(sent or named or known.name) else None
        if named is not None:
            return [named, CONFIDENCE["trace"]], workflow_type, known_as
        return [known.name, known.confidence] if known.confidence else None, workflow_type, known_as


class ServerNames:
    """What the engine's models call agents, for the agents that this process recognises.

    Args:
        ask: each engine, for names unless their digest is the one given.
    """

    def __init__(self, ask: Callable[[str], Awaitable[list[Any]]], agents: Agents) -> None:
        self._ask, self._agents = ask, agents
        self._digest = ""
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Follows the engine from now on; called in the server's loop."""
        self._following = asyncio.get_running_loop().create_task(follow(self.renew))

    async def renew(self) -> None:
        """Takes the names that the engine has now. Does not raise."""
        try:
            found: dict[str, str] = next(filter(None, await self._ask(self._digest)), {})
            digest = found.get("digest", "")
            if digest == self._digest:
                return
            names = None
            if digest:
                names = await asyncio.to_thread(
                    AgentNames.from_json, found["names"].encode(), Path("the engine's model")
                )
                _log.info("%d system prompts of agents are known from the models", len(names))
            self._agents.take_names(names)
            self._digest = digest
        except Exception as error:
            _log.debug("the engine did not say what its models call agents: %s", type(error).__name__)


def _body(path: str, endpoint: Endpoint, top: Top) -> dict[str, Any]:
    """The part of a body that is read, in the shape of the endpoint's API."""
    body = {key: _decoded(_ANY, top[key]) for key in _IDS if key in top and len(memoryview(top[key])) <= _LONGEST_ID}
    if "tools" in top:
        body["tools"] = [_decoded(_TOOL, tool) for tool in islice(_decoded(_LIST, top["tools"]) or (), MOST_TOOLS)]
    if endpoint == "chat":
        body["messages"] = _system_messages(top.get("messages"), begun=False)
    elif path == MESSAGES:
        body["instructions"] = _without_attribution(_decoded(_ANY, top.get("system")))
        body["input"] = _system_messages(top.get("messages"), begun=bool(body["instructions"]))
    elif endpoint == "responses":
        body["instructions"] = _decoded(_ANY, top.get("instructions"))
        body["input"] = _system_messages(top.get("input"), begun=True)
    return body


def _decoded(decoder: msgspec.json.Decoder[Any], value: msgspec.Raw | None) -> Any:
    """None for what is not there, or of no such shape."""
    with suppress(msgspec.DecodeError, RecursionError):
        return None if value is None else decoder.decode(value)
    return None


def _system_messages(messages: msgspec.Raw | None, *, begun: bool) -> list[dict[str, Any]]:
    """The messages that hold the system prompt: those with its role, until it ends.

    Args:
        begun: whether a part of the system prompt stands before the messages.
    """
    found: list[dict[str, Any]] = []
    room = _LONGEST_SYSTEM
    for raw in islice(_decoded(_LIST, messages) or (), MOST_TURNS):
        message = _decoded(_MESSAGE, raw) or {}
        if message.get("role") in _SYSTEM and room > 0:
            content = message.get("content", msgspec.Raw(b"null"))
            room -= len(memoryview(content))
            found.append({"role": "system", "content": _without_attribution(_decoded(_ANY, content))})
        elif begun or found:
            break
    return found


def _without_attribution(content: Any) -> Any:
    if isinstance(content, list):
        return [part for part in content if not _is_attribution(part.get("text") if isinstance(part, dict) else part)]
    return None if _is_attribution(content) else content


def _is_attribution(text: Any) -> bool:
    return isinstance(text, str) and text.startswith(_ATTRIBUTION)


def _session_of_user(metadata: Any) -> str | None:
    """The session in Anthropic's `metadata.user_id`, as Claude Code sends it: in a name, or in a JSON string."""
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user, str):
        return None
    if user.startswith("{"):
        held = _decoded(_ANY, msgspec.Raw(user.encode("utf-8", "surrogatepass")))
        return name(held.get("session_id"), "session_id", EventCounts()) if isinstance(held, dict) else None
    found = _SESSION_OF_USER.fullmatch(user)
    return found[1] if found else None
