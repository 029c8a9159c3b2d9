"""What the HTTP server observed of a request whose client names no workflow, or an agent that the models do not know.

The server writes ids and names into `extra_args`, and no text (`vllm/http/request_sources.py` says where it finds
them). Nothing here decides whose request it is.

This input is untrusted, since without our plugin in the HTTP server it may be a client's: reading it never raises,
it is never logged, and what is no sound name is left out and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from secrets import token_hex
from sys import intern
from typing import Any, Final

from presage.datasets.schema.names import MAX_NAME
from presage.serving_hooks.counts import EVENTS, EventCounts
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.metadata import name, read, sent_tenant
from presage.serving_hooks.workflows.tenants import arguments_of

OBSERVED: Final = "presage_observed"
"""Key in `extra_args`; what a client writes there is discarded."""

KNOWN_AS: Final = "known_as"
"""Its entry for `known_as`; of a request whose client names workflow and agent, the only one."""

UNSOUND: Final = f"{OBSERVED}: unsound"
"""The event that is counted for each value that is left out."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What tells whose request it is, in one field a source. Ids are of the request's tenant: the same id sent by two
    tenants means two things.

    Attributes:
        session: id of a session or conversation, by a protocol that promises one.
        trace: 32 hexadecimal digits, the W3C trace id.
        conversation: of one agent, from the baggage. In one trace there may be several in one workflow, as pydantic-ai
            gives one to each agent's run; a conversation may go on in further traces.
        cache_key: a `prompt_cache_key` that looks drawn at random.
        response: the `previous_response_id`.
        agent: name of the agent; "" if nothing tells it.
        agent_confidence: share of such requests whose agent is right, from 0 to 1.
        workflow_type: the application, as far as this request tells; "" if nothing does. Requests of several agents of
            one workflow may tell different types: the first one counts.
    """

    session: str | None = None
    trace: str | None = None
    conversation: str | None = None
    cache_key: str | None = None
    response: str | None = None
    agent: str = ""
    agent_confidence: float = 0.0
    workflow_type: str = ""


NOTHING: Final = Observed()

REQUEST: Final = "presage_request"
"""Key in `extra_args` for the name that our HTTP server gives a request whose client names no workflow; what a client
writes there is discarded. By it the server tells the engine of the answer, since only the engine infers whose it is."""


def name_unnamed(params: Any, session_id: object, infers: bool) -> None:
    """Gives a request a name of its own, in its sampling parameters, if the engine `infers` whose it is.

    It does not where the client names the workflow, or sends no key to a server that has keys.
    """
    arguments = arguments_of(params)
    if infers and sent_tenant(arguments) is not None and read(arguments, session_id, EventCounts()) is None:
        arguments[REQUEST] = token_hex(8)


def answers_to(extra_args: object, session_id: object) -> Step | str | None:
    """What the answer to a request answers: a step that its client names, else the server's name of the request."""
    step = read(extra_args, session_id, EventCounts())
    return request_name(extra_args) if step is None else step


def request_name(extra_args: object) -> str | None:
    """The name that our HTTP server gave a request; None for requests that did not come through it."""
    given = extra_args.get(REQUEST) if isinstance(extra_args, dict) else None
    return given if isinstance(given, str) and len(given) <= MAX_NAME else None


_UNCOUNTED: Final = EventCounts()
"""Its labels are of what clients send; one event counts for all that is unsound here."""


def known_as(extra_args: object, counts: EventCounts) -> tuple[str, str] | None:
    """Workflow type and agent that the models know a request's system prompt by, told where they lack its agent."""
    sent = extra_args.get(OBSERVED) if isinstance(extra_args, dict) else None
    match sent.get(KNOWN_AS) if isinstance(sent, dict) else None:
        case None:
            return None
        case [str(workflow_type), str(agent)]:
            known = _sound(agent, counts)
            return None if known is None else (_sound(workflow_type or None, counts) or "", known)
    counts.add(EVENTS, UNSOUND)
    return None


def observed(extra_args: object, counts: EventCounts) -> Observed:
    """What the server observed of a request, from its `sampling_params.extra_args`; NOTHING if it observed nothing."""
    sent = extra_args.get(OBSERVED) if isinstance(extra_args, dict) else None
    if sent is None:
        return NOTHING
    if not isinstance(sent, dict):
        counts.add(EVENTS, UNSOUND)
        return NOTHING
    agent, confidence = _agent(sent.get("agent"), counts)
    return Observed(
        session=_sound(sent.get("session"), counts),
        trace=_sound(sent.get("trace"), counts),
        conversation=_sound(sent.get("conversation"), counts),
        cache_key=_sound(sent.get("cache_key"), counts),
        response=_sound(sent.get("response"), counts),
        agent=agent,
        agent_confidence=confidence,
        workflow_type=intern(_sound(sent.get("workflow_type"), counts) or ""),
    )


def _agent(sent: object, counts: EventCounts) -> tuple[str, float]:
    match sent:
        case None:
            return "", 0.0
        case [str(given), float(confidence)] if 0.0 <= confidence <= 1.0:
            agent = _sound(given, counts)
            return (intern(agent), confidence) if agent else ("", 0.0)
    counts.add(EVENTS, UNSOUND)
    return "", 0.0


def _sound(value: object, counts: EventCounts) -> str | None:
    if value is None:
        return None
    found = name(value, "session_id", _UNCOUNTED) if type(value) is str else None  # `intern` takes no subclass
    if found is None:
        counts.add(EVENTS, UNSOUND)
    return found
