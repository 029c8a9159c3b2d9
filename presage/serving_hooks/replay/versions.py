"""Two versions of a predictor, and vLLM alone, on the same workflows in the same order: figures for the last gate.

Each seed draws half of the workflows and their order, the same for all contenders. What a figure varies by from half to
half, undivided, is the standard error of that figure on all of them (half-sample replication: McCarthy 1969; Wu 1986
for any statistic), so whoever compares has the doubt of the workflows in it, not only that of their order. A replay's
figures cannot be resampled workflow by workflow: they compete for one cache.

The order of arrivals is drawn anew too and counts in full, which makes the interval wider than it need be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Final

import numpy as np

from presage.errors import TraceError
from presage.serving_hooks.replay.policies import Policy
from presage.serving_hooks.replay.runs import Done, Setting, run_one
from presage.serving_hooks.replay.workload import Job

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


_Task = tuple[Setting, Contender, int]


def contest(
    setting: Setting,
    contenders: Sequence[Contender],
    seeds: Sequence[int],
    processes: int,
    progress: Callable[[str, float | None], None] = lambda doing, share: None,
) -> list[Done]:
    """Every contender on every half. Needs vLLM.

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
        (replace(setting, jobs=half(setting.jobs, seed), forecasts=one.forecasts), one, seed)
        for seed in seeds
        for one in contenders
    ]
    done = []
    doing = f"replaying {len(tasks)} runs"
    progress(doing, 0.0)
    for one in _run_all(tasks, min(processes, len(tasks))):
        done.append(one)
        progress(doing, len(done) / len(tasks))
    return done


def half(jobs: Sequence[Job], seed: int) -> tuple[Job, ...]:
    """Half of the jobs, in the order of the trace; rounded up."""
    chosen = np.random.default_rng([seed, len(jobs)]).permutation(len(jobs))[: (len(jobs) + 1) // 2]
    return tuple(jobs[number] for number in sorted(chosen))


def _run_all(tasks: Sequence[_Task], processes: int) -> Iterator[Done]:
    if processes == 1:
        yield from map(_run, tasks)
        return
    # Spawned: what a fork takes along of vLLM's and torch's threads is nobody's promise.
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    try:
        yield from pool.map(_run, tasks)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run(task: _Task) -> Done:
    setting, contender, seed = task
    return replace(run_one(setting, contender.policy, seed), policy=contender.name)
