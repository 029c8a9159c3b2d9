"""How long does a replay take, of many short workflows with all policies on, or of long sessions?

Short: workflows of 5 or 8 steps of the law of benchmarks/replay.py, 48 at once, 4,000 blocks of cache, vLLM alone, and
`full` (priority, eviction, admission, prefetch) by counts learnt on the way. Each run is in one process. Prompts are
built and hashed within the time of the first, since a user waits for that too; imports are not.

Long: `--traces`, sessions as recorded, repeated with other ids until there are enough; 32 at once, 2 million tokens of
cache in blocks of 64, costs `h100-8b-datasheet`. Replays with several seeds share prompts and their hashes.

    python benchmarks/replay_speed.py [--workflows 5000] [--policies stock,full]
    python benchmarks/replay_speed.py --traces claude_code.jsonl.gz --workflows 1000 --policies stock,belady --seeds 3

Needs vLLM 0.32. Prints a table and one JSON line.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import time
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from replay import CONVENTIONS, draw

from presage.datasets.read import read_traces
from presage.replay.policies import named
from presage.replay.prompts import PromptIds
from presage.replay.runs import Setting, check_vllm, run_one
from presage.replay.workload import Arrivals, PromptConvention, workload
from presage.serving_hooks.engine_file import read_engine

AT_ONCE, CACHE_TOKENS, MOST_STEPS = 48, 64_000, 8
LONG_AT_ONCE, LONG_CACHE_TOKENS, LONG_BLOCK_TOKENS = 32, 2_000_000, 64
DRAWN = 2
"""For each workflow that is wanted; about two of three are short enough."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workflows", type=int, default=5000)
    parser.add_argument("--policies", default="stock,full")
    parser.add_argument("--traces", type=Path, nargs="*")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    check_vllm()
    setting = long(args.traces, args.workflows) if args.traces else short(args.workflows)
    jobs = setting.jobs
    steps = [step for job in jobs for step in job.steps]
    tokens = sum(step.prompt_tokens for step in steps)
    print(f"{len(jobs)} workflows, {len(steps)} steps, {tokens} prompt tokens\n")
    print("| policy | seed | CPU s | s | hit rate |\n|---|---|---|---|---|")
    prompts = PromptIds(jobs, setting.convention)
    warm = replace(setting, jobs=jobs[:1], arrivals=Arrivals(1))
    runs = []
    for policy in named(args.policies):
        run_one(warm, policy, 0)
        for seed in range(args.seeds):
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            done = run_one(setting, policy, seed, prompts=prompts)
            run = {
                "policy": policy.name,
                "seed": seed,
                "cpu_s": round(time.process_time() - cpu_s, 1),
                "wall_s": round(time.perf_counter() - wall_s, 1),
                "hit_rate": round(done.figures["hit_rate"], 3),
            }
            runs.append(run)
            print("| " + " | ".join(map(str, run.values())) + " |", flush=True)
    found = {"benchmark": "replay_speed", "workflows": len(jobs), "steps": len(steps), "prompt_tokens": tokens}
    print(json.dumps({**found, "runs": runs}))


def short(workflows: int) -> Setting:
    convention = CONVENTIONS["history-first"]
    jobs = [job for job in draw(DRAWN * workflows, convention) if len(job.steps) <= MOST_STEPS][:workflows]
    return Setting(tuple(jobs), convention, Arrivals(AT_ONCE), read_engine("invented", CACHE_TOKENS), "counts")


def long(traces: list[Path], workflows: int) -> Setting:
    convention = PromptConvention()
    recorded = workload(read_traces(traces).table, convention).jobs
    jobs = tuple(
        replace(job, workflow_id=f"{job.workflow_id}.{number}")
        for number, job in enumerate(islice(cycle(recorded), workflows))
    )
    engine = read_engine("h100-8b-datasheet", LONG_CACHE_TOKENS).model_copy(update={"block_tokens": LONG_BLOCK_TOKENS})
    return Setting(jobs, convention, Arrivals(LONG_AT_ONCE), engine, "counts")


if __name__ == "__main__":
    main()
