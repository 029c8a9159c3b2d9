"""Would more traces help, and what does each part add? Both train as `train-predictor` does.

`study_learning_curve` trains on growing subsets and evaluates each on the same workflows. `further_evidence` adds such
a curve and an ablation to the report of one training.

The training sets of a learning curve consist of whole tasks and are nested, and workflow types keep their shares.
Vocabulary, text sketch and early stopping use the subset only. Small sets are drawn several times, because their
accuracy depends most on the draw. Two uncertainties are reported separately: `ci95`, a bootstrap over test workflows,
and `spread`, the lowest and highest accuracy over draws of training workflows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.describe import describe
from presage.datasets.schema import digest
from presage.datasets.tasks import task_keys
from presage.errors import ConfigurationError, InputError, TraceError
from presage.features.moment import MOMENTS, Moment
from presage.features.states import SKETCH, States
from presage.predictors.common.bootstrap import ratio_cis
from presage.predictors.next_agent.parts import COMPONENTS, NextAgentConfig
from presage.training.metrics import Figures, differences, json_values
from presage.training.next_agent.evaluate import ByMoment, Evaluation
from presage.training.next_agent.train import NextAgentTraining, train
from presage.training.sets import set_apart
from presage.training.training import Progress
from presage.wording import counted

OURS: Final = "presage"


@dataclass(frozen=True)
class Recipe:
    """Arguments of `next_agent.train` except traces and baselines."""

    config: NextAgentConfig = field(default_factory=NextAgentConfig)
    horizon: int = 3
    seed: int = 0
    states: States = "auto"
    text_encoder: str = SKETCH

    def train(
        self,
        table: pa.Table,
        test: pa.Table,
        baselines: Sequence[str] = (),
        share: Progress | None = None,
        *,
        what: str = "",
        done: float = 0.0,
    ) -> NextAgentTraining:
        """Train on `table` and evaluate on `test`; `share` is called with `what` and each stage, and with `done`."""
        return train(
            table,
            test,
            self.config,
            horizon=self.horizon,
            seed=self.seed,
            states=self.states,
            text_encoder=self.text_encoder,
            baselines=baselines,
            name=OURS,
            progress=None if share is None else lambda stage, _: share(what + stage, done),
        )


LEAST_TASKS: Final = 2
"""One task to train on, one for early stopping."""


@dataclass(frozen=True)
class NestedSets:
    """Nested training sets: each set is the first tasks of one random order.

    Attributes:
        rows: int64 [n], the task of each row.
        order: int64 [T], tasks in random order.
        held: int64 [T+1], number of workflows in the first 0..T tasks.
    """

    rows: NDArray[np.int64]
    order: NDArray[np.int64]
    held: NDArray[np.int64]

    @classmethod
    def of(cls, table: pa.Table, seed: int, draw: int) -> NestedSets:
        """One draw from a valid trace in canonical order; a task with several workflow types counts as the first."""
        _, first, rows = np.unique(task_keys(table), return_index=True, return_inverse=True)
        heads = table["step"].to_numpy() == 0
        kinds = table["workflow_type"].combine_chunks().dictionary_encode().indices.to_numpy()[first]
        shuffled = np.random.default_rng([seed, draw]).permutation(len(first))
        shuffled = shuffled[np.argsort(kinds[shuffled], kind="stable")]
        _, starts, counts = np.unique(kinds[shuffled], return_index=True, return_counts=True)
        rank = np.arange(len(shuffled)) - np.repeat(starts, counts)
        # Sort tasks by their relative rank within the type, so that any first tasks hold all types in proportion.
        place = (rank + 0.5) / np.repeat(counts, counts)
        order = shuffled[np.argsort(place, kind="stable")]
        return cls(rows, order, np.cumsum([0, *np.bincount(rows[heads], minlength=len(first))[order]]))

    def enough(self, workflows: int) -> int:
        """Number of first tasks that together hold `workflows`; at least two, if there are two."""
        reached = int(np.searchsorted(self.held, workflows))
        return min(max(LEAST_TASKS, reached), len(self.order))

    def take(self, table: pa.Table, tasks: int) -> pa.Table:
        """Rows of the first tasks."""
        chosen = np.zeros(len(self.order), bool)
        chosen[self.order[:tasks]] = True
        return table.filter(pa.array(chosen[self.rows]))


BASELINES: Final = ("markov-3", "boosted-trees", "published-graphsage")

SMALLEST: Final = 25
LARGEST: Final = 800
"""Workflows of the smallest and, by default, of the largest training set of a curve. Sizes double, so the largest costs
as much as all others together."""

DRAWS: Final = 3


def learning_curve(
    train: pa.Table,
    test: pa.Table,
    recipe: Recipe,
    *,
    sizes: Sequence[int] | None = None,
    largest: int = LARGEST,
    draws: int = DRAWS,
    baselines: Sequence[str] = BASELINES,
    whole: Evaluation | None = None,
    share: Progress | None = None,
) -> dict[str, Any]:
    """Train on growing subsets of `train` and evaluate on `test`, a valid trace with other tasks.

    Args:
        sizes: workflows of the training sets; sets consist of whole tasks, so they may hold more. None:
            `default_sizes`, up to `largest`.
        draws: maximum draws of a set; larger sets are drawn less often, so that no size costs more than the largest.
        whole: the evaluation of a training on all of `train`, if known; becomes the last point.
        share: called with each stage and the completed share of the whole, 0 to 1.

    Returns:
        JSON values: `points` [{"tasks", "workflows", "draws"}], the workflows as a mean over the draws; `models` {name:
        {moment: {"accuracy", "ci95", "spread"}}}, each a list over the points of K values; `left_out` [{"tasks",
        "workflows", "reason"}], sets too small to train on; `last_doubling` {"from", "to", "moments": {moment:
        {"difference", "ci95"}}}, what the model gained from about half of the largest set to all of it, paired; None
        for a single point.

    Raises:
        ConfigurationError: a size below 2 or above the number of training workflows, or fewer than 1 draw.
        TraceError: every set is too small to train on.
    """
    sets = [NestedSets.of(train, recipe.seed, draw) for draw in range(draws)]
    tasks, workflows = (len(sets[0].order), int(sets[0].held[-1])) if sets else (0, 0)
    sizes = default_sizes(workflows, largest, whole is not None) if sizes is None else sorted(set(sizes))
    if draws < 1 or (sizes and not LEAST_TASKS <= sizes[0] <= sizes[-1] <= workflows):
        raise ConfigurationError(
            f"got sizes {', '.join(map(str, sizes))} and {counted(draws, 'draw')}; there are "
            f"{counted(workflows, 'workflow')} to train on: wanted at least 1 draw, and sizes from {LEAST_TASKS} to "
            f"{workflows}"
        )
    counts = sorted({sets[0].enough(size) for size in sizes} - ({tasks} if whole is not None else set()))
    held = sets[0].held[counts].tolist()
    times = [min(draws, max(1, held[-1] // size)) for size in held]
    cost, done = sum(size * often for size, often in zip(held, times, strict=True)), 0
    points: list[dict[str, Any]] = []
    runs: list[list[Evaluation]] = []
    left_out: list[dict[str, Any]] = []
    for count, size, often in zip(counts, held, times, strict=True):
        evaluations = []
        try:
            for draw in range(often):
                what = f"{size} training workflows" + (f", draw {draw + 1} of {often}" if often > 1 else "")
                subset = sets[draw].take(train, count)
                again = replace(recipe, seed=recipe.seed + draw)
                trained = again.train(subset, test, baselines, share, what=f"{what}: ", done=done / cost)
                evaluations.append(trained.evaluation)
                done += size
        except InputError as error:
            # A small set may have a single agent or no text; the curve starts at the first usable size.
            left_out.append({"tasks": count, "workflows": size, "reason": str(error)})
            continue
        mean = float(np.mean([growing_set.held[count] for growing_set in sets[:often]]))
        points.append({"tasks": count, "workflows": round(mean, 1), "draws": often})
        runs.append(evaluations)
    if whole is not None:
        points.append({"tasks": tasks, "workflows": float(workflows), "draws": 1})
        runs.append([whole])
    if not points:
        reason = left_out[-1]["reason"]
        raise TraceError(f"no training set of the curve is large enough to train on; the largest: {reason}")
    ours = [[run.moments for run in draws] for draws in runs]
    models = {OURS: ours} | {name: [[run.baselines[name] for run in draws] for draws in runs] for name in baselines}
    return {
        "points": points,
        "models": {
            name: {
                moment: _curve([[run[moment] for run in draws] for draws in runs_by_point], recipe.seed)
                for moment in MOMENTS
            }
            for name, runs_by_point in models.items()
        },
        "left_out": left_out,
        "last_doubling": _last_doubling(points, ours, recipe.seed),
    }


def _last_doubling(
    points: Sequence[Mapping[str, Any]], runs: Sequence[Sequence[ByMoment]], seed: int
) -> dict[str, Any] | None:
    if len(points) < 2:
        return None
    sizes = [point["workflows"] for point in points]
    before = max((i for i, size in enumerate(sizes) if size <= sizes[-1] / math.sqrt(2)), default=len(sizes) - 2)

    def mean_of_draws(point: int, moment: Moment) -> Figures:
        draws = [draw[moment] for draw in runs[point]]
        return replace(draws[0], correct=np.mean([figures.correct for figures in draws], axis=0))

    pairs = {str(moment): (mean_of_draws(-1, moment), mean_of_draws(before, moment)) for moment in MOMENTS}
    return {"from": sizes[before], "to": sizes[-1], "moments": json_values(differences(pairs, seed))}


def default_sizes(workflows: int, largest: int = LARGEST, whole_is_known: bool = False) -> list[int]:
    """25, 50, 100, … up to `largest`; all workflows too if they are no more than that, unless `whole_is_known`."""
    sizes = []
    size = SMALLEST
    while size <= largest and size * math.sqrt(2) <= workflows:  # none much like the last one
        sizes.append(size)
        size *= 2
    if workflows <= largest and not whole_is_known:
        sizes.append(workflows)
    return sizes


def _curve(points: Sequence[Sequence[Figures]], seed: int) -> dict[str, Any]:
    """Figures by point; all draws of a point are evaluated at the same positions."""
    curve: dict[str, list[Any]] = {"accuracy": [], "ci95": [], "spread": []}
    for draws in points:
        by_horizon = list(zip(*(figures.accuracy for figures in draws), strict=True))
        correct, positions = (
            np.sum([getattr(figures, name) for figures in draws], axis=0) for name in ("correct", "positions")
        )
        curve["accuracy"].append([float(np.mean(accuracies)) for accuracies in by_horizon])
        curve["ci95"].append(ratio_cis(correct, positions, np.random.default_rng(seed)))
        curve["spread"].append([(min(accuracies), max(accuracies)) for accuracies in by_horizon])
    return json_values(curve)


def study_learning_curve(
    table: pa.Table,
    test: pa.Table | None,
    recipe: Recipe,
    *,
    sizes: Sequence[int] | None,
    largest: int,
    draws: int,
    baselines: Sequence[str],
    share: Progress,
) -> dict[str, Any]:
    """Accuracy against the number of training workflows, as `metrics.json`; without `test`, a part is set apart."""
    parts = set_apart(table, test, recipe.seed)
    curve = learning_curve(
        parts.train, parts.test, recipe, sizes=sizes, largest=largest, draws=draws, baselines=baselines, share=share
    )
    traces, held = describe(parts.train), parts.test
    return {
        "kind": "study",
        "study": "learning-curve",
        "model": OURS,
        "version": None,
        "workflows": int((held["step"].to_numpy() == 0).sum()),
        "steps": held.num_rows,
        "data": {
            "training": f"{counted(traces['workflows'], 'workflow')}, {counted(traces['steps'], 'step')}",
            "split": parts.rule,
            "states": recipe.states,
            "seed": recipe.seed,
            "digest of the training traces": f"sha256:{digest(parts.train)}",
            "digest of the test traces": f"sha256:{digest(parts.test)}",
        },
        "traces": traces,
        "config": asdict(recipe.config),
        "learning_curve": curve,
    }


def _gains(ours: Evaluation, theirs: Evaluation, recipe: Recipe) -> dict[str, Any]:
    """Differences of the accuracies at each moment, first minus second, as JSON values."""
    pairs = {str(moment): (figures, theirs.moments[moment]) for moment, figures in ours.moments.items()}
    return json_values(differences(pairs, recipe.seed))


STATES: Final = "states"
"""The ablated part that is an input rather than a component."""


def further_evidence(
    training: NextAgentTraining, table: pa.Table, test: pa.Table | None, recipe: Recipe, share: Progress
) -> dict[str, Any]:
    """Figures to add to the metrics of `training`, a training on these traces with this recipe.

    Returns:
        JSON values: "learning_curve" (see `learning_curve`), which ends with `training` itself, and "ablation",
        {part: figures} of the predictor trained and judged without GraphSAGE, trees, n-gram, and states if it reads
        any; of each "moments" and "differences" {moment: {"difference", "ci95"}}, with the part minus without.
    """
    parts = set_apart(table, test, recipe.seed)
    judged_baselines = [name for name in BASELINES if name in training.evaluation.baselines]
    ablation = {}
    for part, without in _without(training, recipe).items():
        fitted = without.train(parts.train, parts.test, (), share, what=f"without {part}: ")
        ablation[part] = {
            "moments": fitted.evaluation.to_dict()["moments"],
            "differences": _gains(training.evaluation, fitted.evaluation, recipe),
        }
    curve = learning_curve(
        parts.train, parts.test, recipe, baselines=judged_baselines, whole=training.evaluation, share=share
    )
    return {"ablation": ablation, "learning_curve": curve}


def _without(training: NextAgentTraining, recipe: Recipe) -> Mapping[str, Recipe]:
    """The recipe without each part; the states are those already chosen, so that only one part differs."""
    kind = training.predictor.source.kind
    kept = replace(recipe, states=kind if kind in ("captured", "none") else "text")

    def changed(config: NextAgentConfig) -> Recipe:
        return replace(kept, config=config)

    config = recipe.config
    recipes = {"GraphSAGE": changed(replace(config, network=replace(config.network, graph=False)))}
    for part in COMPONENTS[1:]:
        mixture = tuple(name for name in config.mixture if name != part)
        recipes[part] = changed(replace(config, mixture=mixture))
    if kind != "none":
        recipes[STATES] = replace(recipe, states="none")
    return recipes
