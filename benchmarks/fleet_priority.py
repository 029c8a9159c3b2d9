"""Does priority by downstream idle risk (Pythia, algorithm 3) complete workflows sooner than shortest total job first?

Three models, an engine each, and agents that use one model each; requests wait where their model is busy. The router
gives each request its priority when it places it, and the engine's queue, its ageing and its victims follow that:

    base = w1 / E[steps to the end] + w2 · Σ P(a) / E[steps to a]   over future agents a of a model with few requests

Expected steps come from transitions that the router counts while it serves; P(a), the probability that a comes at all,
is ours: the paper's sums do not say what an agent counts that may never come. A request that has waited t seconds has
priority base + AGEING · t, so the order of two requests never changes. The engine preempts the lowest when its cache is
full; it takes no running request off for a waiting one, as vLLM does not.

`stjf` orders by remaining output tokens that the router forecasts by counting, with the hooks' ageing; `bounded waits`
adds the hooks' bound, which is their default; `stjf + risk` divides the tokens by 1 + w · risk; `stjf, oracle` knows
them. All see the same arrivals; ratios of mean completion are paired by seed, 95 % (Student's t).

Workloads, each of chains of agents, whose loops and lengths are drawn:

- branches: two types share the planner's model and go on to different models; they arrive in turns, in bursts
- crowded: a type that stays on the planner's model crowds out one that feeds the others
- pipeline: one type, planner, coder, tester with retries, Poisson arrivals

    .venv-vllm/bin/python benchmarks/fleet_priority.py
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from fleet import ratio

from presage.replay.fleet_file import FleetMember
from presage.replay.metrics import Figures
from presage.replay.policies import POLICIES, Policy
from presage.replay.runs import Setting, run_one
from presage.replay.workload import Arrivals, PromptConvention, RecordedRequest, ReplayJob, assemble
from presage.serving_hooks.engine_file import EngineFile, read_engine
from presage.serving_hooks.policies.priority import Key, ShortestTotalJobFirst
from presage.serving_hooks.policies.routing.fleet import Fleet, Placement, RoutingRequest
from presage.serving_hooks.policies.routing.placement import LeastLoaded

if TYPE_CHECKING:
    from presage.serving_hooks.modes import Switch

AGEING: Final = 0.02
"""Priority gained each second: a workflow ten steps from its end passes a new one that ends at once after 45 s."""
IDLE_REQUESTS: Final = 8
"""A model with fewer requests an engine is at risk of becoming idle."""
MOST_REQUESTS: Final = 16
MODELS: Final = {"planner": "large", "critic": "large", "coder": "code", "tester": "code", "writer": "text"}
SIZES: Final = {"large": 2.0, "code": 1.0, "text": 1.0}
CONVENTION: Final = PromptConvention("history-first")


class Transitions:
    """Counts which agent follows which, and END, in one workflow type; expected steps follow from them."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, Counter[str | None]] = defaultdict(Counter)
        self._found: dict[str, tuple[float, dict[str, float]]] = {}

    def follow(self, agent: str, after: str | None) -> None:
        """An agent, or the end if None, came after another."""
        self._counts[agent][after] += 1
        self._found = {}

    def ahead(self, agent: str) -> tuple[float, dict[str, float]]:
        """Expected steps to the end, the present one included, and P(a) / E[steps to a] of each agent to come.

        Infinity and nothing of an agent that has not been followed.
        """
        if agent not in self._found:
            self._solve()
        return self._found.get(agent, (math.inf, {}))

    def _solve(self) -> None:
        agents = list(self._counts)
        rows = np.zeros((len(agents), len(agents)))
        for row, agent in enumerate(agents):
            for column, after in enumerate(agents):
                rows[row, column] = self._counts[agent][after] / self._counts[agent].total()
        one = np.eye(len(agents))
        left = np.linalg.lstsq(one - rows, np.ones(len(agents)), rcond=None)[0]
        near = {agent: dict[str, float]() for agent in agents}
        for column, target in enumerate(agents):
            others = rows.copy()
            others[:, column] = 0.0
            comes = np.linalg.lstsq(one - others, rows[:, column], rcond=None)[0]  # probability, from each agent
            steps = np.linalg.lstsq(one - others, comes, rcond=None)[0]  # times their expected number, given it comes
            for row, agent in enumerate(agents):
                if comes[row] > 1e-9:
                    near[agent][target] = float(comes[row] ** 2 / steps[row])
        self._found = {agent: (max(1.0, float(left[row])), near[agent]) for row, agent in enumerate(agents)}


def idle_risk(near: Mapping[str, float], models: Mapping[str, str], starved: Collection[str]) -> float:
    """Algorithm 3, DownstreamIdleRisk: the sum of P(a) / E[steps to a] over agents of starved models."""
    return sum(value for agent, value in near.items() if models[agent] in starved)


BOARD: Final[dict[str, tuple[float, float]]] = {}
"""What the router hands to the engines with a request, by its name: the base priority, and the tokens to order by."""


class Prioritizing(LeastLoaded):
    """Places as `least-loaded`, and gives each request its priority.

    Args:
        completion, risk: w1 and w2.
        scale: w of `stjf + risk`.
        oracle: whether remaining tokens are the true ones.
    """

    def __init__(
        self,
        jobs: Sequence[ReplayJob],
        completion: float = 1.0,
        risk: float = 0.0,
        scale: float = 0.0,
        oracle: bool = False,
    ) -> None:
        super().__init__()
        self._jobs, self._weights, self._scale, self._oracle = jobs, (completion, risk), scale, oracle
        self._transitions: defaultdict[str, Transitions] = defaultdict(Transitions)
        BOARD.clear()

    def decide(self, request: RoutingRequest, fleet: Fleet, now: float) -> Placement:
        """Its engine; its priority goes with it."""
        number, index = request.id
        job = self._jobs[number]
        transitions = self._transitions[job.workflow_type]
        if index:
            transitions.follow(job.steps[index - 1].agent, request.agent)
        if index == len(job.steps) - 1:
            transitions.follow(request.agent, None)  # as the client's workflow_end would, when it ends
        waiting: Counter[str] = Counter()
        for engine in fleet.engines:
            waiting[engine.model] += engine.requests
        starved = {model for model in SIZES if waiting[model] < IDLE_REQUESTS and model != request.model}
        steps, near = transitions.ahead(request.agent)
        risk = idle_risk(near, MODELS, starved)
        tokens = request.remaining_tokens
        if self._oracle:
            tokens = float(sum(step.output_tokens for step in job.steps[index:]))
        w1, w2 = self._weights
        BOARD[f"{number}.{index}"] = (
            w1 / steps + w2 * risk,
            (math.inf if tokens is None else tokens) / (1.0 + self._scale * risk),
        )
        return super().decide(request, fleet, now)


class BaseAndAgeing:
    """Keys base + AGEING · waited, the highest first, with the methods of `ShortestTotalJobFirst`."""

    promoted = demoted = 0

    def __init__(self) -> None:
        self._keys: dict[str, Key] = {}

    def add(
        self, request: str, iteration: int, arrival: float, workflow_type: str, remaining_tokens: float | None
    ) -> Key:
        """With the priority that the router gave it. The time at which two are compared is the same for both."""
        return self._keys.setdefault(request, Key(0, AGEING * arrival - BOARD[request][0], arrival, request))

    def key(self, request: str) -> Key:
        """The lowest runs first."""
        return self._keys[request]

    def overdue(self, request: str) -> Key:
        """Nothing changes."""
        return self._keys[request]

    def age(self, iteration: int) -> list[str]:
        """Ageing changes no order."""
        return []

    def selected(self, requests: Collection[str], iteration: int) -> list[str]:
        """Nothing changes."""
        return []

    def remove(self, request: str) -> None:
        """It has left."""
        self._keys.pop(request, None)

    def debug_state(self) -> dict[str, int]:
        """Entries."""
        return {"priority keys": len(self._keys)}


class _HandedTokens(ShortestTotalJobFirst):
    """Shortest total job first, by the tokens that the router handed over."""

    def add(
        self, request: str, iteration: int, arrival: float, workflow_type: str, remaining_tokens: float | None
    ) -> Key:
        return super().add(request, iteration, arrival, workflow_type, BOARD[request][1])


def ordered_by(make: Callable[..., Any], hooked: type[Any]) -> type[Any]:
    """A scheduler that orders by handed priorities, and preempts the last of the running requests by them."""
    from presage.serving_hooks.vllm.queues import Priorities

    class HandedScheduler(hooked):  # type: ignore[misc]
        def make_priorities(self, config: Any, medians: Mapping[str, float], switch: Switch) -> Any:
            return Priorities(make(), medians, self.engine_port.by_priority, switch)

        def schedule(self, throttle_prefills: bool = False) -> Any:
            if self.waiting and self.queue_policies.priorities is not None:
                self.running.sort(key=self.queue_policies.priorities.key)
            return super().schedule(throttle_prefills)

    return HandedScheduler


def hooks(make: Callable[..., Any], bounded: bool = False) -> Policy:
    """The hooks of an engine with an order; `bounded` keeps their bound on waits."""
    more = {} if bounded else {"objectives": {"factor": 1e9}}
    return Policy("handed", frozenset({"priority"}), scheduler=partial(ordered_by, make), more=more)


def chain(rng: np.random.Generator, kind: str, name: str, agents: Sequence[str], at_s: float) -> ReplayJob:
    """A workflow; outputs are log-normal (planner, critic, tester 60, others 160; σ 0.5), pauses 0.5 s."""
    asked, history = [], 300
    for index, agent in enumerate(agents):
        mean = 160 if agent in ("coder", "writer") else 60
        output = int(np.clip(mean * math.exp(rng.normal(0.0, 0.5)), 8, 3000))
        history += 150
        asked.append(RecordedRequest(agent, history, output, (index - 1,) if index else (), 0.5 if index else 0.0))
        history += output
    return ReplayJob(kind, name, assemble(asked, CONVENTION), at_s)


def retried(rng: np.random.Generator, *agents: str, again: float = 0.4, most: int = 6) -> list[str]:
    """The agents, again as often as chance wants."""
    found = list(agents)
    while rng.random() < again and len(found) < most * len(agents):
        found += agents
    return found


def branches(rng: np.random.Generator) -> list[ReplayJob]:
    """Bursts of 40 workflows that code, then 40 that write, in turns every 5 s."""
    jobs = []
    for burst in range(8):
        for number in range(40):
            name, at_s = f"{burst}-{number}", 5.0 * burst + float(rng.uniform(0, 2))
            if burst % 2:
                jobs.append(chain(rng, "writing", name, ["planner", "critic", *retried(rng, "writer")], at_s))
            else:
                jobs.append(chain(rng, "coding", name, ["planner", "critic", *retried(rng, "coder", "tester")], at_s))
    return jobs


def crowded(rng: np.random.Generator) -> list[ReplayJob]:
    """Debates that stay on the planner's model, and workflows that feed the others."""
    times = np.cumsum(rng.exponential(1 / 10, 320))
    jobs = []
    for number, at_s in enumerate(times.tolist()):
        draw = rng.random()
        if draw < 0.15:
            jobs.append(chain(rng, "debate", f"{number}", retried(rng, "planner", "critic", again=0.7), at_s))
        elif draw < 0.75:
            jobs.append(chain(rng, "coding", f"{number}", ["planner", *retried(rng, "coder", "tester")], at_s))
        else:
            jobs.append(chain(rng, "writing", f"{number}", ["planner", *retried(rng, "writer")], at_s))
    return jobs


def pipeline(rng: np.random.Generator) -> list[ReplayJob]:
    """One type, with retries."""
    times = np.cumsum(rng.exponential(1 / 6, 260))
    return [
        chain(rng, "coding", f"{n}", ["planner", *retried(rng, "coder", "tester"), "critic", "writer"], at_s)
        for n, at_s in enumerate(times.tolist())
    ]


def scaled(engine: EngineFile, size: float) -> EngineFile:
    """The engine with the costs of a larger model."""
    cost = engine.cost
    larger = {name: getattr(cost, name) * size for name in ("iteration_s", "prefill_token_s", "decode_token_s")}
    return engine.model_copy(update={"cost": cost.model_copy(update=larger), "most_requests": MOST_REQUESTS})


CELLS: Final = {"branches": branches, "crowded": crowded, "pipeline": pipeline}
RISKS: Final = (0.0, 0.25, 1.0, 4.0)
SCALES: Final = (1.0, 4.0)


def run(cell: str, name: str, seed: int) -> Figures:
    """One order with one seed, which draws workflows and arrivals."""
    jobs = tuple(sorted(CELLS[cell](np.random.default_rng(seed)), key=lambda job: job.arrives_s or 0.0))
    base = read_engine("h100-8b-datasheet", 40_000)
    engine_hooks, routing = POLICIES["stock"], partial(Prioritizing, jobs)
    if name.startswith("stjf"):
        scale = float(name.rpartition(" ")[2]) if "risk" in name else 0.0
        engine_hooks = hooks(_HandedTokens, "bounded" in name)
        routing = partial(Prioritizing, jobs, scale=scale, oracle="oracle" in name)
    elif name.startswith("w2/w1"):
        engine_hooks, routing = hooks(BaseAndAgeing), partial(Prioritizing, jobs, risk=float(name.rpartition(" ")[2]))
    members = tuple(FleetMember(model, scaled(base, size), engine_hooks, model=model) for model, size in SIZES.items())
    setting = Setting(
        jobs, CONVENTION, Arrivals(as_recorded=True), members[0].engine, "counts", fleet=members, models=MODELS
    )
    policy = Policy(name, None, "asked", routing=routing)
    return dict(run_one(setting, policy, seed).figures)


ORDERS: Final = (
    "first come",
    "stjf, bounded waits",
    "stjf",
    *(f"stjf + risk, w {scale:g}" for scale in SCALES),
    "stjf, oracle",
    *(f"w2/w1 = {risk:g}" for risk in RISKS),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--orders", nargs="+", default=list(ORDERS))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=0, help="other seeds draw other workflows")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        for cell in args.cells:
            seeds = range(args.first_seed, args.first_seed + args.seeds)
            tasks = {name: [pool.submit(run, cell, name, seed) for seed in seeds] for name in args.orders}
            runs = {name: [one.result() for one in of] for name, of in tasks.items()}
            found[cell] = table(cell, runs)
    print(
        json.dumps(
            {
                "benchmark": "fleet_priority",
                "seeds": args.seeds,
                "first_seed": args.first_seed,
                "ageing": AGEING,
                "cells": found,
            }
        )
    )


def table(cell: str, runs: Mapping[str, list[Figures]]) -> dict[str, Any]:
    """Prints the table of a workload; returns its figures."""
    found: dict[str, Any] = {}
    print(f"\n{cell}: mean over {len(next(iter(runs.values())))} seeds")
    print(
        f"{'':22}{'completion s':>13}{'p99 s':>8}{'makespan s':>11}{'worst wait s':>13}{'preempted':>10}"
        f"{'sooner than stjf':>27}{'sooner than w2 = 0':>27}{'p99 sooner than stjf':>27}"
    )
    for name, of in runs.items():
        keys = ("completion_mean_s", "completion_p99_s", "makespan_s", "longest_wait_s", "preemptions")
        mean = {key: float(np.mean([one[key] for one in of])) for key in keys}
        cells = []
        found[name] = {key: round(value, 2) for key, value in mean.items()}
        pairs = (("stjf", "completion_mean_s"), ("w2/w1 = 0", "completion_mean_s"), ("stjf", "completion_p99_s"))
        for other, figure in pairs:
            if other in runs:
                against = found[name][f"{figure} sooner than {other}"] = ratio(of, runs[other], figure)
                low, high = against["ci95"]
                cells.append(f"{against['mean']:9.3f} ({low:6.3f} to {high:6.3f})")
        print(
            f"{name:22}{mean['completion_mean_s']:13.1f}{mean['completion_p99_s']:8.1f}{mean['makespan_s']:11.1f}"
            f"{mean['longest_wait_s']:13.1f}{mean['preemptions']:10.0f}{''.join(cells)}",
            flush=True,
        )
    return found


if __name__ == "__main__":
    main()
