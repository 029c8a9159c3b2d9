"""How right and how honest probabilities of the next K outcomes are: arrays in, figures out.

A position is a step with something to know k steps ahead: nothing after END, nothing past a cut. An outcome that is not
in the vocabulary can be forecast by no one. It counts as a position and is always wrong in accuracy, top-2 and
calibration; the log-likelihood, which would be infinite, is taken over the other positions, and `unseen` says how large
the share left out is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.prefixes import MASKED
from presage.predictors.bootstrap import ratio_ci
from presage.predictors.reliability import ReliabilityBin, calibration_error
from presage.training.reliability import reliability

LEAST_PROBABILITY: Final = 1e-12
"""The log-likelihood sees no smaller one: a forecast that ruled out what came costs 27.6 nats, not infinity."""

RESAMPLES: Final = 1000


@dataclass(frozen=True)
class Figures:
    """What was measured, K numbers each; NaN where nothing was judged.

    Attributes:
        accuracy: share of positions whose likeliest outcome came true.
        accuracy_by_workflow: the same within each workflow, then the mean over workflows.
        ci95: interval of `accuracy` by bootstrap over workflows.
        top2: share of positions where one of the two likeliest outcomes came true.
        nll: negative log-likelihood of what came, nats a position.
        ece: expected calibration error of the likeliest outcome's probability (Guo et al., 2017, eq. 3).
        unseen: share of positions whose outcome is not in the vocabulary.
        reliability: the bins behind `ece`, empty ones left out.
        correct: int64 [W, K], positions where the likeliest outcome came true.
        positions: int64 [W, K], positions judged.
    """

    accuracy: tuple[float, ...]
    accuracy_by_workflow: tuple[float, ...]
    ci95: tuple[tuple[float, float], ...]
    top2: tuple[float, ...]
    nll: tuple[float, ...]
    ece: tuple[float, ...]
    unseen: tuple[float, ...]
    reliability: tuple[tuple[ReliabilityBin, ...], ...]
    correct: NDArray[np.int64]
    positions: NDArray[np.int64]

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON values, null where nothing was judged; W and the `positions` of all workflows."""
        return {
            "accuracy": _numbers(self.accuracy),
            "accuracy_by_workflow": _numbers(self.accuracy_by_workflow),
            "ci95": [_numbers(ends) for ends in self.ci95],
            "top2": _numbers(self.top2),
            "nll": _numbers(self.nll),
            "ece": _numbers(self.ece),
            "unseen": _numbers(self.unseen),
            "workflows": len(self.positions),
            "positions": self.positions.sum(axis=0).tolist(),
            "reliability": [[asdict(row) for row in horizon] for horizon in self.reliability],
        }


def measure(
    probabilities: NDArray[np.float32],
    outcomes: NDArray[np.int32],
    workflow: NDArray[np.int64],
    rng: np.random.Generator,
    resamples: int = RESAMPLES,
) -> Figures:
    """Judges forecasts of n steps against what came.

    Args:
        probabilities: [n, K, V+1], each row sums to 1.
        outcomes: int32 [n, K], as `Prefixes.outcomes`: V+1 is an outcome not in the vocabulary, MASKED no position.
        workflow: int64 [n], the workflow of each step, 0..W-1.
        rng: the source of the bootstrap.
        resamples: how often the workflows are drawn anew.

    Raises:
        ValueError: shapes do not fit one another, or there is no step.
    """
    steps, horizon, size = probabilities.shape
    if not steps or outcomes.shape != (steps, horizon) or workflow.shape != (steps,):
        raise ValueError(
            f"got probabilities {probabilities.shape}, outcomes {outcomes.shape} and workflow {workflow.shape}; "
            "wanted [n, K, V+1], [n, K] and [n], n > 0"
        )
    workflows = int(workflow.max()) + 1
    judged = outcomes != MASKED
    likeliest = probabilities.argmax(axis=-1)
    confidence = np.take_along_axis(probabilities, likeliest[..., None], axis=-1)[..., 0]
    right = judged & (likeliest == outcomes)
    correct, positions = (_by_workflow(flags, workflow, workflows) for flags in (right, judged))
    known = judged & (outcomes < size)
    of_outcome = np.take_along_axis(probabilities, np.where(known, outcomes, 0)[..., None], axis=-1)[..., 0]
    surprise = -np.log(np.maximum(of_outcome.astype(np.float64), LEAST_PROBABILITY))
    # Second at most: no outcome but one is likelier than what came. A tie for the top counts the first, as argmax does.
    rest = probabilities.copy()
    np.put_along_axis(rest, likeliest[..., None], -1.0, axis=-1)
    among_two = right | (judged & (rest.argmax(axis=-1) == outcomes))
    bins = tuple(reliability(confidence[judged[:, k], k], right[judged[:, k], k]) for k in range(horizon))
    total = positions.sum(axis=0)
    in_vocabulary = known.sum(axis=0)
    return Figures(
        accuracy=_shares(correct.sum(axis=0), total),
        accuracy_by_workflow=tuple(_mean_share(correct[:, k], positions[:, k]) for k in range(horizon)),
        ci95=tuple(ratio_ci(correct[:, k], positions[:, k], rng, resamples) for k in range(horizon)),
        top2=_shares(among_two.sum(axis=0), total),
        nll=_shares((surprise * known).sum(axis=0), in_vocabulary),
        ece=tuple(calibration_error(rows) for rows in bins),
        unseen=_shares(total - in_vocabulary, total),
        reliability=bins,
        correct=correct,
        positions=positions,
    )


def _by_workflow(flags: NDArray[np.bool_], workflow: NDArray[np.int64], workflows: int) -> NDArray[np.int64]:
    """Sums flags [n, K] over the steps of each workflow, int64 [W, K]."""
    columns = [np.bincount(workflow[column], minlength=workflows) for column in flags.T]
    return np.stack(columns, axis=1).astype(np.int64)


def _shares(part: NDArray[Any], whole: NDArray[np.int64]) -> tuple[float, ...]:
    return tuple(float(p / w) if w else math.nan for p, w in zip(part, whole, strict=True))


def _mean_share(part: NDArray[np.int64], whole: NDArray[np.int64]) -> float:
    has = whole > 0
    return float((part[has] / whole[has]).mean()) if has.any() else math.nan


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]
