"""What the settings, the routes and the command call modes and policies, and where the admin key is: said once."""

from __future__ import annotations

from typing import Final, Literal

ModeName = Literal["off", "shadow", "on"]
PolicyName = Literal["priority", "eviction", "admission", "prefetch"]

ADMIN_KEY_VARIABLE: Final = "PRESAGE_ADMIN_KEY"
"""Environment variable with the key, unless a setting names another."""
ADMIN_KEY_HEADER: Final = "X-Presage-Admin-Key"
