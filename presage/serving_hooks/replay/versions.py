"""Two versions of a predictor, and vLLM alone, on the same workflows in the same order: figures for the last gate.

Each seed draws half of the workflows and their order, the same for all contenders. What a figure varies by from half to
half, undivided, is the standard error of that figure on all of them (half-sample replication: McCarthy 1969; Wu 1986
for any statistic), so whoever compares has the doubt of the workflows in it, not only that of their order. A replay's
figures cannot be resampled workflow by workflow: they compete for one cache.

The order of arrivals is drawn anew too and counts in full, which makes the interval wider than it need be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from presage.errors import TraceError
from presage.serving_hooks.replay.policies import Policy
from presage.serving_hooks.replay.runs import Done, Setting
from presage.serving_hooks.replay.side_by_side import side_by_side
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
        (replace(setting, jobs=half(setting.jobs, seed), forecasts=one.forecasts), one.policy, seed)
        for seed in seeds
        for one in contenders
    ]
    names = [one.name for _ in seeds for one in contenders]
    done = side_by_side(tasks, processes, progress)
    return [replace(one, policy=name) for one, name in zip(done, names, strict=True)]


def half(jobs: Sequence[Job], seed: int) -> tuple[Job, ...]:
    """Half of the jobs, in the order of the trace; rounded up."""
    chosen = np.random.default_rng([seed, len(jobs)]).permutation(len(jobs))[: (len(jobs) + 1) // 2]
    return tuple(jobs[number] for number in sorted(chosen))
