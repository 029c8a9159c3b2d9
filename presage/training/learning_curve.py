"""What more traces would bring: accuracy against the number of training workflows (PBKV, appendix C.1).

The test set is fixed. Training sets are nested and of whole tasks: a larger one holds every smaller one of its draw,
and workflow types keep their shares. Small sets are drawn several times, since which workflows they hold matters most
there and they are cheap. Two kinds of doubt stand apart: `ci95` is that of the test workflows, by bootstrap over them;
`spread` that of the training workflows, the least and the greatest accuracy of the draws.

Everything is learnt from the subset alone: vocabulary, text sketch and when to stop, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.tasks import task_keys
from presage.errors import ConfigurationError
from presage.features.moment import MOMENTS
from presage.predictors.bootstrap import ratio_cis
from presage.training.evaluate import Evaluation
from presage.training.metrics import Figures
from presage.training.recipe import Recipe, Share

OURS: Final = "presage"
BASELINES: Final = ("markov-3", "boosted-trees", "published-graphsage")
"""What ours is compared with: what counting gives, the model to beat, and the published one."""

SMALLEST: Final = 25
LARGEST: Final = 800
"""Workflows of the smallest and, unless asked for more, of the largest training set of a curve: each is twice the one
before. The largest costs as much as all the others together."""

DRAWS: Final = 3
_LEAST_TASKS: Final = 2
"""One to learn from, one to decide when to stop."""


@dataclass(frozen=True)
class _Point:
    """One number of training workflows: how many tasks and workflows, and what was measured in each draw."""

    tasks: int
    workflows: float
    runs: Sequence[Evaluation]


def learning_curve(
    train: pa.Table,
    test: pa.Table,
    recipe: Recipe,
    *,
    sizes: Sequence[int] | None = None,
    draws: int = DRAWS,
    baselines: Sequence[str] = BASELINES,
    whole: Evaluation | None = None,
    share: Share | None = None,
) -> dict[str, Any]:
    """Trains on ever more of `train` and judges on `test`.

    Args:
        train: a valid trace to draw training sets from.
        test: a valid trace with other tasks.
        recipe: how to train.
        sizes: workflows of the training sets; a set is of whole tasks, so it may hold more. None: `default_sizes`.
        draws: how often a small set is drawn; a set is drawn so often that its draws cost half of the largest.
        baselines: names of what to train beside ours.
        whole: what is known already of training on all of `train`; the curve then ends there.
        share: told what is being done.

    Returns:
        JSON values: `points` [{"tasks", "workflows", "draws"}], the workflows as a mean over the draws; `models`
        {name: {moment: {"accuracy", "ci95", "spread"}}}, each a list over the points of K values.

    Raises:
        ConfigurationError: a size below 2 or above what there is to train on, or fewer than 1 draw.
        TraceError: a set is too small to learn from.
    """
    tasks = _Tasks.of(train)
    sizes = default_sizes(tasks.workflows, whole is not None) if sizes is None else sorted(set(sizes))
    if draws < 1 or (sizes and not _LEAST_TASKS <= sizes[0] <= sizes[-1] <= tasks.workflows):
        raise ConfigurationError(
            f"got sizes {', '.join(map(str, sizes))} and {draws} draws; there are {tasks.workflows} workflows to train "
            f"on: wanted sizes from {_LEAST_TASKS} to {tasks.workflows}, and at least 1 draw"
        )
    orders = [tasks.order(recipe.seed, draw) for draw in range(draws)]
    counts = sorted({tasks.enough(orders[0], size) for size in sizes})
    plan = [(count, tasks.first(orders[0], count)) for count in counts]
    most = max((int(rows_workflows) for _, (_, rows_workflows) in plan), default=0)
    times = [min(draws, max(1, most // (2 * workflows))) for _, (_, workflows) in plan]
    cost = sum(workflows * often for (_, (_, workflows)), often in zip(plan, times, strict=True))
    done = 0
    points = []
    for count, often in zip(counts, times, strict=True):
        runs, held = [], []
        for draw in range(often):
            rows, workflows = tasks.first(orders[draw], count)
            what = f"{workflows} training workflows" + (f", draw {draw + 1} of {often}" if often > 1 else "")
            tell = _teller(share, what, min(1.0, done / cost))
            fitted = dataclasses.replace(recipe, seed=recipe.seed + draw).train(
                train.filter(pa.array(rows)), test, baselines, tell
            )
            runs.append(fitted.evaluation)
            held.append(workflows)
            done += workflows
        points.append(_Point(count, float(np.mean(held)), runs))
    if whole is not None:
        points.append(_Point(len(tasks.sizes), float(tasks.workflows), [whole]))
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
    }


def default_sizes(workflows: int, whole_is_known: bool = False) -> list[int]:
    """25, 50, 100, … up to 800 workflows, ending with all of them where they are no more than that.

    Args:
        workflows: how many there are to train on.
        whole_is_known: the curve needs no training on all of them.
    """
    sizes = []
    size = SMALLEST
    while size <= LARGEST and size * math.sqrt(2) <= workflows:  # none much like the last one
        sizes.append(size)
        size *= 2
    if workflows <= LARGEST and not whole_is_known:
        sizes.append(workflows)
    return sizes


@dataclass(frozen=True)
class _Tasks:
    """The tasks of a trace: of each row its task, of each task its workflows and its workflow type."""

    rows: NDArray[np.int64]
    sizes: NDArray[np.int64]
    types: NDArray[np.int64]

    @classmethod
    def of(cls, table: pa.Table) -> _Tasks:
        """Reads off a valid trace in canonical order; a task of several types counts as of the first."""
        _, first, rows = np.unique(task_keys(table), return_index=True, return_inverse=True)
        heads = table["step"].to_numpy() == 0
        kinds = table["workflow_type"].combine_chunks().dictionary_encode().indices.to_numpy()
        return cls(rows, np.bincount(rows[heads], minlength=len(first)), kinds[first].astype(np.int64))

    @property
    def workflows(self) -> int:
        """All of them."""
        return int(self.sizes.sum())

    def order(self, seed: int, draw: int) -> NDArray[np.int64]:
        """All tasks, at random, so that any number of first ones holds each workflow type in proportion."""
        shuffled = np.random.default_rng([seed, draw]).permutation(len(self.sizes))
        shuffled = shuffled[np.argsort(self.types[shuffled], kind="stable")]
        kinds, starts, counts = np.unique(self.types[shuffled], return_index=True, return_counts=True)
        rank = np.arange(len(shuffled)) - np.repeat(starts, counts)
        place = (rank + 0.5) / np.repeat(counts, counts)  # of each task on the way through its type
        assert len(kinds) == len(starts)
        return shuffled[np.argsort(place, kind="stable")]

    def enough(self, order: NDArray[np.int64], workflows: int) -> int:
        """How many of the first tasks hold so many workflows."""
        reached = int(np.searchsorted(np.cumsum(self.sizes[order]), workflows)) + 1
        return min(max(_LEAST_TASKS, reached), len(order))

    def first(self, order: NDArray[np.int64], count: int) -> tuple[NDArray[np.bool_], int]:
        """Which rows are of the first `count` tasks, bool [n], and how many workflows those are."""
        chosen = np.zeros(len(self.sizes), bool)
        chosen[order[:count]] = True
        return chosen[self.rows], int(self.sizes[chosen].sum())


def _figures(point: _Point, name: str, moment: Any) -> list[Figures]:
    """Of one model at one moment, a draw each."""
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
    """Accuracy over all draws, K numbers; every draw was judged at the same positions."""
    return [float(np.mean(of)) for of in zip(*(figures.accuracy for figures in draws), strict=True)]


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]


def _teller(share: Share | None, what: str, done: float) -> Any:
    return (lambda doing: share(f"{what}: {doing}", done)) if share is not None else (lambda doing: None)
