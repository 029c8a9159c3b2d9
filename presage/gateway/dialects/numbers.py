"""Forecasts as the whole numbers that servers take, in the polarity of each."""

from __future__ import annotations

import math
from typing import Final

MOST: Final = 2**31 - 1
"""32 bits: what every server behind the gateway can hold."""

DOUBLINGS: Final = 20
SECONDS_A_DOUBLING: Final = 3


def whole(value: float | None, least: int, most: int = MOST) -> int | None:
    """The nearest whole number between `least` and `most`; None if the value is unknown or not finite."""
    return None if value is None or not math.isfinite(value) else round(min(max(value, least), most))


def rounded(value: float | None, digits: int) -> float | None:
    """The value with so many digits, without any a whole number; None if it is unknown or not finite, as in JSON."""
    if value is None or not math.isfinite(value):
        return None
    return round(value, digits) if digits else round(value)


def lower_first(rank: float | None) -> int | None:
    """A priority of which the lower runs first, as in vLLM."""
    return whole(rank, -MOST)


def larger_first(rank: float | None) -> int | None:
    """A priority of which the larger runs first, as in vllm-router."""
    lower = lower_first(rank)
    return None if lower is None else -lower


def seconds_earlier(rank: float | None) -> int | None:
    """A priority that moves a request so many seconds ahead of its arrival, as in Dynamo: 3 s each time that the work
    left is halved, from 0 at 2^20 tokens to 60, so a long workflow waits at most a minute longer and never starves."""
    tokens = whole(rank, 0)
    return None if tokens is None else round(SECONDS_A_DOUBLING * max(0.0, DOUBLINGS - math.log2(1 + tokens)))
