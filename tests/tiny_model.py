"""One small model for all tests that need a trained one, and workflows of every shape to ask it about."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from presage.training.next_agent.train import NextAgentTraining

STATE_SIZE = 16


@dataclass(frozen=True)
class Tiny:
    """A next-agent predictor trained in seconds, and the traces around it.

    Attributes:
        training: what `train` returned.
        folder: its artefact, metrics and report.
        store: what it was trained on, of law "retry", with texts and states.
        held_out: more of the same law.
    """

    training: NextAgentTraining
    folder: Path
    store: Path
    held_out: Path


def steps_of(
    agents: Sequence[str], workflow_type: str = "retry", parents: Sequence[Sequence[int]] = (), running: bool = True
) -> list[dict[str, Any]]:
    """The steps of a workflow with sizes and states, as JSON could hold them; if running, the last has no output."""
    rng = np.random.default_rng(len(agents))
    steps = []
    for step, agent in enumerate(agents):
        row = {
            "workflow_type": workflow_type,
            "workflow_id": f"{workflow_type}-{len(agents)}",
            "step": step,
            "agent": agent,
            "input_tokens": int(rng.integers(1, 5000)),
            "prefill_state": rng.normal(size=STATE_SIZE).astype(np.float16).tolist(),
        }
        if parents and parents[step]:
            row["parent_steps"] = list(parents[step])
        if not (running and step == len(agents) - 1):
            row["output_tokens"] = int(rng.integers(1, 900))
            row["completion_state"] = rng.normal(size=STATE_SIZE).astype(np.float16).tolist()
        steps.append(row)
    return steps


WORKFLOWS = {
    "loop": steps_of(["planner", "coder", "tester", "coder", "tester", "coder", "tester"]),
    "retries": steps_of(["planner", "coder", "coder", "coder", "coder"], running=False),
    "siblings": steps_of(
        ["planner", "retriever", "reader", "retriever", "coder"], parents=[[], [0], [0], [0], [1, 2, 3]]
    ),
    "depth over 3": steps_of(["planner", "retriever", "reader", "coder", "reviewer", "writer"]),
    "an unknown agent": steps_of(["planner", "stranger", "coder"]),
    "an unknown agent now": steps_of(["planner", "stranger"], running=False),
    "an unknown workflow type": steps_of(["planner", "coder", "tester"], workflow_type="other"),
    "one step": steps_of(["planner"]),
    "one step, complete": steps_of(["planner"], running=False),
}
