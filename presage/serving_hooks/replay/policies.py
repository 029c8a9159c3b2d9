"""What is compared: names of policies and the settings of the hooks that each of them is.

    stock          vLLM's own scheduler and order of free blocks
    lifecycle      blocks of ended workflows first, no forecasts (PBKV's lifecycle-aware eviction)
    hierarchical   the scored order of free blocks (PBKV eq. 2), by the forecasts that were asked for
    admission      workflows held back or paused, no forecasts, vLLM's order of free blocks
    full           everything: priority, eviction, admission and prefetch, by the forecasts that were asked for
    oracle         hierarchical with the truth for a forecast

A policy needs switches of the hooks; where the hooks at hand lack one it is refused, not left out in silence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from presage.errors import ConfigurationError

STOCK: Final = "stock"
ORACLE: Final = "oracle"


@dataclass(frozen=True)
class Policy:
    """One of those compared.

    Attributes:
        name: of the policy.
        settings: switches of the hooks that are on; None is vLLM without hooks.
        foretold: whether it looks at forecasts, and whose: "asked" for those asked for, "oracle" for the truth.
        more: further settings of the hooks.
    """

    name: str
    settings: frozenset[str] | None
    foretold: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def presage(self, fields: Collection[str]) -> dict[str, Any] | None:
        """The object `presage` of `--additional-config`: every switch there is, on or off."""
        if self.settings is None:
            return None
        return {switch: switch in self.settings for switch in SWITCHES if switch in fields} | dict(self.more)


SWITCHES: Final = ("priority", "eviction", "admission", "prefetch")

POLICIES: Final[Mapping[str, Policy]] = {
    policy.name: policy
    for policy in (
        Policy(STOCK, None),
        Policy("lifecycle", frozenset({"eviction"})),
        Policy("hierarchical", frozenset({"eviction"}), "asked"),
        Policy("admission", frozenset({"admission"})),
        Policy("full", frozenset(SWITCHES), "asked"),
        Policy(ORACLE, frozenset({"eviction"}), "oracle"),
    )
}


def choose(names: str, fields: Collection[str]) -> list[Policy]:
    """Policies by name.

    Args:
        names: separated by commas; each once.
        fields: settings the hooks at hand know.

    Raises:
        ConfigurationError: an unknown name, or one whose switches these hooks do not have.
    """
    found: dict[str, Policy] = {}
    for name in (part.strip() for part in names.split(",")):
        policy = POLICIES.get(name)
        if policy is None:
            raise ConfigurationError(f"--policy {name!r} is unknown; there are {', '.join(POLICIES)}")
        missing = sorted((policy.settings or frozenset()) - set(fields))
        if missing:
            raise ConfigurationError(
                f"--policy {name}: the hooks of this version cannot do {' and '.join(missing)} yet; leave {name} out"
            )
        found[name] = policy
    return list(found.values())
