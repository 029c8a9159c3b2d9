"""Workflows with retry loops, drawn in advance: a planner, rounds of retriever, reader and verifier, and a writer.

The draw fixes what each step adds, the length of its answer and the time of its tool. The rest of a prompt is what
agents have answered so far, so prompts are equal for all schedulers as long as answers are. Two prompt styles:
"shared" has the common history first and the agent's instruction last; in "own" each agent continues its own
conversation.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import numpy as np

AGENTS = ("planner", "retriever", "reader", "verifier", "writer")
TYPE, VOCABULARY, MOST_STEPS = "loops", 500, 14
Style = Literal["shared", "own"]


@dataclass(frozen=True)
class Planned:
    """One step: agent, tokens added to the prompt, tokens of the answer, iterations until the next step."""

    agent: str
    new: list[int]
    answer: int
    pause: int


def draw(count: int, seed: int) -> dict[str, list[Planned]]:
    """Draws workflows by id. The probability of another round varies between them and is not observable."""
    rng = random.Random(seed)
    drawn = {}
    for number in range(count):
        agents, again = list(AGENTS[:4]), rng.choice([0.25, 0.55, 0.75])
        while rng.random() < again and len(agents) + 4 <= MOST_STEPS:
            agents += AGENTS[1:4]
        drawn[f"w{seed}-{number}"] = [
            Planned(
                agent,
                [rng.randrange(VOCABULARY) for _ in range(rng.randint(20, 130))],
                min(80, int(rng.lognormvariate(3.0, 0.6)) + 4),
                int(rng.expovariate(1 / 20)),
            )
            for agent in [*agents, AGENTS[4]]
        ]
    return drawn


@dataclass
class Written:
    """The prompts of one workflow, step by step."""

    style: Style
    history: list[int] = field(default_factory=list)
    own: dict[str, list[int]] = field(default_factory=dict)

    def prompt(self, step: Planned) -> list[int]:
        """The prompt of the step."""
        base, role = _fixed("base", 100), _fixed(step.agent, 60)
        if self.style == "shared":
            return base + self.history + step.new + role[:20]
        return base + role + self.own.get(step.agent, []) + step.new

    def answered(self, step: Planned, answer: Sequence[int]) -> None:
        """Takes the answer of the step."""
        said = [*step.new, *answer]
        self.history = self.history + said
        self.own[step.agent] = self.own.get(step.agent, []) + said

    def held(self) -> int:
        """Number of tokens that a later prompt may begin with."""
        if self.style == "shared":
            return 100 + len(self.history)
        return 100 + sum(60 + len(said) for said in self.own.values())


def working_set(workflows: Mapping[str, Sequence[Planned]], style: Style) -> float:
    """Mean number of tokens that a workflow reuses, over its steps."""
    held = []
    for steps in workflows.values():
        written = Written(style)
        for step in steps:
            written.answered(step, [0] * step.answer)
            held.append(written.held())
    return float(np.mean(held))


def traced(workflows: Mapping[str, Sequence[Planned]], style: Style, pause_s: float) -> list[dict[str, Any]]:
    """These workflows as rows of a trace, from an engine where a step takes half a second.

    Args:
        workflows: steps by workflow id.
        style: of the prompts.
        pause_s: seconds of one of the iterations in which pauses are drawn.
    """
    rows = []
    for name, steps in workflows.items():
        written, at = Written(style), datetime(2026, 1, 1, tzinfo=UTC)
        for number, step in enumerate(steps):
            began = at + timedelta(seconds=step.pause * pause_s)
            at = began + timedelta(seconds=0.5)
            rows.append(
                {
                    "workflow_type": TYPE,
                    "workflow_id": name,
                    "step": number,
                    "agent": step.agent,
                    "parent_steps": [number - 1] if number else [],
                    "input_tokens": len(written.prompt(step)),
                    "output_tokens": step.answer,
                    "started_at": began,
                    "ended_at": at,
                    "complete": True,
                }
            )
            written.answered(step, [0] * step.answer)
    return rows


def _fixed(name: str, tokens: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(VOCABULARY) for _ in range(tokens)]
