"""Fits the cost model to step times measured on an engine (setting `step_times_file`).

Least absolute relative deviations with non-negative coefficients: SciPy's non-negative least squares (Lawson and Hanson
1974), rows divided by the measured time, reweighted by 1 / |residual| (Schlossmacher 1973) until convergence. Relative,
so that a decode step of milliseconds counts as much as a long prefill; absolute deviations, so that a compilation or a
pause of the machine does not move the fit. Every fifth segment of 32 iterations is held out: single ones would not be
independent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from presage.errors import TraceError

FORMAT: Final = "presage_step_times"

_Tokens = Annotated[int, Field(ge=0)]


class Measured(BaseModel):
    """The measured engine: the first line of a file of step times."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    presage_step_times: int = Field(ge=1, le=1)
    vllm: str
    model: str
    device: str
    cache_tokens: int = Field(gt=0)
    block_tokens: int = Field(gt=0)
    most_requests: int = Field(gt=0)
    most_tokens: int = Field(gt=0)
    chunked_prefill: bool

    def limits(self) -> dict[str, Any]:
        """Cache and limits, as in an engine file."""
        return self.model_dump(exclude={FORMAT, "vllm", "model", "device"})


class _Step(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    prefill_tokens: _Tokens
    decode_tokens: _Tokens
    context_tokens: _Tokens
    pairs: _Tokens = 0  # files of earlier versions have none
    seconds: float = Field(gt=0, allow_inf_nan=False)


@dataclass(frozen=True)
class StepTimes:
    """N measured iterations, in order.

    Attributes:
        tokens: int64 [N, 4]: prefilled, decoded, attended to, and pairs of a prefilled token and one up to it.
        seconds: float64 [N].
    """

    engine: Measured
    tokens: NDArray[np.int64]
    seconds: NDArray[np.float64]


def read_step_times(paths: Sequence[Path]) -> StepTimes:
    """Reads the files of one engine. Ignores a last line that was cut off.

    Raises:
        TraceError: a file is missing or has another format, a line is invalid, or the files are of different engines.
    """
    by_file = [_read(path) for path in paths]
    for path, times in zip(paths[1:], by_file[1:], strict=True):
        if times.engine != by_file[0].engine:
            raise TraceError(f"{path}: step times of another engine than {paths[0]}; give files of one engine")
    return StepTimes(
        by_file[0].engine,
        np.concatenate([times.tokens for times in by_file]),
        np.concatenate([times.seconds for times in by_file]),
    )


def _read(path: Path) -> StepTimes:
    try:
        lines = path.read_text("utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path}: cannot be read ({type(error).__name__}); give a file that an engine wrote with the setting "
            "step_times_file"
        ) from None
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    try:
        engine = Measured.model_validate(json.loads(lines[0]) if lines else {})
    except (ValueError, ValidationError):
        raise TraceError(
            f"{path}: its first line is not that of step times of version 1; give a file that an engine wrote with the "
            "setting step_times_file"
        ) from None
    steps = [_step(path, number, line) for number, line in enumerate(lines[1:], start=2)]
    tokens = [(step.prefill_tokens, step.decode_tokens, step.context_tokens, step.pairs) for step in steps]
    return StepTimes(engine, np.asarray(tokens, np.int64).reshape(-1, 4), np.asarray([step.seconds for step in steps]))


def _step(path: Path, number: int, line: str) -> _Step:
    try:
        return _Step.model_validate_json(line)
    except ValidationError as error:
        problem: Any = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the line"
        raise TraceError(
            f"{path}, line {number}: {where}: {problem['msg'][0].lower()}{problem['msg'][1:]}; repair or remove it"
        ) from None


SEGMENT: Final = 32
HELD_OUT_OF: Final = 5
LEAST: Final = 10 * SEGMENT
LEAST_OF_A_KIND: Final = 32
"""Fewest iterations that prefill, and that only decode, from which their costs can be separated."""

_ROUNDS: Final = 50
_FLOOR: Final = 1e-4
_SHORTEST_S: Final = 1e-6


@dataclass(frozen=True)
class Calibrated:
    """A fitted cost model and its errors on held-out iterations.

    Attributes:
        cost: as in an engine file; without a cost of the host, which was not measured.
        median_error: of |predicted − measured| / measured.
        p90_error: 90th percentile of the same.
        total_error: sum of predicted / sum of measured − 1.
    """

    cost: dict[str, float | str]
    fitted_to: int
    held_out: int
    median_error: float
    p90_error: float
    total_error: float


def calibrate(times: StepTimes, source: str = "") -> Calibrated:
    """Fits a cost model and evaluates it on held-out iterations. Appends a description of the fit to `source`.

    Raises:
        TraceError: too few iterations, or too few of a kind.
    """
    prefills = int(np.count_nonzero(times.tokens[:, 0]))
    decodes = len(times.seconds) - prefills
    if len(times.seconds) < LEAST:
        raise TraceError(f"{len(times.seconds)} iterations; a fit needs at least {LEAST}: let the engine serve longer")
    for count, kind in ((prefills, "prefill"), (decodes, "only decode")):
        if count < LEAST_OF_A_KIND:
            raise TraceError(
                f"{count} of {len(times.seconds)} iterations {kind}; separating the costs of prefill and decode needs "
                f"at least {LEAST_OF_A_KIND}: measure under the load you want to replay"
            )
    segment = np.arange(len(times.seconds)) // SEGMENT
    apart = segment % HELD_OUT_OF == HELD_OUT_OF - 1
    coefficients = fit(times.tokens[~apart], times.seconds[~apart])
    predicted, measured = _design(times.tokens[apart]) @ coefficients, times.seconds[apart]
    errors = np.abs(predicted - measured) / measured
    kept, judged = int((~apart).sum()), int(apart.sum())
    median = float(np.median(errors))
    engine = times.engine
    summary = (
        f"fitted to {kept} iterations of {engine.model} on {engine.device} with vLLM {engine.vllm}; "
        f"median error {median:.1%} on {judged} others"
    )
    names = ("iteration_s", "prefill_token_s", "decode_token_s", "context_token_s", "attention_pair_s")
    cost: dict[str, float | str] = dict(zip(names, map(float, coefficients), strict=True))
    cost["iteration_s"] = max(float(coefficients[0]), _SHORTEST_S)
    cost |= {"source": f"{source}; {summary}" if source else summary, "host_token_s": 0.0}
    total = float(predicted.sum() / measured.sum()) - 1.0
    return Calibrated(cost, kept, judged, median, float(np.quantile(errors, 0.9)), total)


def fit(tokens: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds per iteration, per token prefilled, decoded and attended to, and per pair: float64 [5], non-negative.

    Args:
        tokens: int64 [N, 4], as of `StepTimes`.
        seconds: float64 [N].
    """
    from scipy.optimize import nnls

    relative = _design(tokens) / seconds[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), np.finfo(float).tiny)  # the columns differ by factors of millions
    rows, factors = relative / scale, np.zeros(5)
    weights = np.ones(len(seconds))
    for _ in range(_ROUNDS):
        before = factors
        factors = nnls(rows * weights[:, None], weights)[0]
        if np.allclose(rows @ before, rows @ factors, rtol=1e-6, atol=0.0):
            break
        weights = 1.0 / np.sqrt(np.maximum(np.abs(1.0 - rows @ factors), _FLOOR))
    return np.asarray(factors / scale, np.float64)


def _design(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.column_stack([np.ones(len(tokens)), tokens]).astype(np.float64)
