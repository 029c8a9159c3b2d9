"""Which share of what could be reused is lost, at which load: measured, not assumed.

The load is the working sets of the workflows that may run, over the cache. How much is lost at a load depends on the
prompts and on the order of eviction, and differs several times between workloads: so it is read off what happened at
that load, in steps of WIDTH. Steps next to each other are one where each alone has seen too little, and where the
higher load seems to lose less, since more load never does (isotonic regression, by pooling adjacent violators). In
between it is interpolated; up to QUIET nothing is thought to be lost unless it was seen to be; beyond the highest load
seen it stays what it was there. So before anything was measured nobody is held back: the engine behaves as without us
until it has shown that it should not. Old measurements are forgotten, which lets the engine try again what the workload
may have made harmless.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

WIDTH: Final = 0.125
QUIET: Final = 0.75
ENOUGH_TOKENS: Final = 20_000
"""Reusable tokens below which a load has not been measured."""


class _Pool(NamedTuple):
    """Loads that are one: tokens lost and reusable, and the sum of each reusable token's load."""

    lost: float
    reusable: float
    weighted: float

    @property
    def load(self) -> float:
        return self.weighted / self.reusable

    @property
    def share(self) -> float:
        return min(1.0, self.lost / self.reusable)


class MissCurve:
    """Lost share by load.

    Args:
        forget_s: seconds after which a measurement no longer counts; in half of that, new ones outweigh it.
    """

    def __init__(self, forget_s: float) -> None:
        self.forget_s = forget_s
        self._measured: dict[int, tuple[float, float, float]] = {}  # lost, reusable, when

    def observe(self, load: float, lost_tokens: float, reusable_tokens: float, now: float) -> None:
        """Of `reusable_tokens` that prompts could have reused while the load was `load`, so many were prefilled."""
        if reusable_tokens > 0:
            at = math.floor(load / WIDTH)
            lost, reusable, when = self._measured.get(at, (0.0, 0.0, now))
            keep = 0.5 ** ((now - when) / (self.forget_s / 2))
            self._measured[at] = lost * keep + lost_tokens, reusable * keep + reusable_tokens, now

    def share(self, load: NDArray[np.float64], now: float) -> NDArray[np.float64]:
        """The lost share at each load, float64 [m], in [0, 1]."""
        pools = self._pools(now)
        loads, shares = [pool.load for pool in pools], [pool.share for pool in pools]
        quiet = min([QUIET, *(at - WIDTH for at in loads)])
        return np.asarray(np.interp(load, [quiet, *loads], [0.0, *shares]))

    def _pools(self, now: float) -> list[_Pool]:
        """What was measured, the lightest load first: each with enough tokens, none losing less than one before."""
        pools: list[_Pool] = []
        for at, (lost, reusable, when) in sorted(self._measured.items()):
            if now - when > self.forget_s:
                continue
            pools.append(_Pool(lost, reusable, reusable * (at + 0.5) * WIDTH))
            while len(pools) > 1 and (pools[-2].reusable < ENOUGH_TOKENS or pools[-2].share >= pools[-1].share):
                pools[-2:] = [_Pool(*map(sum, zip(*pools[-2:], strict=True)))]
        if pools and pools[-1].reusable < ENOUGH_TOKENS:
            last = pools.pop()
            pools[-1:] = [_Pool(*map(sum, zip(pools[-1], last, strict=True)))] if pools else []
        return pools
