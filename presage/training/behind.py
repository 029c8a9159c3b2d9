"""Where a baseline beats a predictor beyond the interval: said at the end of a training, at the top of its report, and
kept with the version, where a gate reads it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from presage.features.moment import PREFILL, Moment


@dataclass(frozen=True)
class Behind:
    """One comparison that a baseline won: the paired 95 % interval of the difference does not hold 0.

    Attributes:
        baseline: its name.
        at: what was compared, for people.
        by: how much better the baseline is, above 0, in the unit of the figure.
        ci95: interval of `by`.
        of: the baseline's own figure, for scale.
    """

    baseline: str
    at: str
    by: float
    ci95: tuple[float, float]
    of: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"ci95": list(self.ci95)}


def behind(baseline: str, at: str, by: float, ci95: tuple[float, float], of: float) -> list[Behind]:
    """The comparison if the baseline won it, else nothing; `by` and `ci95` are above 0 where the baseline is better."""
    return [Behind(baseline, at, by, ci95, of)] if math.isfinite(by) and ci95[0] > 0 else []


def moment_name(moment: Moment) -> str:
    """A moment in words: a forecast is made before a step's output, and again after it."""
    return "before the output" if moment == PREFILL else "after the output"


def last_words(found: Sequence[Mapping[str, Any]], advice: str) -> list[str]:
    """What a training ends with where a baseline won.

    Args:
        found: `Behind.to_dict` of each comparison lost.
        advice: what to try.
    """
    if not found:
        return []
    lines = [f"LOST: {len(found)} comparisons with a baseline, beyond the 95 % interval"]
    for one in sorted(found, key=lambda one: -one["by"])[:_MOST_LINES]:
        low, high = one["ci95"]
        lines.append(f"  {one['baseline']} is better {one['at']} by {one['by']:.4g} (95 % {low:.4g} to {high:.4g})")
    if len(found) > _MOST_LINES:
        lines.append(f"  and {len(found) - _MOST_LINES} more")
    return [*lines, f"What to try: {advice}"]


_MOST_LINES = 6


def worst(found: Iterable[Behind]) -> list[dict[str, Any]]:
    """All of them as JSON values, the largest difference first."""
    return [one.to_dict() for one in sorted(found, key=lambda one: -one.by)]
