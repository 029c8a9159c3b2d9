"""Names of modes and policies and of the admin key, apart from `config` so that commands need not load the settings."""

from __future__ import annotations

from typing import Final, Literal

ModeName = Literal["off", "shadow", "on"]
PolicyName = Literal["priority", "eviction", "admission", "prefetch"]
"""Policies of an engine."""
GatewayPolicyName = Literal["annotations", "model-choice", "placement", "prefill-ahead"]
"""Policies of a gateway."""

ADMIN_KEY_VARIABLE: Final = "PRESAGE_ADMIN_KEY"
"""Environment variable with the key, unless a setting names another."""
ADMIN_KEY_HEADER: Final = "X-Presage-Admin-Key"
