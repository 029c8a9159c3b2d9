"""What do the hooks add to an iteration of vLLM's scheduler, against that scheduler itself?

vLLM's own scheduler and KV-cache manager without a model: 50,000 blocks of 16 tokens, up to 64 requests at once,
workflows of five steps that share a prompt of their type and go on with their own history. Rounds of the variants
take turns, so that a busy machine slows all alike. "schedule" is `schedule()`, "update" `update_from_output()`,
"arrive" `add_request()`; CPU time of the thread, and ratios to stock in the same round. Forecasts are drawn
beforehand: what a predictor costs is not in it (forecast_latency.py has that).

    python benchmarks/vllm_overhead.py [--workflows 120] [--rounds 5]

Needs vLLM 0.32. Prints a table of microseconds and of ratios to stock, and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "serving_hooks" / "in_vllm"))

from noise import AGENTS, Noise
from vllm_samples import AsyncScheduler, Engine, ask, build

from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.forecasts import Forecasts
from presage.serving_hooks.vllm.scheduler import WorkflowScheduler

BLOCKS, SEQS, BUDGET, STEPS = 50_000, 64, 2048, 5
VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "hooks, all off": {"priority": False, "eviction": False},
    "priority": {"eviction": False},
    "eviction": {"priority": False},
    "both": {},
    "and prefetch": {"prefetch": True},
}


class Drawn:
    """Forecasts drawn beforehand, given out in turn."""

    def __init__(self) -> None:
        noise = Noise(0)
        self.seen = [noise.on_prefill() for _ in range(1000)]
        self.turn = 0

    def on_prefill(self, *_: object, **__: object) -> Any:
        """The next one."""
        self.turn += 1
        return self.seen[self.turn % len(self.seen)]

    on_completion = on_prefill

    def close(self, workflow_type: str, workflow_id: str) -> None:
        """Keeps nothing."""

    def remaining_tokens(self, step: object, input_tokens: int) -> float:
        """A number that differs."""
        return float(input_tokens)


class Hooked(WorkflowScheduler):
    """With forecasts that cost nothing."""

    def forecasts(self, config: PresageConfig) -> Forecasts:
        """Drawn ones."""
        drawn = Drawn()
        return Forecasts(drawn, drawn)


class Timed:
    """Keeps the time of every call of a scheduler's methods."""

    def __init__(self, scheduler: Any) -> None:
        self.taken: dict[str, list[int]] = defaultdict(list)
        for method, name in (("schedule", "schedule"), ("update_from_output", "update"), ("add_request", "arrive")):
            setattr(scheduler, method, self._timed(getattr(scheduler, method), name))

    def _timed(self, call: Any, name: str) -> Any:
        def timed(*args: Any) -> Any:
            begun = time.thread_time_ns()
            answer = call(*args)
            self.taken[name].append(time.thread_time_ns() - begun)
            return answer

        return timed


def served(folder: Path, settings: dict[str, Any] | None, workflows: int) -> dict[str, list[int]]:
    """Nanoseconds of each call while so many workflows are served, two thirds of the slots busy."""
    kind = AsyncScheduler if settings is None else Hooked
    scheduler = build(folder, kind, blocks=BLOCKS, presage=settings, seqs=SEQS, tokens=BUDGET)
    timed, engine, draw = Timed(scheduler), Engine(scheduler, ahead=True), random.Random(0)
    system = {kind: [draw.randrange(500) for _ in range(400)] for kind in range(8)}
    waiting = [(f"w{number}", number % 8, 0, list[int]()) for number in range(workflows)]
    under_way: dict[str, tuple[str, int, int, list[int]]] = {}
    done = 0
    while waiting or under_way:
        while waiting and len(under_way) < SEQS * 2 // 3:
            name, kind_, step, history = waiting.pop(0)
            history = history + [draw.randrange(500) for _ in range(draw.randrange(60, 300))]
            request = ask(
                f"{name}.{step}",
                system[kind_] + history,
                draw.randrange(10, 120),
                workflow_type=f"t{kind_}",
                workflow_id=name,
                agent=draw.choice(AGENTS),
                workflow_end=step == STEPS - 1,
            )
            scheduler.add_request(request)
            under_way[request.request_id] = (name, kind_, step, history)
        engine.step()
        engine.log.clear()
        for finished in engine.ended[done:]:
            name, kind_, step, history = under_way.pop(finished)
            if step + 1 < STEPS:
                waiting.append((name, kind_, step + 1, history))
        done = len(engine.ended)
    return timed.taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workflows", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    medians: dict[tuple[str, str], list[float]] = defaultdict(list)
    tails: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for name, settings in VARIANTS.items():
                for call, taken in served(Path(folder), settings, args.workflows).items():
                    medians[name, call].append(statistics.median(taken) / 1000)
                    tails[name, call].append(sorted(taken)[int(0.99 * len(taken))] / 1000)
    report = {}
    print(f"{'':16}" + "".join(f"{call:>12}{'p99':>9}{'ratio':>7}" for call in ("schedule", "update", "arrive")))
    for name in VARIANTS:
        line, report[name] = f"{name:16}", {}
        for call in ("schedule", "update", "arrive"):
            median, p99 = statistics.median(medians[name, call]), statistics.median(tails[name, call])
            pairs = zip(medians[name, call], medians["stock", call], strict=True)
            ratio = statistics.median(own / stock for own, stock in pairs)
            line += f"{median:12.1f}{p99:9.1f}{ratio:7.2f}"
            report[name][call] = {"us": round(median, 1), "p99_us": round(p99, 1), "ratio": round(ratio, 3)}
        print(line)
    print(json.dumps({"benchmark": "vllm_overhead", "workflows": args.workflows, "rounds": args.rounds, **report}))


if __name__ == "__main__":
    main()
