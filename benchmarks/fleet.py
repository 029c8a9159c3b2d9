"""Which routing policy completes workflows soonest on a fleet, and does ours ever lose to affinity or to least loaded?

Four engines of vLLM's own scheduler under one clock, from light load to overload, behind each routing policy of
`presage replay --fleet`. Workloads: `loops` (synthetic retry loops with one history for all agents; costs of the
shipped engine `invented`), and with --real FOLDER the recorded workflows of `swe_agent_glm` and `claude_code` (engine
`h100-8b-datasheet`). `presage` learns by counting while it serves; `presage-oracle` knows remaining work and return
times: its bound. All runs of a cell have the same arrivals. The ratio of a policy is that of mean completion times with
session affinity, a geometric mean over seeds with its 95 % interval.

With `--weights`, what return times bring: `fixed-weight` is `presage` with ThunderAgent's weight of a program in a tool
call, 2^-t. `moves` counts programs that were paused on one engine and restored on another.

    .venv-vllm/bin/python benchmarks/fleet.py --real FOLDER [--weights]
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from replay import CONVENTIONS, draw

from presage.datasets.read import read_traces
from presage.replay.fleet_file import FleetMember
from presage.replay.metrics import Figures, interval
from presage.replay.policies import POLICIES, ROUTING
from presage.replay.runs import Setting, side_by_side
from presage.replay.workload import Arrivals, PromptConvention, ReplayJob, workload
from presage.serving_hooks.engine_file import read_engine
from presage.serving_hooks.policies.admission import Phase
from presage.serving_hooks.policies.routing.fleet import Program
from presage.serving_hooks.policies.routing.programs import ForecastPrograms

ENGINES: Final = 4
CELLS: Final = {
    "loops": ("invented", 64_000, (64, 96, 160, 320), 400),
    "swe_agent_glm": ("h100-8b-datasheet", 150_000, (12, 24, 61), 65),
    "claude_code": ("h100-8b-datasheet", 500_000, (16, 40), 60),
}
"""Engine, tokens of a cache, workflows at once, and workflows to replay."""

ORACLE: Final = replace(ROUTING["presage"], name="presage-oracle", forecasts="oracle", returns="oracle")
POLICIES_RUN: Final = (*ROUTING.values(), ORACLE)


class FixedWeight(ForecastPrograms):
    """ThunderAgent's weight in place of forecast return times."""

    def weight(self, program: Program, now: float) -> float:
        """2^-t in a tool call of t seconds."""
        return float(2.0 ** -min(1000.0, now - program.since_s)) if program.phase is Phase.TOOL else 1.0


WEIGHTS: Final = (
    *(ROUTING[name] for name in ("session-affinity", "least-loaded", "thunderagent", "presage")),
    replace(ROUTING["presage"], name="fixed-weight", routing=FixedWeight),
)
OVERLOADED: Final = {"loops": (160,), "swe_agent_glm": (61,), "claude_code": (40,)}


def jobs_of(
    name: str, real: Path | None, most_tokens: int, count: int
) -> tuple[tuple[ReplayJob, ...], PromptConvention]:
    """The workflows of a cell that fit its cache, a random choice of the recorded ones."""
    if name == "loops":
        history_first = CONVENTIONS["history-first"]
        return draw(count, history_first), history_first
    assert real is not None
    convention = PromptConvention("recorded" if name == "claude_code" else "history-first")
    jobs = workload(read_traces([real / f"{name}.jsonl.gz"]).table, convention).jobs
    fits = [job for job in jobs if max(step.prompt_tokens + step.output_tokens for step in job.steps) < most_tokens]
    chosen = sorted(np.random.default_rng(0).permutation(len(fits))[:count].tolist())
    return tuple(fits[number] for number in chosen), convention


def ratio(mine: list[Figures], base: list[Figures], figure: str = "completion_mean_s") -> dict[str, Any]:
    """How many times sooner workflows complete than with the base."""
    logs = [math.log(b[figure] / m[figure]) for m, b in zip(mine, base, strict=True)]
    found = interval(logs)
    ends = found["ci95"] or [math.nan, math.nan]
    return {"mean": math.exp(found["mean"]), "ci95": [math.exp(end) for end in ends]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, help="folder of the public traces; without it only loops")
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), help="default: all that can run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--weights", action="store_true", help="what return times bring, where engines are overloaded")
    args = parser.parse_args()
    cells = args.cells or [name for name in CELLS if name == "loops" or args.real is not None]
    found: dict[str, Any] = {}
    policies = WEIGHTS if args.weights else POLICIES_RUN
    for name in cells:
        kind, cache_tokens, loads, count = CELLS[name]
        loads = OVERLOADED[name] if args.weights else loads
        jobs, convention = jobs_of(name, args.real, int(0.95 * cache_tokens), count)
        engine = read_engine(kind, cache_tokens)
        fleet = tuple(FleetMember(f"e{number}", engine, POLICIES["stock"]) for number in range(ENGINES))
        for at_once in loads:
            setting = Setting(jobs, convention, Arrivals(at_once), engine, "counts", fleet=fleet)
            tasks = [(setting, policy, seed) for policy in policies for seed in range(args.seeds)]
            done = iter(side_by_side(tasks, args.processes))
            runs = {policy.name: [next(done).figures for _ in range(args.seeds)] for policy in policies}
            found[f"{name}/{at_once}"] = table(f"{name}, {len(jobs)} workflows, {at_once} at once", runs)
    print(json.dumps({"benchmark": "fleet", "engines": ENGINES, "seeds": args.seeds, "cells": found}))


def table(title: str, runs: dict[str, list[Figures]]) -> dict[str, Any]:
    """Prints the table of a cell; returns its figures."""
    base = runs["session-affinity"]
    found: dict[str, Any] = {}
    print(f"\n{title}: mean over {len(base)} seeds")
    print(
        f"{'':19}{'hit rate':>9}{'completion s':>13}{'p95 s':>8}{'sooner than affinity':>28}"
        f"{'moves':>7}{'idle':>6}{'unused':>7}"
    )
    for name, of in runs.items():
        mean = {key: float(np.mean([one[key] for one in of])) for key in of[0] if all(key in one for one in of)}
        sooner = ratio(of, base)
        low, high = sooner["ci95"]
        print(
            f"{name:19}{mean['hit_rate']:9.3f}{mean['completion_mean_s']:13.1f}{mean['completion_p95_s']:8.1f}"
            f"{sooner['mean']:12.2f} ({low:5.2f} to {high:5.2f}){mean['moves']:7.0f}{mean['idle_share']:6.2f}"
            f"{mean['unused_share']:7.2f}",
            flush=True,
        )
        found[name] = {
            "hit_rate": round(mean["hit_rate"], 4),
            "completion_mean_s": round(mean["completion_mean_s"], 2),
            "sooner": sooner,
        }
    for other in ("thunderagent", "least-loaded", "fixed-weight"):
        if other not in runs:
            continue
        against = found["presage"][f"sooner_than_{other}"] = ratio(runs["presage"], runs[other])
        low, high = against["ci95"]
        print(f"presage: {against['mean']:.2f} ({low:.2f} to {high:.2f}) times sooner than {other}", flush=True)
    return found


if __name__ == "__main__":
    main()
