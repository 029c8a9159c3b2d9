"""In which regimes does Presage pay, and in which not? Replayed on vLLM's own scheduler.

    swe        SWE-agent sessions, 52 at once where about 20 fit the cache: vLLM alone thrashes
    swe-burst  the same, arriving five times as fast as vLLM can serve them
    swe-calm   the same at .9 of what vLLM can serve: nothing is to gain, and nothing may be lost
    claude     Claude Code sessions with long contexts, 43 at once in a cache for 6
    host       the same with the host's memory behind the cache, which holds all of them
    mixed      four made-up types with long system prompts that their workflows share, 52 at once
    chats      1,000 single chat requests of Azure, most with one system prompt, arriving faster than they are served:
               nothing to gain either
    shared     retry loops with a common history, arriving 2.5 times as fast as one engine serves them

Policies: vLLM alone (`stock`); the same with the number of workflows at once that completes soonest (`fixed`, found by
a sweep on the first seed: a bound, not a policy); ThunderAgent's published rule; `full` (everything on, forecasts from
online counts); `unnamed` (the same, and no client names its workflow or says when it ends); `truth` (as `full`, with
the future known); and others as `presage replay` names them. Completion is over that of vLLM alone, seed by seed.

    python benchmarks/regimes.py [--real FOLDER] [--cells swe,mixed] [--policies stock,thunderagent,full] [--seeds 2]
    python benchmarks/regimes.py --real FOLDER --hour

With `--hour`, SWE-agent sessions arrive for an hour at 1.5 times what the engine serves at its best, and `full` serves
them: does the number of open workflows stay steady?

Needs vLLM 0.32. `--real` is the folder of the public traces; without it their cells are left out. Prints a table and
one JSON line. Everything takes about 20 minutes on one core.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from papers import THUNDERAGENT
from retry_loops import Written, draw

from presage.datasets.read import read_traces
from presage.datasets.requests import HASH_TOKENS, read_requests
from presage.replay.policies import POLICIES, STOCK, Policy
from presage.replay.runs import Setting, best, check_vllm, most_at_once, run_one, tried
from presage.replay.workload import (
    Arrivals,
    PromptConvention,
    RecordedRequest,
    ReplayJob,
    assemble,
    requests_workload,
    workload,
)
from presage.serving_hooks.engine_file import Cost, EngineFile, read_engine

BLOCK: Final = 64
LONGEST_PAUSE_S: Final = 600.0
Jobs = tuple[tuple[ReplayJob, ...], PromptConvention]


@dataclass(frozen=True)
class Cell:
    """One regime.

    Attributes:
        jobs: from the folder of the public traces and a seed; None without that folder.
        engine: that serves them.
        arrivals: of workflows.
    """

    jobs: Callable[[Path | None, int], Jobs | None]
    engine: EngineFile
    arrivals: Arrivals


def recorded(
    name: str, count: int, steps: int, longest: int, convention: PromptConvention
) -> Callable[[Path | None, int], Jobs | None]:
    """The first steps of so many recorded sessions, none with a prompt above `longest` tokens."""

    def jobs(folder: Path | None, seed: int) -> Jobs | None:
        file = folder / f"{name}.jsonl.gz" if folder is not None else None
        if file is None or not file.is_file():
            return None
        found = []
        for job in workload(read_traces([file]).table, convention).jobs:
            if len(job.steps) > 1:
                first = tuple(replace(step, pause_s=min(step.pause_s, LONGEST_PAUSE_S)) for step in job.steps[:steps])
                if max(step.prompt_tokens + step.output_tokens for step in first) <= longest:
                    found.append(replace(job, steps=first))
        random.Random(0).shuffle(found)
        return tuple(found[:count]), convention

    return jobs


@dataclass(frozen=True)
class Kind:
    """A made-up workflow type: tokens of its system prompt, agents in turn, ranges of steps and of tokens that a step
    adds and answers, and tool times: shares, medians in seconds, spreads."""

    system: int
    agents: tuple[str, ...]
    steps: tuple[int, int]
    new: tuple[int, int]
    output: tuple[int, int]
    tools: tuple[tuple[float, float, float], ...]


KINDS: Final = {
    "tickets": (0.4, Kind(6000, ("sorter",), (2, 4), (400, 2000), (40, 200), ((1.0, 1.0, 0.5),))),
    "coding": (
        0.25,
        Kind(
            *(16000, ("coder", "coder", "coder", "tester"), (8, 36), (400, 4000), (60, 500)),
            ((0.7, 1.5, 0.6), (0.25, 25.0, 0.6), (0.05, 150.0, 0.8)),
        ),
    ),
    "research": (
        0.2,
        Kind(
            *(9000, ("planner", "searcher", "searcher", "reader"), (5, 16), (1500, 7000), (80, 700)),
            ((0.8, 3.0, 0.6), (0.2, 12.0, 0.6)),
        ),
    ),
    "approvals": (
        0.15,
        Kind(8000, ("assistant",), (3, 10), (300, 1500), (60, 300), ((0.5, 1.0, 0.5), (0.5, 120.0, 0.7))),
    ),
}
"""Shares and kinds."""


def mixed(_: Path | None, seed: int) -> Jobs:
    """A hundred workflows of four types; each agent continues its own conversation behind a shared system prompt."""
    rng, jobs = random.Random(seed), []
    for number in range(100):
        name = rng.choices(list(KINDS), [share for share, _ in KINDS.values()])[0]
        kind = KINDS[name][1]
        said: dict[str, int] = {}
        asked: list[RecordedRequest] = []
        for step in range(between(rng, kind.steps)):
            agent, new, output = kind.agents[step % len(kind.agents)], between(rng, kind.new), between(rng, kind.output)
            _, median_s, spread = rng.choices(kind.tools, [share for share, *_ in kind.tools])[0]
            pause_s = min(LONGEST_PAUSE_S, median_s * math.exp(rng.gauss(0, spread))) if step else 0.0
            prompt = kind.system + said.get(agent, 0) + new
            asked.append(RecordedRequest(f"{name}-{agent}", prompt, output, (step - 1,) if step else (), pause_s))
            said[agent] = said.get(agent, 0) + new + output
        convention = PromptConvention("own-conversation", opening_tokens=kind.system)
        jobs.append(ReplayJob(name, f"{name}-{number}", assemble(asked, convention)))
    return tuple(jobs), PromptConvention("own-conversation", opening_tokens=1)


def between(rng: random.Random, ends: tuple[int, int]) -> int:
    """A number between these, evenly on a logarithmic scale."""
    return round(math.exp(rng.uniform(math.log(ends[0]), math.log(ends[1]))))


def shared(_: Path | None, seed: int) -> Jobs:
    """Retry loops whose prompts begin with the common history."""
    convention, jobs = PromptConvention("history-first", opening_tokens=100, closing_tokens=20), []
    for name, steps in draw(100, seed).items():
        written, asked = Written("shared"), []
        for number, step in enumerate(steps):
            parents, pause_s = ((number - 1,), step.pause * 0.02) if number else ((), 0.0)
            asked.append(RecordedRequest(step.agent, len(written.prompt(step)), step.answer, parents, pause_s))
            written.answered(step, [0] * step.answer)
        jobs.append(ReplayJob("loops", name, assemble(asked, convention)))
    return tuple(jobs), convention


def chats(folder: Path | None, seed: int) -> Jobs | None:
    """Single requests; the first 512 tokens of longer ones are a system prompt that they share."""
    file = folder.parent / "serving" / "azure2023_conv.jsonl.gz" if folder is not None else None
    if file is None or not file.is_file():
        return None
    found = read_requests([file])[1000 * seed :][:1000]
    first = found[0].arrives_s
    asked = [
        replace(one, arrives_s=one.arrives_s - first, hash_ids=(0, number + 1) if one.input_tokens > 600 else ())
        for number, one in enumerate(found)
    ]
    return requests_workload(asked, HASH_TOKENS).jobs, PromptConvention("history-first")


def h100(cache_tokens: int, host_cache_tokens: int = 0) -> EngineFile:
    """A model of 8B on one H100."""
    engine = read_engine("h100-8b-datasheet", cache_tokens, host_cache_tokens)
    return engine.model_copy(update={"block_tokens": BLOCK})


SWE: Final = recorded("swe_agent_glm", 65, 30, 120_000, PromptConvention("own-conversation", opening_tokens=5000))
CLAUDE: Final = recorded("claude_code", 56, 16, 200_000, PromptConvention("recorded", opening_tokens=17_000))
SMALL: Final = EngineFile(
    cache_tokens=5056,
    host_cache_tokens=0,
    block_tokens=32,
    most_requests=64,
    most_tokens=2048,
    chunked_prefill=True,
    cost=Cost(
        source="a small engine", iteration_s=0.009, prefill_token_s=4.4e-5, decode_token_s=1e-4, context_token_s=0.0,
        host_token_s=1e-6,
    ),
)  # fmt: skip
CELLS: Final = {
    "swe": Cell(SWE, h100(391_168), Arrivals(52)),
    "swe-burst": Cell(SWE, h100(391_168), Arrivals(rate=0.306)),
    "swe-calm": Cell(SWE, h100(391_168), Arrivals(rate=0.055)),
    "claude": Cell(CLAUDE, h100(407_104), Arrivals(43)),
    "host": Cell(CLAUDE, h100(407_104, 8_000_000), Arrivals(43)),
    "mixed": Cell(mixed, h100(357_056), Arrivals(52)),
    "chats": Cell(chats, h100(40_000), Arrivals(rate=20.0)),
    "shared": Cell(shared, SMALL, Arrivals(rate=4.17)),
}


def played(setting: Setting, policy: Policy, seed: int) -> dict[str, float]:
    """Figures of one run."""
    figures = run_one(setting, policy, seed).figures
    return {
        "completion_s": figures["completion_mean_s"],
        "completion_p99_s": figures["completion_p99_s"],
        "makespan_s": figures["makespan_s"],
        "hit_rate": figures["hit_rate"],
        "recomputing": figures["recomputing_share"],
        "start_p99_s": figures.get("start_delay_p99_s", 0.0),
        "later_p99_s": figures.get("later_ttft_p99_s", 0.0),  # chats have no later steps
    }


FIXED: Final = "fixed"
KNOWN: Final = {
    **POLICIES,
    THUNDERAGENT.name: THUNDERAGENT,
    FIXED: replace(POLICIES[STOCK], name=FIXED),
    "unnamed": replace(POLICIES["full"], name="unnamed", named=False),
    "truth": replace(POLICIES["full"], name="truth", forecasts="oracle", ranked="oracle", returns="oracle"),
}


def policies_of(names: str) -> list[Policy]:
    """The policies, vLLM alone first."""
    return [KNOWN[name] for name in dict.fromkeys([STOCK, *names.split(",")])]


def with_best_number(setting: Setting, policy: Policy) -> Policy:
    """The policy with the number of workflows at once that completes soonest, by the first seed."""
    most = most_at_once(setting.arrivals.concurrency, setting.engine.most_requests, setting.jobs)
    runs = {one.at_once: run_one(setting, one, 0).figures for one in tried(policy, most) if one.at_once is not None}
    return replace(policy, at_once=best(runs))


HOUR_S: Final = 3600.0
SETTLED_S: Final = 600.0
OVERLOAD: Final = 0.3
"""Workflows a second: 1.5 times the .2 of the best fixed number of workflows."""


def an_hour(folder: Path | None) -> dict[str, float] | None:
    """Open workflows, which have begun and not ended, each second from `SETTLED_S` to the end of the hour."""
    found = SWE(folder, 0)
    if found is None:
        return None
    jobs, convention = found
    rng = random.Random(0)
    many = tuple(replace(rng.choice(jobs), workflow_id=str(number)) for number in range(round(HOUR_S * OVERLOAD)))
    runs: list[Any] = []
    setting = Setting(many, convention, Arrivals(rate=OVERLOAD), CELLS["swe"].engine, "counts")
    figures = run_one(setting, POLICIES["full"], 0, on_run=runs.append).figures
    began, ended = np.full(len(many), math.inf), np.zeros(len(many))
    for asked in runs[0].asked:
        began[asked.job] = min(began[asked.job], asked.began_s)
        ended[asked.job] = max(ended[asked.job], asked.ended_s)
    seconds = np.arange(SETTLED_S, HOUR_S)[:, None]
    opened = ((began <= seconds) & (seconds < ended)).sum(axis=1)
    low, middle, high = np.percentile(opened, [5, 50, 95])
    return {
        "open_p5": float(low),
        "open_p50": float(middle),
        "open_p95": float(high),
        "recomputing": figures["recomputing_share"],
        "workflows_per_s": figures["workflows_per_s"],
        "start_p99_s": figures.get("start_delay_p99_s", 0.0),
        "later_p99_s": figures.get("later_ttft_p99_s", 0.0),  # chats have no later steps
    }


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, help="folder of the public traces")
    parser.add_argument("--cells", default=",".join(CELLS), help="of them, separated by commas")
    parser.add_argument("--policies", default="stock,fixed,thunderagent,full,truth")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--hour", action="store_true", help="an hour of overload instead of the table")
    args = parser.parse_args()
    check_vllm()
    if args.hour:
        over = an_hour(args.real)
        for name, value in (over or {"--real names no folder with its traces": math.nan}).items():
            print(f"{name:16} {value:10.3f}")
        print(json.dumps({"benchmark": "regimes", "hour": over}))
        return
    print(f"{'cell':10} {'policy':14} completion    p99  makespan  hits  recomputing  start p99 s  later p99 s")
    rows: list[dict[str, Any]] = []
    for name in args.cells.split(","):
        cell = CELLS[name]
        alone: list[dict[str, float]] = []
        for policy in policies_of(args.policies):
            found = []
            for seed in range(args.seeds):
                jobs = cell.jobs(args.real, seed)
                if jobs is not None:
                    setting = Setting(*jobs, cell.arrivals, cell.engine, "counts")
                    if policy.name == FIXED and policy.at_once is None:
                        policy = with_best_number(setting, policy)
                    found.append(played(setting, policy, seed))
            if not found:
                print(f"{name:10} left out: --real names no folder with its traces")
                break
            alone = alone or found
            over = {
                key: mean([one[key] / base[key] for one, base in zip(found, alone, strict=True)])
                for key in ("completion_s", "completion_p99_s", "makespan_s")
            }
            row = {
                "cell": name,
                "policy": policy.name,
                "at_once": policy.at_once,
                "seeds": args.seeds,
                "over_stock": over,
            }
            row |= {key: mean([one[key] for one in found]) for key in found[0]}
            rows.append(row)
            completion, p99, makespan = over.values()
            print(
                f"{name:10} {policy.name:14} {completion:10.3f} {p99:6.3f} {makespan:9.3f} {row['hit_rate']:5.3f} "
                f"{row['recomputing']:12.0%} {row['start_p99_s']:12.1f} {row['later_p99_s']:12.1f}",
                flush=True,
            )
    print(json.dumps({"benchmark": "regimes", "rows": rows}))


if __name__ == "__main__":
    main()
