"""How many scheduler steps pass between a hidden state and the decision it affects, and what does reading states cost?

Part one: vLLM's own scheduler and KV-cache manager without a model, one step ahead (as engines run on GPUs) and in
step. The worker's end of the connector is the real one and projects rows of 1,024 random numbers in float32 on the
CPU. The delay of a state begins in the step whose rows contain it and ends when eviction has the score made with it.
It is counted in calls of `schedule()`: 0 means that the score is there before the next step is scheduled. Every
prompt and every answer of a workflow's step counts; states that never arrive count as late.

Part two, in turns: no connector ("off"), a connector without readers ("idle"), and states read. CPU time of the
thread of `schedule()`, which creates the connector's metadata; of `update_from_output()`, which reads the states and
makes the second forecast of a step (drawn beforehand, so without the predictor's time); and of the worker's end.
Ratios are to "off" in the same round.

    python benchmarks/forecast_to_decision.py [--workflows 120] [--rounds 5]

Needs vLLM 0.32. Prints two tables and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from presage.features.moment import COMPLETION, MOMENTS, PREFILL
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler, WorkflowScheduler
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import LiveForecast
from presage.testing.engine import QWEN, ask, build
from presage.testing.engine import ScriptedEngine as Engine
from presage.testing.forecasts import AGENTS, Noise

BLOCKS, SEQS, BUDGET, STEPS, WIDTH = 50_000, 64, 2048, 5, 1024
QWEN["hidden_size"] = WIDTH
CONNECTOR = {
    "kv_connector": "StatesConnector",
    "kv_connector_module_path": "presage.serving_hooks.vllm.hidden_states.connector",
    "kv_role": "kv_producer",
}


class Drawn:
    """A source that returns forecasts drawn in advance; `reads` states or not."""

    def __init__(self, reads: bool) -> None:
        noise, draw = Noise(0), np.random.default_rng(0)
        self.seen = [noise.on_prefill() for _ in range(1000)]
        self.turn = 0
        self.projections = {
            moment: (draw.normal(size=(WIDTH, size)).astype(np.float32), np.zeros(size, np.float32))
            for moment, size in ((PREFILL, 16), (COMPLETION, 24))
            if reads
        }

    def on_prefill(self, *_: object, **__: object) -> LiveForecast:
        """The next one."""
        self.turn += 1
        return self.seen[self.turn % len(self.seen)]

    on_prefill_state = on_completion = on_prefill

    def await_states(self) -> None:
        """They are not looked at."""

    def close(self, workflow: object) -> None:
        """Keeps nothing."""


def hooked(ahead: bool, reads: bool) -> type[Any]:
    """A scheduler whose forecasts cost nothing."""

    class Hooked(WorkflowScheduler if ahead else SyncWorkflowScheduler):  # type: ignore[misc]
        def forecasts(self, config: PresageConfig) -> Forecasts:
            return Forecasts(Drawn(reads), None)

    return Hooked


class Worked(Engine):
    """A scheduler with the worker's end of the connector.

    Attributes:
        taken: nanoseconds per call.
        way: steps scheduled between a row and the score made with its state, by moment.
    """

    def __init__(self, scheduler: Any, ahead: bool) -> None:
        super().__init__(scheduler, ahead)
        self.taken: dict[str, list[int]] = defaultdict(list)
        self.way: dict[str, list[int]] = defaultdict(list)
        self._scheduled = 0
        self._computed_at: dict[tuple[str, str], int] = {}
        self._rows = torch.randn(SEQS, WIDTH, generator=torch.Generator().manual_seed(0))
        self._worker: Any = None
        for method, name in (("schedule", "schedule"), ("update_from_output", "update")):
            setattr(scheduler, method, self._timed(getattr(scheduler, method), name))
        if scheduler.connector is not None:
            kind, of = type(scheduler.connector), scheduler.kv_cache_config
            self._worker = kind(scheduler.vllm_config, KVConnectorRole.WORKER, of)
            self._watch(scheduler)

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            self._scheduled += name == "schedule"
            begun = time.thread_time_ns()
            answer = call(*args)
            self.taken[name].append(time.thread_time_ns() - begun)
            return answer

        return timed

    def _watch(self, scheduler: Any) -> None:
        """Records when a score made with a state is there, counting the steps scheduled before."""
        forecasts, scored = scheduler.step_forecasts, scheduler.block_order
        prefill, leaves, forecast = forecasts.prefill_state, forecasts.request_finished, scored.forecast
        untold: dict[str, list[tuple[str, str]]] = defaultdict(list)

        def scored_with(step: Step, *forecasts: Any) -> None:
            forecast(step, *forecasts)
            for moment, name in untold.pop(step.workflow_id, ()):
                at = self._computed_at.pop((moment, name), None)
                if at is not None:
                    self.way[moment].append(self._scheduled - at)

        def of_prompt(name: str, state: Any) -> None:
            prefill(name, state)
            untold[name.split(".")[0]].append((PREFILL, name))

        def of_answer(request: Any, step: Any, left: Any) -> None:
            used = self.scheduler.engine_status().counts.get("completion states: used", 0)
            leaves(request, step, left)
            if self.scheduler.engine_status().counts.get("completion states: used", 0) != used:
                untold[request.request_id.split(".")[0]].append((COMPLETION, request.request_id))

        forecasts.prefill_state, forecasts.request_finished, scored.forecast = of_prompt, of_answer, scored_with

    def _computed(self, output: Any) -> Any:
        computed = super()._computed(output)
        if self._worker is None:
            return computed
        begun = time.thread_time_ns()
        self._worker.bind_connector_metadata(output.kv_connector_metadata)
        meta = self._worker.build_connector_worker_meta()
        rows = self._rows[: len(computed.req_ids)]
        self._worker.captured(computed.req_ids, lambda: rows)
        self.taken["worker"].append(time.thread_time_ns() - begun)
        for moment, names in output.kv_connector_metadata.rows.items():
            self._computed_at.update(((moment, name), self._scheduled) for name in names)
        computed.kv_connector_output = KVConnectorOutput(kv_connector_worker_meta=meta)
        return computed


def served(folder: Path, ahead: bool, how: str, workflows: int) -> tuple[Worked, int]:
    """Serves workflows of five steps; returns the engine and the number of steps."""
    scheduler = build(
        folder,
        hooked(ahead, reads=how == "on"),
        blocks=BLOCKS,
        presage={},
        seqs=SEQS,
        tokens=BUDGET,
        connector=CONNECTOR if how != "off" else None,
    )
    engine, draw = Worked(scheduler, ahead), random.Random(0)
    waiting = [(f"w{number}", 0, [draw.randrange(500) for _ in range(400)]) for number in range(workflows)]
    under_way: dict[str, tuple[str, int, list[int]]] = {}
    done = 0
    while waiting or under_way:
        while waiting and len(under_way) < SEQS * 2 // 3:
            name, step, history = waiting.pop(0)
            history = history + [draw.randrange(500) for _ in range(draw.randrange(60, 300))]
            sent = {"workflow_type": "t", "workflow_id": name, "agent": draw.choice(AGENTS), "step": step}
            request = ask(f"{name}.{step}", history, draw.randrange(10, 120), **sent)
            scheduler.add_request(request)
            under_way[request.request_id] = (name, step, history)
        engine.step()
        engine.log.clear()
        for finished in engine.ended[done:]:
            name, step, history = under_way.pop(finished)
            if step + 1 < STEPS:
                waiting.append((name, step + 1, history))
        done = len(engine.ended)
    return engine, workflows * STEPS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workflows", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ways: dict[str, dict[str, float]] = {}
    medians: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(args.rounds):
            for order in ("ahead", "in step"):
                for how in ("off", "idle", "on"):
                    engine, of = served(Path(folder), order == "ahead", how, args.workflows)
                    for call, taken in engine.taken.items():
                        medians[order, how, call].append(statistics.median(taken) / 1000)
                    if how == "on" and round_ == 0:
                        ways |= {f"{moment}, {order}": shares(engine.way[moment], of) for moment in MOMENTS}
    print(f"{'from state to score, steps in between':40}{'states':>8}{'0':>8}{'1':>8}{'later, never':>14}{'0 or 1':>8}")
    for name, way in ways.items():
        soon = way["0"] + way["1"]
        print(f"{name:40}{way['states']:8}{way['0']:8.1%}{way['1']:8.1%}{way['later']:14.1%}{soon:8.1%}")
    print(f"\n{'median µs a step':40}{'off':>8}{'idle':>8}{'ratio':>8}{'on':>8}{'ratio':>8}")
    costs = {}
    for order in ("ahead", "in step"):
        for call in ("schedule", "update", "worker"):
            off, idle, on = (medians[order, how, call] for how in ("off", "idle", "on"))
            found = {"idle_us": round(statistics.median(idle), 1), "on_us": round(statistics.median(on), 1)}
            line = f"{call + ', ' + order:40}"
            if off:
                found |= {"off_us": round(statistics.median(off), 1), "idle_ratio": ratio(idle, off)}
                found["on_ratio"] = ratio(on, off)
                line += f"{found['off_us']:8.1f}{found['idle_us']:8.1f}{found['idle_ratio']:8.2f}"
                line += f"{found['on_us']:8.1f}{found['on_ratio']:8.2f}"
            else:
                line += f"{'-':>8}{found['idle_us']:8.1f}{'-':>8}{found['on_us']:8.1f}{'-':>8}"
            costs[f"{call}, {order}"] = found
            print(line)
    report = {"benchmark": "forecast_to_decision", "workflows": args.workflows, "rounds": args.rounds}
    print(json.dumps({**report, "way": ways, "cost": costs}))


def ratio(of: list[float], to: list[float]) -> float:
    """The median ratio over rounds."""
    return round(statistics.median(a / b for a, b in zip(of, to, strict=True)), 3)


def shares(way: list[int], of: int) -> dict[str, float]:
    """Shares of states by steps in between; states that never came are late."""
    counted = Counter(way)
    soon = counted[0] + counted[1]
    return {"states": of, "0": counted[0] / of, "1": counted[1] / of, "later": (of - soon) / of}


if __name__ == "__main__":
    main()
