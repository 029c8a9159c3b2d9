"""Who gets the next place, by service received: first the tenants, then the workflow types of a tenant.

Source: the virtual token counter (VTC; Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024), in two
levels as in hierarchical fair queueing (Bennett & Zhang, 1996). A counter is the service received divided by a weight,
and of those who wait the tenant with the lowest counter is served; who begins to wait is lifted to the lowest counter
of those who waited before, so nobody saves up.

Service is the tokens of contexts that workflows hold while they have a place: what a workflow is let in with, and what
it grows by then. It is counted only while somebody waits, and begins with what each holds then.

Between types of a tenant the order of the caller stays while no counter is behind by more than `lag_tokens`, as in
deficit longest prefix match (Cao et al., 2025): the caller's order completes workflows sooner in the mean.

The bound: of two tenants that both wait, neither is ahead by more than the contexts that its open workflows come to,
that of the last one let in included, divided by its weight; of two types of a tenant by `lag_tokens` more. So nobody
starves: each place given to another brings the other's counter nearer, and then above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from presage.serving_hooks.workflows.identity import tenant_of, unscoped

MOST_GROUPS: Final = 64
"""Groups whose turn is compared; of more that wait, those whose workflows are first in order. Types are the clients'
own words, so there may be thousands."""


@dataclass(frozen=True)
class Weights:
    """Shares of the service; who is not named has weight 1."""

    tenants: Mapping[str, float] = field(default_factory=dict)
    workflow_types: Mapping[str, float] = field(default_factory=dict)


class _Counters:
    """The counters of one level."""

    __slots__ = ("floor", "of", "waiting")

    def __init__(self) -> None:
        self.of: dict[str, float] = {}
        self.floor = 0.0
        self.waiting: set[str] = set()

    def wait(self, now: set[str]) -> None:
        """Who waits now; the others are forgotten once the floor has passed them, since it would lift them."""
        still = now & self.waiting
        if still:
            self.floor = max(self.floor, min(self.of.get(name, 0.0) for name in still))
        for name in now - self.waiting:
            self.of[name] = max(self.of.get(name, 0.0), self.floor)
        self.waiting = now
        for name in [name for name, counter in self.of.items() if counter <= self.floor and name not in now]:
            del self.of[name]


class FairShares:
    """The counters, by group: a workflow type with its tenant (`Step.stats_key`).

    Args:
        lag_tokens: by which the counter of a type may be behind others of its tenant before it goes first.
    """

    def __init__(self, weights: Weights | None = None, lag_tokens: float = 0.0) -> None:
        self._weights = weights or Weights()
        self._lag_tokens = lag_tokens
        self._tenants = _Counters()
        self._types: dict[str, _Counters] = {}

    @property
    def counting(self) -> bool:
        """Whether somebody waited at the latest `wait`."""
        return bool(self._tenants.waiting)

    def charge(self, group: str, tokens: float) -> None:
        """A group has received service."""
        tenant, kind = tenant_of(group), unscoped(group)
        share = tokens / self._weights.tenants.get(tenant, 1.0)
        self._tenants.of[tenant] = self._tenants.of.get(tenant, 0.0) + share
        types = self._types.setdefault(tenant, _Counters())
        types.of[group] = types.of.get(group, 0.0) + tokens / self._weights.workflow_types.get(kind, 1.0)

    def wait(self, groups: Iterable[str]) -> None:
        """These groups wait now, and no others. Once nobody waits all is forgotten."""
        by_tenant: dict[str, set[str]] = {}
        for group in groups:
            by_tenant.setdefault(tenant_of(group), set()).add(group)
        if not by_tenant:
            self._tenants, self._types = _Counters(), {}
            return
        self._tenants.wait(set(by_tenant))
        for tenant in [name for name in self._types if name not in by_tenant and name not in self._tenants.of]:
            del self._types[tenant]
        for tenant, tenant_groups in by_tenant.items():
            self._types.setdefault(tenant, _Counters()).wait(tenant_groups)

    def next(self, heads: Mapping[str, tuple[bool, Any]]) -> str:
        """The group whose first workflow goes next.

        Args:
            heads: by group that waits, in the caller's order: whether its first workflow can wait, and what orders
                it. One that cannot wait goes before all others of its tenant.
        """
        tenants: dict[str, list[str]] = {}
        for group in islice(heads, MOST_GROUPS):
            tenants.setdefault(tenant_of(group), []).append(group)
        counter = self._tenants.of
        tenant = min(tenants, key=lambda name: (counter.get(name, 0.0), heads[tenants[name][0]]))
        groups = tenants[tenant]
        first = min(groups, key=heads.__getitem__)
        if not heads[first][0] or len(groups) == 1:
            return first
        received = self._types.setdefault(tenant, _Counters()).of
        behind = min(groups, key=lambda group: (received.get(group, 0.0), heads[group]))
        return behind if received.get(first, 0.0) - received.get(behind, 0.0) > self._lag_tokens else first
