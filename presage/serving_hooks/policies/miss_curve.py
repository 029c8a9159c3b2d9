"""Which share of what could be reused is lost, at which load: measured, not assumed.

The load is the working sets of the workflows that may run, over the cache. How much is lost at a load depends on the
prompts and on the order of eviction, and differs several times between workloads: so it is read off what happened at
that load, in steps of WIDTH. In between it is interpolated, never falling; up to QUIET nothing is thought to be lost
unless it was seen to be; beyond the highest load seen it stays what it was there. So before anything was measured
nobody is held back: the engine behaves as without us until it has shown that it should not. Old measurements are
forgotten, which lets the engine try again what the workload may have made harmless.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

WIDTH: Final = 0.125
QUIET: Final = 0.75
ENOUGH_TOKENS: Final = 20_000
"""Reusable tokens below which a load has not been measured."""


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
        measured = {
            (at + 0.5) * WIDTH: min(1.0, lost / reusable)
            for at, (lost, reusable, when) in self._measured.items()
            if reusable >= ENOUGH_TOKENS and now - when <= self.forget_s
        }
        loads = sorted({QUIET, *measured})
        shares = np.maximum.accumulate([measured.get(at, 0.0) for at in loads])
        return np.asarray(np.interp(load, [loads[0] - WIDTH, *loads], [0.0, *shares]))
