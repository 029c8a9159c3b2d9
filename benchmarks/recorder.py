"""What does recording cost the engine's thread, and how many steps a second reach the disk?

One thread plays the engine. It reports steps to the recorder (start, two hidden states, a forecast at each moment,
completion, and after every tenth step the end of its workflow) at a given rate and sleeps in between; the recorder's
own thread writes at the same time. The cost of a step is the wall time of all its calls, including waits for the
interpreter lock; its CPU time excludes other work of the machine. The baseline is a copy of the two states, the least
possible work. Variants run in turns, and figures are medians over rounds.

Then steps are offered at a rate for some seconds, and counted: those on disk, read back from there, and those dropped.
"CPU µs to write" is the CPU time of the recorder's thread a step: a million over it is what a whole core could write.

    python benchmarks/recorder.py [--seconds 5] [--rounds 5] [--rate 10000] [--size 2560] [--folder TEMPORARY]

Prints two tables, and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from presage.datasets.adapters.recording import batches, engines
from presage.datasets.recording import RECORDED_FINISHED
from presage.serving_hooks.recorder.config import RecorderConfig
from presage.serving_hooks.recorder.recorder import StepRecorder, start
from presage.serving_hooks.workflows import RunningStep, Workflow
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import LiveForecast, LiveLengths

STEPS_A_WORKFLOW = 10
COPY = "copy of the states alone"
WAYS = {"ids alone": (False, False), "ids and forecasts": (False, True), "ids and states": (True, False)}
EVERYTHING = "ids, states, forecasts"


def known(count: int) -> list[RunningStep]:
    """The request data that an engine has before it reports a step."""
    steps: list[RunningStep] = []
    for i in range(count):
        step = Step("application", f"run-{i // STEPS_A_WORKFLOW}", f"agent-{i % 7}", i % STEPS_A_WORKFLOW)
        workflow = steps[-1].workflow if i % STEPS_A_WORKFLOW else Workflow(step)
        steps.append(RunningStep(f"request-{i}", step, workflow))
    return steps


def served(to: StepRecorder, step: RunningStep, states: Any, forecasts: Any) -> None:
    """A step, as reported by an engine's hooks."""
    i, request = step.step.number or 0, step.request_id
    to.begun(step, input_tokens=1000 + i % 500, cached_input_tokens=512)
    if states is not None:
        to.states([request], "prefill", states[0][None])
    if forecasts is not None:
        to.forecast(request, forecasts[0])
    to.completed(request, output_tokens=90, finish_reason="stop", state_comes=states is not None)
    if states is not None:
        to.states([request], "completion", states[1][None])
    if forecasts is not None:
        to.forecast(request, forecasts[1])
    if step.step.number == STEPS_A_WORKFLOW - 1:
        to.ended(step.workflow, RECORDED_FINISHED)


def paced(call: Callable[[int], object], rate: float, seconds: float) -> tuple[list[float], list[float]]:
    """Call at a fixed rate for a fixed time; µs and CPU µs of each call."""
    taken, worked = [], []
    begun = time.perf_counter()
    for i in range(int(rate * seconds)):
        cpu, before = time.thread_time_ns(), time.perf_counter_ns()
        call(i)
        taken.append((time.perf_counter_ns() - before) / 1000)
        worked.append((time.thread_time_ns() - cpu) / 1000)
        early = begun + (i + 1) / rate - time.perf_counter()
        if early > 0:
            time.sleep(early)
    return taken, worked


def made_forecasts(agents: int = 20, steps: int = 3) -> tuple[LiveForecast, LiveForecast]:
    chances = np.full((steps, agents + 1), 1 / (agents + 1), np.float32)
    left = LiveLengths("champion", 900, (0.5, 0.9, 0.99), (120.0, 300.0, 600.0), 0, 3)
    names = tuple(f"agent-{i}" for i in range(agents))
    one, other = (
        LiveForecast("champion", 900, moment, chances, names, 7, None, left) for moment in ("prefill", "completion")
    )
    return one, other


def recorded(folder: Path, states: bool) -> RecorderConfig:
    return RecorderConfig(folder=str(folder), states="both" if states else "off", max_mb=2**20)


def price(folder: Path, states: Any, rounds: int, rate: float, seconds: float) -> dict[str, dict[str, float]]:
    """µs a step in the engine's thread."""
    seen: dict[str, list[tuple[float, ...]]] = {}
    steps = known(int(rate * seconds))
    for turn in range(rounds):
        ways: dict[str, tuple[bool, bool] | None] = {COPY: None, **WAYS, EVERYTHING: (True, True)}
        for name, way in ways.items():
            if way is None:
                taken, worked = paced(lambda _: (states[0].copy(), states[1].copy()), rate, seconds)
            else:
                to = start(recorded(folder / f"{turn}-{name}", way[0]), model="model")
                given, said = states if way[0] else None, made_forecasts() if way[1] else None
                taken, worked = paced(
                    lambda i, to=to, given=given, said=said: served(to, steps[i], given, said), rate, seconds
                )
                to.close()
            seen.setdefault(name, []).append(
                (float(np.median(taken)), float(np.quantile(taken, 0.99)), float(np.median(worked)))
            )
    return {
        name: {
            key: statistics.median(run[i] for run in runs) for i, key in enumerate(("median_us", "p99_us", "cpu_us"))
        }
        for name, runs in seen.items()
    }


def sustained(folder: Path, states: Any, rate: float, seconds: float) -> dict[str, float]:
    """Steps offered at a rate, and where they went."""
    to = start(recorded(folder, True), model="model")
    begun = time.perf_counter()
    steps = known(int(rate * seconds))
    others = time.process_time() - time.thread_time()
    taken, worked = paced(lambda i: served(to, steps[i], states, None), rate, seconds)
    offered_s = time.perf_counter() - begun
    to.close()
    closed_s = time.perf_counter() - begun
    writing_s = time.process_time() - time.thread_time() - others
    counts = to.status().counts
    lost: Counter[str] = Counter()
    on_disk = whole = 0
    for engine in engines(folder):
        for batch, _ in batches(engine, "steps", None, lost):
            on_disk += batch.num_rows
            whole += batch.num_rows - max(batch["prefill_state"].null_count, batch["completion_state"].null_count)
    dropped = len(taken) - on_disk
    assert not lost
    assert on_disk == counts["written: steps"]
    # Ends of workflows wait in the same queue, and are counted with what it drops.
    assert dropped <= counts.get("dropped: queue full", 0) + counts.get("lost: not written before the end", 0)
    return {
        "offered_per_s": len(taken) / offered_s,
        "on_disk_per_s": on_disk / closed_s,
        "on_disk": on_disk,
        "with_both_states": whole,
        "dropped_and_counted": dropped,
        "mib_per_s": sum(path.stat().st_size for path in folder.rglob("*.arrows")) / 2**20 / closed_s,
        "cpu_us_to_write": 1e6 * writing_s / on_disk,
        "median_us": float(np.median(taken)),
        "p99_us": float(np.quantile(taken, 0.99)),
        "cpu_us": float(np.median(worked)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=10_000.0, help="steps a second of the second table")
    parser.add_argument("--size", type=int, default=2560, help="numbers of a state")
    parser.add_argument("--folder", type=Path, help="where to write; else the folder for temporary files")
    chosen = parser.parse_args()
    draw = np.random.default_rng(0)
    states = [draw.standard_normal(chosen.size, np.float32).astype(np.float16) for _ in range(2)]
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        paid = price(folder, states, chosen.rounds, 500.0, chosen.seconds / 5)
        runs = [sustained(folder / f"rate-{i}", states, chosen.rate, chosen.seconds) for i in range(chosen.rounds)]
    flow = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    print(f"states of {chosen.size} numbers, float16; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print("| 500 steps a second | µs a step, median | × the copy | CPU µs | 99 % within |\n|---|---|---|---|---|")
    for way, row in paid.items():
        ratio = row["median_us"] / paid[COPY]["median_us"]
        print(f"| {way} | {row['median_us']:.1f} | {ratio:.1f} | {row['cpu_us']:.1f} | {row['p99_us']:.0f} |")
    print(
        "\n| offered steps/s | on disk steps/s | dropped, counted | MiB/s | CPU µs to write | µs a step | 99 % within |"
    )
    print("|---|---|---|---|---|---|---|")
    print(
        f"| {flow['offered_per_s']:,.0f} | {flow['on_disk_per_s']:,.0f} | {flow['dropped_and_counted']:,.0f} | "
        f"{flow['mib_per_s']:.0f} | {flow['cpu_us_to_write']:.0f} | {flow['median_us']:.1f} | {flow['p99_us']:.0f} |"
    )
    print(json.dumps({"benchmark": "recorder", "size": chosen.size, "engine_thread": paid, "sustained": flow}))


if __name__ == "__main__":
    main()
