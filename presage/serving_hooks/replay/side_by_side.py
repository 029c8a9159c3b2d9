"""Runs that differ in more than policy and seed (versions of a model, settings, loads), in parallel processes.

Unlike `runs.run_all`, each run has its own setting, and an interrupt loses all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, Final, TypeVar

import numpy as np

from presage.errors import TraceError
from presage.serving_hooks.replay.metrics import Figures, over_seeds
from presage.serving_hooks.replay.policies import Policy
from presage.serving_hooks.replay.runs import Done, Setting, run_one
from presage.serving_hooks.replay.workload import ReplayJob

Point = TypeVar("Point", bound=Hashable)

Task = tuple[Setting, Policy, int]
"""Setting, policy, and seed of the arrivals."""


def side_by_side(
    tasks: Sequence[Task],
    processes: int,
    progress: Callable[[str, float | None], None] = lambda doing, share: None,
) -> list[Done]:
    """Runs every task; results are in the order of the tasks. Needs vLLM.

    Args:
        tasks: to run.
        processes: in parallel; with 1 everything runs in this process.
        progress: called with a description and the share done.
    """
    done: list[Done] = []
    doing = f"replaying {len(tasks)} runs"
    progress(doing, 0.0)
    for one in _each(tasks, min(processes, len(tasks))):
        done.append(one)
        progress(doing, len(done) / len(tasks))
    return done


def swept(
    points: Mapping[Point, tuple[Setting, Policy]],
    seeds: Sequence[int],
    processes: int,
    progress: Callable[[str, float | None], None] = lambda doing, share: None,
) -> dict[Point, list[Figures]]:
    """Figures of each point, seed by seed.

    Args:
        points: what to run, by name.
        seeds: of every point, so that points can be compared seed by seed.
        processes: as of `side_by_side`.
        progress: as of `side_by_side`.
    """
    tasks = [(setting, policy, seed) for setting, policy in points.values() for seed in seeds]
    done = side_by_side(tasks, processes, progress)
    return {
        point: [one.figures for one in done[at * len(seeds) : (at + 1) * len(seeds)]] for at, point in enumerate(points)
    }


def gained(runs: Sequence[Figures], than: Sequence[Figures]) -> dict[str, Any]:
    """Mean differences with 95 % intervals, paired by seed.

    Args:
        runs: of one point.
        than: of another, with the same seeds.
    """
    pairs = zip(runs, than, strict=True)
    return over_seeds([{name: one[name] - other[name] for name in one.keys() & other.keys()} for one, other in pairs])


def _each(tasks: Sequence[Task], processes: int) -> Iterator[Done]:
    if processes == 1:
        yield from map(_run, tasks)
        return
    # Spawned: vLLM and torch do not promise that their threads survive a fork.
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    try:
        yield from pool.map(_run, tasks)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run(task: Task) -> Done:
    return run_one(*task)


LEAST: Final = 8
"""Fewest workflows of which different halves can be drawn."""


@dataclass(frozen=True)
class Contender:
    """A policy with a model.

    Attributes:
        name: of its figures.
        policy: to run.
        forecasts: folder of the model; ignored by a policy without forecasts.
    """

    name: str
    policy: Policy
    forecasts: str = ""


def contest(
    setting: Setting,
    contenders: Sequence[Contender],
    seeds: Sequence[int],
    processes: int,
    progress: Callable[[str, float | None], None] = lambda doing, share: None,
) -> list[Done]:
    """Runs every contender (versions of a predictor, and vLLM alone) on every half. Needs vLLM.

    Each seed draws half of the workflows and their order, the same for all contenders. The standard deviation of a
    figure over halves is its standard error on all workflows (half-sample replication: McCarthy 1969; Wu 1986 for any
    statistic), so intervals cover the choice of workflows and not only their order. Workflows compete for one cache, so
    figures cannot be resampled workflow by workflow. The order of arrivals is redrawn too, which widens intervals.

    Args:
        setting: common to all runs; its `forecasts` are ignored.
        contenders: to compare.
        seeds: one half each.
        processes: as of `side_by_side`.
        progress: as of `side_by_side`.

    Returns:
        Runs by seed and contender as given; `policy` of each is the contender's name.

    Raises:
        TraceError: too few workflows.
    """
    if len(setting.jobs) < LEAST:
        raise TraceError(
            f"{len(setting.jobs)} workflows to replay; each run takes half of them, and at least {LEAST} are wanted: "
            "give more traces"
        )
    tasks = [
        (replace(setting, jobs=half(setting.jobs, seed), forecasts=one.forecasts), one.policy, seed)
        for seed in seeds
        for one in contenders
    ]
    names = [one.name for _ in seeds for one in contenders]
    done = side_by_side(tasks, processes, progress)
    return [replace(one, policy=name) for one, name in zip(done, names, strict=True)]


def half(jobs: Sequence[ReplayJob], seed: int) -> tuple[ReplayJob, ...]:
    """A random half of the jobs, rounded up, in the order of the trace."""
    chosen = np.random.default_rng([seed, len(jobs)]).permutation(len(jobs))[: (len(jobs) + 1) // 2]
    return tuple(jobs[number] for number in sorted(chosen))
