"""What does each policy, and each forecast, bring on a real engine: tokens from the cache, first tokens, completion?

vLLM's own engine, with a model of random weights in which 2,048 prompt tokens cost about ten decode steps. Workflows
with retry loops (retry_loops.py) arrive by themselves, faster than vLLM alone serves them (`--load`), and the cache
holds a third of what is reused. Each pair draws other workflows and other arrivals; within a pair every variant serves
the same ones, in random order, with an empty cache:

    vLLM alone        vLLM's scheduler; served twice: the second time shows the error of the method
    shadow            all policies compute their decisions and act on none; with the trained models
    admission         only admission, without forecasts
    + priority        and shortest job first
    + eviction        and the order of free blocks: all policies, without forecasts
    + counts          and forecasts from online counts, which start empty: an installation without models
    + models          and the models of next agent, remaining length, return time and context growth, trained on
                      other workflows; a single agent has none of next agents
    - admission …     one of the three policies left out, with the models
    truth             all policies with the agents, tokens and pauses that were drawn

Seconds are CPU seconds of this process (model, scheduler, hooks and forecasts), so other load on the machine hardly
counts; pauses and idle times are skipped. Three other workloads are closed loops; their variants are vLLM alone and all
policies with counts, and with models:

    thrash     sessions of one agent whose conversation grows to 2,000 to 8,000 tokens, with short answers and pauses of
               tools, 2.5 times as many at once as the cache holds: vLLM recomputes nearly every prompt
    calm       the same sessions, as many at once as fill .9 of the cache: nothing is to gain
    decode     64 workflows of one step at once, with short prompts, long answers and cache enough: the hooks can only
               cost

    python benchmarks/real_engine.py [--pairs 10] [--workloads shared thrash calm decode] [--variants "+ counts" truth]

Needs vLLM; 10 pairs of a workload take one to two hours. Prints a line a run; then a table of medians over pairs and
of geometric means of the ratios to vLLM alone with 95 % intervals (Student's t over pairs); then one JSON line.
"""

from __future__ import annotations

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the engine can be given another scheduler
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import gc
import heapq
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from retry_loops import AGENTS, TYPE, VOCABULARY, Planned, Style, Written, draw, traced, working_set

from presage.testing.models import save_qwen

if TYPE_CHECKING:
    from presage.serving_hooks.forecasting.forecasts import Forecasts

BLOCK, MOST_BLOCKS, MODEL_LENGTH = 32, 4096, 8192
PAUSE_S: Final = 0.02
"""Of one of the iterations in which pauses are drawn: a pause is 0.4 s at the mean."""
TAUGHT, TAUGHT_SEED = 400, 1_000_000
"""Workflows the models learn from, and the seed they are drawn by."""
AT_ONCE: Final = 24
"""Workflows at once by which the cache is sized and vLLM's work on a workflow is measured."""

Modes = Mapping[str, Any]


def only(*policies: str) -> Modes:
    """The mode in which these policies act."""
    return {"default": "off", "policies": dict.fromkeys(policies, "on")}


ALL: Final = only("admission", "priority", "eviction")
VARIANTS: Final[Mapping[str, tuple[str, Modes]]] = {
    "vLLM again": ("", {}),
    "shadow": ("models", {"default": "shadow"}),
    "admission": ("none", only("admission")),
    "+ priority": ("none", only("admission", "priority")),
    "+ eviction": ("none", ALL),
    "+ counts": ("counts", ALL),
    "+ models": ("models", ALL),
    "- admission": ("models", only("priority", "eviction")),
    "- priority": ("models", only("admission", "eviction")),
    "- eviction": ("models", only("admission", "priority")),
    "truth": ("truth", ALL),
}
"""Forecasts and modes of each variant beside vLLM alone; without forecasts it is vLLM alone."""
ALONE: Final = "vLLM alone"
LESS_IS_BETTER: Final = {
    "first token p50": lambda ran: float(np.quantile(ran.first_tokens_s, 0.5)),
    "p99": lambda ran: float(np.quantile(ran.first_tokens_s, 0.99)),
    "completion mean": lambda ran: float(np.mean(list(ran.completions_s.values()))),
    "completion p99": lambda ran: float(np.quantile(list(ran.completions_s.values()), 0.99)),
    "CPU s": lambda ran: ran.busy_s,
}
"""Figures of a run, seconds."""


class VirtualClock:
    """A clock that advances with CPU time or wall time, and that can wait."""

    def __init__(self, kind: str = "cpu") -> None:
        self._wall, self._skipped = kind == "wall", 0.0

    def __call__(self) -> float:
        """Seconds."""
        return time.monotonic() if self._wall else time.process_time() + self._skipped

    def wait_until(self, at_s: float) -> None:
        """Waits until this time."""
        more = max(0.0, at_s - self())
        if self._wall:
            time.sleep(more)
        else:
            self._skipped += more


@dataclass
class Served:
    """The result of a scheduler; times in seconds of the clock.

    Attributes:
        first_tokens_s: of each request, from its arrival to its first token.
        completions_s: of each workflow, from its arrival to the end of its last answer.
        busy_s: in steps of the engine.
        answers: token ids by workflow and step.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    iterations: int = 0
    busy_s: float = 0.0
    makespan_s: float = 0.0
    first_tokens_s: list[float] = field(default_factory=list)
    completions_s: dict[str, float] = field(default_factory=dict)
    answers: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the cache."""
        return self.cached_tokens / self.prompt_tokens


def start(folder: Path, **model: Any) -> Any:
    """Starts an engine with a model of random weights; `model` overrides those of the tiny model."""
    from vllm import LLM

    save_qwen(folder, length=MODEL_LENGTH, **model)
    return LLM(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=MODEL_LENGTH,
        block_size=BLOCK,
        num_gpu_blocks_override=MOST_BLOCKS,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        async_scheduling=False,
        seed=0,
    )


def give_scheduler(llm: Any, kind: type[Any], blocks: int, settings: Mapping[str, Any]) -> Any:
    """Gives the engine a new scheduler with an empty cache of this many blocks."""
    core = llm.llm_engine.engine_core.engine_core
    old = core.scheduler
    while old.has_requests():  # the worker has to hear who has finished
        llm.llm_engine.step()
    old.vllm_config.additional_config = {"presage": dict(settings)}
    core.scheduler = kind(
        vllm_config=old.vllm_config,
        kv_cache_config=replace(old.kv_cache_config, num_blocks=blocks),
        structured_output_manager=core.structured_output_manager,
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )
    return core.scheduler


def serve(
    llm: Any,
    workflows: Mapping[str, Sequence[Planned]],
    style: Style,
    clock: VirtualClock,
    *,
    arrivals: Sequence[float] = (),
    at_once: int = 0,
    pause_s: float = PAUSE_S,
    plain: bool = False,
) -> Served:
    """Serves all workflows.

    Args:
        llm: the engine.
        workflows: steps by workflow id.
        style: of the prompts.
        clock: of the engine's scheduler.
        arrivals: of the workflows in their order, seconds from now; empty for a closed loop.
        at_once: workflows at a time of a closed loop.
        pause_s: seconds of one of the iterations in which pauses are drawn.
        plain: send no metadata: the requests belong to no workflow.
    """
    from vllm import SamplingParams

    engine, served = llm.llm_engine, Served()
    written = {name: Written(style) for name in workflows}
    coming, turn, begun = iter(workflows), itertools.count(), clock()
    wakes = [(begun + at_s, next(turn), name, 0) for at_s, name in zip(arrivals, coming, strict=False)]
    wakes += [(begun, next(turn), name, 0) for name in itertools.islice(coming, at_once)]
    heapq.heapify(wakes)
    came: dict[str, float] = {}
    running: dict[str, tuple[str, int, float]] = {}
    silent: set[str] = set()

    def send(at_s: float, name: str, number: int) -> None:
        step, last = workflows[name][number], number == len(workflows[name]) - 1
        sent = {"workflow_type": TYPE, "workflow_id": name, "agent": step.agent, "step": number, "workflow_end": last}
        wanted = SamplingParams(
            temperature=0.0,
            max_tokens=step.answer,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if plain else sent,
        )
        prompt, request = written[name].prompt(step), f"{name}.{number}"
        came.setdefault(name, at_s)
        served.prompt_tokens += len(prompt)
        running[request] = name, number, at_s
        silent.add(request)
        engine.add_request(request, {"prompt_token_ids": prompt}, wanted)

    def ended(answer: Any, now: float) -> None:
        name, number, _ = running.pop(answer.request_id)
        tokens, steps = tuple(answer.outputs[0].token_ids), workflows[name]
        served.cached_tokens += answer.num_cached_tokens
        served.answers[name, number] = tokens
        written[name].answered(steps[number], tokens)
        if number + 1 < len(steps):
            heapq.heappush(wakes, (now + steps[number + 1].pause * pause_s, next(turn), name, number + 1))
            return
        served.completions_s[name] = now - came[name]
        if (after := next(coming, None)) is not None:
            heapq.heappush(wakes, (now, next(turn), after, 0))

    while wakes or running:
        if not running:
            clock.wait_until(wakes[0][0])
        while wakes and wakes[0][0] <= clock():
            at_s, _, name, number = heapq.heappop(wakes)
            send(at_s, name, number)
        before = clock()
        answers = engine.step() if running else []
        now = clock()
        served.busy_s += now - before
        served.iterations += 1
        for answer in answers:
            if answer.request_id in silent:
                silent.discard(answer.request_id)
                served.first_tokens_s.append(now - running[answer.request_id][2])
            if answer.finished:
                ended(answer, now)
    served.makespan_s = clock() - begun
    return served


def teach(kind: Workload, folder: Path) -> None:
    """Trains a model of each kind on other workflows of the same kind, in folders of `folder`; not if they are there.

    Workflows of one agent have no next-agent model: there is no other agent to forecast.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from presage.datasets.schema import conform
    from presage.datasets.schema.validate import validate
    from presage.training.length.train import train_lengths
    from presage.training.next_agent.train import train
    from presage.training.return_time.train import train_return_times

    if (folder / "return-time").is_dir():
        return
    rows = traced(kind.draw(TAUGHT, TAUGHT_SEED), kind.style, pause_s=PAUSE_S)
    table = validate(conform(pa.Table.from_pylist(rows), "drawn"), "drawn")
    if pc.count_distinct(table["agent"]).as_py() > 1:
        train(table, None, states="none", baselines=()).save(folder / "next-agent")
    train_lengths(table, None, baselines=()).save(folder / "lengths")
    train_lengths(table, None, baselines=(), target="final-context").save(folder / "context-growth")
    train_return_times(table, None, baselines=()).save(folder / "return-time")


def forecasts_of(
    kind: str, workflows: Mapping[str, Sequence[Planned]], models: Path, clock: Callable[[], float]
) -> Forecasts:
    """The sources of forecasts: none, counts, models, or truth."""
    from presage.replay.forecasts import contexts, return_times, source
    from presage.replay.workload import JobStep, ReplayJob
    from presage.serving_hooks.forecasting.forecasts import Forecasts

    if kind == "none":
        return Forecasts()
    named = {"counts": ("counts", None, "counts"), "truth": ("oracle", None, "oracle")}
    trained = models / "next-agent"  # workflows of one agent have none
    agents, lengths, returns = named.get(
        kind, (str(trained) if trained.is_dir() else "counts", str(models / "lengths"), str(models / "return-time"))
    )
    jobs = []
    for name, steps in workflows.items():
        planned = [
            JobStep(one.agent, None, 0, 0, 0, 0, one.answer, (at - 1,) if at else (), one.pause * PAUSE_S, one.answer)
            for at, one in enumerate(steps)
        ]
        jobs.append(ReplayJob(TYPE, name, tuple(planned)))
    asked = source(agents, lengths)(jobs, clock)
    growth = contexts(str(models / "context-growth"), clock) if kind == "models" else None
    return Forecasts(asked, asked, returns=return_times(returns)(jobs, clock), contexts=growth)


def single_steps(count: int, seed: int) -> dict[str, list[Planned]]:
    """Twice as many workflows of one step each, with short prompts and long answers."""
    rng = random.Random(seed)
    return {
        f"p{seed}-{number}": [
            Planned(rng.choice(AGENTS), [rng.randrange(VOCABULARY) for _ in range(32)], rng.randint(150, 250), 0)
        ]
        for number in range(2 * count)
    }


def sessions(count: int, seed: int) -> dict[str, list[Planned]]:
    """Workflows of one agent whose conversation grows: a task, then what tools returned."""
    rng = random.Random(seed)
    drawn: dict[str, list[Planned]] = {}
    for number in range(count):
        steps, tokens = [], 160 + 200  # the fixed part of each prompt, and the longest answer and its margin
        for _ in range(min(40, int(rng.lognormvariate(2.5, 0.5)) + 3)):
            added = rng.randint(400, 1600) if not steps else min(1200, int(rng.lognormvariate(5.3, 0.7)) + 20)
            answer = rng.randint(6, 24)
            tokens += added + answer
            if tokens > MODEL_LENGTH:
                break
            new = [rng.randrange(VOCABULARY) for _ in range(added)]
            steps.append(Planned("solver", new, answer, int(rng.expovariate(1 / 20)) if steps else 0))
        drawn[f"s{seed}-{number}"] = steps
    return drawn


@dataclass(frozen=True)
class Workload:
    """What is served.

    Attributes:
        draw: workflows by id, from their number and a seed.
        style: of the prompts.
        at_once: workflows at a time of a closed loop; 0: they arrive by themselves.
        cached: workflows whose mean working set the cache holds; 0: MOST_BLOCKS.
        variants: beside vLLM alone, unless `--variants` are given.
    """

    draw: Callable[[int, int], dict[str, list[Planned]]]
    style: Style
    at_once: int = 0
    cached: float = AT_ONCE / 3
    variants: tuple[str, ...] = tuple(VARIANTS)

    def blocks(self) -> int:
        """Of the cache."""
        held = working_set(self.draw(200, TAUGHT_SEED), self.style) if self.cached else 0.0
        return int(self.cached * held / BLOCK) or MOST_BLOCKS


WORKLOADS: Final = {
    "shared": Workload(draw, "shared"),
    "own": Workload(draw, "own"),
    "thrash": Workload(sessions, "own", AT_ONCE, AT_ONCE / 2.5, ("vLLM again", "+ counts", "+ models")),
    "calm": Workload(sessions, "own", AT_ONCE, AT_ONCE / 0.9, ("vLLM again", "+ counts", "+ models")),
    "decode": Workload(single_steps, "shared", 64, 0, ("vLLM again", "+ models")),
}


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of the ratios and its 95 % interval, Student's t over pairs; the mean alone from one pair."""
    from scipy.stats import t

    logs = np.log(ratios)
    half = t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5 if len(logs) > 1 else np.nan
    mean, low, high = np.exp([logs.mean(), logs.mean() - half, logs.mean() + half]).tolist()
    return mean, low, high


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--workflows", type=int, default=100, help="in each run")
    parser.add_argument("--workloads", nargs="+", default=["shared", "own"], choices=list(WORKLOADS))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), help="all, or those of the workload")
    parser.add_argument("--load", type=float, default=2.5, help="arrivals over vLLM's own throughput")
    parser.add_argument("--hidden-size", type=int, default=512, help="of the model that is made")
    parser.add_argument("--settings", type=json.loads, default={}, help="object of additional_config's `presage`")
    parser.add_argument("--models", type=Path, help="folder to keep the trained models in")
    args = parser.parse_args()
    report = {}
    with tempfile.TemporaryDirectory() as scratch:
        llm = start(Path(scratch) / "model", hidden_size=args.hidden_size, inner=4 * args.hidden_size)
        for workload in args.workloads:
            report[workload] = measured(llm, workload, args, (args.models or Path(scratch)) / workload)
    print(json.dumps({"benchmark": "real_engine", "load": args.load, "settings": args.settings, **report}))


def measured(llm: Any, workload: str, args: argparse.Namespace, models: Path) -> dict[str, Any]:
    """Serves a workload in pairs; prints its runs and its table."""
    # vLLM looks through all modules that are loaded when it starts, and stumbles over some.
    from vllm.v1.core.sched.scheduler import Scheduler

    from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler

    kind, clock = WORKLOADS[workload], VirtualClock()
    variants = args.variants or list(kind.variants)
    if "models" in {VARIANTS[name][0] for name in variants}:
        teach(kind, models)
    blocks = kind.blocks()

    def run(name: str, workflows: Mapping[str, Sequence[Planned]], **load: Any) -> Served:
        source, mode = VARIANTS.get(name, ("", {}))
        scheduler: type[Any] = Scheduler
        if source:
            told = forecasts_of(source, workflows, models, clock)
            called = {"forecasts": lambda self, config: told, "clock": staticmethod(clock)}
            scheduler = type("Told", (SyncWorkflowScheduler,), called)
        given = give_scheduler(llm, scheduler, blocks, {"mode": mode, **args.settings} if source else {})
        gc.collect()
        served = serve(llm, workflows, kind.style, clock, **load)
        served.status = given.presage_status() if source else {}
        return served

    for name in variants:  # everything is compiled after this
        run(name, kind.draw(6, TAUGHT_SEED + 1), at_once=6)
    rate = 0.0
    if not kind.at_once:
        whole = run(ALONE, kind.draw(args.workflows, TAUGHT_SEED + 2), at_once=AT_ONCE)
        rate = args.load * args.workflows / whole.busy_s
    load = f"{kind.at_once} workflows at once" if kind.at_once else f"{rate:.2f} workflows a second"
    print(f"\n{workload}: {blocks} blocks, {load}", flush=True)
    head = ("hit rate", *LESS_IS_BETTER, "iterations", "other answers")
    print(f"{'':14}" + "".join(f"{name:>17}" for name in head))
    runs: list[dict[str, Served]] = []
    for seed in range(args.pairs):
        rng = random.Random(seed)
        workflows = kind.draw(args.workflows, seed)
        arrivals = [] if kind.at_once else list(itertools.accumulate(rng.expovariate(rate) for _ in workflows))
        order = [ALONE, *variants]
        rng.shuffle(order)
        pair = {}
        for name in order:
            pair[name] = run(name, workflows, arrivals=arrivals, at_once=kind.at_once)
        runs.append(pair)
        for name in (ALONE, *variants):
            ran = pair[name]
            figures = [of(ran) for of in LESS_IS_BETTER.values()]
            other = sum(pair[ALONE].answers[at] != said for at, said in ran.answers.items())
            print(f"{name:14}{ran.hit_rate:17.3f}" + "".join(f"{value:17.2f}" for value in figures), end="")
            print(f"{ran.iterations:17}{other:17}", flush=True)
    table = {name: row(runs, name) for name in (ALONE, *variants)}
    print(f"\n{workload}, {len(runs)} pairs: medians for {ALONE}, then ratios to it with 95 % intervals")
    print(f"{'':14}" + "".join(f"{name:>21}" for name in head[: 1 + len(LESS_IS_BETTER)]))
    for name, cells in table.items():
        shown = (
            f"{cell[0]:.3f}" if len(cell) == 1 else f"{cell[0]:.2f} ({cell[1]:.2f} to {cell[2]:.2f})"
            for cell in cells.values()
        )
        print(f"{name:14}" + "".join(f"{text:>21}" for text in shown))
    return {
        "pairs": len(runs),
        "blocks": blocks,
        "rate": rate,
        "table": table,
        "runs": [{name: told(ran, pair[ALONE]) for name, ran in pair.items()} for pair in runs],
    }


def row(runs: Sequence[Mapping[str, Served]], name: str) -> dict[str, list[float]]:
    """A variant's cells: of vLLM alone the median, else the mean ratio and its interval."""
    figures: dict[str, Callable[[Served], float]] = {"hit rate": lambda ran: ran.hit_rate, **LESS_IS_BETTER}
    if name == ALONE:
        return {figure: [float(np.median([of(pair[ALONE]) for pair in runs]))] for figure, of in figures.items()}
    return {
        figure: list(interval([(of(pair[name]) or 1e-9) / (of(pair[ALONE]) or 1e-9) for pair in runs]))
        for figure, of in figures.items()
    }


def told(ran: Served, alone: Served) -> dict[str, Any]:
    """A run for the JSON line."""
    return {
        "prompt_tokens": ran.prompt_tokens,
        "cached_tokens": ran.cached_tokens,
        "iterations": ran.iterations,
        "makespan_s": round(ran.makespan_s, 3),
        **{name: round(of(ran), 4) for name, of in LESS_IS_BETTER.items()},
        "other_answers": sum(alone.answers[at] != said for at, said in ran.answers.items()),
        "status": ran.status,
    }


if __name__ == "__main__":
    main()
