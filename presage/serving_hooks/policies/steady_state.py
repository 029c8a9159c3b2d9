"""Where the load settles: the steps a second of an engine that keeps n workflows open, its cache under LRU included.

A workflow takes a step, pauses for its tool, takes the next. Its context, c tokens that no other workflow has, stays in
the cache while it is used within the characteristic time T of the cache: the time in which the contexts used since fill
it (Che, Tung & Wang, 2002). What is used later is computed again, and that slows the engine, which lengthens the time
between two uses. So there is a cliff: a few workflows more than fit, and next to nothing stays. Where agents with
conversations of their own take turns there are two: first goes what is read some steps later, then the rest.

With X steps a second of n open workflows, a share e of steps that end one, pauses Z, and waits q for a turn:

    p = c_p (a + (1 − e) m r)                                  seconds to prefill a step: a new tokens, and those lost
    B = X o c_0 / (1 − X (p + o c_1)),  B ≤ B_max              requests that decode at once, o tokens each
    n = X (Z + p / (1 − X p) + B / X)                          Little's law; the solution below 1 / (p + o c_1)
    q = max(0, n / X − Z − p / (1 − X p) − B / X) + X p² / (1 − X p)
    s_i = q + (i − 1) n / X                                    before what is read every i steps is used again: Z + s_i
    Σ h_i ((1 − e i) E[min(Z + s_i, T)] + e i T) = (C − B r) / (X r)      what is not in use fills what is left of C
    m = Σ h_i P(Z + s_i > T)

with c_0, c_1, c_p the seconds of an iteration and of each token decoded and prefilled, and r ≤ c the part of a context
that one prompt reads: the share h_1 of it was used in the step before, and the rest, h_k, k steps before. T is found by
Newton's method, the fixed point in m by damped iteration from the share lost lately. The model is Presage's own.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.errors import InputError

Floats = NDArray[np.float64]

_ROUNDS: Final = 16
_DAMPING: Final = 0.5
_NEWTON: Final = 6
_NEWTON_STAYS: Final = 2
_NEVER_FULL: Final = 0.95
"""Of the cache, the share that decoding requests take at most."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of the engine and its workload.

    Attributes:
        iteration_s: c_0, seconds of an empty iteration.
        decode_token_s: c_1, seconds each decoded token adds.
        prefill_token_s: c_p, seconds each prefilled token adds.
        output_tokens: o, of a step.
        new_tokens: a, prompt tokens of a step that no cache can hold.
        most_decoding: requests that decode at once, by configuration.
        pauses_s: Z, seconds between two steps of a workflow, rising, [Z]; a sample of the latest.
        end: e, share of steps that end their workflow.
        miss_share: m, share of their own contexts that prompts have lost lately.
        read_share: r / c, of a workflow's context the share that a prompt reads.
        latest_share: h_1, of what a prompt reads the share that was used in the step before.
        apart: k, steps since the rest was used, 2 or more.

    Raises:
        InputError: a value that no measurement gives.
    """

    iteration_s: float
    decode_token_s: float
    prefill_token_s: float
    output_tokens: float
    new_tokens: float
    most_decoding: int
    pauses_s: Floats
    end: float
    miss_share: float = 0.0
    read_share: float = 1.0
    latest_share: float = 1.0
    apart: float = 2.0

    def __post_init__(self) -> None:
        for name, value in self.to_dict().items():
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} is {value}; a measured rate is finite and not negative")
        positive = (self.iteration_s, self.output_tokens, self.most_decoding, self.end, self.read_share)
        if not all(value > 0 for value in positive):
            raise InputError(
                "iteration_s, output_tokens, most_decoding, end and read_share must be above 0: measure before deciding"
            )
        if max(self.end, self.miss_share, self.read_share, self.latest_share) > 1 or self.apart < 2:
            raise InputError(
                "end, miss_share, read_share and latest_share are shares, 1 at most, and apart is 2 or more"
            )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, with the mean of the pauses."""
        return {**asdict(self), "pauses_s": float(self.pauses_s.mean()) if len(self.pauses_s) else math.nan}


@dataclass(frozen=True)
class Settled:
    """Where n open workflows settle, float64 [m] each.

    Attributes:
        steps_per_s: X.
        miss_share: m.
        decoding: B.
        stays_s: T, seconds that an unused context stays in the cache.
        served_s: from the request to the answer.
        recomputing: share of the engine's time that goes into lost contexts, X c_p (1 − e) m r.
    """

    steps_per_s: Floats
    miss_share: Floats
    decoding: Floats
    stays_s: Floats
    served_s: Floats
    recomputing: Floats


def settle(
    rates: Rates, cache_tokens: float, workflows: Floats, context_tokens: Floats, keeps_s: Floats | float = math.inf
) -> Settled:
    """Where these numbers of open workflows settle.

    Args:
        cache_tokens: C, of the cache, less what workflows share.
        workflows: n, [m], 1 or more.
        context_tokens: c, [m], above 0.
        keeps_s: κ, [m]; a workflow that pauses for longer is not open until it is let in again.
    """
    n, c, end = workflows, context_tokens, rates.end
    read = np.minimum(rates.read_share * c, cache_tokens)
    a, o = max(rates.new_tokens, 1.0), rates.output_tokens
    it_s, out_s = o * rates.iteration_s, o * rates.decode_token_s
    pauses = rates.pauses_s
    most = np.clip(_NEVER_FULL * cache_tokens / read, 1.0, rates.most_decoding)
    # E[min(Z, t)] at each pause t, with 0 first.
    knots = np.concatenate([[0.0], pauses])
    above = 1.0 - np.arange(len(pauses)) / len(pauses)
    within = np.concatenate([[0.0], np.cumsum(np.diff(knots) * above)])
    rank = np.arange(len(knots)) / len(pauses)
    # A row for what was used in the step before, a row for what was used before that, if there is any.
    parts = [(rates.latest_share, 1.0), (1.0 - rates.latest_share, rates.apart)]
    share, apart = np.array([part for part in parts if part[0] > 0]).T[:, :, None]
    last = np.minimum(1.0, end * apart)  # share of what a step reads that no later step does
    pause_s = np.interp(keeps_s, knots, within)  # E[min(Z, κ)]
    miss, stays_s = np.full_like(n, rates.miss_share), np.zeros_like(n)
    for _ in range(_ROUNDS):
        prefill_s = rates.prefill_token_s * (a + (1.0 - end) * miss * read)
        work_s = prefill_s + out_s
        top = most / (it_s + most * work_s)  # where as many decode as can
        per_s = np.minimum(0.9999 * top, n / (pause_s + work_s + it_s))
        for _ in range(_NEWTON):  # from above, on a convex function: it does not pass the root
            busy, full = 1.0 - per_s * prefill_s, 1.0 - per_s * work_s
            wrong = per_s * (pause_s + prefill_s / busy + it_s / full) - n
            slope = pause_s + prefill_s / busy**2 + it_s / full**2
            per_s = np.where(wrong > 0, per_s - wrong / slope, per_s)
        busy, full = 1.0 - per_s * prefill_s, 1.0 - per_s * work_s
        decoding = np.minimum(most, per_s * it_s / full)
        served_s = prefill_s / busy + decoding / per_s
        wait_s = np.maximum(0.0, n / per_s - pause_s - served_s) + per_s * prefill_s**2 / busy
        away_s = wait_s + (apart - 1.0) * n / per_s
        room_s = np.maximum(0.0, cache_tokens - decoding * read) / (per_s * read)
        for _ in range(_NEWTON_STAYS):  # on a concave function; later rounds begin where the last one ended
            beyond = np.maximum(0.0, stays_s - away_s)
            unused = np.minimum(stays_s, away_s) + np.interp(beyond, knots, within)
            filled = (share * ((1.0 - last) * unused + last * stays_s)).sum(axis=0)
            remains = np.where(stays_s < away_s, 1.0, 1.0 - np.interp(beyond, knots, rank))
            slope = (share * ((1.0 - last) * remains + last)).sum(axis=0)
            stays_s = np.maximum(0.0, stays_s + (room_s - filled) / slope)
        kept = np.interp(np.minimum(np.maximum(0.0, stays_s - away_s), keeps_s), knots, rank)
        target = 1.0 - (share * kept).sum(axis=0)
        miss = miss + _DAMPING * (target - miss)
    recomputing = per_s * rates.prefill_token_s * (1.0 - end) * miss * read
    return Settled(per_s, miss, decoding, stays_s, n / per_s - pause_s, recomputing)
