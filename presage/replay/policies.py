"""The policies and schedulers that a replay compares; docs/replay.md describes them.

To replay your own policy, name a `Policy` of a module as module:NAME; benchmarks/papers.py has examples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal

from presage.errors import ConfigurationError

if TYPE_CHECKING:
    from presage.replay.forecasts import Returns, Source
    from presage.serving_hooks.policies.routing.placement import RoutingPolicy

STOCK: Final = "stock"
ORACLE: Final = "oracle"

Forecasting = Literal["asked", "oracle", "output"]
"""The source of forecasts: --forecasts, the oracle, or the output length of the request."""


@dataclass(frozen=True)
class Policy:
    """A policy to replay.

    Attributes:
        settings: switches of the hooks that are on; None is vLLM without hooks.
        forecasts: source of next-agent forecasts, one of the named ones or your own; None without forecasts.
        ranked: source of remaining tokens; None uses `forecasts`.
        returns: source of return times, one of the named ones or your own; None without.
        foresight: whether blocks are evicted by Belady's rule.
        at_once: limit on concurrent workflows, which a sweep finds if it is `swept`.
        more: further settings of the hooks.
        scheduler: derives your own scheduler class from the hooked one; a module-level function, since it is sent to
            other processes.
        named: whether clients name their workflows; if not, the hooks infer them from prompts, and ends are not told.
        routing: name of a routing policy, or your own; only for a fleet, whose engines have hooks of their own.
    """

    name: str
    settings: frozenset[str] | None
    forecasts: Forecasting | Source | None = None
    ranked: Forecasting | None = None
    returns: Forecasting | Returns | None = None
    foresight: bool = False
    at_once: int | None = None
    swept: bool = False
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    scheduler: Callable[[type[Any]], type[Any]] | None = None
    named: bool = True
    routing: str | Callable[[], RoutingPolicy] | None = None

    def presage(self) -> dict[str, Any] | None:
        """The object `presage` of `--additional-config`; None without hooks."""
        if self.settings is None:
            return None
        switches = {switch: switch in self.settings for switch in SWITCHES}
        return switches | {"infer_workflows": not self.named} | dict(self.more)

    @property
    def sources(self) -> set[Forecasting | Source | Returns]:
        """Its sources of forecasts."""
        return {who for who in (self.forecasts, self.ranked, self.returns) if who is not None}

    @property
    def is_bound(self) -> bool:
        """Whether it knows what no engine can: the recorded future, or the best limit on this workload."""
        return self.foresight or self.swept or not {"oracle", "output"}.isdisjoint(self.sources)


SWITCHES: Final = ("priority", "eviction", "admission", "prefetch")

PBKV: Final[Mapping[str, Any]] = {"eviction_rule": "pbkv"}
"""The settings of PBKV as published: hierarchical eviction by eq. 2."""

POLICIES: Final[Mapping[str, Policy]] = {
    policy.name: policy
    for policy in (
        Policy(STOCK, None),
        Policy("lifecycle", frozenset({"eviction"})),
        Policy("next-use", frozenset({"eviction"}), "asked", returns="asked"),
        Policy("pbkv", frozenset({"eviction", "prefetch"}), "asked", more=PBKV),
        Policy("pbkv-he", frozenset({"eviction"}), "asked", more=PBKV),
        Policy("admission", frozenset({"admission"})),
        Policy("full", frozenset(SWITCHES), "asked", returns="asked"),
        Policy(ORACLE, frozenset({"eviction"}), "oracle", returns="oracle"),
        Policy("belady", frozenset({"eviction"}), foresight=True),
        Policy("best-fixed", frozenset({"eviction"}), "oracle", returns="oracle", swept=True),
        Policy("shortest-job", frozenset({"priority"}), ranked="oracle"),
    )
}

ROUTING: Final[Mapping[str, Policy]] = {
    **{
        name: Policy(name, None, routing=name)
        for name in (
            "session-affinity",
            "round-robin",
            "least-loaded",
            "longest-prefix",
            "program-scheduling",
            "thunderagent",
        )
    },
    "presage": Policy("presage", None, "asked", returns="asked", routing="presage"),
}
"""Routing policies of a fleet; all but the last know no forecasts."""

FIRST_COME: Final = "fcfs"
CLAIRVOYANT: Final = "stjf-oracle"

SCHEDULERS: Final[Mapping[str, Forecasting | None]] = {
    FIRST_COME: None,
    "sjf": "output",
    "stjf": "asked",
    CLAIRVOYANT: "oracle",
}
"""Source of remaining tokens; None without."""


def named(names: str) -> list[Policy]:
    """Policies by name.

    Args:
        names: separated by commas; module:NAME imports a `Policy` of a module.

    Raises:
        ConfigurationError: unknown name, or the module has no such policy, or one with settings unknown to the hooks.
    """
    own = {name: _own(name) for name in (part.strip() for part in names.split(",")) if ":" in name}
    available = {**POLICIES, **own}
    return [available[name] for name in _each(names, available, "--policy")]


def routing_named(names: str) -> list[Policy]:
    """Routing policies by name.

    Raises:
        ConfigurationError: unknown name.
    """
    return [ROUTING[name] for name in _each(names, ROUTING, "--policy")]


def _own(path: str) -> Policy:
    from presage.serving_hooks.vllm.config import PresageConfig

    module, _, name = path.partition(":")
    try:
        policy = getattr(import_module(module), name)
    except Exception as error:  # a user's module may raise any error
        raise ConfigurationError(f"--policy {path!r} cannot be imported: {error}") from None
    if not isinstance(policy, Policy):
        raise ConfigurationError(f"--policy {path!r} is a {type(policy).__name__}; give the name of a Policy")
    missing = sorted(((policy.settings or frozenset()) | policy.more.keys()) - PresageConfig.model_fields.keys())
    if missing:
        raise ConfigurationError(
            f"--policy {policy.name}: the hooks of this version cannot do {' and '.join(missing)} yet; leave "
            f"{policy.name} out"
        )
    return policy


def crossed(policies: Sequence[Policy], schedulers: str) -> list[Policy]:
    """Every policy with every scheduler, named policy+scheduler.

    Raises:
        ConfigurationError: unknown name.
    """
    combined = []
    for policy in policies:
        for name in _each(schedulers, SCHEDULERS, "--scheduler"):
            ranked = SCHEDULERS[name]
            settings = (policy.settings or frozenset()) - {"priority"}
            if ranked is not None:
                settings |= {"priority"}
            plain = policy.settings is None and ranked is None
            changed = replace(policy, settings=None if plain else settings, ranked=ranked or policy.ranked)
            combined.append(replace(changed, name=f"{policy.name}+{name}"))
    return combined


def ends(name: str) -> tuple[str, str]:
    """Names of the baseline and of the oracle between which a policy's gain is measured."""
    policy, plus, _ = name.partition("+")
    return (f"{policy}+{FIRST_COME}", f"{policy}+{CLAIRVOYANT}") if plus else (STOCK, ORACLE)


def _each(names: str, known: Collection[str], option: str) -> list[str]:
    chosen = list(dict.fromkeys(part.strip() for part in names.split(",")))
    for name in chosen:
        if name not in known:
            raise ConfigurationError(f"{option} {name!r} is unknown; there are {', '.join(known)}")
    return chosen
