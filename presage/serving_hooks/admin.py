"""The admin key: who may set modes on a running server."""

from __future__ import annotations

import hmac
import os
from hashlib import sha256
from typing import Final

from presage.errors import ConfigurationError
from presage.serving_hooks.mode_names import ADMIN_KEY_HEADER

SHORTEST_KEY: Final = 16


def admin_key(variable: str) -> str | None:
    """The admin key in this environment variable; None where none is set.

    Raises:
        ConfigurationError: the key is too short.
    """
    key = os.environ.get(variable)
    if key and len(key) < SHORTEST_KEY:
        raise ConfigurationError(f"{variable} has {len(key)} characters; give {SHORTEST_KEY} or more, or unset it")
    return key or None


def refusal(sent: str | None, key: str) -> tuple[int, str] | None:
    """HTTP status and message for a request with this key in its header; None if it is the admin key."""
    if sent is None:
        return 401, f"send the admin key in the header {ADMIN_KEY_HEADER}"
    if not hmac.compare_digest(sha256(sent.encode()).digest(), sha256(key.encode()).digest()):
        return 403, "this is not the admin key"
    return None
