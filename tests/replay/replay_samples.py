"""Traces and jobs for replays, small enough to be reckoned by hand."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from presage.datasets.schema import conform
from presage.replay.workload import PromptConvention, RecordedRequest, ReplayJob, assemble

START = datetime(2026, 1, 1, tzinfo=UTC)


def row(workflow: str, step: int, agent: str, began_s: float | None = 0.0, took_s: float = 1.0, **more: Any) -> dict:
    times = {}
    if began_s is not None:
        began = START + timedelta(seconds=began_s)
        times = {"started_at": began, "ended_at": began + timedelta(seconds=took_s)}
    return {
        "workflow_type": "t",
        "workflow_id": workflow,
        "step": step,
        "agent": agent,
        "input_tokens": 100,
        "output_tokens": 10,
        "parent_steps": None,
        "kind": "llm",
        **times,
        **more,
    }


def table(*rows: dict) -> pa.Table:
    names = list(dict.fromkeys(name for one in rows for name in one))
    return conform(pa.table({name: [one.get(name) for one in rows] for name in names}), "a sample")


def chain(
    number: int, agents: str, convention: PromptConvention, new: int = 60, output: int = 20, pause_s: float = 0.5
) -> ReplayJob:
    """A workflow whose agents take turns; all prompts grow by what is said."""
    history, own = convention.opening_tokens, dict.fromkeys(agents, convention.opening_tokens)
    asked = []
    for step, agent in enumerate(agents):
        before = history if convention.prompts != "own-conversation" else own[agent]
        size = before + new + convention.closing_tokens
        asked.append(RecordedRequest(agent, size, output, (step - 1,) if step else (), pause_s if step else 0.0))
        history += new + output
        own[agent] += new + output
    return ReplayJob("t", f"w{number}", assemble(asked, convention))
