"""Identity of workflows: workflow type, workflow id and tenant; and of requests as steps.

With several API keys, the tenant is a prefix of the workflow id, separated by a mark that no client can send, since
names must be printable (metadata.py). So tenants cannot share a workflow. Without tenants a name is as the client
sent it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from sys import intern
from typing import Final, Literal

LONGEST_NAME: Final = 128

Key = tuple[str, str]
"""Workflow type and id, as `short` returns them."""


def short(name: str) -> str:
    """A name of at most LONGEST_NAME characters, with a digest in place of the rest; different for different names.

    Raises:
        TypeError: the name is no str.
    """
    if not isinstance(name, str):
        raise TypeError("a name is a str")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:64]}…{blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"


def shared(name: str) -> str:
    """`short`, interned: one copy of a name that many workflows have."""
    return intern(str(short(name)))


MARK: Final = "\xa0"
"""A space that `str.isprintable` rejects."""


def scoped(tenant: str, name: str) -> str:
    """The name with its tenant; the name itself for the tenant ""."""
    return f"{tenant}{MARK}{name}" if tenant else name


def tenant_of(name: str) -> str:
    """The tenant of a scoped name; "" without tenants."""
    return name.rpartition(MARK)[0]


def unscoped(name: str) -> str:
    """The name as the client sent it."""
    return name.rpartition(MARK)[2]


def workflow_key(workflow_type: str, workflow_id: str) -> str:
    """The key of a workflow in policies and tables."""
    return f"{workflow_type}\0{workflow_id}"


DRAWN_IDS: Final = ("auto-", "inferred-")
"""How the ids begin that gateway and engine give to workflows that no client and no trace names."""
IdentitySource = Literal[
    "explicit", "session", "response", "trace", "conversation", "cache key", "answered", "prompt", "quoted", "new",
]  # fmt: skip
"""What identified the workflow of a request: its client's names, an id, or how its prompt continues an earlier one
(`presage.continuation.LinkedBy`); "new" if nothing did."""

BY_ID: Final[Mapping[str, float]] = {
    "session": 1.0, "response": 1.0, "trace": 0.95, "conversation": 0.95, "cache key": 0.9,
}  # fmt: skip
"""Confidence of ids, as their protocols promise it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request as a step of a workflow.

    Attributes:
        workflow_type: the application; "" if the client did not send it. Folded, as the agent is, where models fold.
        workflow_id: one run of it, with its tenant.
        agent: the role; "" if the client did not send it.
        number: of the step in its workflow, from 0, if the client sent it.
        last: the client marked this step as the last of its workflow.
        sent: workflow type and agent as the client sent them: what is recorded, and what it calls them later.
        source, confidence: what identified the workflow, and the share of such identities that are right.
        workflow: one key for the sent workflow type and id. Names hold no control characters, so no two workflows
            collide.
        stats_key: the workflow type with its tenant: statistics are kept per tenant.
    """

    workflow_type: str
    workflow_id: str
    agent: str
    number: int | None = None
    last: bool = False
    sent: tuple[str, str] = field(default=("", ""), repr=False)
    source: IdentitySource = field(default="explicit", compare=False)
    confidence: float = field(default=1.0, compare=False)
    workflow: str = field(init=False, repr=False, compare=False)
    stats_key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Interned: several tables are keyed by these names.
        if self.sent == ("", ""):
            object.__setattr__(self, "sent", (self.workflow_type, self.agent))
        object.__setattr__(self, "workflow", intern(workflow_key(self.sent[0], self.workflow_id)))
        stats_key = scoped(tenant_of(self.workflow_id), self.workflow_type)
        object.__setattr__(self, "stats_key", intern(stats_key))
