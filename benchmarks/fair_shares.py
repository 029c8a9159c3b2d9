"""Does one tenant's backlog hold up another's workflows, and do workflows with a deadline meet it?

SWE-agent sessions (`regimes`, cell swe) on one engine that holds about 20 of them: one tenant submits 64 at once, and
another 16 over the next five minutes. `one key`: both use the same API key, so the engine does not know them apart.
`two keys`: each has its own, and places are shared by tokens. `3 : 1`: the second has three times the weight.

With `deadline`, both use one key and the 16 are a workflow type of their own, whose workflows have to end within
`DEADLINE_S` of their arrival, pauses included: with and without telling the engine (`objectives`).

Ratios of mean completion, pauses included, are those with `one key`; geometric means over seeds with 95 % intervals.

    .venv-vllm/bin/python benchmarks/fair_shares.py --real FOLDER [--seeds 4]
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from fleet import ratio
from regimes import CELLS, KNOWN, SWE

from presage.replay.metrics import PolicyRun, interval
from presage.replay.runs import Setting, check_vllm, run_one
from presage.replay.workload import Arrivals, ReplayJob
from presage.serving_hooks.workflows.identity import scoped

MANY: Final = 64
FEW: Final = 16
OVER_S: Final = 300.0
DEADLINE_S: Final = 150.0
URGENT: Final = "urgent"
OBJECTIVES: Final = {"objectives": {"workflow_types": {URGENT: {"deadline_s": DEADLINE_S}}}}
RUNS: Final[dict[str, tuple[bool, bool, dict[str, Any]]]] = {
    "one key": (False, False, {}),
    "two keys": (True, False, {}),
    "3 : 1": (True, False, {"weights": {"tenants": {"key-1": 3.0}}}),
    "untold deadline": (False, True, {}),
    "deadline": (False, True, OBJECTIVES),
}
"""Whether there are two keys, whether the few are a type of their own, and settings of the engine."""


def jobs_of(recorded: tuple[ReplayJob, ...], seed: int, keys: bool, apart: bool) -> tuple[ReplayJob, ...]:
    """The workflows of both tenants, drawn with the seed, those of the second from `MANY` on."""
    rng = random.Random(seed)
    drawn = rng.choices(recorded, k=MANY + FEW)
    times = [rng.uniform(0.0, 1.0) for _ in range(MANY)] + sorted(rng.uniform(20.0, OVER_S) for _ in range(FEW))
    return tuple(
        replace(
            job,
            workflow_id=scoped(f"key-{int(number >= MANY)}" if keys else "", f"{number}"),
            workflow_type=URGENT if apart and number >= MANY else job.workflow_type,
            arrives_s=at_s,
        )
        for number, (job, at_s) in enumerate(zip(drawn, times, strict=True))
    )


def completions_s(run: PolicyRun) -> list[float]:
    """Seconds from the arrival of each workflow to its end, by number."""
    came: dict[int, float] = {}
    ended: dict[int, float] = {}
    for one in run.asked:
        came[one.job] = min(came.get(one.job, one.came_s), one.came_s)
        ended[one.job] = max(ended.get(one.job, 0.0), one.ended_s or 0.0)
    return [ended[number] - came[number] for number in sorted(came)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, required=True, help="folder of the public traces")
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    check_vllm()
    found = SWE(args.real, 0)
    assert found is not None, "--real names no folder with swe_agent_glm"
    recorded, convention = found
    rows: dict[str, list[dict[str, float]]] = {}
    print(f"{'':17}{'64 at once, s':>14}{'16 later, s':>12}{'sooner than one key: the 64':>30}{'the 16':>22}  in time")
    for name, (keys, apart, more) in RUNS.items():
        rows[name] = []
        for seed in range(args.seeds):
            jobs = jobs_of(recorded, seed, keys, apart)
            setting = Setting(jobs, convention, Arrivals(as_recorded=True), CELLS["swe"].engine, "counts")
            runs: list[PolicyRun] = []
            run_one(setting, replace(KNOWN["full"], more=more), seed, on_run=runs.append)
            took = completions_s(runs[0])
            rows[name].append(
                {
                    "many_s": fmean(took[:MANY]),
                    "few_s": fmean(took[MANY:]),
                    "all_s": fmean(took),
                    "in_time": fmean(one <= DEADLINE_S for one in took[MANY:]),
                }
            )
        of, base = rows[name], rows["one key"]
        many, few = ratio(of, base, "many_s"), ratio(of, base, "few_s")
        texts = [f"{one['mean']:.2f} ({one['ci95'][0]:.2f} to {one['ci95'][1]:.2f})" for one in (many, few)]
        in_time = interval([one["in_time"] for one in of], 0.0, 1.0)
        low, high = in_time["ci95"]
        print(
            f"{name:17}{fmean(one['many_s'] for one in of):14.1f}{fmean(one['few_s'] for one in of):12.1f}"
            f"{texts[0]:>30}{texts[1]:>22}  {in_time['mean']:.2f} ({low:.2f} to {high:.2f})",
            flush=True,
        )
    print(json.dumps({"benchmark": "fair_shares", "seeds": args.seeds, "rows": rows}))


if __name__ == "__main__":
    main()
