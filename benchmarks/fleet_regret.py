"""How far is each routing policy from the best placement in hindsight?

Small cases that can be enumerated: a few workflows arrive at once on two engines, every way to give each workflow one
engine is replayed (half of them, since the engines are alike), and the best mean completion is the yardstick. The
regret of a policy is its mean completion divided by that, minus 1. It can be negative: policies that hold or
move workflows do what no fixed placement does.

    .venv-vllm/bin/python benchmarks/fleet_regret.py
"""

from __future__ import annotations

import argparse
import itertools
import json
from functools import partial
from typing import Any, Final

import numpy as np
from replayed_cells import workload_of

from presage.serving_hooks.policies.routing.fleet import Fleet, Placement, RoutingRequest
from presage.serving_hooks.policies.routing.placement import Immediate
from presage.serving_hooks.replay.engine_file import read_engine
from presage.serving_hooks.replay.fleet_file import FleetMember
from presage.serving_hooks.replay.metrics import interval
from presage.serving_hooks.replay.policies import POLICIES, ROUTING, Policy
from presage.serving_hooks.replay.prompts import PromptIds
from presage.serving_hooks.replay.runs import Setting, run_one
from presage.serving_hooks.replay.workload import Arrivals

FIXED: Final = "fixed"


class Fixed(Immediate):
    """Each workflow on its engine, by the number of the workflow."""

    def __init__(self, engines: tuple[int, ...]) -> None:
        super().__init__()
        self._engines = engines

    def choose(self, request: RoutingRequest, fleet: Fleet, engines: list[int]) -> Placement:
        """The given engine."""
        return Placement(self._engines[int(request.program)], FIXED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workflows", type=int, default=7)
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--cache-tokens", type=int, default=9_600)
    args = parser.parse_args()
    engine = read_engine("invented", args.cache_tokens)
    members = tuple(FleetMember(f"e{number}", engine, POLICIES["stock"]) for number in range(2))
    pool = workload_of("history-first", 20 * args.cases * args.workflows, None)
    room = 0.95 * args.cache_tokens
    fits = [job for job in pool.jobs if max(step.prompt_tokens + step.output_tokens for step in job.steps) < room]
    regret: dict[str, list[float]] = {name: [] for name in ROUTING}
    for case in range(args.cases):
        jobs = tuple(fits[case * args.workflows : (case + 1) * args.workflows])
        setting = Setting(jobs, pool.convention, Arrivals(args.workflows), engine, "counts", fleet=members)
        prompts = PromptIds(jobs, pool.convention)

        def completion(policy: Policy, setting: Setting = setting, prompts: PromptIds = prompts) -> float:
            return run_one(setting, policy, 0, True, prompts).figures["completion_mean_s"]

        best = float("inf")
        for rest in itertools.product(range(2), repeat=len(jobs) - 1):
            best = min(best, completion(Policy(FIXED, None, routing=partial(Fixed, (0, *rest)))))
        for name in ROUTING:
            regret[name].append(completion(ROUTING[name]) / best - 1)
    print(f"{args.cases} cases of {args.workflows} workflows on 2 engines of {args.cache_tokens} tokens")
    print(f"{'':19}{'mean regret':>12}{'95 % interval':>20}{'worst':>8}")
    found: dict[str, Any] = {}
    for name, of in regret.items():
        found[name] = interval(of)
        low, high = found[name]["ci95"]
        print(f"{name:19}{found[name]['mean']:12.3f}{f'{low:.3f} to {high:.3f}':>20}{np.max(of):8.3f}")
    print(json.dumps({"benchmark": "fleet_regret", "cases": args.cases, "regret": found}))


if __name__ == "__main__":
    main()
