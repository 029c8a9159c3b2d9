"""Signatures of webhooks, as Standard Webhooks defines them (https://www.standardwebhooks.com).

The header `webhook-signature` holds `v1,` and the base64 of HMAC-SHA256 over `id.timestamp.body`, once for each secret.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Final

from presage.errors import ConfigurationError, WebhookError

TOLERANCE_S: Final = 300.0
"""Seconds by which the clocks of sender and receiver may differ, a late delivery included."""
_FORM: Final = "whsec_ and 24 to 64 bytes in base64, such as: echo whsec_$(openssl rand -base64 32)"


def secret_keys(text: str) -> tuple[bytes, ...]:
    """The keys of one or several secrets, separated by white space: during a rotation, the new and the old one.

    Raises:
        ConfigurationError: there is none, or one has another form.
    """
    found = []
    for secret in text.split():
        try:
            found.append(base64.b64decode(secret.removeprefix("whsec_"), validate=True))
        except (binascii.Error, ValueError):
            found.append(b"")
    if not found or not all(24 <= len(key) <= 64 for key in found):
        wrong = "has another form" if found else "is not there"
        raise ConfigurationError(f"the secret of webhooks {wrong}; give {_FORM}")
    return tuple(found)


def signed_headers(keys: Sequence[bytes], webhook_id: str, at: int, body: bytes) -> dict[str, str]:
    """The headers of a message that is sent `at` seconds since 1970."""
    signatures = " ".join(_signature(key, webhook_id, str(at), body) for key in keys)
    return {"webhook-id": webhook_id, "webhook-timestamp": str(at), "webhook-signature": signatures}


def verify(keys: Sequence[bytes], headers: Mapping[str, str], body: bytes, now: float) -> None:
    """Checks that the holder of a secret has sent the body, within `TOLERANCE_S` of `now`.

    Args:
        headers: in any case.

    Raises:
        WebhookError: a header is missing, the message is too old, or no signature is right.
    """
    of = {name.lower(): value for name, value in headers.items()}
    try:
        webhook_id, at, signatures = (of[f"webhook-{name}"] for name in ("id", "timestamp", "signature"))
    except KeyError as missing:
        raise WebhookError(f"the header {missing} is missing; send a signed webhook") from None
    if not (at.isascii() and at.isdigit()) or abs(now - int(at[:12])) > TOLERANCE_S:
        raise WebhookError(f"webhook-timestamp is not within {TOLERANCE_S:.0f} s of now; compare the clocks")
    right = [_signature(key, webhook_id, at, body).encode() for key in keys]
    if not any(hmac.compare_digest(one.encode(), good) for one in signatures.split() for good in right):
        raise WebhookError("the signature is wrong; give sender and receiver the same secret")


def _signature(key: bytes, webhook_id: str, at: str, body: bytes) -> str:
    digest = hmac.digest(key, f"{webhook_id}.{at}.".encode() + body, hashlib.sha256)
    return f"v1,{base64.b64encode(digest).decode()}"
