"""How long a call takes: warm, the median of many, one thread, on whatever else the machine is doing."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

_WARM_UP = 50


def median_us(call: Callable[[int], object], rounds: int) -> float:
    """Median of `rounds` calls, microseconds; each is given its number, and as many as warm it up are not counted."""
    for i in range(min(rounds, _WARM_UP)):
        call(i)
    taken = []
    for i in range(rounds):
        begun = time.perf_counter_ns()
        call(i)
        taken.append(time.perf_counter_ns() - begun)
    return float(np.median(taken)) / 1000
