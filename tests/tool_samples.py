"""Traces with tool calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from presage.datasets.schema import conform
from presage.datasets.schema.validate import validate
from presage.predictors.next_agent.network_weights import NetworkConfig
from presage.predictors.next_agent.parts import NextAgentConfig

QUICK = NextAgentConfig(network=NetworkConfig(epochs=2))


def trace(*workflows: list[dict[str, Any]]) -> pa.Table:
    rows = [
        {"workflow_type": "app", "workflow_id": f"w{number}", "step": step, **row}
        for number, workflow in enumerate(workflows)
        for step, row in enumerate(workflow)
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    return validate(conform(pa.Table.from_pylist([{n: row.get(n) for n in names} for row in rows]), "test"), "test")


def llm(agent: str, **more: Any) -> dict[str, Any]:
    return {"agent": agent, "kind": "llm", **more}


def tool(agent: str, **more: Any) -> dict[str, Any]:
    return {"agent": agent, "kind": "tool", **more}


def tool_led(workflows: int, seed: int) -> pa.Table:
    """Workflows whose second step depends on the tool that the first one calls, and on nothing else."""
    rng, drawn = np.random.default_rng(seed), []
    for _ in range(workflows):
        found = rng.random() < 0.5
        called = [tool("search")] if found else [tool("ask"), tool("ask")]
        drawn.append([llm("plan", output_tokens=5), *called, llm("write" if found else "clarify"), llm("check")])
    return trace(*drawn)
