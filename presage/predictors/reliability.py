"""How far confidence is from being right: one definition, for held-out traces and for what an engine sees live."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from numpy.typing import NDArray

BINS: Final = 15
"""Equal-width bins of confidence; bin b holds b/15 up to, but not including, (b+1)/15, the last one 1 as well."""


@dataclass(frozen=True)
class ReliabilityBin:
    """One bin of confidence: `positions` forecasts, as sure as `confidence` on the mean, right at `accuracy`."""

    low: float
    high: float
    positions: int
    confidence: float
    accuracy: float


def filled_bins(positions: NDArray[Any], sure: NDArray[Any], hits: NDArray[Any]) -> tuple[ReliabilityBin, ...]:
    """The bins that hold a position.

    Args:
        positions: [B], forecasts in each of the bins, which divide 0 to 1 evenly.
        sure: [B], sum of their confidences.
        hits: [B], how many of them were right.
    """
    size = len(positions)
    return tuple(
        ReliabilityBin(b / size, (b + 1) / size, int(count), float(sure[b] / count), float(hits[b] / count))
        for b, count in enumerate(positions)
        if count
    )


def calibration_error(bins: Iterable[ReliabilityBin]) -> float:
    """Expected calibration error of one horizon, between 0 and 1: the mean gap of confidence and accuracy."""
    rows = tuple(bins)
    total = sum(row.positions for row in rows)
    gap = sum(row.positions * abs(row.accuracy - row.confidence) for row in rows)
    return gap / total if total else math.nan
