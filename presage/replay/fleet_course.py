"""A fleet's replay over time: requests held by the router, and requests and cache in use of each engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.replay.metrics import PolicyRun

if TYPE_CHECKING:
    from presage.replay.engine import EngineLoop

WINDOWS: Final = 60

MOST_SHOWN: Final = 5
"""Engines with series of their own; of more, the least, mean and greatest of all."""


def fleet_course(run: PolicyRun, loops: Sequence[EngineLoop], names: Sequence[str]) -> dict[str, Any]:
    """A finished run in `WINDOWS` windows of equal length.

    Args:
        loops: its engines, and their names.

    Returns:
        window_s: seconds of a window.
        held: mean number of requests held by the router, by window.
        under_way, cache_in_use: by engine, or by "least", "mean" and "most" of all engines: the mean number of its
            requests, waiting or running, and the mean share of its blocks that its requests use, by window.
    """
    edges = np.linspace(0.0, max(run.end_s, 1e-9), WINDOWS + 1)
    came, placed, ended = (
        np.array([getattr(request, name) for request in run.asked], np.float64)
        for name in ("came_s", "placed_s", "ended_s")
    )
    engine = np.array([request.engine for request in run.asked])
    there = [_present(placed[engine == n], ended[engine == n], edges) for n in range(len(loops))]
    used = [_mean(loop.used_s, loop.used, edges) for loop in loops]
    return {
        "window_s": float(edges[1]),
        "held": _rounded(_present(came, placed, edges)),
        "under_way": _shown(names, np.array(there)),
        "cache_in_use": _shown(names, np.array(used)),
    }


def _present(begins: NDArray[np.float64], ends: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean number of the intervals that cover a window, float64 [W] for W + 1 edges."""
    total: NDArray[np.float64] = _waited(begins, edges) - _waited(ends, edges)
    means: NDArray[np.float64] = np.diff(total) / np.diff(edges)
    return means


def _waited(times: NDArray[np.float64], until: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum of the seconds from each time to `until`, of the times before it."""
    ordered = np.sort(times)
    before = np.searchsorted(ordered, until)
    waited: NDArray[np.float64] = before * until - np.concatenate([[0.0], np.cumsum(ordered)])[before]
    return waited


def _mean(since_s: Sequence[float], values: Sequence[float], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over windows of a value that stays until the next one; 0 before the first."""
    times_s, value = np.array([0.0, *since_s, edges[-1]]), np.array([0.0, *values])
    total = np.concatenate([[0.0], np.cumsum(np.diff(times_s) * value)])
    means: NDArray[np.float64] = np.diff(np.interp(edges, times_s, total)) / np.diff(edges)
    return means


def _shown(names: Sequence[str], series: NDArray[np.float64]) -> dict[str, list[float]]:
    if len(names) <= MOST_SHOWN:
        return {name: _rounded(by_window) for name, by_window in zip(names, series, strict=True)}
    return {"least": _rounded(series.min(0)), "mean": _rounded(series.mean(0)), "most": _rounded(series.max(0))}


def _rounded(series: NDArray[np.float64]) -> list[float]:
    return [round(value, 3) for value in series.tolist()]
