"""Whether enough steps can lie beyond a quantile to compare pinball losses there: of baselines, and in gates."""

from typing import Final

STEPS_BEYOND: Final = 10
"""Expected steps beyond a quantile, below which its pinball loss is no reason to prefer another forecast: without
misses the loss is the width alone, and a bootstrap cannot draw the misses that were not seen."""


def steps_beyond(steps: int, q: float) -> float:
    """Number of `steps` expected beyond quantile q, on its rarer side; whole numbers are exact."""
    return round(steps * min(q, 1.0 - q), 9)  # else 100 steps at .9 are a little less than 10


def enough_beyond(steps: int, q: float) -> bool:
    """Whether a pinball loss at q on so many steps is a reason to prefer a forecast."""
    return steps_beyond(steps, q) >= STEPS_BEYOND
