"""Live figures of return times: what share of the returns came within the quantiles of their forecasts.

They are sums since the start, by workflow type and source of the forecast, so that rates over any time can be taken.
"""

from __future__ import annotations

import math
from typing import Any, Final

from presage.features.return_times import LEAST_MS
from presage.serving_hooks.counts import MOST_TYPES, OTHER
from presage.serving_hooks.workflows.live import LiveReturn

JUDGED: Final = (0.1, 0.5, 0.9, 0.99)
"""Quantiles that are judged, as far as a forecast has them."""
_LEAST_S: Final = LEAST_MS / 1e3


class LiveReturns:
    """Sums over judged returns. Types beyond MOST_TYPES are counted together, as OTHER."""

    def __init__(self) -> None:
        self._figures: dict[tuple[str, str], _Sums] = {}
        self._types: set[str] = set()

    def returned(self, workflow_type: str, forecast: LiveReturn, seconds: float) -> None:
        """Judges a forecast by the time after which the workflow has returned."""
        if not forecast.quantiles:
            return
        if workflow_type not in self._types:
            if len(self._types) < MOST_TYPES:
                self._types.add(workflow_type)
            else:
                workflow_type = OTHER
        key = workflow_type, forecast.source
        sums = self._figures.get(key)
        if sums is None:
            sums = self._figures[key] = _Sums()
        seconds = max(seconds, _LEAST_S)
        for quantile, most in zip(forecast.quantiles, forecast.seconds, strict=True):
            if quantile in sums.judged:
                sums.judged[quantile] += 1
                sums.within[quantile] += seconds <= max(most, _LEAST_S)
                if quantile == 0.5:
                    sums.log_error += abs(math.log(seconds / max(most, _LEAST_S)))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """By workflow type and source, as JSON values."""
        by_type: dict[str, dict[str, Any]] = {}
        for (name, source), sums in self._figures.items():
            by_type.setdefault(name, {})[source] = {
                "judged": {f"{q:g}": n for q, n in sums.judged.items()},
                "within": {f"{q:g}": n for q, n in sums.within.items()},
                "log_error": sums.log_error,
            }
        return by_type


class _Sums:
    __slots__ = ("judged", "log_error", "within")

    def __init__(self) -> None:
        self.judged, self.within = dict.fromkeys(JUDGED, 0), dict.fromkeys(JUDGED, 0)
        self.log_error = 0.0
