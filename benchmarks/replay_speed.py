"""How long does one replay of many short workflows take, with all policies on?

Workflows of 5 or 8 steps of the law of benchmarks/replay.py, 48 at once, 4,000 blocks of cache, one run in one process:
vLLM alone, and `full` (priority, eviction, admission, prefetch) by counts learnt on the way. Prompts are built and
hashed within the time, since a user waits for that too; imports are not.

    python benchmarks/replay_speed.py [--workflows 5000] [--policies stock,full]

Needs vLLM 0.32. Prints a table and one JSON line.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import time

from replay import CONVENTIONS, draw

from presage.serving_hooks.replay.engine_file import read_engine
from presage.serving_hooks.replay.policies import named
from presage.serving_hooks.replay.runs import Setting, check_vllm, run_one
from presage.serving_hooks.replay.workload import Arrivals

AT_ONCE, CACHE_TOKENS, MOST_STEPS = 48, 64_000, 8
DRAWN = 2
"""For each workflow that is wanted; about two of three are short enough."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workflows", type=int, default=5000)
    parser.add_argument("--policies", default="stock,full")
    args = parser.parse_args()
    check_vllm()
    convention = CONVENTIONS["history-first"]
    short = [job for job in draw(DRAWN * args.workflows, convention) if len(job.steps) <= MOST_STEPS]
    jobs = tuple(short[: args.workflows])
    engine = read_engine("invented", CACHE_TOKENS)
    warm = Setting(jobs[:1], convention, Arrivals(1), engine, "counts")
    setting = Setting(jobs, convention, Arrivals(AT_ONCE), engine, "counts")
    steps = sum(len(job.steps) for job in jobs)
    print(f"{len(jobs)} workflows, {steps} steps\n\n| policy | CPU s | s | hit rate |\n|---|---|---|---|")
    runs = []
    for policy in named(args.policies):
        run_one(warm, policy, 0)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        done = run_one(setting, policy, 0)
        run = {
            "policy": policy.name,
            "cpu_s": round(time.process_time() - cpu_s, 1),
            "wall_s": round(time.perf_counter() - wall_s, 1),
            "hit_rate": round(done.figures["hit_rate"], 3),
        }
        runs.append(run)
        print("| " + " | ".join(map(str, run.values())) + " |", flush=True)
    print(json.dumps({"benchmark": "replay_speed", "workflows": len(jobs), "steps": steps, "runs": runs}))


if __name__ == "__main__":
    main()
