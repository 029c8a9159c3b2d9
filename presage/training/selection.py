"""The one-standard-error rule: choose the simplest candidate whose loss is within one standard error of the best.

Source: Breiman et al., "Classification and Regression Trees", 1984. Candidates are fitted on one part of the training
tasks and scored on the other. A sketch of relevant terms has already passed a test (`features/sketch.py`) and only
needs to be better than no texts. A sketch of all terms can identify single workflows and must be better by two standard
errors. Without PyTorch, because training a length predictor needs only the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.states import Candidate


@dataclass(frozen=True)
class Choice:
    """The chosen candidate and the comparison behind it.

    Attributes:
        losses: mean loss of each candidate per label, with the standard error (over tasks) of its difference to the
            best; empty without a comparison.
        refused: candidates that could not be fitted, with the reason.
    """

    keys: ClassVar[tuple[str, str]]
    """Names of the comparison and of the loss in the metrics."""

    name: Candidate
    losses: Mapping[str, tuple[float, float]]
    refused: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """JSON values for the metrics."""
        comparison, figure = self.keys
        return {
            "chosen": self.name,
            comparison: {name: {figure: loss, "se": error} for name, (loss, error) in self.losses.items()},
            "refused": dict(self.refused),
        }


_ORDER: Final[Mapping[Candidate, int]] = {"none": 0, "captured": 1, "relevant text": 2, "text": 3}
"""Candidates, simplest first. Hidden states come before texts, because an engine supplies no texts."""

_ERRORS_OF_TEXT: Final = 2.0
"""Standard errors by which a sketch of all terms must be better; other candidates need one."""


def simplest(
    losses: Mapping[Candidate, NDArray[np.float64]], task: NDArray[np.int32]
) -> tuple[Candidate, dict[str, tuple[float, float]]]:
    """Choose the simplest candidate within one standard error of the best.

    Args:
        losses: by candidate, the loss and the number of labels of n held-out steps, float64 [2, n].
        task: int32 [n].

    Returns:
        The chosen candidate; and for each candidate the mean loss per label and the standard error, over tasks, of its
        difference to the best.
    """
    index = np.unique(task, return_inverse=True)[1]
    tasks = int(index.max(initial=-1)) + 1
    sums = {name: np.bincount(index, loss[0], tasks) for name, loss in losses.items()}
    labels = np.bincount(index, next(iter(losses.values()))[1], tasks)
    mean = {name: float(total.sum() / max(labels.sum(), 1.0)) for name, total in sums.items()}
    best = min(mean, key=lambda name: mean[name])
    table: dict[str, tuple[float, float]] = {}
    for name in sums:
        # Standard error of a ratio of sums over tasks, to first order.
        gap = sums[name] - sums[best]
        spread = gap - labels * gap.sum() / max(labels.sum(), 1.0)
        error = np.sqrt(tasks / max(tasks - 1, 1) * np.square(spread).sum()) / max(labels.sum(), 1.0)
        table[name] = mean[name], float(error)
    errors = _ERRORS_OF_TEXT if best == "text" else 1.0
    close = [name for name in mean if mean[name] - mean[best] <= errors * table[name][1]]
    if mean.get("relevant text", np.inf) < mean.get("none", -np.inf):
        close = [name for name in close if name != "none"]
    return min(close, key=lambda name: _ORDER[name]), table
