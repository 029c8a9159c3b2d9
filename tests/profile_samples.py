"""Traces of small applications with a known plan."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from presage.datasets.read import read_traces
from presage.datasets.schema import conform
from presage.predictors.profile.profile import ProfileConfig, TypeProfile, profile_of

Parents = Sequence[Sequence[int]]


def rows_of(
    workflows: Iterable[Sequence[str]], parents: Parents | None = None, workflow_type: str = "app", **more: Any
) -> list[dict[str, Any]]:
    """A workflow a list of agents; `parents` are those of every workflow, `more` columns of every step."""
    return [
        {"workflow_type": workflow_type, "workflow_id": f"w{at:05d}", "step": step, "agent": agent, **more}
        | ({} if parents is None else {"parent_steps": list(parents[step])})
        for at, agents in enumerate(workflows)
        for step, agent in enumerate(agents)
    ]


def table_of(workflows: Iterable[Sequence[str]], parents: Parents | None = None, **more: Any) -> pa.Table:
    """The trace of these workflows."""
    import pandas as pd

    if parents is None and not more:
        return read_traces(pd.DataFrame(rows_of(workflows))).table
    return conform(pa.Table.from_pylist(rows_of(workflows, parents, **more)), "sample")


def coding(count: int, seed: int = 0, reviewer: float = 0.5, explorer: str = "explorer") -> list[list[str]]:
    """planner explorer{3,12} (coder tester){1,4} reviewer?"""
    rng = random.Random(seed)
    return [
        [
            "planner",
            *[explorer] * rng.randint(3, 12),
            *["coder", "tester"] * rng.randint(1, 4),
            *["reviewer"] * (rng.random() < reviewer),
        ]
        for _ in range(count)
    ]


def profile(table: pa.Table, **settings: Any) -> TypeProfile:
    """The profile of the only workflow type."""
    from presage.features.sequences import sequences_of

    (of,) = sequences_of(table).values()
    return profile_of(of, ProfileConfig(**settings))
