"""The coefficients of the cost model, fitted to step times measured on an engine.

Least absolute relative deviations with no coefficient below zero: non-negative least squares (Lawson and Hanson 1974,
SciPy's) whose rows are divided by what was measured, weighted anew by 1 / |residual| (Schlossmacher 1973) until they
settle. Relative, because a decode step of milliseconds counts as much as a long prefill; absolute deviations, because a
compilation or a pause of the machine is one large residual and does not move a median. Such a fit says what a step
usually takes; what steps take together has the tail in it as well. `total_error` says how much that is.

Every fifth stretch of 32 iterations is kept out of the fit and judged on: neighbours are alike, so single iterations
kept out would be judged by their neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.errors import TraceError
from presage.serving_hooks.replay.cost import Cost
from presage.serving_hooks.replay.step_times import StepTimes

STRETCH: Final = 32
HELD_OUT_OF: Final = 5
LEAST: Final = 10 * STRETCH
LEAST_OF_A_KIND: Final = 32
"""Iterations that prefill, and that decode only, below which their costs cannot be told apart."""

_ROUNDS: Final = 50
_FLOOR: Final = 1e-4
_SHORTEST_S: Final = 1e-6


@dataclass(frozen=True)
class Calibrated:
    """A cost model and how far off it is.

    Attributes:
        cost: fitted.
        fitted_to: iterations.
        held_out: iterations it was judged on.
        median_error: of these, |predicted − measured| / measured.
        p90_error: its 90th percentile.
        total_error: sum of the predicted over that of the measured, less 1.
    """

    cost: Cost
    fitted_to: int
    held_out: int
    median_error: float
    p90_error: float
    total_error: float


def calibrate(times: StepTimes, source: str = "") -> Calibrated:
    """Fits and judges.

    Args:
        times: of one engine.
        source: where they come from, in words; what was fitted to is said behind it.

    Raises:
        TraceError: too few iterations, or too few of a kind, to tell the coefficients apart.
    """
    _check(times)
    stretch = np.arange(len(times.seconds)) // STRETCH
    apart = stretch % HELD_OUT_OF == HELD_OUT_OF - 1
    coefficients = fit(times.tokens[~apart], times.seconds[~apart])
    predicted, measured = predict(coefficients, times.tokens[apart]), times.seconds[apart]
    errors = np.abs(predicted - measured) / measured
    kept, judged = int((~apart).sum()), int(apart.sum())
    median = float(np.median(errors))
    of = times.engine
    said = (
        f"fitted to {kept} iterations of {of.model} on {of.device} with vLLM {of.vllm}; "
        f"median error {median:.1%} on {judged} others"
    )
    iteration_s, prefill, decode, context = map(float, coefficients)
    cost = Cost(max(iteration_s, _SHORTEST_S), prefill, decode, context, f"{source}; {said}" if source else said)
    total = float(predicted.sum() / measured.sum()) - 1.0
    return Calibrated(cost, kept, judged, median, float(np.quantile(errors, 0.9)), total)


def fit(tokens: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds of an iteration, and of each token prefilled, decoded and attended to: float64 [4], none below 0.

    Args:
        tokens: int64 [N, 3]: prefilled, decoded, attended to.
        seconds: float64 [N].
    """
    from scipy.optimize import nnls

    relative = _design(tokens) / seconds[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), np.finfo(float).tiny)  # a second and a token differ by millions
    rows, found = relative / scale, np.zeros(4)
    weights = np.ones(len(seconds))
    for _ in range(_ROUNDS):
        before = found
        found = nnls(rows * weights[:, None], weights)[0]
        if np.allclose(rows @ before, rows @ found, rtol=1e-6, atol=0.0):
            break
        weights = 1.0 / np.sqrt(np.maximum(np.abs(1.0 - rows @ found), _FLOOR))
    return np.asarray(found / scale, np.float64)


def predict(coefficients: NDArray[np.float64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Seconds of iterations, float64 [N], by what `fit` found; tokens int64 [N, 3]."""
    return np.asarray(_design(tokens) @ coefficients, np.float64)


def _design(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.column_stack([np.ones(len(tokens)), tokens]).astype(np.float64)


def _check(times: StepTimes) -> None:
    prefills = int(np.count_nonzero(times.tokens[:, 0]))
    decodes = len(times.seconds) - prefills
    if len(times.seconds) < LEAST:
        raise TraceError(
            f"{len(times.seconds)} iterations; at least {LEAST} are wanted for a fit and a judgement: let the engine "
            "serve longer"
        )
    for count, kind in ((prefills, "prefill"), (decodes, "only decode")):
        if count < LEAST_OF_A_KIND:
            raise TraceError(
                f"{count} of {len(times.seconds)} iterations {kind}; at least {LEAST_OF_A_KIND} are wanted, else the "
                "costs of prefill and decode cannot be told apart: measure under the load you want to replay"
            )
