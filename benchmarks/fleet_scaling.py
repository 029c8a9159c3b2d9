"""Does a forecast of demand add engines before it comes, and what does that save over reacting to it?

Two models, `large` (planner, verifier) and `small` (explorers), each with a pool of engines that take 10, 30 or 60 s to
load. Workloads (synthetic, 25 minutes, all lengths drawn anew for each seed):

- bursts: about every five minutes ten workflows begin within ten seconds (a cron job). Each plans in 3 to 5 steps with
  tool calls between them, then 6 to 10 explorers run at once, 2 to 4 steps each, then a verifier.
- smooth: the same workflows, by a Poisson process whose rate rises and falls.
- unannounced: bursts of single requests at random times, which nothing that runs announces.

`forecast` learns while it serves, from nothing. `reactive` follows the requests in flight, as KEDA and HPA do; `static`
keeps its engines. Both are swept (requests per engine, or engines) and interpolated, log queueing over engine-hours, at
the engine-hours of the forecast; outside a sweep its nearest point counts. Of reactive, the better of two stabilisation
windows counts, seed by seed. Requests wait in one queue while all engines of their model are full.

Queueing is the mean time from the arrival of a request to its first iteration. Demand error: mean absolute error of the
requests in flight, load time plus a second ahead, beside that of their mean over the last 30 s; "outside" is the share
of demands outside the forecast's 80 % interval. Ratios are geometric means over seeds with 95 % intervals.

    .venv-vllm/bin/python benchmarks/fleet_scaling.py
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from presage.replay.fleet_file import FleetMember
from presage.replay.metrics import Figures, interval
from presage.replay.policies import POLICIES, Policy
from presage.replay.runs import Setting, side_by_side
from presage.replay.workload import Arrivals, PromptConvention, RecordedRequest, ReplayJob, assemble
from presage.serving_hooks.engine_file import EngineFile, read_engine
from presage.serving_hooks.policies.routing.fleet import Fleet, Placement, RoutingRequest
from presage.serving_hooks.policies.routing.placement import FEWEST, LeastLoaded
from presage.serving_hooks.policies.scaling import ScalingConfig

POOL: Final = {"large": 4, "small": 10}
MODELS: Final = {"planner": "large", "verifier": "large", "explorer": "small", "single": "small"}
CONVENTION: Final = PromptConvention("history-first")
LENGTH_S: Final = 1500.0
WORKLOADS: Final = ("bursts", "smooth", "unannounced")
DELAYS: Final = (10.0, 30.0, 60.0)
FULL: Final = "queued: every engine of the model is full"
SERVES: Final = 12.0
"""Requests in flight that an engine of 16 an iteration is to have, for the forecast."""

REACTIVE: Final = ((0.0, (5.0, 9.0, 16.0)), (60.0, (4.0, 9.0, 16.0)))
"""Stabilisation windows, and requests per engine swept with each."""

STATIC: Final = ((1, 1), (1, 2), (1, 4), (2, 6))


def engine_file() -> EngineFile:
    """The shipped engine with three times its costs and 16 requests an iteration."""
    engine = read_engine("invented", 96_000)
    cost = engine.cost
    slower = {name: 3 * getattr(cost, name) for name in ("iteration_s", "prefill_token_s", "decode_token_s")}
    return engine.model_copy(update={"cost": cost.model_copy(update=slower), "most_requests": 16, "block_tokens": 64})


class SharedQueue(LeastLoaded):
    """The least loaded engine of a model; requests wait in one queue while all of them are full.

    Without it a burst is placed on the engines that are open, and those that open later find nothing to do.
    """

    def decide(self, request: RoutingRequest, fleet: Fleet, now: float) -> Placement:
        """An engine with a free place."""
        engines = fleet.open(request.model)
        free = [number for number in engines if fleet.engines[number].requests < fleet.engines[number].most_requests]
        if free:
            return self.choose(request, fleet, free)
        self._held.append(request)
        return Placement(None, FULL)

    def release(self, fleet: Fleet, now: float) -> list[tuple[RoutingRequest, Placement]]:
        """As many as places are free, in the order of arrival."""
        free = Counter({n: engine.most_requests - engine.requests for n, engine in enumerate(fleet.engines)})
        found, still = [], []
        for request in self._held:
            engines = [number for number in fleet.open(request.model) if free[number] > 0]
            if engines:
                number = max(engines, key=lambda one: (free[one], -one))
                free[number] -= 1
                found.append((request, Placement(number, FEWEST)))
            else:
                still.append(request)
        self._held = still
        return found


ROUTER: Final = Policy("shared-queue", None, routing=SharedQueue)


def setting_of(jobs: tuple[ReplayJob, ...], scaling: ScalingConfig) -> Setting:
    """The fleet, its engines added and drained as `scaling` says."""
    engine = engine_file()
    members = tuple(
        FleetMember(f"{model}-{number}", engine, POLICIES["stock"], model=model)
        for model, count in POOL.items()
        for number in range(count)
    )
    arrivals = Arrivals(as_recorded=True)
    return Setting(jobs, CONVENTION, arrivals, engine, "counts", fleet=members, models=MODELS, scaling=scaling)


def tokens(rng: np.random.Generator, median: float) -> int:
    """Output tokens of a request."""
    return int(np.clip(median * np.exp(rng.normal(0.0, 0.4)), 8, 2000))


def research(rng: np.random.Generator, number: int, at_s: float) -> ReplayJob:
    """A planner with tool calls, a fan-out of explorers, and a verifier that waits for all."""
    asked: list[RecordedRequest] = []
    history = 600
    for step in range(int(rng.integers(3, 6))):
        output = tokens(rng, 160)
        asked.append(
            RecordedRequest("planner", history, output, (step - 1,) if step else (), float(rng.gamma(4.0, 3.0)))
        )
        history += output + 60
    planned, ends = len(asked) - 1, []
    for _ in range(int(rng.integers(6, 11))):
        before, own = planned, history
        for _ in range(int(rng.integers(2, 5))):
            output = tokens(rng, 160)
            asked.append(RecordedRequest("explorer", own, output, (before,), float(rng.gamma(4.0, 0.5))))
            before, own = len(asked) - 1, own + output + 60
        ends.append(before)
    asked.append(RecordedRequest("verifier", history + 800, tokens(rng, 130), tuple(ends), 0.5))
    return ReplayJob("research", f"w{number}", assemble(asked, CONVENTION), at_s)


def single(rng: np.random.Generator, number: int, at_s: float) -> ReplayJob:
    """One request."""
    asked = [RecordedRequest("single", 600, tokens(rng, 250), (), 0.0)]
    return ReplayJob("single", f"w{number}", assemble(asked, CONVENTION), at_s)


def jobs_of(workload: str, seed: int) -> tuple[ReplayJob, ...]:
    """The workflows of a workload, with their arrivals."""
    rng = np.random.default_rng([seed, WORKLOADS.index(workload)])
    times, now = [], float(rng.uniform(5, 60))
    while now < LENGTH_S:
        if workload == "smooth":
            times.append(now)
            now += float(rng.exponential(1 / (0.03 * (1 + 0.8 * math.sin(2 * math.pi * now / 1200)))))
        elif workload == "bursts":
            times += (now + rng.uniform(0, 10, rng.poisson(10))).tolist()
            now += 300 * float(rng.uniform(0.7, 1.3))
        else:
            times += (now + rng.uniform(0, 10, rng.poisson(80))).tolist()
            now += float(rng.exponential(200))
    make = single if workload == "unannounced" else research
    return tuple(make(rng, number, at_s) for number, at_s in enumerate(sorted(times)))


def reactive(load_s: float, keep_s: float, many: float) -> ScalingConfig:
    """Follows requests in flight."""
    return ScalingConfig(policy="reactive", load_s=load_s, requests_per_engine=many, keep_s=keep_s)


def fixed(large: int, small: int) -> ScalingConfig:
    """Engines that are always there, and no others."""
    return ScalingConfig(policy="reactive", requests_per_engine=1e9, least={"large": large, "small": small})


def at_hours(sweep: Sequence[Figures], hours: float) -> float:
    """Queueing of a sweep at these engine-hours, interpolated."""
    points = sorted((one["engine_hours"], math.log(max(1e-3, one["queueing_mean_s"]))) for one in sweep)
    return math.exp(float(np.interp(hours, *zip(*points, strict=True))))


def ratio(values: Sequence[float]) -> dict[str, Any]:
    """Geometric mean of ratios and its 95 % interval."""
    found = interval([math.log(value) for value in values])
    low, high = found["ci95"] or (math.nan, math.nan)
    return {"mean": math.exp(found["mean"]), "ci95": [math.exp(low), math.exp(high)]}


def shown(of: Mapping[str, Any]) -> str:
    """A ratio with its interval."""
    low, high = of["ci95"]
    return f"{of['mean']:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--delays", nargs="+", type=float, default=list(DELAYS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    print(
        f"{'':17}{'engine-hours':>13}{'queueing, s':>12}{'error / last window':>22}{'outside':>8}"
        f"{'reactive, times':>22}{'static, times':>22}"
    )
    for workload in args.workloads:
        kept: dict[int, list[Figures]] = {}
        for load_s in args.delays:
            cell = Cell(workload, load_s, args.seeds, args.processes, kept)
            found[f"{workload}/{load_s:g}"] = of = cell.run()
            print(
                f"{workload + f', {load_s:g} s':17}{of['engine_hours']:13.2f}{of['queueing_s']:12.2f}"
                f"{shown(of['error']):>22}{of['outside']:8.2f}{shown(of['reactive']):>22}{shown(of['static']):>22}",
                flush=True,
            )
    print(json.dumps({"benchmark": "fleet_scaling", "seeds": args.seeds, "cells": found}))


class Cell:
    """A workload with a load time. `kept` has the runs of static fleets by seed, which do not depend on it."""

    def __init__(
        self, workload: str, load_s: float, seeds: int, processes: int, kept: dict[int, list[Figures]]
    ) -> None:
        self.workload, self.load_s, self.seeds, self.processes, self.kept = workload, load_s, seeds, processes, kept

    def run(self) -> dict[str, Any]:
        """Its figures: those of the forecast, and how many times longer others queue at its engine-hours."""
        rows = [self._seed(seed) for seed in range(self.seeds)]
        mine = [row["forecast"] for row in rows]
        found: dict[str, Any] = {
            "engine_hours": float(np.mean([one["engine_hours"] for one in mine])),
            "queueing_s": float(np.mean([one["queueing_mean_s"] for one in mine])),
            "completion_s": float(np.mean([one["completion_mean_s"] for one in mine])),
            "error": ratio([one["demand_error"] / one["last_window_error"] for one in mine]),
            "outside": float(np.mean([one["outside_share"] for one in mine])),
            "reactive_reaches_hours": float(np.mean([row["reached"] for row in rows])),
        }
        for name in ("reactive", "static"):
            queued = [row[name] for row in rows]
            found[f"{name}_queueing_s"] = float(np.mean(queued))
            found[name] = ratio([q / max(1e-3, one["queueing_mean_s"]) for q, one in zip(queued, mine, strict=True)])
        return found

    def _seed(self, seed: int) -> dict[str, Any]:
        jobs, load_s = jobs_of(self.workload, seed), self.load_s
        configs = [ScalingConfig(load_s=load_s, requests_per_engine=SERVES, keep_s=10.0)]
        configs += [reactive(load_s, keep_s, many) for keep_s, swept in REACTIVE for many in swept]
        configs += [] if seed in self.kept else [fixed(*sizes) for sizes in STATIC]
        tasks = [(setting_of(jobs, config), ROUTER, seed) for config in configs]
        done = iter([one.figures for one in side_by_side(tasks, self.processes)])
        mine = next(done)
        sweeps = [[next(done) for _ in swept] for _, swept in REACTIVE]
        self.kept.setdefault(seed, list(done))
        hours = mine["engine_hours"]
        return {
            "forecast": mine,
            "reached": float(max(one["engine_hours"] for sweep in sweeps for one in sweep) >= hours),
            "reactive": min(at_hours(sweep, hours) for sweep in sweeps),
            "static": at_hours(self.kept[seed], hours),
        }


if __name__ == "__main__":
    main()
