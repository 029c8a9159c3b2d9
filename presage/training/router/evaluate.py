"""Evaluate routers and baselines on held-out prompts.

All are evaluated on the same labels. Differences are paired: both routers share the bootstrap's resamples of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.datasets.outcomes import Outcomes, prompt_keys
from presage.errors import ConfigurationError, TraceError
from presage.predictors.common.bootstrap import ratio_ci
from presage.predictors.router.choice import pick
from presage.predictors.router.predictor import RouterPredictor
from presage.training.baselines import Behind, behind, worst
from presage.training.metrics import RESAMPLES, Estimate, json_values
from presage.training.router.baselines import Routes
from presage.training.router.cost_quality import CostQuality, cost_quality
from presage.training.router.metrics import PickFigures, RankingFigures, mean_ci, measure, measure_picks, percentiles

MIN_TASK_PROMPTS: Final = 20

_CALLED: Final = {"macro_map": "macro mAP", "brier": "Brier score", "picked_accuracy": "accuracy of the picks"}
_LOWER_IS_BETTER: Final = frozenset({"brier"})


@dataclass(frozen=True)
class RouterFigures:
    """Figures of one router: of its probabilities, and of its picks."""

    ranking: RankingFigures
    picking: PickFigures

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**self.ranking.to_dict(), **self.picking.to_dict()}


@dataclass(frozen=True)
class RouterEvaluation:
    """Figures of one router on n prompts and M models.

    Attributes:
        figures: on all prompts; the registry's gates compare their values by prompt.
        by_task: figures of each task with 20 prompts or more, without intervals.
        differences: router minus each baseline: `macro_map`, `brier` (below 0 is better), `picked_accuracy`.
        curve: cost against quality; None without costs.
    """

    figures: RouterFigures
    by_task: Mapping[str, RouterFigures]
    baselines: Mapping[str, RouterFigures]
    differences: Mapping[str, Mapping[str, Estimate]]
    curve: CostQuality | None

    def to_dict(self) -> dict[str, Any]:
        """The object that `train-predictor` prints, as JSON values; the caller sets "model" and "version"."""
        headline = (
            *("macro_map", "brier", "picked_accuracy", "best_single", "best_single_model", "random", "oracle"),
            "prompts",
        )
        by_task = {name: figures.to_dict() for name, figures in self.by_task.items()}
        return json_values(
            {
                "kind": "router",
                "model": None,
                "version": None,
                **self.figures.to_dict(),
                "by_task": {
                    name: {figure: figures[figure] for figure in headline} for name, figures in by_task.items()
                },
                "cost_quality": self.curve,
                "behind": worst(lost(self.baselines, self.differences)),
                "baselines": self.baselines,
                "differences": self.differences,
            }
        )


def evaluate(
    router: Routes,
    outcomes: Outcomes,
    seed: int,
    *,
    baselines: Mapping[str, Routes] | None = None,
    resamples: int = RESAMPLES,
) -> RouterEvaluation:
    """Evaluate a router, and baselines by name, on prompts that they were not trained on; raises TraceError for no
    label.

    The router's models are those of `outcomes`, in the same order.
    """
    if not outcomes.labels.any():
        raise TraceError(
            f"of {len(outcomes)} prompts none has a label of the models {', '.join(outcomes.models)}: nothing can be "
            "judged; give outcomes of these models"
        )
    predicted = router.probabilities(outcomes.prompts)
    picks = router.picks(predicted)
    figures = judge(predicted, picks, outcomes, seed, resamples)
    others = {}
    for name, baseline in (baselines or {}).items():
        theirs = baseline.probabilities(outcomes.prompts)
        others[name] = judge(theirs, baseline.picks(theirs), outcomes, seed, resamples)
    return RouterEvaluation(
        figures=figures,
        by_task=_by_task(predicted, picks, outcomes, seed),
        baselines=others,
        differences={name: differences(figures, other, seed, resamples) for name, other in others.items()},
        curve=cost_quality(predicted, outcomes),
    )


def judge(
    predicted: NDArray[np.float32], picks: NDArray[np.int64], outcomes: Outcomes, seed: int, resamples: int = RESAMPLES
) -> RouterFigures:
    """Figures of probabilities [n, M] and picks [n]."""
    return RouterFigures(
        measure(predicted, outcomes.correct, outcomes.models, seed, resamples),
        measure_picks(picks, outcomes.correct, outcomes.models, seed, resamples),
    )


def differences(
    ours: RouterFigures, theirs: RouterFigures, seed: int, resamples: int = RESAMPLES
) -> dict[str, Estimate]:
    """First minus second on the same prompts, with paired intervals; both need the same seed and resamples."""
    mine, its = ours.ranking, theirs.ranking
    squared = ratio_ci(mine.squared - its.squared, mine.counted, np.random.default_rng(seed), resamples)
    return {
        "macro_map": Estimate(mine.macro_map - its.macro_map, percentiles(mine.map_draws - its.map_draws)),
        "brier": Estimate(mine.brier - its.brier, squared),
        "picked_accuracy": Estimate(
            ours.picking.picked_accuracy - theirs.picking.picked_accuracy,
            mean_ci(ours.picking.hits - theirs.picking.hits, seed, resamples),
        ),
    }


def lost(baselines: Mapping[str, RouterFigures], against: Mapping[str, Mapping[str, Estimate]]) -> list[Behind]:
    """Comparisons that a baseline won significantly; `against` as in `RouterEvaluation.differences`."""
    lost_to = []
    for name, its in baselines.items():
        own = {
            "macro_map": its.ranking.macro_map,
            "brier": its.ranking.brier,
            "picked_accuracy": its.picking.picked_accuracy,
        }
        for figure, (gain, (low, high)) in against[name].items():
            by, ci95 = (gain, (low, high)) if figure in _LOWER_IS_BETTER else (-gain, (-high, -low))
            lost_to += behind(name, f"in {_CALLED[figure]}", by, ci95, own[figure])
    return lost_to


def _by_task(
    predicted: NDArray[np.float32], picks: NDArray[np.int64], outcomes: Outcomes, seed: int
) -> dict[str, RouterFigures]:
    names = np.array([task or "" for task in outcomes.task])
    judged = {}
    for name in sorted(set(names.tolist()) - {""}):
        rows = np.flatnonzero(names == name)
        if len(rows) >= MIN_TASK_PROMPTS:
            judged[name] = judge(predicted[rows], picks[rows], outcomes.take(rows), seed, resamples=0)
    return judged


def held_out(outcomes: Outcomes, *routers: RouterPredictor) -> tuple[Outcomes, int]:
    """Prompts that no router was trained on, and the number of prompts left out; raises TraceError if none is left."""
    seen = np.isin(prompt_keys(outcomes), np.concatenate([router.trained_on for router in routers]))
    if seen.all():
        raise TraceError(
            f"all {len(outcomes)} prompts are ones that the model was trained on, so its figures on them prove "
            "nothing: give outcomes that were kept apart, such as later ones or those of --test"
        )
    return outcomes.take(~seen), int(seen.sum())


def compare_routers(
    mine: RouterPredictor, its: RouterPredictor, outcomes: Outcomes, seed: int
) -> tuple[RouterFigures, RouterFigures, dict[str, Estimate]]:
    """Compare two routers on prompts that neither was trained on, restricted to their common models.

    Returns the figures of each, and the differences, mine − its, by figure. Raises ConfigurationError for no common
    model.
    """
    shared = [name for name in mine.models if name in its.models]
    if not shared:
        raise ConfigurationError(
            f"two routers without a model in common ({', '.join(mine.models)}; {', '.join(its.models)}): they cannot "
            "be compared; register the new one under a name of its own"
        )
    judged = outcomes.of_models(shared)
    figures = []
    for router in (mine, its):
        columns = np.array([router.models.index(name) for name in shared])
        predicted = router.probabilities(judged.prompts)[:, columns]
        figures.append(judge(predicted, pick(predicted, router.base[columns], router.trust), judged, seed))
    own, other = figures
    return own, other, differences(own, other, seed)
