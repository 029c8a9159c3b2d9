"""How much memory do the hooks in vLLM's scheduler take: per block, per workflow, and after 100,000 workflows?

vLLM's own scheduler and KV-cache manager without a model. "A block": 50,000 blocks, all written by running workflows.
"A workflow": 10,000 idle workflows of two steps each, forecast by a small predictor of a synthetic process with
online counts behind it; the predictor's own state is excluded. Both are traced Python memory, with the hooks minus
without. Two settings that are on by default are listed separately: "explain", a ring of the last forecasts of all
workflows, is included; "truth", which compares forecasts with outcomes, is what the same workflows take in addition.
"Soak": short workflows one after the other; resident memory and blocks of Python's allocator at every fifth of the
way.

    python benchmarks/vllm_memory.py [--soak 100000]

Needs vLLM 0.32. Prints tables and one JSON line.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import gc
import json
import resource
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from presage.datasets.synthetic.workflows import generate
from presage.predictors.next_agent.boosting import BoostingConfig
from presage.predictors.next_agent.network_weights import NetworkConfig
from presage.predictors.next_agent.parts import NextAgentConfig
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.forecasting.forecaster import Forecaster, VersionedForecaster
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler
from presage.testing.engine import ScriptedEngine as Engine
from presage.testing.engine import ask, build
from presage.training.next_agent.train import train

BLOCKS, BLOCK, WORKFLOWS = 50_000, 16, 10_000
AGENTS = ("planner", "coder", "tester")
Made = Callable[[], type[Any]]


def learned() -> NextAgentPredictor:
    """A small predictor of a synthetic process."""
    config = NextAgentConfig(network=NetworkConfig(epochs=3), boosting=BoostingConfig(rounds=5))
    return train(generate("retry", 80, 0, state_size=16).table, None, config, baselines=("markov-1",)).predictor


def send(engine: Engine, workflow: int, step: int, tokens: int, last: bool) -> None:
    """Sends a step of a workflow with a prompt of its own."""
    prompt = [workflow % 500, workflow // 500, *range(tokens * (step + 1) - 2)]
    said = {"workflow_type": "retry", "workflow_id": f"w{workflow}", "agent": AGENTS[step], "step": step}
    engine.scheduler.add_request(ask(f"w{workflow}.{step}", prompt, 2, **said, workflow_end=last))


def forget(engine: Engine) -> None:
    """Drops what the harness itself keeps."""
    for kept in (engine.hits, engine.said, engine.ended, engine.log):
        kept.clear()


def serve(engine: Engine, workflows: int, steps: int, tokens: int, end: bool, first: int = 0) -> None:
    """Serves workflows, 64 at a time."""
    for start in range(first, first + workflows, 64):
        for step in range(steps):
            for workflow in range(start, min(start + 64, first + workflows)):
                send(engine, workflow, step, tokens, end and step == steps - 1)
            engine.run()
        forget(engine)


def traced(folder: Path, kind: type[Any], workflows: int, steps: int, tokens: int) -> tuple[int, int]:
    """Bytes that a scheduler keeps for running workflows, and the part of the last forecasts."""
    gc.collect()
    tracemalloc.start()
    engine = Engine(build(folder, kind, blocks=BLOCKS, seqs=64, tokens=2048))
    serve(engine, workflows, steps, tokens, end=False)
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0]
    if kind is not Scheduler:
        engine.scheduler._last_forecasts._ring.clear()
        gc.collect()
    without_last = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return kept, kept - without_last


def resident() -> float:
    """Resident memory of the process, MB."""
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def soak(folder: Path, made: Made, workflows: int) -> list[dict[str, float]]:
    """Serves short workflows one after the other."""
    engine = Engine(build(folder, made(), blocks=1000, seqs=64, tokens=2048))
    levels = []
    for part in range(5):
        serve(engine, workflows // 5, 2, 32, end=True, first=part * (workflows // 5))
        gc.collect()
        levels.append(
            {
                "workflows": (part + 1) * (workflows // 5),
                "resident_mb": round(resident(), 2),
                "python_blocks": sys.getallocatedblocks(),
            }
        )
        print("{workflows:12}{resident_mb:14.2f}{python_blocks:16}".format(**levels[-1]), flush=True)
    assert all(engine.scheduler.presage_status()["on"].values())
    return levels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--soak", type=int, default=100_000)
    args = parser.parse_args()
    predictor = learned()
    state = predictor.open("retry").nbytes

    def forecast(truth: ForecastMonitor | None = None) -> type[Any]:
        # Tracing slows every call; what is late must not switch the predictor off.
        budget = Budget(deadline_s=60.0, hang_s=None)
        asked = VersionedForecaster(Forecaster(predictor, back_off=OnlineCounts(), budget=budget, monitor=truth))
        forecasts = {"forecasts": lambda self, config: Forecasts(asked, asked)}
        return type("Told", (SyncWorkflowScheduler,), forecasts)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        serve(Engine(build(folder, forecast(), blocks=1000)), 64, 2, 32, end=True)  # what is compiled is compiled
        served = (BLOCKS // 100, 1, 100 * BLOCK)
        block = (traced(folder, forecast(), *served)[0] - traced(folder, Scheduler, *served)[0]) / BLOCKS
        print(f"a block: {block:.0f} bytes")
        served = (WORKFLOWS, 2, 32)
        (kept, last), (stock, _) = traced(folder, forecast(), *served), traced(folder, Scheduler, *served)
        followed = traced(folder, forecast(ForecastMonitor()), *served)[0]
        workflow, explain, truth = (kept - stock) / WORKFLOWS - state, last / WORKFLOWS, (followed - kept) / WORKFLOWS
        print(f"a workflow: {workflow:.0f} bytes, and {state} of the predictor's state")
        print(f"explain: {explain:.0f} bytes of that; truth: {truth:.0f} bytes more")
        print(f"{'workflows':>12}{'resident MB':>14}{'Python blocks':>16}")
        levels = soak(folder, forecast, args.soak)
    report = {
        "block_bytes": round(block),
        "workflow_bytes": round(workflow),
        "explain_bytes": round(explain),
        "truth_bytes": round(truth),
        "state_bytes": state,
        "soak": levels,
    }
    print(json.dumps({"benchmark": "vllm_memory", **report}))


if __name__ == "__main__":
    main()
