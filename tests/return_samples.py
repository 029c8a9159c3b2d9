"""Sessions of a coding agent whose return times follow a known process."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa

from presage.datasets.schema import conform

MEDIAN_S = {"grep": 0.5, "pytest": 40.0}
"""Median time of a tool; after an answer without a tool a person returns after about three minutes."""
PERSON_S = 180.0
SPREAD = 0.6
"""Standard deviation of the logarithm of every return time."""


def sessions(workflows: int, seed: int) -> pa.Table:
    """A trace of LLM steps that call a tool ("tool_calls") or answer ("stop"); a third of the answers end a session.

    The return time is log-normal around its median, and each session is faster or slower by a factor of its own.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(workflows):
        now, place, pace = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=number), 0, rng.normal(0, 0.5)
        tokens = int(rng.integers(500, 5000))
        while True:
            tool = None if rng.random() < 0.3 else str(rng.choice(list(MEDIAN_S)))
            end, output = now + timedelta(seconds=float(rng.uniform(1, 5))), int(rng.integers(10, 400))
            of = {"workflow_type": "coding", "workflow_id": f"s{seed}-{number}"}
            reason = "stop" if tool is None else "tool_calls"
            counts = {"input_tokens": tokens, "output_tokens": output, "finish_reason": reason}
            rows.append({**of, "step": place, "agent": "main", "started_at": now, "ended_at": end, **counts})
            away = (PERSON_S if tool is None else MEDIAN_S[tool]) * float(np.exp(rng.normal(pace, SPREAD)))
            if tool is None and rng.random() < 1 / 3:
                break
            now, place, tokens = end + timedelta(seconds=away), place + 1, tokens + output + int(rng.integers(5, 500))
            if tool is not None:
                called = {"kind": "tool", "agent": tool, "started_at": end, "ended_at": now}
                rows.append({**of, "step": place, **called})
                place += 1
    names = dict.fromkeys(name for row in rows for name in row)
    return conform(pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows]), "test")
