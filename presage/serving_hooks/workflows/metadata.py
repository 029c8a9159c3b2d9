"""Reads a request's workflow, agent and step from what its client sent.

The names are those of `vllm_xargs` (`workflow_type`, `workflow_id`, `agent`, `step`, `workflow_end`, `session_id`)
and those of Pythia's `app_metadata` (`workflow_type_id`, `agent_id`), flat or nested under that name. A session
without a workflow id is a workflow of its own.

This input is untrusted. Reading it never raises, it is never logged, and anything but a short, printable name is
ignored and counted. Names are never truncated, since two long names could become one. On a server with API keys, that
of a request without one is ignored altogether.

A client may send any number of keys. What runs in the engine asks for the names above and walks over nothing else; keys
that only resemble a name are looked for by the HTTP server (`misspelt_keys`), among few, and reported to `check`. Of
what that finds, only keys are shown and logged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from sys import intern
from typing import Any, Final, Literal, get_args

from presage.datasets.schema.names import MAX_NAME, NO_NAMES, NameMapping
from presage.serving_hooks.counts import EVENTS, METADATA_LEFT_OUT, EventCounts, MetadataField, Reason
from presage.serving_hooks.workflows.identity import Step, scoped
from presage.serving_hooks.workflows.tenants import ANONYMOUS, ARGUMENT
from presage.wording import nearest

MAX_STEP: Final = 2**31 - 1

PAGE: Final = "docs/serving.md#what-a-client-sends"

MISTAKES: Final = "presage_mistakes"
"""Key in `extra_args` for the mistakes that our HTTP server found, `{field: [reason, key]}`; what a client writes there
is discarded."""

MOST_KEYS: Final = 32
"""Keys of a request that are compared with names; 35 µs each."""
LONGEST_KEY: Final = 64

_NAMES: Final[tuple[tuple[MetadataField, tuple[str, ...]], ...]] = (
    ("workflow_type", ("workflow_type", "workflow_type_id")),
    ("workflow_id", ("workflow_id",)),
    ("agent", ("agent", "agent_id")),
    ("session_id", ("session_id",)),
)
FIELDS: Final[Mapping[MetadataField, tuple[str, ...]]] = {
    **dict(_NAMES),
    "step": ("step",),
    "workflow_end": ("workflow_end",),
}
"""What a client may send, by the keys that name it, the best first."""
FIELD_OF: Final[Mapping[str, MetadataField]] = {key: field for field, keys in FIELDS.items() for key in keys}
NAME_KEYS: Final = tuple(FIELD_OF)
"""All keys that `names` reads."""
_SPELT: Final = tuple(key for key in NAME_KEYS if key != "step")
"""`step` is too short: `stop` resembles it."""
_FLAGS: Final = dict.fromkeys(("true", "1", "yes", 1), True) | dict.fromkeys(("false", "0", "no", "", 0), False)


_LONGEST_FLAG: Final = 5


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


def read(extra_args: object, session_id: object, counts: EventCounts, folded: NameMapping = NO_NAMES) -> Step | None:
    """The workflow step of a request, from its `sampling_params.extra_args`; None if it belongs to no workflow.

    Its workflow type and agent are `folded`: here, and nowhere else in an engine, so that models, counts, monitors and
    blocks have one name for both.
    """
    sent = _flat(extra_args, counts)
    tenant = sent.get(ARGUMENT)  # the server's own, which `app_metadata` cannot replace
    found = names(sent, counts)
    workflow_id = found.workflow_id or found.session_id or name(session_id, "session_id", counts)
    if workflow_id is None:
        return None
    if tenant == ANONYMOUS:
        counts.add(METADATA_LEFT_OUT, "workflow_id", "without a key")
        return None
    kind, agent = _interned(found.workflow_type), _interned(found.agent)
    return Step(
        workflow_type=intern(folded.workflow_type(kind)),
        workflow_id=scoped(name(tenant, ARGUMENT, counts) or "", workflow_id),
        agent=intern(folded.agent(agent)),
        number=found.number,
        last=found.last,
        sent=(kind, agent),
    )


def sent_tenant(extra_args: object) -> str | None:
    """The tenant of a request, "" without tenants; None where it came without a key to a server that has keys."""
    tenant = extra_args.get(ARGUMENT) if isinstance(extra_args, dict) else None
    return None if tenant == ANONYMOUS else name(tenant, ARGUMENT, EventCounts()) or ""


def _flat(extra_args: object, counts: EventCounts) -> Mapping[Any, Any]:
    sent = table(extra_args, "extra_args", counts)
    if sent.get("app_metadata") is None:
        return sent
    nested = table(sent["app_metadata"], "app_metadata", counts)
    inner = {key: nested[key] for key in FIELD_OF if key in nested}
    return {**inner, **{key: sent[key] for key in (*FIELD_OF, ARGUMENT, MISTAKES) if key in sent}}


def check(extra_args: object, session_id: object, counts: EventCounts) -> None:
    """Counts the names that a request lacks, and the keys that the HTTP server takes for meant for them."""
    sent = _flat(extra_args, EventCounts())
    if sent.get(ARGUMENT) == ANONYMOUS:
        return
    if sent.get(MISTAKES) is None and all(map(sent.get, _WANTED)):  # nearly always
        return
    given = given_fields(sent, session_id)
    mistakes = {field: of for field, of in _reported(sent.get(MISTAKES)).items() if field not in given}
    tenant = name(sent.get(ARGUMENT), ARGUMENT, EventCounts()) or ""
    for field, (reason, key) in mistakes.items():
        counts.add(METADATA_LEFT_OUT, field, reason, example=scoped(tenant, key))  # another tenant does not see it
    if not given and not mistakes:
        counts.add(EVENTS, "requests without a workflow")
    if any(key in sent for field in _WANTED for key in FIELDS[field]):  # otherwise it is at most a session
        for field in _WANTED:
            if field not in given and field not in mistakes:
                counts.add(METADATA_LEFT_OUT, field, "missing", example="")


_WANTED: Final[tuple[MetadataField, ...]] = ("workflow_type", "workflow_id", "agent")
_ONE_OF: Final[frozenset[MetadataField]] = frozenset({"workflow_id", "session_id"})

Mistakes = dict[MetadataField, tuple[Reason, str]]
"""By the field that a client may have meant: why it is left out, and the key that it has sent instead."""


def given_fields(sent: Mapping[Any, Any], session_id: object) -> set[MetadataField]:
    """The fields for which a request has a value, sound or not; a session stands for a workflow id."""
    given = {field for field, keys in FIELDS.items() if any(sent.get(key) not in (None, "") for key in keys)}
    return given | _ONE_OF if session_id or given & _ONE_OF else given


def misspelt_keys(sent: Iterable[Any], most: int = MOST_KEYS) -> Mistakes:
    """Keys that resemble a name and are none, among the first ones."""
    found: Mistakes = {}
    for key in islice(sent, most):
        if isinstance(key, str) and key not in FIELD_OF and len(key) <= LONGEST_KEY and (field := _meant(key)):
            found.setdefault(field, ("misspelt", key))
    return found


@lru_cache(maxsize=1024)
def _meant(key: str) -> MetadataField | None:
    known = nearest(key, _SPELT) if key.isprintable() else None
    return FIELD_OF[known] if known is not None else None


def _reported(found: object) -> Mistakes:
    """What the HTTP server found; without our plugin there, it may be a client's."""
    known: Mistakes = {}
    for field in get_args(MetadataField) if isinstance(found, dict) else ():
        match found.get(field) if isinstance(found, dict) else None:
            case [reason, str(key)] if reason in get_args(Reason):
                if len(key) <= LONGEST_KEY and key.isprintable():
                    known[field] = reason, key
    return known


def warning(field: MetadataField, reason: Reason, key: str) -> str:
    """The line that is logged for the first of these mistakes.

    Args:
        key: that a client has sent; "" if it has sent none.
    """
    wanted = _INSTEAD.get(field, f"`{field}` in `vllm_xargs`, in `metadata` or in a header")
    if not key:
        return f"a client names its workflow without `{field}`; send {wanted} ({PAGE})"
    if reason in ("misspelt", "misplaced"):
        return f"a client sends `{key}`, which is not read; send {wanted} ({PAGE})"
    return f"`{key}` of a request is left out: {reason}; send {wanted} ({PAGE})"


_INSTEAD: Final[Mapping[MetadataField, str]] = {
    "extra_args": "an object `vllm_xargs`",
    "extra_body": "its content at the top of the body, where OpenAI's Python client puts its argument `extra_body`",
    "app_metadata": "an object",
    "agentic_context": "an object",
    "metadata": "an object",
}


def _interned(sent: str | None) -> str:
    return intern(sent) if type(sent) is str else str(sent or "")


def table(value: object, field: MetadataField, counts: EventCounts) -> Mapping[Any, Any]:
    """A JSON object that a client sent; empty if it is anything else."""
    if isinstance(value, dict):
        return value
    if value is not None:
        counts.add(METADATA_LEFT_OUT, field, "wrong type", example=field)
    return {}


def _first(sent: Mapping[Any, Any], field: MetadataField, keys: tuple[str, ...], counts: EventCounts) -> str | None:
    found = (name(sent.get(key), field, counts, key) for key in keys)
    return next((one for one in found if one is not None), None)


def name(
    value: object, field: MetadataField | Literal["presage_tenant"], counts: EventCounts, key: str | None = None
) -> str | None:
    """A name that a client sent, if it is sound; the key is that of the field by default."""
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
        counts.add(METADATA_LEFT_OUT, field, reason, example=key or field)
    return None


def _number(value: object, counts: EventCounts) -> int | None:
    if value is None:
        return None
    if isinstance(value, str) and len(value) <= 10 and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_STEP:
        return value
    counts.add(METADATA_LEFT_OUT, "step", "no number from 0", example="step")
    return None


def _flag(value: object, counts: EventCounts) -> bool:
    if value is None:
        return False
    flag = None
    if isinstance(value, int) or (isinstance(value, str) and len(value) <= _LONGEST_FLAG):
        flag = _FLAGS.get(value.lower() if isinstance(value, str) else value)
    if flag is None:
        counts.add(METADATA_LEFT_OUT, "workflow_end", "neither true nor false", example="workflow_end")
    return bool(flag)
