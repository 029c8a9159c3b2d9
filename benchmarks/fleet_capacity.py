"""How many requests fit an engine if upper quantiles of their lengths are reserved, and how often is that too little?

Pythia's algorithm 2 on two engines: a request is placed where the upper bounds of all lengths fit the cache, with risks
that sum to ε. Bounds are quantiles of output tokens by agent, of other workflows of the same law. Beside it: reserving
`max_tokens` as a server without forecasts must, and reserving the mean. Overflow is the share of placements after which
the true final lengths on the engine pass its cache: ε bounds it. Prompts are counted whole, shared prefixes too.

    .venv-vllm/bin/python benchmarks/fleet_capacity.py
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from functools import partial
from typing import Any, Final

import numpy as np
from published_routing import StatisticalCapacity
from replay import CONVENTIONS, draw

from presage.replay.fleet_file import FleetMember
from presage.replay.metrics import PolicyRun, interval
from presage.replay.policies import POLICIES, Policy
from presage.replay.runs import Setting, run_one
from presage.replay.workload import Arrivals, ReplayJob
from presage.serving_hooks.engine_file import read_engine
from presage.serving_hooks.policies.routing.fleet import Fleet, Placement, Program, RoutingRequest

RISKS: Final = (0.01, 0.05, 0.2)
LEARNT_FROM, LEARNT_FROM_SEED = 400, 1000
"""The other workflows whose output lengths give the quantiles."""


class Watched(StatisticalCapacity):
    """Counts placements after which the true lengths pass the cache."""

    def __init__(self, jobs: tuple[ReplayJob, ...], seen: list[bool], bound: Any, risk: float) -> None:
        super().__init__(bound, risk)
        self._jobs, self._seen = jobs, seen
        self._true: defaultdict[int, dict[tuple[int, int], int]] = defaultdict(dict)

    def decide(self, request: RoutingRequest, fleet: Fleet, now: float) -> Placement:
        """As the policy."""
        placement = super().decide(request, fleet, now)
        self._placed(request, placement, fleet)
        return placement

    def release(self, fleet: Fleet, now: float) -> list[tuple[RoutingRequest, Placement]]:
        """As the policy."""
        found = super().release(fleet, now)
        for request, placement in found:
            self._placed(request, placement, fleet)
        return found

    def answered(self, request: tuple[int, int], program: Program, fleet: Fleet, now: float) -> None:
        """As the policy."""
        super().answered(request, program, fleet, now)
        for of in self._true.values():
            of.pop(request, None)

    def _placed(self, request: RoutingRequest, placement: Placement, fleet: Fleet) -> None:
        if placement.engine is None:
            return
        job, step = request.id
        of = self._true[placement.engine]
        of[request.id] = request.prompt_tokens + self._jobs[job].steps[step].output_tokens
        self._seen.append(sum(of.values()) > fleet.engines[placement.engine].cache_tokens)


def fixed(tokens: int, request: RoutingRequest, alpha: float) -> float:
    """The same for all requests."""
    return float(tokens)


def at_once(run: PolicyRun) -> float:
    """Mean requests in the engines."""
    return sum((one.ended_s or 0.0) - (one.began_s or 0.0) for one in run.asked) / run.end_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workflows", type=int, default=300)
    parser.add_argument("--cache-tokens", type=int, default=48_000)
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    convention = CONVENTIONS["history-first"]
    jobs = draw(args.workflows, convention)
    outputs: dict[str, list[int]] = defaultdict(list)
    for job in draw(LEARNT_FROM, convention, LEARNT_FROM_SEED):
        for step in job.steps:
            outputs[step.agent].append(step.output_tokens)
    known = {agent: np.sort(of) for agent, of in outputs.items()}

    def quantile(request: RoutingRequest, alpha: float) -> float:
        """The order statistic that a new output passes with probability alpha at most, if it is exchangeable."""
        of = known[jobs[request.id[0]].steps[request.id[1]].agent]
        rank = math.ceil((1 - alpha) * (len(of) + 1))
        return float(of[rank - 1]) if rank <= len(of) else 1.5 * float(of[-1])

    def mean(request: RoutingRequest, alpha: float) -> float:
        return float(known[jobs[request.id[0]].steps[request.id[1]].agent].mean())

    engine = read_engine("invented", args.cache_tokens)
    members = tuple(FleetMember(f"e{number}", engine, POLICIES["stock"]) for number in range(2))
    setting = Setting(jobs, convention, Arrivals(160), engine, "counts", fleet=members)
    rules: dict[str, tuple[Any, float]] = {
        f"max_tokens {n}": (lambda r, a, n=n: float(n), 1.0) for n in args.max_tokens
    }
    rules |= {"mean": (mean, 1.0)} | {f"quantiles, ε {risk:g}": (quantile, risk) for risk in RISKS}
    print(f"{args.workflows} workflows, 160 at once, 2 engines of {args.cache_tokens} tokens, {args.seeds} seeds")
    print(
        f"{'reserved':20}{'overflow':>9}{'95 % interval':>18}{'ε':>6}{'in an engine':>13}"
        f"{'preempted':>10}{'completion s':>13}"
    )
    found: dict[str, Any] = {}
    for name, (bound, risk) in rules.items():
        over, inside, preempted, completion = [], [], [], []
        for seed in range(args.seeds):
            seen: list[bool] = []
            runs: list[PolicyRun] = []
            policy = Policy(name, None, routing=partial(Watched, jobs, seen, bound, risk))
            figures = run_one(setting, policy, seed, on_run=runs.append).figures
            over.append(float(np.mean(seen)))
            inside.append(at_once(runs[0]) / len(members))
            preempted.append(figures["preemptions"])
            completion.append(figures["completion_mean_s"])
        found[name] = {"overflow": interval(over, 0.0, 1.0), "requests": interval(inside), "epsilon": risk}
        low, high = found[name]["overflow"]["ci95"] or (math.nan, math.nan)
        print(
            f"{name:20}{np.mean(over):9.4f}{f'{low:.4f} to {high:.4f}':>18}{risk:6.2f}{np.mean(inside):13.2f}"
            f"{np.mean(preempted):10.0f}{np.mean(completion):13.1f}"
        )
    print(json.dumps({"benchmark": "fleet_capacity", "rules": found}))


if __name__ == "__main__":
    main()
