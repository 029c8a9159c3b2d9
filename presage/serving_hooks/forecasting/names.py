"""Names of workflows and agents: bounded in length, and each tenant's own.

Names are cut to a bounded length, with a digest in the place of the rest: an id of a megabyte must not be kept.

Where several API keys are told apart, a tenant stands before a name with a mark between them that no client can write,
since names are printable (vllm/metadata.py). So two tenants never mean the same workflow, whatever they call it, and
nothing has to be kept beside the name. Without tenants a name is as the client gave it.
"""

from __future__ import annotations

from hashlib import blake2b
from sys import intern
from typing import Final

LONGEST_NAME: Final = 128

Key = tuple[str, str]
"""Workflow type and id, as `short` has them."""


def short(name: str) -> str:
    """A name of at most LONGEST_NAME characters, different for different names.

    Raises:
        TypeError: it is no text.
    """
    if not isinstance(name, str):
        raise TypeError("a name is a text")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:64]}…{blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"


def shared(name: str) -> str:
    """The same, one copy for whoever says it: for names that many workflows have."""
    return intern(str(short(name)))


MARK: Final = "\xa0"
"""A space that is not printable to Python, and looks like one to people."""


def scoped(tenant: str, name: str) -> str:
    """A name as this tenant's; the name itself for the tenant ""."""
    return f"{tenant}{MARK}{name}" if tenant else name


def tenant_of(name: str) -> str:
    """Whose a scoped name is; "" where nobody is told apart."""
    return name.rpartition(MARK)[0]


def unscoped(name: str) -> str:
    """The name as its client gave it."""
    return name.rpartition(MARK)[2]
