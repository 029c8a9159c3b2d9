"""What do the hooks add to an iteration of vLLM's scheduler?

vLLM's own scheduler and KV-cache manager without a model: 50,000 blocks of 16 tokens, always 64 running and 500
waiting requests. Workflows of five steps share a prompt of their type and continue with their own history; a new step
or workflow follows each that ends. "schedule" is `schedule()`, "update" `update_from_output()`, "arrive" one
`add_request()`. "step" is all of these from one iteration to the next, before the model starts; "decode" are the
steps without prefill. "beside" is `get_grammar_bitmask()`, which vLLM calls while the model runs. "whole" is step
plus beside. All times are CPU times of the thread. With `--ahead` the engine schedules one iteration ahead, as on
GPUs, and all of it runs beside the model. Every variant takes turns with a stock scheduler of its own, so that a
machine of varying speed affects both alike.

The added time depends on how often requests come and go. The default, outputs of 10 to 120 tokens, means an arrival
and an end in nearly every iteration (eighty requests per second with iterations of 12 ms); `--output-tokens 100 600`
has longer answers. "arrivals", "ends" and "forecasts" are the numbers of each per step.

"added" is the difference of medians, and of 99th percentiles, to the stock scheduler: the variants choose other
requests, so single steps cannot be compared. Forecasts are drawn in advance, so the predictor's cost is excluded (see
forecast_latency.py), and so is its circuit breaker's.

    python benchmarks/vllm_overhead.py [--iterations 2000] [--waiting 500] [--output-tokens 10 120] [--ahead]
                                       [--variants …]

Needs vLLM 0.32. Prints a table of microseconds, one of events per step, and one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler, WorkflowScheduler
from presage.testing.engine import ScriptedEngine as Engine
from presage.testing.engine import ask, build
from presage.testing.forecasts import AGENTS, Noise

BLOCKS, SEQS, BUDGET, STEPS = 50_000, 64, 2048, 5
OUTPUT = (10, 120)
"""Tokens of an answer, at least and below."""
WARM = 2500
"""Iterations before any is counted, at that length: by then every block has been used once."""
TURN = 25
"""Iterations of one scheduler until it is the other's turn."""
BURST = 4
"""Workflows that begin between two iterations at most, while the engine fills."""
EVENTS = ("arrivals", "ends", "forecasts")
BESIDE = "beside"
CALLS = ("schedule", "update", "arrive", BESIDE, "step", "decode", "whole")
OFF: dict[str, Any] = {"priority": False, "eviction": False, "admission": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "hooks, all off": OFF,
    "priority": {**OFF, "priority": True},
    "eviction": {**OFF, "eviction": True},
    "admission": {**OFF, "admission": True},
    "all three": {},
    "and prefetch": {"prefetch": True},
}


class Drawn:
    """A source that returns forecasts drawn in advance."""

    def __init__(self) -> None:
        noise = Noise(0)
        self.seen = [noise.on_prefill() for _ in range(1000)]
        self.left = [float(tokens) for tokens in noise.draw.integers(10, 2000, 1000)]
        self.turn = self.forecasts = 0

    def on_prefill(self, *_: object, **__: object) -> Any:
        """The next one."""
        self.turn += 1
        self.forecasts += 1
        return self.seen[self.turn % len(self.seen)]

    on_completion = on_prefill

    def close(self, workflow: object) -> None:
        """Keeps nothing."""

    def remaining_tokens(self, *_: object) -> float:
        """A random number: the order must cause as much work as without the hooks."""
        self.turn += 1
        return self.left[self.turn % len(self.left)]


class ForDrawn:
    """Mixin for a scheduler whose forecasts cost nothing."""

    def forecasts(self, config: PresageConfig) -> Forecasts:
        """Drawn ones."""
        self.drawn = Drawn()
        return Forecasts(self.drawn, self.drawn)


class Hooked(ForDrawn, SyncWorkflowScheduler):
    """The synchronous scheduler."""


class HookedAhead(ForDrawn, WorkflowScheduler):
    """The scheduler one iteration ahead."""


class Timed:
    """Records the time of each call of a scheduler's methods, and their sum per step."""

    def __init__(self, scheduler: Any) -> None:
        self.taken: dict[str, list[int]] = {name: [] for name in CALLS}
        self._now = self._beside = 0
        for method, name in (
            ("schedule", "schedule"),
            ("update_from_output", "update"),
            ("add_request", "arrive"),
            ("get_grammar_bitmask", BESIDE),
        ):
            setattr(scheduler, method, self._timed(getattr(scheduler, method), name))

    def stepped(self, decodes: bool) -> None:
        """Ends an iteration with its arrivals; `decode` if it only decodes."""
        self.taken["step"].append(self._now)
        if decodes:
            self.taken["decode"].append(self._now)
        self.taken["whole"].append(self._now + self._beside)
        self._now = self._beside = 0

    def _timed(self, call: Any, name: str) -> Any:
        def timed(*args: Any) -> Any:
            begun = time.thread_time_ns()
            answer = call(*args)
            took = time.thread_time_ns() - begun
            self.taken[name].append(took)
            if name == BESIDE:
                self._beside += took
            else:
                self._now += took
            return answer

        return timed


@dataclass
class Under:
    """A running workflow."""

    name: str
    kind: int
    step: int = 0
    history: list[int] = field(default_factory=list)


class Load:
    """An endless load with a constant number of requests in the engine."""

    def __init__(self, scheduler: Any, at_once: int, output: tuple[int, int]) -> None:
        self.scheduler, self.at_once, self.output = scheduler, at_once, output
        self.draw = random.Random(0)
        self.system = {kind: [self.draw.randrange(500) for _ in range(400)] for kind in range(8)}
        self.under_way: dict[str, Under] = {}
        self.begun = 0

    def arrive(self, ended: list[str]) -> None:
        """Replaces ended requests."""
        for request_id in ended:
            of = self.under_way.pop(request_id)
            if of.step + 1 < STEPS:
                self.send(Under(of.name, of.kind, of.step + 1, of.history))
        for _ in range(min(BURST, self.at_once - len(self.under_way))):
            self.send(Under(f"w{self.begun}", self.begun % 8))
            self.begun += 1

    def send(self, of: Under) -> None:
        """Sends the next step of a workflow."""
        draw = self.draw
        of.history = of.history + [draw.randrange(500) for _ in range(draw.randrange(60, 300))]
        request = ask(
            f"{of.name}.{of.step}",
            self.system[of.kind] + of.history,
            draw.randrange(*self.output),
            workflow_type=f"t{of.kind}",
            workflow_id=of.name,
            agent=draw.choice(AGENTS),
            workflow_end=of.step == STEPS - 1,
        )
        self.under_way[request.request_id] = of
        self.scheduler.add_request(request)


class Run:
    """One scheduler under load.

    Args:
        folder: for the configuration of a model.
        settings: of the hooks; None for vLLM's own scheduler.
        waiting: constant number of waiting requests.
        output: tokens of an answer, minimum and exclusive maximum.
        ahead: schedules one iteration ahead.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any] | None, waiting: int, output: tuple[int, int], ahead: bool
    ) -> None:
        own, hooked = (AsyncScheduler, HookedAhead) if ahead else (Scheduler, Hooked)
        kind = own if settings is None else hooked
        self.scheduler = build(folder, kind, blocks=BLOCKS, presage=settings, seqs=SEQS, tokens=BUDGET)
        self.timed, self.engine = Timed(self.scheduler), Engine(self.scheduler, ahead)
        self._load, self._waiting = Load(self.scheduler, SEQS + waiting, output), waiting
        self._done, self._before = 0, (0, 0)

    def count(self) -> None:
        """Starts to count; engine and cache are full by now."""
        self._before = len(self.engine.ended), forecasts(self.scheduler)
        for taken in self.timed.taken.values():
            taken.clear()

    def go(self, iterations: int) -> None:
        """Runs iterations."""
        for _ in range(iterations):
            self._load.arrive(self.engine.ended[self._done :])
            self._done = len(self.engine.ended)
            self.engine.step()
            tokens, _, _ = self.engine.log.pop()
            self.timed.stepped(decodes=max(tokens.values(), default=0) == 1)

    def a_step(self) -> dict[str, float]:
        """Events a step, by name."""
        assert len(self.scheduler.running) > 0.9 * SEQS
        assert len(self.scheduler.waiting) >= 0.9 * self._waiting
        taken, ended = self.timed.taken, len(self.engine.ended) - self._before[0]
        counted = len(taken["arrive"]), ended, forecasts(self.scheduler) - self._before[1]
        return {name: round(count / len(taken["step"]), 3) for name, count in zip(EVENTS, counted, strict=True)}


def side_by_side(
    folder: Path, settings: dict[str, Any], waiting: int, iterations: int, output: tuple[int, int], ahead: bool
) -> tuple[Run, Run]:
    """Runs vLLM's own scheduler and a variant in turns."""
    both = Run(folder, None, waiting, output, ahead), Run(folder, settings, waiting, output, ahead)
    gc.collect()
    gc.freeze()  # as vLLM does when its engine has started
    for run in both:
        run.go(WARM * sum(output) // sum(OUTPUT))
        run.count()
    for _ in range(iterations // TURN):
        for run in both:
            run.go(TURN)
    gc.unfreeze()
    return both


def forecasts(scheduler: Any) -> int:
    """Number of next-agent forecasts."""
    return scheduler.drawn.forecasts if isinstance(scheduler, ForDrawn) else 0


def quantiles(taken: list[int]) -> tuple[float, float]:
    """Median and 99th percentile, microseconds."""
    return statistics.median(taken) / 1000, sorted(taken)[int(0.99 * len(taken))] / 1000


def said(run: Run) -> dict[str, tuple[float, float]]:
    """Median and 99th percentile of each call."""
    return {call: quantiles(of) for call, of in run.timed.taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--waiting", type=int, default=500)
    parser.add_argument("--output-tokens", type=int, nargs=2, default=OUTPUT, metavar=("LOW", "HIGH"))
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    args = parser.parse_args()
    output = args.output_tokens[0], args.output_tokens[1]
    report: dict[str, Any] = {}
    print(f"{'':24}" + "".join(f"{call:>10}{'p99':>8}" for call in (*CALLS, "added", "decode+", "whole+")))
    with tempfile.TemporaryDirectory() as folder:
        for name in args.variants:
            stock, own = side_by_side(Path(folder), VARIANTS[name], args.waiting, args.iterations, output, args.ahead)
            beside, table = said(stock), said(own)
            for added, of in (("added", "step"), ("added to decode", "decode"), ("added to whole", "whole")):
                table[added] = table[of][0] - beside[of][0], table[of][1] - beside[of][1]
            for called, row in (("  stock beside it", beside), (name, table)):
                print(f"{called:24}" + "".join(f"{median:10.1f}{p99:8.1f}" for median, p99 in row.values()), flush=True)
            report[name] = {
                call: {"us": round(median, 1), "p99_us": round(p99, 1)} for call, (median, p99) in table.items()
            }
            report[name] |= {"stock": {call: [round(us, 1) for us in of] for call, of in beside.items()}}
            report[name] |= {"a step": own.a_step()}
    print(f"\n{'a step':16}" + "".join(f"{event:>12}" for event in EVENTS))
    for name, of in report.items():
        print(f"{name:16}" + "".join(f"{of['a step'][event]:12.3f}" for event in EVENTS))
    settings = {"waiting": args.waiting, "iterations": args.iterations, "output_tokens": output, "ahead": args.ahead}
    print(json.dumps({"benchmark": "vllm_overhead", **settings, **report}))


if __name__ == "__main__":
    main()
