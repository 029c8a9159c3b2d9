"""Learning curve: accuracy against the number of training workflows (PBKV, appendix C.1).

The test set is fixed. Training sets consist of whole tasks and are nested: a larger set contains every smaller one of
its draw, and workflow types keep their shares. Small sets are drawn several times, because their accuracy depends most
on the draw and training is cheap. Two uncertainties are reported separately: `ci95`, a bootstrap over test workflows,
and `spread`, the lowest and highest accuracy over draws of training workflows.

Vocabulary, text sketch and early stopping use the subset only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.tasks import task_keys
from presage.errors import ConfigurationError, InputError, TraceError
from presage.features.moment import MOMENTS
from presage.features.states import SKETCH, States
from presage.predictors.common.bootstrap import ratio_cis
from presage.predictors.next_agent.parts import NextAgentConfig
from presage.training.evaluate import Evaluation
from presage.training.metrics import Figures
from presage.training.next_agent import NextAgentTraining, train

Share = Callable[[str, float], None]
"""Progress callback: current stage, and the completed share of the whole, 0 to 1."""


@dataclass(frozen=True)
class Recipe:
    """Arguments of `next_agent.train` except traces and baselines."""

    config: NextAgentConfig = field(default_factory=NextAgentConfig)
    horizon: int = 3
    seed: int = 0
    states: States = "auto"
    text_encoder: str = SKETCH

    def train(
        self, table: pa.Table, test: pa.Table, baselines: Sequence[str], report: Callable[[str], None]
    ) -> NextAgentTraining:
        """Train on `table` and evaluate on `test`; `progress` receives each stage."""
        return train(
            table,
            test,
            self.config,
            horizon=self.horizon,
            seed=self.seed,
            states=self.states,
            text_encoder=self.text_encoder,
            baselines=baselines,
            name="presage",
            progress=lambda doing, _: report(doing),
        )


LEAST_TASKS: Final = 2
"""One task to train on, one for early stopping."""


@dataclass(frozen=True)
class NestedSets:
    """Nested training sets: each set is the first tasks of one random order.

    Attributes:
        rows: int64 [n], the task of each row.
        sizes: int64 [T], workflows of each task.
        order: int64 [T], tasks in random order.
    """

    rows: NDArray[np.int64]
    sizes: NDArray[np.int64]
    order: NDArray[np.int64]

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
        return cls(rows, np.bincount(rows[heads], minlength=len(first)), shuffled[np.argsort(place, kind="stable")])

    @property
    def tasks(self) -> int:
        """T."""
        return len(self.sizes)

    @property
    def workflows(self) -> int:
        """Number of workflows in all tasks."""
        return int(self.sizes.sum())

    def enough(self, workflows: int) -> int:
        """Number of first tasks that together hold `workflows`; at least two, if there are two."""
        reached = int(np.searchsorted(np.cumsum(self.sizes[self.order]), workflows)) + 1
        return min(max(LEAST_TASKS, reached), self.tasks)

    def held(self, tasks: int) -> int:
        """Number of workflows in the first tasks."""
        return int(self.sizes[self.order[:tasks]].sum())

    def take(self, table: pa.Table, tasks: int) -> pa.Table:
        """Rows of the first tasks."""
        chosen = np.zeros(self.tasks, bool)
        chosen[self.order[:tasks]] = True
        return table.filter(pa.array(chosen[self.rows]))


OURS: Final = "presage"
BASELINES: Final = ("markov-3", "boosted-trees", "published-graphsage")
"""Baselines of a curve: an n-gram, the strongest baseline, and the published model."""

SMALLEST: Final = 25
LARGEST: Final = 800
"""Workflows of the smallest and, by default, of the largest training set of a curve. Sizes double, so the largest costs
as much as all others together."""

DRAWS: Final = 3


@dataclass(frozen=True)
class _Point:
    """One point of the curve: its tasks and workflows, and the figures of each draw."""

    tasks: int
    workflows: float
    runs: Sequence[Evaluation]


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
    share: Share | None = None,
) -> dict[str, Any]:
    """Train on growing subsets of `train` and evaluate on `test`.

    Args:
        train: a valid trace to draw training sets from.
        test: a valid trace with other tasks.
        recipe: the training arguments.
        sizes: workflows of the training sets; sets consist of whole tasks, so they may hold more. None:
            `default_sizes`.
        largest: the largest default size.
        draws: maximum draws of a set; larger sets are drawn less often, so that no size costs more than the largest.
        baselines: names of baselines to train as well.
        whole: the evaluation of a training on all of `train`, if known; becomes the last point.
        share: progress callback.

    Returns:
        JSON values: `points` [{"tasks", "workflows", "draws"}], the workflows as a mean over the draws; `models`
        {name: {moment: {"accuracy", "ci95", "spread"}}}, each a list over the points of K values; `left_out`
        [{"tasks", "workflows", "reason"}], sets too small to train on.

    Raises:
        ConfigurationError: a size below 2 or above the number of training workflows, or fewer than 1 draw.
        TraceError: every set is too small to train on.
    """
    sets = [NestedSets.of(train, recipe.seed, draw) for draw in range(draws)]
    workflows = sets[0].workflows if sets else 0
    sizes = default_sizes(workflows, largest, whole is not None) if sizes is None else sorted(set(sizes))
    if draws < 1 or (sizes and not LEAST_TASKS <= sizes[0] <= sizes[-1] <= workflows):
        raise ConfigurationError(
            f"got sizes {', '.join(map(str, sizes))} and {draws} draws; there are {workflows} workflows to train on: "
            f"wanted at least 1 draw, and sizes from {LEAST_TASKS} to {workflows}"
        )
    counts = sorted({sets[0].enough(size) for size in sizes} - ({sets[0].tasks} if whole is not None else set()))
    held = [sets[0].held(count) for count in counts]
    times = [min(draws, max(1, held[-1] // of)) for of in held]
    cost, done = sum(of * often for of, often in zip(held, times, strict=True)), 0
    points: list[_Point] = []
    left_out: list[dict[str, Any]] = []
    for count, of, often in zip(counts, held, times, strict=True):
        runs = []
        try:
            for draw in range(often):
                what = f"{of} training workflows" + (f", draw {draw + 1} of {often}" if often > 1 else "")
                subset = sets[draw].take(train, count)
                again = dataclasses.replace(recipe, seed=recipe.seed + draw)
                runs.append(again.train(subset, test, baselines, _teller(share, what, done / cost)).evaluation)
                done += of
        except InputError as error:
            # A small set may have a single agent or no text; the curve starts at the first usable size.
            left_out.append({"tasks": count, "workflows": of, "reason": str(error)})
            continue
        points.append(_Point(count, float(np.mean([one.held(count) for one in sets[:often]])), runs))
    if whole is not None:
        points.append(_Point(sets[0].tasks, float(workflows), [whole]))
    if not points:
        raise TraceError(f"no training set of the curve can be learnt from; the largest: {left_out[-1]['reason']}")
    return {
        "points": [
            {"tasks": point.tasks, "workflows": round(point.workflows, 1), "draws": len(point.runs)} for point in points
        ],
        "models": {
            name: {
                moment: _curve([_figures(point, name, moment) for point in points], recipe.seed) for moment in MOMENTS
            }
            for name in (OURS, *baselines)
        },
        "left_out": left_out,
    }


def default_sizes(workflows: int, largest: int = LARGEST, whole_is_known: bool = False) -> list[int]:
    """25, 50, 100, … up to `largest`, or up to all workflows if there are fewer.

    Args:
        workflows: number of training workflows.
        largest: maximum workflows of a set.
        whole_is_known: leave out the set of all workflows.
    """
    sizes = []
    size = SMALLEST
    while size <= largest and size * math.sqrt(2) <= workflows:  # none much like the last one
        sizes.append(size)
        size *= 2
    if workflows <= largest and not whole_is_known:
        sizes.append(workflows)
    return sizes


def _figures(point: _Point, name: str, moment: Any) -> list[Figures]:
    """Figures of one model at one moment, by draw."""
    return [(run.moments if name == OURS else run.baselines[name])[moment] for run in point.runs]


def _curve(points: Sequence[Sequence[Figures]], seed: int) -> dict[str, Any]:
    return {
        "accuracy": [_numbers(_mean(draws)) for draws in points],
        "ci95": [
            [
                _numbers(ends)
                for ends in ratio_cis(
                    np.sum([figures.correct for figures in draws], axis=0),
                    np.sum([figures.positions for figures in draws], axis=0),
                    np.random.default_rng(seed),
                )
            ]
            for draws in points
        ],
        "spread": [
            [_numbers([min(of), max(of)]) for of in zip(*(figures.accuracy for figures in draws), strict=True)]
            for draws in points
        ],
    }


def _mean(draws: Sequence[Figures]) -> list[float]:
    """Mean accuracy over draws, K numbers; all draws are evaluated at the same positions."""
    return [float(np.mean(of)) for of in zip(*(figures.accuracy for figures in draws), strict=True)]


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]


def _teller(share: Share | None, what: str, done: float) -> Any:
    return (lambda doing: share(f"{what}: {doing}", done)) if share is not None else (lambda doing: None)
