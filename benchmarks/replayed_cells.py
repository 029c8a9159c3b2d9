"""The cells of policies_replayed.py: what runs in each, what it is run by, and who foretells.

A cell is a workload, how many workflows want to run at once (or `rate4`: so many arrive a second), and blocks of 16
tokens. The workloads: the two kinds of prompts of replay.py, and autocoderover, real traces with their recorded
tokens. Whoever learns does so from other workflows: of the same law, or of other tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from papers import THUNDERAGENT, static_graph
from replay import CONVENTIONS, draw

from presage.datasets.schema import conform
from presage.errors import ConfigurationError
from presage.serving_hooks.replay.engine_file import read_engine
from presage.serving_hooks.replay.policies import POLICIES, Policy, crossed
from presage.serving_hooks.replay.runs import Setting
from presage.serving_hooks.replay.workload import Arrivals, PromptConvention, ReplayJob, workload

REAL: Final = "autocoderover"
TRAINED: Final = "trained"
_REAL_PROMPTS: Final = PromptConvention("own-conversation", opening_tokens=300)
_TEACHING: Final = 400
_LATER_SEED: Final = 1000
"""Of the workflows that teach, and how many of them there are."""

BLOCK_TOKENS: Final = 16
KNEE: Final = {("history-first", 2500): 18, ("history-first", 4000): 28, ("history-first", 6000): 40}
"""Where the working sets of so many workflows are about to outgrow the cache."""


@dataclass(frozen=True)
class Cell:
    """One of them.

    Attributes:
        group: that asks for it.
        workload: kind of prompts, or REAL.
        load: workflows at once, or "rate" and how many come in a second.
        blocks: of the cache.
        forecasts: of policies that ask for some: TRAINED, or as `presage replay` takes them.
        policies: names; with + and a scheduler, if the queue is what is asked about.
    """

    group: str
    workload: str
    load: str
    blocks: int
    forecasts: str
    policies: tuple[str, ...]

    @property
    def name(self) -> str:
        """As --cells takes it."""
        return f"{self.workload}/{self.load}/{self.blocks}"

    @property
    def at_once(self) -> int | None:
        """None where workflows arrive by themselves."""
        return None if self.load.startswith("rate") else int(self.load)

    @property
    def near_the_knee(self) -> bool:
        """Whether an order of free blocks alone can gain something with one history for all."""
        return KNEE.get((self.workload, self.blocks)) == self.at_once


def _cells(group: str, names: str, forecasts: str, policies: str) -> tuple[Cell, ...]:
    return tuple(cell(group, name, forecasts, policies) for name in names.split())


def cell(group: str, name: str, forecasts: str, policies: str) -> Cell:
    """A cell by its name.

    Raises:
        ConfigurationError: it is no name of a cell.
    """
    parts = name.split("/")
    if len(parts) != 3 or parts[0] not in (*CONVENTIONS, REAL) or not parts[2].isdigit():
        raise ConfigurationError(f"{name!r} is no cell; give a workload, a load and blocks: history-first/72/4000")
    return Cell(group, parts[0], parts[1], int(parts[2]), forecasts, tuple(policies.split(",")))


LOOPS: Final = "stock,lifecycle,next-use,admission,full,thunderagent,oracle,belady,best-fixed"
_ORDERS: Final = "stock,lifecycle,next-use,admission,full,oracle"
GROUPS: Final = {
    "loops": _cells(
        "loops",
        "history-first/72/4000 own-conversation/48/4000 history-first/28/4000 own-conversation/72/4000 "
        "history-first/8/4000 own-conversation/8/4000",
        TRAINED,
        LOOPS,
    ),
    "caches": _cells(
        "caches",
        "history-first/72/2500 own-conversation/72/2500 history-first/72/6000 own-conversation/72/6000 "
        "history-first/18/2500 history-first/40/6000 own-conversation/48/2500",
        TRAINED,
        LOOPS,
    ),
    "real": _cells(
        "real",
        f"{REAL}/24/16000 {REAL}/32/8000",
        TRAINED,
        "stock,lifecycle,static-graph,next-use,admission,thunderagent,full,oracle,belady",
    ),
    "noise": tuple(
        one
        for share in ("noise:0.2", "noise:1")
        for one in _cells("noise", "own-conversation/48/4000 history-first/28/4000", share, _ORDERS)
    ),
    "queueing": _cells(
        "queueing", "history-first/rate4/20000", TRAINED, "stock+fcfs,stock+sjf,stock+stjf,stock+stjf-oracle"
    ),
}
"""In the order of their weight, so that what is not done in time is what matters least."""


def policy_of(name: str, learnt: Sequence[ReplayJob] = ()) -> Policy:
    """A policy by its name, with a scheduler where it names one; a static graph has learnt from these jobs."""
    known = {**POLICIES, **{of.name: of for of in (THUNDERAGENT, static_graph(learnt))}}
    policy, plus, scheduler = name.partition("+")
    if policy not in known:
        raise ConfigurationError(f"no policy {policy!r}; there are {', '.join(known)}")
    return crossed([known[policy]], scheduler)[0] if plus else known[policy]


@dataclass(frozen=True)
class Workload:
    """What is replayed and what teaches.

    Attributes:
        jobs: replayed.
        convention: prompts are put together by.
        teaching: traces of others.
        learnt: the same as jobs.
    """

    jobs: tuple[ReplayJob, ...]
    convention: PromptConvention
    teaching: pa.Table
    learnt: tuple[ReplayJob, ...]


@lru_cache(maxsize=4)
def workload_of(name: str, workflows: int, real: Path | None) -> Workload:
    """A workload by its name.

    Args:
        name: kind of prompts, or REAL.
        workflows: to be replayed; of REAL as many as half of the tasks have, if these are fewer.
        real: folder of the public traces.
    """
    if name == REAL:
        return _recorded(workflows, real)
    convention = CONVENTIONS[name]
    learnt = draw(_TEACHING, convention, _LATER_SEED)
    table = traces(learnt)
    return Workload(draw(workflows, convention), convention, table, learnt)


def _recorded(workflows: int, real: Path | None) -> Workload:
    from presage.datasets.read import read_traces
    from presage.datasets.split import split

    if real is None:
        raise ConfigurationError(f"{REAL} is wanted and no folder of the public traces was given; give --real FOLDER")
    parts = split(read_traces([real / f"{REAL}.jsonl.gz"]).table, 0.5, 0, by="task")
    jobs = workload(parts.test, _REAL_PROMPTS).jobs
    chosen = sorted(np.random.default_rng(0).permutation(len(jobs))[:workflows])
    learnt = workload(parts.train, _REAL_PROMPTS).jobs
    return Workload(tuple(jobs[number] for number in chosen), _REAL_PROMPTS, parts.train, learnt)


def traces(jobs: Sequence[ReplayJob]) -> pa.Table:
    """What a recorder would have written of them on an engine where each step takes half a second."""
    start, rows = datetime(2026, 1, 1, tzinfo=UTC), []
    for job in jobs:
        ended: list[datetime] = []
        for number, step in enumerate(job.steps):
            began = max([start, *(ended[parent] for parent in step.parents)]) + timedelta(seconds=step.pause_s)
            ended.append(began + timedelta(seconds=0.5))
            rows.append(
                {
                    "workflow_type": job.workflow_type,
                    "workflow_id": f"taught-{job.workflow_id}",
                    "step": number,
                    "agent": step.agent,
                    "parent_steps": list(step.parents),
                    "input_tokens": step.prompt_tokens,
                    "output_tokens": step.output_tokens,
                    "started_at": began,
                    "ended_at": ended[-1],
                    "complete": True,
                }
            )
    return conform(pa.Table.from_pylist(rows), "benchmark")


def train_models(table: pa.Table, folder: Path) -> None:
    """A model of each kind with the defaults, in folders; by ids and numbers, without texts.

    Workflows of one agent have no next-agent model: there is no other agent to forecast.
    """
    from presage.training.length.train import train_lengths
    from presage.training.next_agent.train import train
    from presage.training.return_time.train import train_return_times

    if not (folder / "return-time").is_dir():
        if pc.count_distinct(table["agent"]).as_py() > 1:
            train(table, None, states="none", baselines=()).save(folder / "next-agent")
        train_lengths(table, None, baselines=()).save(folder / "lengths")
        train_lengths(table, None, baselines=(), target="final-context").save(folder / "context-growth")
        train_return_times(table, None, baselines=()).save(folder / "return-time")


def setting_of(one: Cell, workflows: int, real: Path | None, models: Path) -> Setting:
    """What all runs of a cell have in common.

    Args:
        one: the cell.
        workflows: to be replayed.
        real: folder of the public traces.
        models: folder that holds those of each workload.
    """
    held, folder = workload_of(one.workload, workflows, real), models / one.workload
    learnt = one.forecasts == TRAINED
    return Setting(
        held.jobs,
        held.convention,
        Arrivals(one.at_once) if one.at_once else Arrivals(rate=float(one.load.removeprefix("rate"))),
        read_engine("invented", one.blocks * BLOCK_TOKENS),
        str(folder / "next-agent") if learnt else one.forecasts,
        str(folder / "lengths") if learnt else None,
        str(folder / "return-time") if learnt else one.forecasts,
        with_pauses=True,
    )
