"""The figures a report is made from, and how they are written: three digits, a dash where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Metrics = Mapping[str, Any]
"""What is in `metrics.json`."""

DIGITS = 3


def number(value: float | None, digits: int = DIGITS) -> str:
    """A figure."""
    return "–" if value is None else f"{value:.{digits}f}"


def signed(value: float | None, digits: int = DIGITS) -> str:
    """A difference, its sign always told; a true minus."""
    return "–" if value is None else f"{value:+.{digits}f}".replace("-", "−")


def interval(value: float | None, ends: Sequence[float | None]) -> str:
    """A figure with its interval."""
    return number(value) if value is None else f"{number(value)} [{number(ends[0])}, {number(ends[1])}]"


def signed_interval(value: float | None, ends: Sequence[float | None]) -> str:
    """A difference with its interval."""
    return signed(value) if value is None else f"{signed(value)} [{signed(ends[0])}, {signed(ends[1])}]"


def signed_tokens(value: float | None, ends: Sequence[float | None]) -> str:
    """A difference in tokens with its interval, to a tenth."""
    return signed(value, 1) if value is None else f"{signed(value, 1)} [{signed(ends[0], 1)}, {signed(ends[1], 1)}]"


def count(value: float) -> str:
    """How many, the thousands apart."""
    return f"{value:,.0f}"


def ahead(horizon: int) -> list[str]:
    """1 step, 2 steps, … of K."""
    return ["1 step", *(f"{k} steps" for k in range(2, horizon + 1))]
