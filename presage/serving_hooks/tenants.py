"""Whose a workflow is, where several API keys are told apart: names of workflows and of what is learnt carry it.

A tenant stands before a name with a mark between them that no client can write, since names are printable
(vllm/metadata.py). So two tenants never mean the same workflow, whatever they call it, and nothing has to be kept
beside the name. Without tenants a name is as the client gave it.
"""

from __future__ import annotations

from typing import Final

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
