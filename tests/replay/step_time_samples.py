"""Step times made up by a known cost model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.replay.calibrate import Measured, StepTimes

TRUE = np.asarray([0.008, 90e-6, 150e-6, 3e-8, 2e-9])
ENGINE = {
    "presage_step_times": 1,
    "vllm": "0.32.0",
    "model": "made-up",
    "device": "cpu",
    "cache_tokens": 64000,
    "block_tokens": 16,
    "most_requests": 64,
    "most_tokens": 2048,
    "chunked_prefill": True,
}


def iterations(count: int, seed: int = 0, prefills: float = 0.3) -> NDArray[np.int64]:
    """Tokens and pairs of iterations as an engine under load has them, int64 [count, 4]; prefills go on from where
    earlier ones have come to."""
    rng = np.random.default_rng(seed)
    decoded = rng.integers(1, 48, count)
    prefilled = np.where(rng.random(count) < prefills, rng.integers(16, 2048, count), 0)
    computed = prefilled + np.where(prefilled > 0, rng.integers(0, 60_000, count), 0)
    pairs = prefilled * computed - prefilled * (prefilled - 1) // 2
    return np.column_stack([prefilled, decoded, decoded * rng.integers(200, 3000, count) + computed, pairs])


def times_of(tokens: NDArray[np.int64], true: NDArray[np.float64] = TRUE) -> NDArray[np.float64]:
    return np.asarray(np.column_stack([np.ones(len(tokens)), tokens]) @ true)


def measured(tokens: NDArray[np.int64], seconds: NDArray[np.float64]) -> StepTimes:
    return StepTimes(Measured.model_validate(ENGINE), tokens, seconds)


def write_steps(path: Path, times: StepTimes, **engine: Any) -> Path:
    names = ("prefill_tokens", "decode_tokens", "context_tokens", "pairs")
    rows = [
        dict(zip(names, map(int, of), strict=True)) | {"seconds": float(s)}
        for of, s in zip(times.tokens, times.seconds, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [{**ENGINE, **engine}, *rows]), encoding="utf-8")
    return path
