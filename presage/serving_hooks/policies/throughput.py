"""How many steps a second the engine completes if n workflows take turns: what more of them gain and what they cost.

A workflow takes a step, pauses Z seconds (its tool), takes the next. A step decodes g tokens and prefills p: those that
are new, and the share of the rest that the cache has lost. An iteration costs c0 whatever is in it, c1 for each token
decoded and c_p for each token prefilled. At X steps a second and iterations of τ seconds, an engine that is busy has

    g X τ requests decoding (Little's law), so   τ = c0 + c1 g X τ + c_p p X τ   and   n = X (Z + g τ).

With s = c1 g + c_p p, the seconds of work that a step adds to the engine, this is Z s X² − (Z + g c0 + n s) X + n = 0,
whose smaller root is X. It rises with n towards 1 / s, as c0 is shared by more; it falls as s rises with what is lost.
At most B requests decode at once, as configured or as fit into the cache: X ≤ 1 / (g (c0 + c1 B) / B + c_p p).

Ours; ThunderAgent (§4.2) counts the cost of recomputation and of idle cache, and leaves out the batch that holding
workflows back empties. It is a mean of a fluid: it knows neither bursts nor prefills that delay a decode.
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
    """What the engine and its workload measured of themselves, running means.

    Attributes:
        iteration_s: c0, seconds an iteration takes whatever is in it.
        decode_token_s: c1, seconds each decoded token adds.
        prefill_token_s: c_p, seconds each prefilled token adds.
        output_tokens: g, of a step.
        new_tokens: prompt tokens of a step that no cache could have.
        reusable_tokens: prompt tokens of a step that an endless cache would have.
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
    """X for n workflows of whose reusable tokens a share is lost and prefilled again.

    Args:
        rates: as measured.
        cache_tokens: what the cache holds.
        workflows: n, float64 [m].
        miss_share: in [0, 1], float64 [m].

    Returns:
        Steps a second, float64 [m].
    """
    pinned_tokens = rates.new_tokens + rates.reusable_tokens + rates.output_tokens
    most = max(1.0, min(rates.most_decoding, cache_tokens / pinned_tokens))
    prefill_s = rates.prefill_token_s * (rates.new_tokens + miss_share * rates.reusable_tokens)
    work_s = rates.decode_token_s * rates.output_tokens + prefill_s
    linear = rates.pause_s + rates.output_tokens * rates.iteration_s + workflows * work_s
    # 4 a c ≤ b² always: b ≥ Z + n s ≥ 2 √(Z s n). The other form of the root, exact where Z s is 0.
    root = np.sqrt(np.maximum(0.0, linear * linear - 4.0 * rates.pause_s * work_s * workflows))
    full = rates.iteration_s / most + rates.decode_token_s
    bound = 1.0 / (rates.output_tokens * full + prefill_s)
    return np.asarray(np.minimum(2.0 * workflows / (linear + root), bound))


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
    """Which share of what could be reused is lost, at which load: measured, not assumed.

    The load is the working sets of the workflows that may run, over the cache. How much is lost at a load depends on
    the prompts and on the order of eviction, and differs several times between workloads: so it is read off what
    happened at that load, in steps of WIDTH. Steps next to each other are one where each alone has seen too little, and
    where the higher load seems to lose less, since more load never does (isotonic regression, by pooling adjacent
    violators). In between it is interpolated; up to QUIET nothing is thought to be lost unless it was seen to be;
    beyond the highest load seen it stays what it was there. So before anything was measured nobody is held back: the
    engine behaves as without us until it has shown that it should not. Old measurements are forgotten, which lets the
    engine try again what the workload may have made harmless.

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
