"""What is compared: names of policies and what each of them is.

    stock          vLLM's own scheduler and order of free blocks
    lifecycle      blocks of ended workflows first, no forecasts (PBKV's lifecycle-aware eviction)
    hierarchical   the scored order of free blocks (PBKV eq. 2), by the forecasts that were asked for
    admission      workflows held back or paused, no forecasts, vLLM's order of free blocks
    full           everything: priority, eviction, admission and prefetch, by the forecasts that were asked for
    oracle         hierarchical with the truth for a forecast
    belady         the block whose next use is furthest away is given up first, by the truth: foresight.py
    best-fixed     oracle, and never more workflows at once than the best fixed number: `runs.tried`
    shortest-job   shortest total job first by the truth, vLLM's order of free blocks

Schedulers say who runs next, crossed with any of them:

    fcfs           first come, first served: vLLM's own
    sjf            the request with the shortest output first, by the truth (what Chimera calls shortest job first)
    stjf           the workflow with the fewest output tokens left first, by the forecasts that were asked for
    stjf-oracle    the same by the truth

A policy of your own is a `Policy` of a module of yours, named module:NAME; benchmarks/papers.py has some.

A policy needs switches of the hooks; where the hooks at hand lack one it is refused, not left out in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal

from presage.errors import ConfigurationError

if TYPE_CHECKING:
    from presage.serving_hooks.replay.forecasts import Source

STOCK: Final = "stock"
ORACLE: Final = "oracle"

Foreteller = Literal["asked", "oracle", "output"]
"""Whose word counts: the forecasts asked for, the truth, the request's output."""


@dataclass(frozen=True)
class Policy:
    """One of those compared.

    Attributes:
        name: of the policy.
        settings: switches of the hooks that are on; None is vLLM without hooks.
        foretold: who says which agents come next, or a source of your own; None for nobody.
        ranked: who says how much work is left; None for whoever says which agents come.
        foresight: the order of free blocks is Belady's, by the truth.
        at_once: workflows under way at once; None for no limit.
        swept: the limit is found by a sweep.
        more: further settings of the hooks.
        scheduler: makes a scheduler class of your own from the hooked one; a function of a module, since it goes to
            other processes.
    """

    name: str
    settings: frozenset[str] | None
    foretold: Foreteller | Source | None = None
    ranked: Foreteller | None = None
    foresight: bool = False
    at_once: int | None = None
    swept: bool = False
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    scheduler: Callable[[type[Any]], type[Any]] | None = None

    def presage(self, fields: Collection[str]) -> dict[str, Any] | None:
        """The object `presage` of `--additional-config`: every switch there is, on or off."""
        if self.settings is None:
            return None
        return {switch: switch in self.settings for switch in SWITCHES if switch in fields} | dict(self.more)

    @property
    def foretellers(self) -> set[Foreteller | Source]:
        """All whose word it goes by."""
        return {who for who in (self.foretold, self.ranked) if who is not None}


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
        Policy("belady", frozenset({"eviction"}), foresight=True),
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
        names: separated by commas, each once; module:NAME is a `Policy` of a module that can be imported.

    Raises:
        ConfigurationError: an unknown name.
    """
    own = {name: _own(name) for name in (part.strip() for part in names.split(",")) if ":" in name}
    known = {**POLICIES, **own}
    return [known[name] for name in _each(names, known, "--policy")]


def _own(path: str) -> Policy:
    """A policy by module:NAME."""
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # a module of the user's may raise anything
        raise ConfigurationError(f"--policy {path!r} cannot be imported: {error}") from None
    if not isinstance(found, Policy):
        raise ConfigurationError(f"--policy {path!r} is a {type(found).__name__}; give the name of a Policy")
    return found


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
