"""Accuracy and calibration of forecasts of the next K outcomes.

A position is a step with a known outcome k steps ahead: none after END or after a truncation. An outcome outside the
vocabulary counts as a position and as wrong in accuracy, top-2 and calibration. The log-likelihood, which would be
infinite there, uses the other positions; `unseen` is the share it leaves out.

Two predictors are compared by paired differences on the same positions: all pairs share the bootstrap's resamples of
workflows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.features.prefixes import MASKED
from presage.predictors.common.bootstrap import MomentCounts, ratio_ci, ratio_cis
from presage.predictors.common.probabilities import BINS, ReliabilityBin, bin_of, calibration_error, reliability


def json_values(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures as JSON values: objects by `to_dict` or by their fields, null for a number that is not finite."""
    return {name: _json(value) for name, value in figures.items()}


def _json(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Mapping):
        return json_values(value)
    if is_dataclass(value):
        return json_values(vars(value))
    if isinstance(value, list | tuple):
        return [_json(element) for element in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


Interval = tuple[float, float]
"""Lower and upper end, 95 %; NaN where nothing was evaluated."""


class Estimate(NamedTuple):
    """A figure, or a difference of two figures, with its interval; NaN where nothing was evaluated."""

    value: float
    ci95: Interval

    def to_dict(self) -> dict[str, Any]:
        """A difference as JSON values."""
        return json_values({"difference": self.value, "ci95": self.ci95})


LEAST_PROBABILITY: Final = 1e-12
"""Lower bound on probabilities in the log-likelihood: an outcome forecast as impossible costs 27.6 nats."""

RESAMPLES: Final = 1000


@dataclass(frozen=True)
class Figures(MomentCounts):
    """Figures at K horizons beside the counts, K numbers each; NaN without positions.

    Attributes:
        accuracy: share of positions whose likeliest outcome occurred.
        accuracy_by_workflow: the same within each workflow, then the mean over workflows.
        ci95: interval of `accuracy` by bootstrap over workflows.
        top2: share of positions where one of the two likeliest outcomes occurred.
        unseen: share of positions whose outcome is not in the vocabulary.
        reliability: the bins behind `ece`, empty ones left out.
        ends, end_errors: positions whose outcome is END, and those where just one of forecast and outcome is END.
    """

    accuracy: tuple[float, ...]
    accuracy_by_workflow: tuple[float, ...]
    ci95: tuple[Interval, ...]
    top2: tuple[float, ...]
    unseen: tuple[float, ...]
    reliability: tuple[tuple[ReliabilityBin, ...], ...]
    ends: tuple[int, ...]
    end_errors: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values, with W and the total `positions`."""
        names = ("accuracy", "accuracy_by_workflow", "ci95", "top2", "nll", "ece", "unseen", "ends", "end_errors")
        return json_values(
            {
                **{name: getattr(self, name) for name in names},
                "workflows": len(self.positions),
                "positions": self.positions.sum(axis=0).tolist(),
                "reliability": self.reliability,
            }
        )


def measure(
    probabilities: NDArray[np.float32],
    outcomes: NDArray[np.int32],
    workflow: NDArray[np.int64],
    rng: np.random.Generator,
    resamples: int = RESAMPLES,
) -> Figures:
    """Compare forecasts of n steps with their outcomes; raises ValueError for inconsistent shapes, or no step.

    Args:
        probabilities: [n, K, V+1], each row sums to 1.
        outcomes: int32 [n, K], as `Prefixes.outcomes`: V+1 is an outcome not in the vocabulary, MASKED no position.
        workflow: int64 [n], the workflow of each step, 0..W-1.
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
    correct, positions = (by_workflow(flags, workflow, workflows).astype(np.int64) for flags in (right, judged))
    known_outcome = judged & (outcomes < size)
    of_outcome = np.take_along_axis(probabilities, np.where(known_outcome, outcomes, 0)[..., None], axis=-1)[..., 0]
    surprise = -np.log(np.maximum(of_outcome.astype(np.float64), LEAST_PROBABILITY))
    # Top two: at most one outcome is likelier than the actual one. Ties for the top count the first, as in argmax.
    rest = probabilities.copy()
    np.put_along_axis(rest, likeliest[..., None], -1.0, axis=-1)
    among_two = right | (judged & (rest.argmax(axis=-1) == outcomes))
    bins = tuple(reliability(confidence[judged[:, k], k], right[judged[:, k], k]) for k in range(horizon))
    gaps = np.zeros((workflows, horizon, BINS))
    rows, ahead = np.nonzero(judged)
    np.add.at(gaps, (workflow[rows], ahead, bin_of(confidence[judged])), right[judged] - confidence[judged])
    came, foretold = judged & (outcomes == size - 1), judged & (likeliest == size - 1)
    total = positions.sum(axis=0)
    in_vocabulary = known_outcome.sum(axis=0)
    return Figures(
        accuracy=_shares(correct.sum(axis=0), total),
        accuracy_by_workflow=tuple(_mean_share(correct[:, k], positions[:, k]) for k in range(horizon)),
        ci95=tuple(ratio_ci(correct[:, k], positions[:, k], rng, resamples) for k in range(horizon)),
        top2=_shares(among_two.sum(axis=0), total),
        nll=_shares((surprise * known_outcome).sum(axis=0), in_vocabulary),
        ece=tuple(calibration_error(rows) for rows in bins),
        unseen=_shares(total - in_vocabulary, total),
        reliability=bins,
        ends=tuple(came.sum(axis=0).tolist()),
        end_errors=tuple((came != foretold).sum(axis=0).tolist()),
        correct=correct,
        positions=positions,
        workflow=workflow,
        surprise=np.where(known_outcome, surprise, np.nan),
        bin_gaps=gaps,
    )


def by_workflow(values: NDArray[Any], workflow: NDArray[np.integer], workflows: int) -> NDArray[np.float64]:
    """Sums of values [n, M] over the steps of each workflow, float64 [W, M]."""
    return np.stack([np.bincount(workflow, weights=column, minlength=workflows) for column in values.T], axis=1)


def _shares(part: NDArray[Any], whole: NDArray[np.int64]) -> tuple[float, ...]:
    return tuple(float(p / w) if w else math.nan for p, w in zip(part, whole, strict=True))


def _mean_share(part: NDArray[np.int64], whole: NDArray[np.int64]) -> float:
    has = whole > 0
    return float((part[has] / whole[has]).mean()) if has.any() else math.nan


@dataclass(frozen=True)
class Difference:
    """Accuracy of the first predictor minus the second, with its paired interval, K each; NaN without positions."""

    difference: tuple[float, ...]
    ci95: tuple[Interval, ...]


def differences(
    pairs: Mapping[str, tuple[Figures, Figures]], seed: int, resamples: int = RESAMPLES
) -> dict[str, Difference]:
    """The difference of each pair, first minus second; all pairs are of the same W workflows and K steps ahead."""
    if not pairs:
        return {}
    gains = [ours.correct - theirs.correct for ours, theirs in pairs.values()]
    positions = [ours.positions for ours, _ in pairs.values()]
    above, below = np.concatenate(gains, axis=1), np.concatenate(positions, axis=1)  # [W, pairs·K]
    ends = ratio_cis(above, below, np.random.default_rng(seed), resamples)
    total = below.sum(axis=0)
    gain = np.divide(above.sum(axis=0), total, out=np.full(len(total), np.nan), where=total > 0).tolist()
    horizon = gains[0].shape[1]
    slices = [slice(i * horizon, (i + 1) * horizon) for i in range(len(pairs))]
    return {
        name: Difference(tuple(gain[columns]), tuple(ends[columns]))
        for name, columns in zip(pairs, slices, strict=True)
    }
