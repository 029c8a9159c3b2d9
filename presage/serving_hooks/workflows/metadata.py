"""Reads a request's workflow, agent and step from what its client sent.

The names are those of `vllm_xargs` (`workflow_type`, `workflow_id`, `agent`, `step`, `workflow_end`, `session_id`)
and those of Pythia's `app_metadata` (`workflow_type_id`, `agent_id`), flat or nested under that name. A session
without a workflow id is a workflow of its own.

This input is untrusted. Reading it never raises, it is never logged, and anything but a short, printable name is
ignored and counted. Names are never truncated, since two long names could become one. On a server with API keys, that
of a request without one is ignored altogether.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from sys import intern
from typing import Any, Final, Literal

from presage.serving_hooks.counts import EVENTS, METADATA_LEFT_OUT, EventCounts, MetadataField, Reason
from presage.serving_hooks.workflows.identity import Step, scoped
from presage.serving_hooks.workflows.tenants import ANONYMOUS, ARGUMENT

MAX_NAME: Final = 256
"""Characters of a name; longer ones are ignored."""

MAX_STEP: Final = 2**31 - 1

_NAMES: Final[tuple[tuple[MetadataField, tuple[str, ...]], ...]] = (
    ("workflow_type", ("workflow_type", "workflow_type_id")),
    ("workflow_id", ("workflow_id",)),
    ("agent", ("agent", "agent_id")),
    ("session_id", ("session_id",)),
)
NAME_KEYS: Final = (*(key for _, keys in _NAMES for key in keys), "step", "workflow_end")
"""All keys that `names` reads."""
_FLAGS: Final = dict.fromkeys(("true", "1", "yes", 1), True) | dict.fromkeys(("false", "0", "no", "", 0), False)


@dataclass(frozen=True, slots=True)
class SentNames:
    """What a client sent of the names above; None where it sent nothing sound."""

    workflow_type: str | None = None
    workflow_id: str | None = None
    agent: str | None = None
    session_id: str | None = None
    number: int | None = None
    last: bool = False


def names(sent: Mapping[Any, Any], counts: EventCounts) -> SentNames:
    """The names in a flat table."""
    workflow_type, workflow_id, agent, session_id = (_first(sent, field, keys, counts) for field, keys in _NAMES)
    number, last = _number(sent.get("step"), counts), _flag(sent.get("workflow_end"), counts)
    return SentNames(workflow_type, workflow_id, agent, session_id, number, last)


def read(extra_args: object, session_id: object, counts: EventCounts) -> Step | None:
    """The workflow step of a request, from its `sampling_params.extra_args`; None if it belongs to no workflow."""
    sent = table(extra_args, "extra_args", counts)
    tenant = sent.get(ARGUMENT)  # never read from `app_metadata`
    if sent.get("app_metadata") is not None:
        sent = {**table(sent["app_metadata"], "app_metadata", counts), **sent}
    found = names(sent, counts)
    workflow_id = found.workflow_id or found.session_id or name(session_id, "session_id", counts)
    if workflow_id is None:
        if found.workflow_type or found.agent:
            counts.add(METADATA_LEFT_OUT, "workflow_id", "missing")
        return None
    if tenant == ANONYMOUS:
        counts.add(METADATA_LEFT_OUT, "workflow_id", "without a key")
        return None
    return Step(
        workflow_type=_interned(found.workflow_type),
        workflow_id=scoped(name(tenant, ARGUMENT, counts) or "", workflow_id),
        agent=_interned(found.agent),
        number=found.number,
        last=found.last,
    )


def _interned(sent: str | None) -> str:
    return intern(sent) if type(sent) is str else str(sent or "")


def table(value: object, field: MetadataField, counts: EventCounts) -> Mapping[Any, Any]:
    """A JSON object that a client sent; empty if it is anything else."""
    if isinstance(value, dict):
        return value
    if value is not None:
        counts.add(METADATA_LEFT_OUT, field, "wrong type")
    return {}


def _first(sent: Mapping[Any, Any], field: MetadataField, keys: tuple[str, ...], counts: EventCounts) -> str | None:
    found = (name(sent.get(key), field, counts) for key in keys)
    return next((one for one in found if one is not None), None)


def name(value: object, field: MetadataField | Literal["presage_tenant"], counts: EventCounts) -> str | None:
    """A name that a client sent, if it is sound."""
    if isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable():  # nearly always
        return value
    if value is None or value == "":
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= 64:
        return str(value)
    reason: Reason = "wrong type"
    if isinstance(value, str):
        reason = "too long" if len(value) > MAX_NAME else "not printable"
    if field == ARGUMENT:  # set by our server, not by a client
        counts.add(EVENTS, f"{field}: {reason}")
    else:
        counts.add(METADATA_LEFT_OUT, field, reason)
    return None


def _number(value: object, counts: EventCounts) -> int | None:
    if value is None:
        return None
    if isinstance(value, str) and len(value) <= 10 and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_STEP:
        return value
    counts.add(METADATA_LEFT_OUT, "step", "no number from 0")
    return None


def _flag(value: object, counts: EventCounts) -> bool:
    if value is None:
        return False
    flag = _FLAGS.get(value.lower() if isinstance(value, str) else value) if isinstance(value, str | int) else None
    if flag is None:
        counts.add(METADATA_LEFT_OUT, "workflow_end", "neither true nor false")
    return bool(flag)
