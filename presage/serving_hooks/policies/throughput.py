"""A throughput model: the steps per second of an engine that runs n workflows at once.

A workflow takes a step, pauses Z seconds (its tool), takes the next. A step decodes g tokens and prefills p: the new
ones, and the share of the rest that the cache has lost. An iteration costs c0 in any case, c1 for each decoded token
and c_p for each prefilled token. At X steps a second and iterations of τ seconds, a busy engine has

    g X τ requests decoding (Little's law), so   τ = c0 + c1 g X τ + c_p p X τ   and   n = X (Z + g τ).

With s = c1 g + c_p p, the seconds of work that a step adds to the engine, this is Z s X² − (Z + g c0 + n s) X + n = 0,
whose smaller root is X. X rises with n towards 1 / s, as more requests share c0; it falls as lost tokens raise s. At
most B requests decode at once, by configuration or cache size: X ≤ 1 / (g (c0 + c1 B) / B + c_p p).

The model is Presage's own, a fluid model: it ignores bursts, and prefills that delay a decode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.errors import InputError


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of the engine and its workload, as running means.

    Attributes:
        iteration_s: c0, seconds of an empty iteration.
        decode_token_s: c1, seconds each decoded token adds.
        prefill_token_s: c_p, seconds each prefilled token adds.
        output_tokens: g, of a step.
        new_tokens: prompt tokens of a step that no cache can hold.
        reusable_tokens: prompt tokens of a step that an infinite cache would hold.
        pause_s: Z, between two steps of a workflow.
        most_decoding: B, requests that decode at once.
    """

    iteration_s: float
    decode_token_s: float
    prefill_token_s: float
    output_tokens: float
    new_tokens: float
    reusable_tokens: float
    pause_s: float
    most_decoding: int

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{one.name} is {value}; a measured rate is finite and not negative")
        if not (self.iteration_s > 0 and self.output_tokens > 0 and self.most_decoding > 0):
            raise InputError("iteration_s, output_tokens and most_decoding must be above 0: measure before deciding")


def steps_per_s(
    rates: Rates, cache_tokens: float, workflows: NDArray[np.float64], miss_share: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Steps a second X, float64 [m], for n workflows [m], of whose reusable tokens a share [m] is lost and prefilled
    again."""
    pinned_tokens = rates.new_tokens + rates.reusable_tokens + rates.output_tokens
    most = max(1.0, min(rates.most_decoding, cache_tokens / pinned_tokens))
    prefill_s = rates.prefill_token_s * (rates.new_tokens + miss_share * rates.reusable_tokens)
    work_s = rates.decode_token_s * rates.output_tokens + prefill_s
    linear = rates.pause_s + rates.output_tokens * rates.iteration_s + workflows * work_s
    # 4 a c ≤ b² always: b ≥ Z + n s ≥ 2 √(Z s n). This form of the root is exact even if Z s is 0.
    root = np.sqrt(np.maximum(0.0, linear * linear - 4.0 * rates.pause_s * work_s * workflows))
    full = rates.iteration_s / most + rates.decode_token_s
    bound = 1.0 / (rates.output_tokens * full + prefill_s)
    return np.asarray(np.minimum(2.0 * workflows / (linear + root), bound))


WIDTH: Final = 0.125
QUIET: Final = 0.75
ENOUGH_TOKENS: Final = 20_000
"""Reusable tokens needed to measure a load."""


class _Pool(NamedTuple):
    """Pooled loads: tokens lost and reusable, and the load summed over reusable tokens."""

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
    """The measured share of reusable tokens that the cache loses, by load.

    The load is the working sets of the workflows that may run, divided by the cache, in bins of WIDTH. Adjacent bins
    are pooled if one has too little data, or if the higher load seems to lose less (isotonic regression by pooling
    adjacent violators). The curve is interpolated between bins, 0 up to a load of QUIET unless losses were
    measured there, and constant beyond the highest measured load. So before any measurement no workflow is held back.

    Args:
        forget_s: seconds after which a measurement is dropped, since a changed workload may have made its load
            harmless; the half-life is half of that.
    """

    def __init__(self, forget_s: float) -> None:
        self.forget_s = forget_s
        self._measured: dict[int, tuple[float, float, float]] = {}  # lost, reusable, when

    def observe(self, load: float, lost_tokens: float, reusable_tokens: float, now: float) -> None:
        """Records that prompts had to prefill `lost_tokens` of `reusable_tokens` at this load."""
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
        """The pooled measurements by rising load: each has enough tokens, and lost shares do not fall."""
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
