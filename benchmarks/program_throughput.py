"""Does the engine take as many steps a minute as with ThunderAgent's rule, at rising concurrency and in RL rollouts?

ThunderAgent (§5.2, §5.3) reports steps a minute against vLLM at rising numbers of programs at once, and of rollouts for
reinforcement learning. Here vLLM's own scheduler is replayed with the costs of a data sheet: vLLM alone, ThunderAgent's
published rule (`papers.THUNDERAGENT`), and `full` (forecasts from online counts). Figures are ratios, not theirs.

    serving   so many workflows at once, the next comes when one ends; steps that end from the moment at which so many
              are there until the last workflow has begun
    rollout   all workflows are submitted at once, and the engine is free when the last has ended: all steps by all
              minutes

    swe       SWE-agent sessions as recorded: one conversation a workflow (`--real`)
    agents    made-up coding and research workflows (`regimes.KINDS`): each agent continues a conversation of its own

Ratios are geometric means over seeds, which draw workflows and their order, with 95 % intervals (Student's t). The last
row of a workload is over all its loads: seed by seed the geometric mean of their ratios.

    .venv-vllm/bin/python benchmarks/program_throughput.py --real FOLDER [--seeds 4] [--processes 1]
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import math
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, Final

from fleet import ratio
from regimes import CELLS, KINDS, KNOWN, SWE, Jobs, mixed

from presage.replay.metrics import PolicyRun
from presage.replay.runs import Setting, check_vllm, run_one
from presage.replay.workload import Arrivals

POLICIES_RUN: Final = ("stock", "thunderagent", "full")
SERVING: Final = (16, 32, 48, 64, 96)
ROLLOUTS: Final = (64, 128)
WORKLOADS: Final = {"swe": "swe", "agents": "mixed"}
"""Each with the cell of `regimes` whose engine serves it."""
OWN_CONVERSATIONS: Final = ("coding", "research")
AGAIN: Final = 2
"""Workflows to serve, by those at once."""


def jobs_of(workload: str, real: Path | None, count: int, seed: int) -> Jobs | None:
    """So many workflows, drawn with the seed; a recorded one may be drawn again, as another workflow."""
    found = SWE(real, seed) if workload == "swe" else mixed(None, seed)
    if found is None:
        return None
    jobs, convention = found
    jobs = tuple(job for job in jobs if workload == "swe" or job.workflow_type in OWN_CONVERSATIONS)
    rng = random.Random(seed)
    drawn = rng.sample(jobs, len(jobs)) if count >= len(jobs) else rng.sample(jobs, count)
    drawn += rng.choices(jobs, k=count - len(drawn))
    return tuple(replace(job, workflow_id=f"{number}") for number, job in enumerate(drawn)), convention


def steps_per_minute(run: PolicyRun, at_once: int, rollout: bool) -> float:
    """Of a whole run, or of the part in which so many workflows are there."""
    ends = sorted(one.ended_s or 0.0 for one in run.asked)
    if rollout:
        return 60 * len(ends) / run.end_s
    began: dict[int, float] = {}
    for one in run.asked:
        began[one.job] = min(began.get(one.job, math.inf), one.came_s)
    arrived = sorted(began.values())
    first, last = arrived[at_once - 1], arrived[-1]
    return 60 * sum(first < end <= last for end in ends) / (last - first)


def played(task: tuple[str, str, int, str, int, Path | None]) -> dict[str, float] | None:
    """Figures of one run; None without its traces."""
    load, workload, at_once, policy, seed, real = task
    rollout = load == "rollout"
    found = jobs_of(workload, real, at_once if rollout else AGAIN * at_once, seed)
    if found is None:
        return None
    runs: list[PolicyRun] = []
    setting = Setting(*found, Arrivals(at_once), CELLS[WORKLOADS[workload]].engine, "counts")
    figures = run_one(setting, KNOWN[policy], seed, on_run=runs.append).figures
    return {
        # One figure under which less is better, as `ratio` takes it.
        "minutes_per_step": 1 / steps_per_minute(runs[0], at_once, rollout),
        "completion_mean_s": figures["completion_mean_s"],
        "hit_rate": figures["hit_rate"],
    }


Runs = dict[str, list[dict[str, float]]]
"""Figures by policy, of a run a seed."""


def over_all(loads: list[Runs]) -> Runs:
    """Seed by seed, the geometric mean over loads of each figure."""
    means: Runs = {}
    for name in POLICIES_RUN:
        by_seed = zip(*(runs[name] for runs in loads), strict=True)
        means[name] = [{figure: geometric_mean(one[figure] for one in of) for figure in of[0]} for of in by_seed]
    return means


def row_of(runs: Runs) -> dict[str, Any]:
    """What a row of the table and the JSON line holds, but its name."""
    steps = {name: fmean(1 / one["minutes_per_step"] for one in found) for name, found in runs.items()}
    return {
        "steps_per_minute": steps,
        "full_than": {name: ratio(runs["full"], runs[name], "minutes_per_step") for name in ("stock", "thunderagent")},
        "hit_rates": {name: fmean(one["hit_rate"] for one in found) for name, found in runs.items()},
        "completion_sooner_than_thunderagent": ratio(runs["full"], runs["thunderagent"]),
    }


def show(load: str, workload: str, at_once: object, row: dict[str, Any]) -> None:
    steps, than = row["steps_per_minute"], [*row["full_than"].values(), row["completion_sooner_than_thunderagent"]]
    texts = [f"{one['mean']:.2f} ({one['ci95'][0]:.2f} to {one['ci95'][1]:.2f})" for one in than]
    print(
        f"{load:9}{workload:8}{at_once:>5}  {steps['stock']:8.1f}{steps['thunderagent']:14.1f}{steps['full']:10.1f}"
        f"{texts[0]:>22}{texts[1]:>22}{texts[2]:>22}   {' '.join(f'{one:.2f}' for one in row['hit_rates'].values())}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, help="folder of the public traces; without it only agents")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--loads", nargs="+", default=["serving", "rollout"])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    args = parser.parse_args()
    check_vllm()
    assert set(OWN_CONVERSATIONS) <= set(KINDS)
    cells = [
        (load, workload, at_once)
        for workload in args.workloads
        for load in args.loads
        for at_once in (SERVING if load == "serving" else ROLLOUTS)
    ]
    print(f"{'':24}{'steps a minute':>32}   full takes times as many as          completes sooner than")
    others = f"{'stock':>22}{'thunderagent':>22}{'thunderagent':>22}"
    print(f"{'':24}{'stock':>8}{'thunderagent':>14}{'full':>10}{others}   hits")
    rows: list[dict[str, Any]] = []
    loads: list[Runs] = []
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        for load, workload, at_once in cells:
            tasks = [
                (load, workload, at_once, name, seed, args.real) for name in POLICIES_RUN for seed in range(args.seeds)
            ]
            done = iter(pool.map(played, tasks))
            of = {name: [next(done) for _ in range(args.seeds)] for name in POLICIES_RUN}
            runs = {name: [one for one in found if one is not None] for name, found in of.items()}
            if not runs["full"]:
                print(f"{load} {workload}: left out, --real names no folder with its traces")
                continue
            loads.append(runs)
            rows.append({"load": load, "workload": workload, "at_once": at_once} | row_of(runs))
            show(load, workload, at_once, rows[-1])
            if (load, workload, at_once) == [cell for cell in cells if cell[1] == workload][-1]:
                rows.append({"load": "all", "workload": workload, "at_once": None} | row_of(over_all(loads)))
                show("all", workload, "", rows[-1])
                loads.clear()
    print(json.dumps({"benchmark": "program_throughput", "seeds": args.seeds, "rows": rows}))


if __name__ == "__main__":
    main()
