"""What does admission gain or lose where nothing else acts: against everybody at once, and against a fixed number?

A small engine in virtual time: an LRU cache, a cost model, and a closed loop of 72 workflows with retry loops.
"shared": every prompt is the common history of its workflow, which one sequence in the cache holds. "own": each agent
continues its own conversation, a sequence each. Ended workflows' sequences are dropped. The costs of an iteration are
invented; only ratios mean anything. "best fixed" is the best of 16, 24 and 32 workflows at once; "half", "double" and
"noise" are admission with contexts forecast wrong.

    python benchmarks/admission_alone.py [--workflows 150] [--blocks 2500 4000 6000]

Prints seconds until the last workflow has ended over those of everybody at once, with the hit rates, then one JSON
line.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from presage.serving_hooks.policies.admission import Admission, Phase
from presage.serving_hooks.policies.steady_state import Rates

BLOCK, AT_ONCE, FIXED = 16, 72, (16, 24, 32)
NOISE = random.Random(0)
ERRORS: dict[str, Callable[[], float]] = {
    "admission": lambda: 1.0,
    "half": lambda: 0.5,
    "double": lambda: 2.0,
    "noise": lambda: NOISE.uniform(0.3, 3.0),
}


ITERATION_S, TOKEN_S, PREFILL_S, MOST, BUDGET, PAUSE_S = 0.012, 150e-6, 120e-6, 64, 2048, 1.5


@dataclass
class Job:
    """One workflow: (agent, new tokens, output tokens, pause after) a step; what its sequences hold by now."""

    id: str
    steps: list[tuple[int, int, int, float]]
    at: int = 0
    phase: Phase = Phase.READY
    since: float = 0.0
    started: float | None = None
    sequences: dict[int, int] = field(default_factory=dict)

    def working_set(self) -> float:
        _, new, output, _ = self.steps[self.at]
        return sum(self.sequences.values()) + new + output

    def context(self) -> float:
        """The working set in the mean over the steps that are left."""
        return self.working_set() + sum(new + output for _, new, output, _ in self.steps[self.at + 1 :]) / 2


@dataclass
class Request:
    job: Job
    key: tuple[str, int]
    tokens: int
    prefill: int
    decode: int


def draw(n: int, seed: int) -> list[Job]:
    """A planner, rounds of retriever, reader and verifier, and a writer."""
    rng = random.Random(seed)
    jobs = []
    for i in range(n):
        agents, again = [0, 1, 2, 3], rng.choice([0.25, 0.55, 0.75])
        while rng.random() < again and len(agents) < 16:
            agents += [1, 2, 3]
        steps = [
            (agent, rng.randint(60, 400), min(600, int(rng.lognormvariate(4.6, 0.6)) + 8), rng.expovariate(1 / PAUSE_S))
            for agent in [*agents, 4]
        ]
        jobs.append(Job(f"w{i}", steps))
    return jobs


class Loop:
    """`wanting` of the jobs want to run at once; when one ends the next comes."""

    def __init__(self, jobs: list[Job], prompts: str, cache_tokens: int, wanting: int, admission: Admission | None):
        self.jobs, self.shared, self.cache_tokens, self.admission = (
            jobs[::-1],
            prompts == "shared",
            cache_tokens,
            admission,
        )
        self.now, self.ended, self.iterations = 0.0, 0, 0
        self.here: dict[str, Job] = {}
        self.wakes: list[tuple[float, str]] = []
        self.queue: list[Request] = []
        self.running: list[Request] = []
        self.cache: OrderedDict[tuple[str, int], int] = OrderedDict()
        self.pinned = 0
        self.lost = self.reusable = 0.0
        self.all_lost = self.prompts = self.all_new = 0
        self.means: tuple[float, ...] = (200.0, 200.0, 0.5)
        self.pauses = np.sort(np.array([step[3] for job in jobs for step in job.steps]))
        self.steps = float(np.mean([len(job.steps) for job in jobs]))
        self.completions: list[float] = []
        self.longest_wait = 0.0
        self.context_error: Callable[[], float] = lambda: 1.0
        self.decide_at = 0.0
        self.may: frozenset[str] = frozenset()
        for _ in range(wanting):
            self.come()

    def come(self) -> None:
        if self.jobs:
            job = self.jobs.pop()
            job.since = job.started = self.now
            self.here[job.id] = job

    def makespan(self) -> float:
        while self.here:
            while self.wakes and self.wakes[0][0] <= self.now:
                job = self.here[heapq.heappop(self.wakes)[1]]
                job.phase, job.since = Phase.READY, self.now
            self.let_in()
            self.start()
            if self.running:
                self.iterate()
            else:
                next_times = [self.wakes[0][0]] if self.wakes else []
                self.now = max(self.now, min(next_times + ([self.decide_at] if self.admission else [])))
        return self.now

    def let_in(self) -> None:
        """The requests of ready workflows queue up, first come first served: of all, or of those that may run."""
        ready = sorted((job for job in self.here.values() if job.phase is Phase.READY), key=lambda job: job.since)
        if self.admission is not None and self.now >= self.decide_at:
            self.decide_at = self.now + 0.25
            self.may = self.decided(self.admission)
        self.queue = [self.request(job) for job in ready if self.admission is None or job.id in self.may]

    def decided(self, admission: Admission) -> frozenset[str]:
        """The workflows that may run."""
        crowd = admission.workflows
        for job in self.here.values():
            row, error = crowd.place(job.id), self.context_error()
            own, context = job.working_set() * error, job.context() * error
            crowd.facts[row] = job.phase, job.since, job.at > 0, own, context, math.inf, math.inf, 0.0, 0.0
        if admission.is_due(self.now):
            admission.choose(self.rates(), 0.2, 0.0, self.now, False)
        return admission.decide(self.now).run

    def request(self, job: Job) -> Request:
        agent, new, output, _ = job.steps[job.at]
        key = (job.id, 0 if self.shared else agent)
        before = job.sequences.get(key[1], 0)
        return Request(job, key, before + new + output, before + new, output)

    def rates(self) -> Rates:
        """Running means, as an engine would measure them."""
        output, new, read = self.means
        miss = self.lost / self.reusable if self.reusable else 0.0
        return Rates(ITERATION_S, TOKEN_S, PREFILL_S, output, new, MOST, self.pauses, 1 / self.steps, miss, read)

    def hit_rate(self) -> float:
        return 1 - (self.all_lost + self.all_new) / self.prompts

    def start(self) -> None:
        while self.queue and len(self.running) < MOST:
            request = self.queue[0]
            if self.running and self.pinned + request.tokens > self.cache_tokens:
                break
            self.queue.pop(0)
            self.longest_wait = max(self.longest_wait, self.now - request.job.since)
            request.job.phase = Phase.STEP
            hit = self.cache.pop(request.key, 0)
            before = request.job.sequences.get(request.key[1], 0)
            keep = 0.5 ** (before / self.cache_tokens)
            self.lost, self.reusable = (self.lost + before - hit) * keep, (self.reusable + before) * keep
            own = request.job.context()
            seen = (request.decode, request.prefill - before, min(1.0, request.prefill / own))
            self.means = tuple(0.98 * mean + 0.02 * value for mean, value in zip(self.means, seen, strict=True))
            self.all_lost += before - hit
            self.all_new += request.prefill - before
            self.prompts += request.prefill
            request.prefill -= hit
            self.pinned += request.tokens
            self.running.append(request)
            self.shrink()

    def shrink(self) -> None:
        """Least recently used sequences give up their last tokens first."""
        over = self.pinned + sum(self.cache.values()) - self.cache_tokens
        while over > 0 and self.cache:
            key, tokens = next(iter(self.cache.items()))
            if tokens <= over:
                del self.cache[key]
            else:
                self.cache[key] = tokens - over
            over -= tokens

    def iterate(self) -> None:
        """One iteration while anything is prefilled, several where nothing can change."""
        decoding = [r for r in self.running if not r.prefill]
        room, chunk = BUDGET - len(decoding), 0
        for request in self.running:
            part = min(request.prefill, room - chunk)
            request.prefill -= part
            chunk += part
        one_s = ITERATION_S + TOKEN_S * len(decoding) + PREFILL_S * chunk
        times = 1 if chunk else min(r.decode for r in decoding)
        if not chunk:
            until = min([self.wakes[0][0] if self.wakes else 1e18, self.decide_at if self.admission else 1e18])
            times = max(1, min(times, int((until - self.now) / one_s) + 1))
        self.now += one_s * times
        for request in decoding:
            request.decode -= times
            if not request.decode:
                self.finish(request)

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self.pinned -= request.tokens
        job = request.job
        self.cache[request.key] = job.sequences[request.key[1]] = request.tokens
        pause_s = job.steps[job.at][3]
        job.at += 1
        if job.at < len(job.steps):
            job.phase, job.since = Phase.TOOL, self.now
            heapq.heappush(self.wakes, (self.now + pause_s, job.id))
            return
        for key in [key for key in self.cache if key[0] == job.id]:
            del self.cache[key]
        del self.here[job.id]
        if self.admission is not None:
            self.admission.workflows.drop(job.id)
        self.completions.append(self.now - (job.started or 0.0))
        self.come()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workflows", type=int, default=150)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2500, 4000, 6000], help="of 16 tokens, in the cache")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def run(prompts: str, blocks: int, at_once: int, admission: Admission | None, error: Callable[[], float]) -> Loop:
        loop = Loop(draw(args.workflows, seed=0), prompts, BLOCK * blocks, at_once, admission)
        loop.context_error = error
        loop.makespan()
        return loop

    print(f"{'prompts':9}{'blocks':>7}  {'':12}{'makespan':>9}{'hit rate':>9}")
    for prompts in ("shared", "own"):
        for blocks in args.blocks:
            exact = ERRORS["admission"]
            fixed = [run(prompts, blocks, number, None, exact) for number in FIXED]
            loops = {
                "everybody": run(prompts, blocks, AT_ONCE, None, exact),
                "best fixed": min(fixed, key=lambda loop: loop.now),
                **{
                    name: run(prompts, blocks, AT_ONCE, Admission(BLOCK * blocks), error)
                    for name, error in ERRORS.items()
                },
            }
            for name, loop in loops.items():
                over = loop.now / loops["everybody"].now
                row = {"prompts": prompts, "blocks": blocks, "who": name, "makespan": round(over, 3)}
                rows.append(row | {"hit_rate": round(loop.hit_rate(), 3)})
                print(f"{prompts:9}{blocks:7}  {name:12}{over:9.3f}{loop.hit_rate():9.3f}", flush=True)
    print(json.dumps({"benchmark": "admission_alone", "workflows": args.workflows, "runs": rows}))


if __name__ == "__main__":
    main()
