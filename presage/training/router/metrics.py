"""Ranking and calibration of a router's probabilities, and accuracy of its picks.

Missing labels are ignored. A fractional label, the share of attempts that solved the prompt, counts as that much
solved and the rest unsolved; with labels 0 and 1 the figures are the usual ones. Macro figures are means over models
with both classes. Intervals are by bootstrap over prompts, because the labels of one prompt are correlated.

Picks are evaluated on prompts with a label of every model, since the outcome of any pick must be known. They are
compared with the best single model, a random model, and an oracle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.predictors.common.bootstrap import ratio_ci, resample_weights
from presage.predictors.common.probabilities import ReliabilityBin, calibration_error, reliability
from presage.training.metrics import RESAMPLES, Interval, json_values

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ModelFigures:
    """Figures of one model; NaN without labels or with a single class.

    Attributes:
        base_rate: share of solved prompts.
        average_precision: of its probabilities; a random ranking has `base_rate`.
        auroc: area under the receiver operating characteristic; a random ranking has .5.
        brier: mean squared error of the probability.
        ece: expected calibration error (Guo et al., 2017, eq. 3); biased upwards with few labels.
    """

    labels: int
    base_rate: float
    average_precision: float
    auroc: float
    brier: float
    ece: float


@dataclass(frozen=True)
class RankingFigures:
    """Figures of probabilities on n prompts and M models; NaN without labels.

    Attributes:
        macro_map: mean over models of the average precision, as Chimera's table 2.
        macro_auroc: mean over models.
        brier: over all labels.
        ece: expected calibration error over all labels, probabilities of all models together.
        reliability: the bins behind `ece`, empty ones left out.
        map_draws: float64 [R], `macro_map` of each resample, for paired differences.
        squared, counted: float64 [n], squared error and number of labels of each prompt, for paired differences.
    """

    macro_map: float
    macro_map_ci95: Interval
    macro_auroc: float
    brier: float
    brier_ci95: Interval
    ece: float
    prompts: int
    labels: int
    by_model: Mapping[str, ModelFigures]
    reliability: tuple[ReliabilityBin, ...]
    map_draws: Floats
    squared: Floats
    counted: Floats

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the arrays."""
        return json_values({name: figure for name, figure in vars(self).items() if not isinstance(figure, np.ndarray)})


def measure(
    probabilities: NDArray[np.floating],
    correct: NDArray[np.floating],
    models: Sequence[str],
    seed: int,
    resamples: int = RESAMPLES,
) -> RankingFigures:
    """Evaluate the probabilities of M models on n prompts.

    Args:
        probabilities: [n, M], 0..1.
        correct: [n, M], 0..1, NaN if missing.
        seed: of the bootstrap; equal seeds give equal resamples, hence paired differences.
        resamples: number of bootstrap resamples; 0 omits intervals.

    Raises ValueError for inconsistent shapes, or a probability outside 0..1.
    """
    if probabilities.shape != correct.shape or correct.shape[1:] != (len(models),) or not len(correct):
        raise ValueError(
            f"got probabilities {probabilities.shape}, labels {correct.shape} and {len(models)} models; wanted [n, M], "
            "[n, M] and M, n > 0"
        )
    predicted, truth = probabilities.astype(np.float64), correct.astype(np.float64)
    if not ((predicted >= 0) & (predicted <= 1)).all():
        raise ValueError("a probability is not between 0 and 1")
    labelled = ~np.isnan(truth)
    error = np.where(labelled, (predicted - truth) ** 2, 0.0)
    squared, counted = error.sum(axis=1), labelled.sum(axis=1).astype(np.float64)
    bins = reliability(predicted[labelled], truth[labelled])
    by_model = {
        name: _of_model(predicted[labelled[:, m], m], truth[labelled[:, m], m]) for m, name in enumerate(models)
    }
    draws = macro_draws(predicted, truth, seed, resamples) if resamples else np.zeros(0)
    interval = (math.nan, math.nan)
    return RankingFigures(
        macro_map=_mean([model.average_precision for model in by_model.values()]),
        macro_map_ci95=percentiles(draws),
        macro_auroc=_mean([model.auroc for model in by_model.values()]),
        brier=float(squared.sum() / counted.sum()) if labelled.any() else math.nan,
        brier_ci95=ratio_ci(squared, counted, np.random.default_rng(seed), resamples) if resamples else interval,
        ece=calibration_error(bins) if bins else math.nan,
        reliability=bins,
        by_model=by_model,
        prompts=int((counted > 0).sum()),
        labels=int(labelled.sum()),
        map_draws=draws,
        squared=squared,
        counted=counted,
    )


def macro_draws(predicted: Floats, truth: Floats, seed: int, resamples: int) -> Floats:
    """Macro mean average precision of resamples of the prompts, float64 [resamples]."""
    labelled = [np.flatnonzero(~np.isnan(column)) for column in truth.T]
    draws = []
    for weights in resample_weights(len(truth), np.random.default_rng(seed), resamples):
        of_models = [
            _ranked(predicted[rows, m], truth[rows, m], weights[:, rows])[0] for m, rows in enumerate(labelled)
        ]
        stacked = np.stack(of_models)
        total, count = np.nansum(stacked, axis=0), (~np.isnan(stacked)).sum(axis=0)
        draws.append(np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0))
    return np.concatenate(draws)


def _ranked(scores: Floats, truth: Floats, weights: NDArray[Any]) -> tuple[Floats, Floats]:
    """Average precision and area under the curve of n scores for each row of weights [R, n], float64 [R] both.

    Average precision is Σ (R_i − R_{i−1}) P_i over distinct scores; the area is the probability that a solved prompt
    has a higher score than an unsolved one, ties half. NaN unless both classes occur.
    """
    if not len(scores):
        return np.full(len(weights), np.nan), np.full(len(weights), np.nan)
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)  # of each group of equal scores
    drawn = weights[:, order].astype(np.float64)
    solved = np.cumsum(drawn * truth[order], axis=1)[:, last]
    seen = np.cumsum(drawn, axis=1)[:, last]
    total, all_seen = solved[:, -1:], seen[:, -1:]
    unsolved = seen - solved
    both = (total > 0) & (unsolved[:, -1:] > 0)
    gained = np.diff(solved, axis=1, prepend=0.0)
    precision = np.divide(solved, seen, out=np.zeros_like(solved), where=seen > 0)
    ap = (gained * precision).sum(axis=1, keepdims=True)
    below = all_seen - total - unsolved  # unsolved prompts with a lower score than the group
    group = np.diff(unsolved, axis=1, prepend=0.0)
    pairs = (gained * (below + group / 2)).sum(axis=1, keepdims=True)
    size = np.where(both, total * unsolved[:, -1:], 1.0)
    return (
        np.where(both, ap / np.where(both, total, 1.0), np.nan)[:, 0],
        np.where(both, pairs / size, np.nan)[:, 0],
    )


def percentiles(draws: Floats) -> Interval:
    """The 95 % interval of resamples; NaN without resamples."""
    usable = draws[~np.isnan(draws)]
    if not len(usable):
        return math.nan, math.nan
    low, high = np.quantile(usable, [0.025, 0.975]).tolist()
    return low, high


def _of_model(predicted: Floats, truth: Floats) -> ModelFigures:
    if not len(truth):
        return ModelFigures(0, *(math.nan,) * 5)
    bins = reliability(predicted, truth)
    ap, area = _ranked(predicted, truth, np.ones((1, len(truth))))
    return ModelFigures(
        labels=len(truth),
        base_rate=float(truth.mean()),
        average_precision=float(ap[0]),
        auroc=float(area[0]),
        brier=float(((predicted - truth) ** 2).mean()),
        ece=calibration_error(bins),
    )


def _mean(values: Sequence[float]) -> float:
    numbers = [value for value in values if not math.isnan(value)]
    return float(np.mean(numbers)) if numbers else math.nan


@dataclass(frozen=True)
class PickFigures:
    """Figures of the picks on the n' prompts with every label; NaN without such prompts.

    Attributes:
        picked_accuracy: mean label of the picked models.
        best_single: of the model that is best on these prompts, known only in hindsight.
        gain_over_best_single_ci95: of `picked_accuracy` minus `best_single`, paired.
        random: of a random model.
        oracle: of the best model for each prompt; with many models inflated by chance.
        picked_shares: share of prompts for which each model was picked, by name.
        prompts_with_every_label: n'.
        hits: float64 [n'], label of the picked model.
    """

    picked_accuracy: float
    picked_accuracy_ci95: Interval
    best_single: float
    best_single_model: str | None
    gain_over_best_single_ci95: Interval
    random: float
    oracle: float
    picked_shares: Mapping[str, float]
    prompts_with_every_label: int
    hits: Floats

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the array."""
        return json_values({name: figure for name, figure in vars(self).items() if name != "hits"})


def judged_prompts(correct: NDArray[np.floating]) -> NDArray[np.bool_]:
    """The prompts with a label of every model, bool [n]."""
    return np.asarray(~np.isnan(correct).any(axis=1), np.bool_)


def measure_picks(
    picks: NDArray[np.int64],
    correct: NDArray[np.floating],
    models: Sequence[str],
    seed: int,
    resamples: int = RESAMPLES,
) -> PickFigures:
    """Evaluate the models picked for n prompts.

    `picks` is int64 [n], 0..M-1, `correct` [n, M], 0..1, NaN if missing; seed and resamples are as of `measure`.
    """
    whole = judged_prompts(correct)
    truth, taken = correct[whole].astype(np.float64), picks[whole]
    if not len(truth):
        unknown = (math.nan, math.nan)
        return PickFigures(math.nan, unknown, math.nan, None, unknown, math.nan, math.nan, {}, 0, np.zeros(0))
    hits = np.take_along_axis(truth, taken[:, None], axis=1)[:, 0]
    best = int(truth.mean(axis=0).argmax())
    return PickFigures(
        picked_accuracy=float(hits.mean()),
        picked_accuracy_ci95=mean_ci(hits, seed, resamples),
        best_single=float(truth[:, best].mean()),
        best_single_model=models[best],
        gain_over_best_single_ci95=mean_ci(hits - truth[:, best], seed, resamples),
        random=float(truth.mean()),
        oracle=float(truth.max(axis=1).mean()),
        picked_shares={name: float((taken == m).mean()) for m, name in enumerate(models)},
        prompts_with_every_label=len(truth),
        hits=hits,
    )


def mean_ci(values: Floats, seed: int, resamples: int = RESAMPLES) -> Interval:
    """The 95 % interval of a mean over prompts."""
    if not resamples or not len(values):
        return math.nan, math.nan
    return ratio_ci(values, np.ones(len(values)), np.random.default_rng(seed), resamples)
