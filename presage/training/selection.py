"""The one-standard-error rule: of several candidates, keep the simplest that is as good as the best.

Kept apart from what fits the candidates: training a predictor of lengths needs the rule, and no PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.features.states import Candidate

_ORDER: Final[Mapping[Candidate, int]] = {"none": 0, "captured": 1, "relevant text": 2, "text": 3}
"""The simplest first. An engine supplies hidden states and no text, so they come before it."""

_ERRORS_OF_TEXT: Final = 2.0
"""Standard errors by which all terms of texts have to be better; anything else, by one."""


def simplest(
    losses: Mapping[Candidate, NDArray[np.float64]], task: NDArray[np.int32]
) -> tuple[Candidate, dict[str, tuple[float, float]]]:
    """The simplest candidate within one standard error of the best, and the figures of all.

    Args:
        losses: of each candidate on n held-out steps, their loss and how many labels that is of, float64 [2, n].
        task: int32 [n].

    Returns:
        The candidate, and of each the mean loss a label and the standard error, over tasks, of its gap to the best.
    """
    index = np.unique(task, return_inverse=True)[1]
    tasks = int(index.max(initial=-1)) + 1
    sums = {name: np.bincount(index, of[0], tasks) for name, of in losses.items()}
    labels = np.bincount(index, next(iter(losses.values()))[1], tasks)
    mean = {name: float(of.sum() / max(labels.sum(), 1.0)) for name, of in sums.items()}
    best = min(mean, key=lambda name: mean[name])
    table: dict[str, tuple[float, float]] = {}
    for name in sums:
        # Of a ratio of sums over tasks, to first order.
        gap = sums[name] - sums[best]
        spread = gap - labels * gap.sum() / max(labels.sum(), 1.0)
        error = np.sqrt(tasks / max(tasks - 1, 1) * np.square(spread).sum()) / max(labels.sum(), 1.0)
        table[name] = mean[name], float(error)
    errors = _ERRORS_OF_TEXT if best == "text" else 1.0
    close = [name for name in mean if mean[name] - mean[best] <= errors * table[name][1]]
    if mean.get("relevant text", np.inf) < mean.get("none", -np.inf):
        close = [name for name in close if name != "none"]
    return min(close, key=lambda name: _ORDER[name]), table
