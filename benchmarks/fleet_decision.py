"""How long does a routing decision take with 64 engines and 5,000 running workflows?

Arrivals and answers of random workflows are reported to each policy as the gateway would, without engines behind it: a
decision is `decide` and the `release` after it. Most workflows are in tool calls, the caches are full and hundreds of
programs are queued, the worst case. Needs no vLLM.

    .venv/bin/python benchmarks/fleet_decision.py
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from presage.serving_hooks.policies.routing.fleet import Fleet, FleetEngine, RoutingRequest
from presage.serving_hooks.policies.routing.placement import LeastLoaded, RoundRobin, SessionAffinity
from presage.serving_hooks.policies.routing.programs import ForecastPrograms, ProgramScheduling, ThunderAgent

NAMES: dict[str, Callable[[], Any]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "session-affinity": SessionAffinity,
    "program-scheduling": ProgramScheduling,
    "thunderagent": ThunderAgent,
    "presage": ForecastPrograms,
}


def measured(policy: Any, engines: int, workflows: int, decisions: int) -> dict[str, float]:
    """Microseconds of a decision, and milliseconds of a tick."""
    rng = random.Random(0)
    fleet = Fleet([FleetEngine(f"e{n}", 5_000 * workflows // engines, 256, 0.02, 3e-5) for n in range(engines)])
    flying: list[tuple[tuple[int, int], str]] = []
    away: list[int] = []
    took, ticks, now, steps = [], [], 0.0, [0] * (2 * workflows + decisions)
    new = 0
    for number in range(workflows + decisions):
        now += 0.001
        if number < workflows or not away or rng.random() < 0.1:
            workflow, new = new, new + 1
        else:
            workflow = away.pop(rng.randrange(len(away)))
        one = RoutingRequest(
            (workflow, steps[workflow]), f"{workflow}", now, rng.randint(2_000, 14_000), 500, rng.expovariate(1e-3)
        )
        steps[workflow] += 1
        fleet.arrived(one)
        began = time.perf_counter()
        placed = [(one, policy.decide(one, fleet, now)), *policy.release(fleet, now)]
        spent = time.perf_counter() - began
        if number >= workflows:
            took.append(spent)
        for request, placement in placed:
            if placement.engine is not None:
                fleet.place(request, placement.engine)
                flying.append((request.id, request.program))
        if len(flying) > 500:
            id_, name = flying.pop(rng.randrange(len(flying)))
            program = fleet.answered(id_, name, 200, now)
            policy.answered(id_, program, fleet, now)
            if rng.random() < 0.1 and not program.waiting:
                fleet.ended(name)
            else:
                program.return_s = 5.0
                away.append(id_[0])
        if number % 500 == 0:
            began = time.perf_counter()
            policy.tick(fleet, now)
            ticks.append(time.perf_counter() - began)
    queued = sum(bool(program.waiting) for program in fleet.programs.values())
    return {
        "median_us": float(np.median(took) * 1e6),
        "p99_us": float(np.percentile(took, 99) * 1e6),
        "tick_ms": float(np.median(ticks[-10:]) * 1e3),
        "workflows": len(fleet.programs),
        "queued": queued,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--workflows", type=int, default=5_000)
    parser.add_argument("--decisions", type=int, default=10_000)
    args = parser.parse_args()
    found = {}
    print(f"{'':19}{'median µs':>10}{'p99 µs':>8}{'times round robin':>18}{'tick ms':>8}{'workflows':>10}{'queued':>7}")
    for name, kind in NAMES.items():
        of = found[name] = measured(kind(), args.engines, args.workflows, args.decisions)
        of["times_round_robin"] = of["median_us"] / found["round-robin"]["median_us"]
        print(
            f"{name:19}{of['median_us']:10.1f}{of['p99_us']:8.1f}{of['times_round_robin']:18.1f}{of['tick_ms']:8.1f}"
            f"{of['workflows']:10.0f}{of['queued']:7.0f}"
        )
    print(json.dumps({"benchmark": "fleet_decision", "engines": args.engines, "policies": found}))


if __name__ == "__main__":
    main()
