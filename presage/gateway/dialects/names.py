"""Names of workflows as they leave the gateway: one printable name each, different for different tenants.

A name that every server accepts stays as the client sent it. Any other gets a digest of all of it, the tenant included,
behind a `~`; a name that contains `~` gets one too, so no client can send the name of another tenant's workflow. The
digest of a name with a tenant is keyed: who knows the position of another's key cannot compute what its names become.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from presage.gateway.annotation import Annotation
from presage.serving_hooks.workflows.identity import scoped, unscoped

MOST_BYTES: Final = 256
"""UTF-8 bytes of a name: the limit of vllm-router, and of characters in our own engine."""

SESSION_HEADERS: Final = (
    "x-session-id",
    "x-session-affinity",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-dynamo-session-id",
)
"""Headers by which routers recognise a session, as clients may send them."""

ID_HEADERS: Final = (
    *SESSION_HEADERS,
    "conversation_id",
    "x-dynamo-parent-session-id",
    "x-llm-d-inference-fairness-id",
    "x-gateway-inference-fairness-id",
)

_SHOWN: Final = 64
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:/-")


def body_name(name: str) -> str:
    """A name, with its tenant if it has one, for a field of the body; "" for ""."""
    printable = name.isprintable() and name == name.strip() and "~" not in name
    return name if printable and len(name.encode()) <= MOST_BYTES else _digested(name)


def header_name(name: str) -> str:
    """The same for a header: ASCII without control characters."""
    return body_name(name) if name.isascii() else _digested(name)


class SafeNames:
    """Names with tenants, as servers get them.

    Args:
        secret: at most 64 bytes; gateways that share servers need the same one.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def of(self, tenant: str, name: str) -> str:
        """The name of a tenant's workflow or session, good for bodies and headers; the name itself without tenants."""
        return _digested(scoped(tenant, name), self._secret) if tenant else name


def workflow_name(annotation: Annotation) -> str:
    """The workflow in a field of the body."""
    return annotation.sent_id or body_name(annotation.step.workflow_id)


def session(headers: Mapping[str, str], header: str, annotation: Annotation) -> dict[str, str]:
    """The workflow as a session in `header`; {} if the client has sent a session in any header."""
    if any(headers.get(name) for name in SESSION_HEADERS):
        return {}
    return {header: annotation.sent_id or header_name(annotation.step.workflow_id)}


def known(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are neither None nor empty."""
    return {name: value for name, value in fields.items() if value is not None and value != ""}


def _digested(name: str, secret: bytes = b"") -> str:
    shown = "".join(letter if letter in _PLAIN else "_" for letter in unscoped(name)[:_SHOWN])
    return f"{shown}~{blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=16, key=secret).hexdigest()}"
