"""What is compared: names of policies and what each of them is.

    stock          vLLM's own scheduler and order of free blocks
    lifecycle      blocks of ended workflows first, no forecasts (PBKV's lifecycle-aware eviction)
    static-graph   blocks by steps to execution over the transitions of their workflow type (KVFlow): static_graph.py
    hierarchical   the scored order of free blocks (PBKV eq. 2), by the forecasts that were asked for
    admission      workflows held back or paused, no forecasts, vLLM's order of free blocks
    thunderagent   workflows paused where they do not fit, no forecasts, vLLM's order of free blocks: pause_restore.py
    full           everything: priority, eviction, admission and prefetch, by the forecasts that were asked for
    oracle         hierarchical with the truth for a forecast
    belady         the block whose next use is furthest away is given up first, by the truth: foresight.py
    best-fixed     oracle, and never more workflows at once than the best fixed number: sweep.py
    shortest-job   shortest total job first by the truth, vLLM's order of free blocks

Schedulers say who runs next, crossed with any of them:

    fcfs           first come, first served: vLLM's own
    sjf            the request with the shortest output first, by the truth (what Chimera calls shortest job first)
    stjf           the workflow with the fewest output tokens left first, by the forecasts that were asked for
    stjf-oracle    the same by the truth

A policy needs switches of the hooks; where the hooks at hand lack one it is refused, not left out in silence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from presage.errors import ConfigurationError
from presage.serving_hooks.replay.static_graph import SETTINGS as STATIC_GRAPH_SETTINGS

STOCK: Final = "stock"
ORACLE: Final = "oracle"

Foreteller = Literal["asked", "oracle", "transitions", "output"]
"""Whose word counts: the forecasts asked for, the truth, the transitions of a workflow type, the request's output."""


@dataclass(frozen=True)
class Policy:
    """One of those compared.

    Attributes:
        name: of the policy.
        settings: switches of the hooks that are on; None is vLLM without hooks.
        foretold: who says which agents come next; None for nobody.
        ranked: who says how much work is left; None for whoever says which agents come.
        own: what of it is no policy of the hooks: "foresight" for the order of free blocks, "pause-restore" for who is
            held.
        at_once: workflows under way at once; None for no limit.
        swept: the limit is found by a sweep.
        more: further settings of the hooks.
    """

    name: str
    settings: frozenset[str] | None
    foretold: Foreteller | None = None
    ranked: Foreteller | None = None
    own: Literal["foresight", "pause-restore"] | None = None
    at_once: int | None = None
    swept: bool = False
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def presage(self, fields: Collection[str]) -> dict[str, Any] | None:
        """The object `presage` of `--additional-config`: every switch there is, on or off."""
        if self.settings is None:
            return None
        return {switch: switch in self.settings for switch in SWITCHES if switch in fields} | dict(self.more)

    @property
    def foretellers(self) -> set[Foreteller]:
        """All whose word it goes by."""
        return {who for who in (self.foretold, self.ranked) if who is not None}


SWITCHES: Final = ("priority", "eviction", "admission", "prefetch")

POLICIES: Final[Mapping[str, Policy]] = {
    policy.name: policy
    for policy in (
        Policy(STOCK, None),
        Policy("lifecycle", frozenset({"eviction"})),
        Policy("static-graph", frozenset({"eviction"}), "transitions", more=STATIC_GRAPH_SETTINGS),
        Policy("hierarchical", frozenset({"eviction"}), "asked"),
        Policy("admission", frozenset({"admission"})),
        Policy("thunderagent", frozenset({"admission"}), own="pause-restore"),
        Policy("full", frozenset(SWITCHES), "asked"),
        Policy(ORACLE, frozenset({"eviction"}), "oracle"),
        Policy("belady", frozenset({"eviction"}), own="foresight"),
        Policy("best-fixed", frozenset({"eviction"}), "oracle", swept=True),
        Policy("shortest-job", frozenset({"priority"}), ranked="oracle"),
    )
}

FIRST_COME: Final = "fcfs"
CLAIRVOYANT: Final = "stjf-oracle"

SCHEDULERS: Final[Mapping[str, Foreteller | None]] = {
    FIRST_COME: None,
    "sjf": "output",
    "stjf": "asked",
    CLAIRVOYANT: "oracle",
}
"""Who says how much work is left; None where nobody is asked."""


def named(names: str) -> list[Policy]:
    """Policies by name.

    Args:
        names: separated by commas; each once.

    Raises:
        ConfigurationError: an unknown name.
    """
    return [POLICIES[name] for name in _each(names, POLICIES, "--policy")]


def check_switches(policies: Sequence[Policy], fields: Collection[str]) -> None:
    """Refuses policies whose switches these hooks do not have.

    Args:
        policies: that are wanted.
        fields: settings the hooks at hand know.

    Raises:
        ConfigurationError: there is one.
    """
    for policy in policies:
        missing = sorted(((policy.settings or frozenset()) | policy.more.keys()) - set(fields))
        if missing:
            raise ConfigurationError(
                f"--policy {policy.name}: the hooks of this version cannot do {' and '.join(missing)} yet; leave "
                f"{policy.name} out"
            )


def choose(names: str, fields: Collection[str]) -> list[Policy]:
    """Policies by name, which the hooks at hand can do; see `named` and `check_switches`."""
    policies = named(names)
    check_switches(policies, fields)
    return policies


def crossed(policies: Sequence[Policy], schedulers: str) -> list[Policy]:
    """Every policy with every scheduler, named policy+scheduler; all else of the policy stays.

    Args:
        policies: to be crossed.
        schedulers: names, separated by commas; each once.

    Raises:
        ConfigurationError: an unknown name.
    """
    found = []
    for policy in policies:
        for name in _each(schedulers, SCHEDULERS, "--scheduler"):
            ranked = SCHEDULERS[name]
            settings = (policy.settings or frozenset()) - {"priority"}
            if ranked is not None:
                settings |= {"priority"}
            plain = policy.settings is None and ranked is None
            changed = replace(policy, settings=None if plain else settings, ranked=ranked or policy.ranked)
            found.append(replace(changed, name=f"{policy.name}+{name}"))
    return found


def ends(name: str) -> tuple[str, str]:
    """What a policy's gain is a share of: the names of the one that gains nothing and the one that knows all."""
    policy, plus, _ = name.partition("+")
    return (f"{policy}+{FIRST_COME}", f"{policy}+{CLAIRVOYANT}") if plus else (STOCK, ORACLE)


def _each(names: str, known: Collection[str], option: str) -> list[str]:
    found = list(dict.fromkeys(part.strip() for part in names.split(",")))
    for name in found:
        if name not in known:
            raise ConfigurationError(f"{option} {name!r} is unknown; there are {', '.join(known)}")
    return found
