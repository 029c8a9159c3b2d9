"""Threads of model fits, and settings of LightGBM."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

_ROWS_A_THREAD: Final = 50_000

Item = TypeVar("Item")
Result = TypeVar("Result")


def lightgbm_threads(rows: int) -> int:
    """Threads for LightGBM: one on little data, where waiting threads spin at three to ten times the CPU time."""
    return min(os.cpu_count() or 1, 1 + rows // _ROWS_A_THREAD)


def lightgbm_settings(seed: int, threads: int) -> dict[str, Any]:
    """Settings of LightGBM that make equal fits equal, and silent."""
    return {
        "seed": seed,
        "num_threads": threads,
        "deterministic": True,
        "force_row_wise": True,  # otherwise LightGBM times both layouts and picks one, which makes runs differ
        "verbosity": -1,
    }


def side_by_side(fit: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Results of independent fits that release the GIL, run in parallel on all cores."""
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(fit, items))
