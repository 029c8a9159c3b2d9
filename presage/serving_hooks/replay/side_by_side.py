"""Runs that differ in more than policy and seed, in processes side by side: versions of a model, settings, loads.

`runs.run_all` has one setting for all of its runs and keeps what was run when somebody interrupts; here each run has
its own, and the answer is all of them or none.
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
"""What is run, by whom, and the seed of its arrivals."""


def side_by_side(
    tasks: Sequence[Task],
    processes: int,
    progress: Callable[[str, float | None], None] = lambda doing, share: None,
) -> list[Done]:
    """Every task, in the order given. Needs vLLM.

    Args:
        tasks: to be run.
        processes: side by side; with 1 everything is done in this one.
        progress: told what is being done and the share that is done.
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
        points: what is run, under a name of the caller's.
        seeds: of every point, so that points may be compared seed by seed.
        processes: as of `side_by_side`.
        progress: as of `side_by_side`.
    """
    tasks = [(setting, policy, seed) for setting, policy in points.values() for seed in seeds]
    done = side_by_side(tasks, processes, progress)
    return {
        point: [one.figures for one in done[at * len(seeds) : (at + 1) * len(seeds)]] for at, point in enumerate(points)
    }


def gained(runs: Sequence[Figures], than: Sequence[Figures]) -> dict[str, Any]:
    """Differences of runs, seed by seed, with their means and 95 % intervals: those of what both depend on cancel.

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
    # Spawned: what a fork takes along of vLLM's and torch's threads is nobody's promise.
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    try:
        yield from pool.map(_run, tasks)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run(task: Task) -> Done:
    return run_one(*task)


LEAST: Final = 8
"""Workflows of which halves can be drawn that differ."""


@dataclass(frozen=True)
class Contender:
    """One of those compared.

    Attributes:
        name: what its figures go by.
        policy: of the hooks.
        forecasts: folder of its model; not looked at by a policy without forecasts.
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
    """Every contender on every half: versions of a predictor, and vLLM alone. Needs vLLM.

    Each seed draws half of the workflows and their order, the same for all contenders. What a figure varies by from
    half to half, undivided, is the standard error of that figure on all of them (half-sample replication: McCarthy
    1969; Wu 1986 for any statistic), so whoever compares has the doubt of the workflows in it, not only that of their
    order. A replay's figures cannot be resampled workflow by workflow: they compete for one cache.

    The order of arrivals is drawn anew too and counts in full, which makes the interval wider than it need be.

    Args:
        setting: what they have in common; its `forecasts` are those of nobody.
        contenders: to be compared.
        seeds: one half each.
        processes: runs side by side; with 1 everything is done in this one.
        progress: told what is being done and the share that is done.

    Returns:
        Runs by seed and contender as given; `policy` of each is the contender's name.

    Raises:
        TraceError: too few workflows to draw halves of.
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
    """Half of the jobs, in the order of the trace; rounded up."""
    chosen = np.random.default_rng([seed, len(jobs)]).permutation(len(jobs))[: (len(jobs) + 1) // 2]
    return tuple(jobs[number] for number in sorted(chosen))
