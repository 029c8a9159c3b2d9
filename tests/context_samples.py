"""Agents in a loop whose contexts grow by a known process: each step adds what its workflow adds, until it ends."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from presage.datasets.schema import conform

STEPS = {"fix": 24, "answer": 4}
"""Steps of a workflow by type, give or take a quarter."""


def loops(workflows: int, seed: int) -> pa.Table:
    """A trace; a step of a workflow adds 100 to 2,000 tokens, by the factor of the workflow, of which 50 are output."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(workflows):
        name = list(STEPS)[number % 2]
        steps = round(STEPS[name] * rng.uniform(0.75, 1.25))
        added, prompt = float(np.exp(rng.uniform(np.log(100), np.log(2000)))), 3000.0
        for step in range(steps):
            prompt += added * rng.uniform(0.5, 1.5)
            of = {"workflow_type": name, "workflow_id": f"w{seed}-{number}", "step": step, "agent": "coder"}
            rows.append({**of, "input_tokens": round(prompt), "output_tokens": 50})
    return conform(pa.Table.from_pylist(rows), "test")
