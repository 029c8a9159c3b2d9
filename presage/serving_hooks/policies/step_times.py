"""What an iteration costs: c0 + c1 · tokens decoded + c_p · tokens prefilled, fitted to the iterations themselves.

Least absolute deviations over the last `window` iterations, by least squares with weights 1 / |residual| (Schlossmacher
1973): a compilation, a pause of the machine or a collection of garbage is one large residual, and does not move a
median. No cost is negative: of the sign patterns the best feasible one is taken, which for three coefficients are seven
small systems. The oldest iteration is forgotten when a new one comes, so the fit follows the engine.

Where iterations differ little the three cannot be told apart. A slight pull of c1 and c_p towards 0 then leaves the
cost with c0, which makes an emptier batch look dear: the mistake that holds nobody back.
"""

from __future__ import annotations

import itertools
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

ENOUGH: Final = 64
"""Iterations below which nothing is said."""

ENOUGH_PREFILLS: Final = 16
"""Iterations with a prefill below which nothing is said."""

WINDOW: Final = 512

_ROUNDS: Final = 8
_PULL: Final = 1e-4
_PATTERNS: Final = [list(s) for n in (3, 2, 1) for s in itertools.combinations(range(3), n)]


class IterationCosts(NamedTuple):
    """Seconds: of any iteration, and what each decoded and each prefilled token adds."""

    iteration_s: float
    decode_token_s: float
    prefill_token_s: float


class StepTimes:
    """The last iterations.

    Args:
        window: how many are remembered.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._seen = np.zeros((window, 3))
        self._times = np.zeros(window)
        self._count = 0

    def observe(self, decode_tokens: int, prefill_tokens: int, seconds: float) -> None:
        """An iteration; one without tokens, or without a time, says nothing and is left out."""
        if seconds > 0 and decode_tokens + prefill_tokens > 0:
            at = self._count % len(self._times)
            self._seen[at] = 1.0, decode_tokens, prefill_tokens
            self._times[at] = seconds
            self._count += 1

    def fit(self) -> IterationCosts | None:
        """What they cost; None while too few have been seen to say."""
        seen, times = self._seen[: self._count], self._times[: self._count]
        if len(times) < ENOUGH or np.count_nonzero(seen[:, 2]) < ENOUGH_PREFILLS:
            return None
        weights = np.ones(len(times))
        floor = 1e-3 * float(np.median(times))
        found = np.zeros(3)
        for _ in range(_ROUNDS):
            before, found = found, _not_negative(seen, times, weights)
            if np.allclose(seen @ before, seen @ found, rtol=1e-3, atol=0.0):
                break
            weights = 1.0 / np.maximum(np.abs(times - seen @ found), floor)
        if not found[0] > 0:
            found[0] = floor  # an iteration costs something
        return IterationCosts(*map(float, found))


def _not_negative(
    seen: NDArray[np.float64], times: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The weighted least squares over all coefficients ≥ 0, float64 [3]; seen float64 [n, 3], the others [n]."""
    weighted = seen * weights[:, None]
    normal, target = weighted.T @ seen, weighted.T @ times
    normal += np.diag([0.0, _PULL, _PULL]) * np.diag(normal)
    best, least = np.zeros(3), 0.0
    for kept in _PATTERNS:
        if any(not normal[i, i] > 0 for i in kept):
            continue
        part = np.linalg.lstsq(normal[np.ix_(kept, kept)], target[kept], rcond=None)[0]
        if (part < 0).any():
            continue
        loss = float(part @ normal[np.ix_(kept, kept)] @ part - 2 * part @ target[kept])
        if loss < least:
            least, best = loss, np.zeros(3)
            best[kept] = part
        if len(kept) == 3:
            break  # the unconstrained minimum is feasible
    return best
