"""Workflows that take turns on vLLM's own scheduler in virtual time: retry loops, tool pauses, a closed loop.

Two ways to write prompts. "shared": every prompt is the common history of the workflow with the agent's instruction at
its end. "own": each agent has its own system prompt and continues its own conversation. The costs of an iteration are
invented; only ratios mean anything.
"""

import heapq
import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_samples import Engine, ask, build, token

from presage.serving_hooks.workflows.tenants import ARGUMENT

ITERATION_S, TOKEN_S, PREFILL_S, PAUSE_S = 0.012, 150e-6, 120e-6, 1.5
LONGEST = 4096


class Clock:
    """Seconds that somebody moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Work:
    """One workflow, of a tenant or none: (agent, new prompt tokens, output tokens, pause after) a step."""

    name: str
    steps: list[tuple[int, list[int], int, float]]
    at: int = 0
    history: list[int] = field(default_factory=list)
    own: dict[int, list[int]] = field(default_factory=dict)
    began: float = 0.0
    tenant: str = ""


def draw(n: int, seed: int) -> list[Work]:
    """A planner, rounds of retriever, reader and verifier, and a writer."""
    rng, works = random.Random(seed), []
    for i in range(n):
        agents, again = [0, 1, 2, 3], rng.choice([0.25, 0.55, 0.75])
        while rng.random() < again and len(agents) < 16:
            agents += [1, 2, 3]
        steps = [
            (
                agent,
                [rng.randrange(500) for _ in range(rng.randint(60, 400))],
                min(600, int(rng.lognormvariate(4.6, 0.6)) + 8),
                rng.expovariate(1 / PAUSE_S),
            )
            for agent in [*agents, 4]
        ]
        works.append(Work(f"w{i}", steps))
    return works


class Turns:
    """`wanting` of the workflows want to run at once; when one ends the next comes.

    Attributes:
        engine: that serves them.
        finished: seconds each workflow took, by its name.
    """

    def __init__(
        self, folder: Path, kind: type[Any], works: list[Work], prompts: str, wanting: int, **more: Any
    ) -> None:
        self.clock = Clock()
        made = type(kind.__name__, (kind,), {"clock": self.clock})
        self.engine = Engine(build(folder, made, **{"seqs": 64, "tokens": 2048, **more}))
        self.finished: dict[str, float] = {}
        self._shared = prompts == "shared"
        self._coming = works[::-1]
        self._wakes: list[tuple[float, int, Work]] = []
        self._order = itertools.count()
        self._asked: dict[str, Work] = {}
        self._prompt_tokens = 0
        rng = random.Random(99)
        self._base = [rng.randrange(500) for _ in range(300)]
        self._role = [[rng.randrange(500) for _ in range(200)] for _ in range(5)]
        for number in range(wanting):
            self._come(0.07 * number)

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in the cache, of all."""
        return sum(self.engine.hits.values()) / self._prompt_tokens

    def makespan(self) -> float:
        """Seconds until the last workflow has ended."""
        scheduler, clock = self.engine.scheduler, self.clock
        while self._wakes or scheduler.has_unfinished_requests():
            if not scheduler.has_unfinished_requests():
                clock.now = max(clock.now, self._wakes[0][0])
            while self._wakes and self._wakes[0][0] <= clock.now:
                self._ask(heapq.heappop(self._wakes)[2])
            self._step()
        return clock.now

    def _step(self) -> None:
        ended = len(self.engine.ended)
        self.engine.schedule()
        done = self.engine.log[-1][0].values()
        decoded = sum(1 for tokens in done if tokens == 1)
        self.clock.now += ITERATION_S + TOKEN_S * decoded + PREFILL_S * (sum(done) - decoded)
        self.engine.drain()
        for name in self.engine.ended[ended:]:
            self._answered(name)

    def comes(self, work: Work, at: float) -> None:
        """A workflow begins then, whoever else is there."""
        work.began = at
        heapq.heappush(self._wakes, (at, next(self._order), work))

    def _come(self, at: float) -> None:
        if self._coming:
            self.comes(self._coming.pop(), at)

    def _ask(self, work: Work) -> None:
        agent, new, output, _ = work.steps[work.at]
        if self._shared:
            prompt = self._base + work.history + new + self._role[agent][:40]
        else:
            prompt = self._base + self._role[agent] + work.own.get(agent, []) + new
        prompt = prompt[: LONGEST - output - 1]
        name = f"{work.name}.{work.at}"
        self._asked[name] = work
        self._prompt_tokens += len(prompt)
        self.engine.scheduler.add_request(
            ask(
                name,
                prompt,
                output,
                arrival=self.clock.now,
                workflow_type="loop",
                workflow_id=work.name,
                agent=f"a{agent}",
                step=work.at,
                workflow_end=work.at == len(work.steps) - 1,
                **({ARGUMENT: work.tenant} if work.tenant else {}),
            )
        )

    def _answered(self, name: str) -> None:
        work = self._asked.pop(name)
        agent, new, output, pause_s = work.steps[work.at]
        said = [token(name)] * output
        work.history += new + said
        work.own[agent] = work.own.get(agent, []) + new + said
        work.at += 1
        if work.at < len(work.steps):
            heapq.heappush(self._wakes, (self.clock.now + pause_s, next(self._order), work))
        else:
            self.finished[work.name] = self.clock.now - work.began
            self._come(self.clock.now)
