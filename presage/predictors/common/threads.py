"""Thread counts of model fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

_ROWS_A_THREAD: Final = 50_000

Item = TypeVar("Item")
Result = TypeVar("Result")


def lightgbm_threads(rows: int) -> int:
    """Threads for LightGBM: one on little data, where waiting threads spin at three to ten times the CPU time."""
    return min(os.cpu_count() or 1, 1 + rows // _ROWS_A_THREAD)


def side_by_side(fit: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Results of independent fits that release the GIL, run in parallel on all cores."""
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(fit, items))
