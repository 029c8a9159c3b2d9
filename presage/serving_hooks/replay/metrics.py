"""What a run leaves behind: a record of each request, its figures, and their means and intervals over several seeds.

A policy's share of what the oracle gains over stock is a ratio of mean differences, run against run of the same seed.
It is None where the oracle's gain is not established: its 95 % interval holds 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray


class VirtualClock:
    """Virtual time in seconds. The replay engine advances `now`; schedulers and policies read it."""

    now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


@dataclass(slots=True)
class RequestOutcome:
    """A request and what became of it; times in seconds of the virtual clock.

    Attributes:
        job: number of its job.
        step: its number in the job.
        agent: that asked.
        came_s: when it came.
        prompt_tokens: of its prompt.
        again_tokens: of them, in whole blocks, those that an endless cache would have had.
        hit_tokens: those that were found when the request was first selected, in the cache or the host's.
        began_s: when that was.
        first_token_s: when its first token was there.
        ended_s: when its last was.
        host_tokens: of those found, the ones that were loaded from the host.
    """

    job: int
    step: int
    agent: str
    came_s: float
    prompt_tokens: int
    again_tokens: int
    hit_tokens: int = 0
    began_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    host_tokens: int = 0


@dataclass
class PolicyRun:
    """One run of a workload under a policy.

    Attributes:
        asked: requests, in the order in which they ended.
        completions_s: of each job, from its arrival to its end.
        end_s: when the last job ended.
        iterations: of the engine.
        fast_iterations: of them, done in short.
        prefilled_tokens: computed of prompts, and of outputs again after preemptions.
        output_tokens: of all requests.
        preemptions: requests that lost their blocks.
        evicted: blocks that were given up, by class; empty where nobody counted.
        loaded_tokens: from the host, also for what no workflow asked for and again after preemptions; None without one.
    """

    asked: list[RequestOutcome] = field(default_factory=list)
    completions_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    iterations: int = 0
    fast_iterations: int = 0
    prefilled_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    evicted: dict[str, int] = field(default_factory=dict)
    loaded_tokens: int | None = None


LOWER_IS_BETTER: Final = (
    "completion_mean_s",
    "completion_p95_s",
    "makespan_s",
    "ttft_mean_s",
    "ttft_p95_s",
    "queueing_mean_s",
    "longest_wait_s",
    "preemptions",
    "recomputed_tokens",
)
HIGHER_IS_BETTER: Final = ("hit_rate", "throughput_tokens_per_s", "workflows_per_s")

Figures = dict[str, float]


def figures(run: PolicyRun) -> Figures:
    """Of one run.

    Returns:
        hit_rate: prompt tokens found in the cache at the first selection, the host's included, of all prompt tokens.
        hit_tokens: how many these were.
        hit_tokens_gpu, hit_tokens_host: the same by where they were; where there is a cache in the host.
        loaded_tokens: from the host, also those prefetched and those again after preemptions; where there is one.
        reusable_share: the same of an endless cache: no policy can have more.
        completion_mean_s, completion_p95_s: of workflows, from arrival to end.
        makespan_s: until the last has ended.
        ttft_mean_s, ttft_p95_s: of requests, from arrival to the first token; "ttft_mean_s of AGENT" of an agent's.
        queueing_mean_s, longest_wait_s: from arrival to the first selection.
        throughput_tokens_per_s, workflows_per_s: output tokens, workflows, by makespan.
        preemptions: how often a running request lost its blocks.
        recomputed_tokens: prefilled though they had been computed before.
        iterations: of the engine.
        evicted_blank, evicted_retired, evicted_active: blocks given up that held nothing, whose workflows had ended, or
            that a workflow under way has used (`engine.Evictions`); where they were counted.

    `runs` adds promotions: how often ageing took a request up a level, where requests are ranked.
    """
    prompt = sum(asked.prompt_tokens for asked in run.asked)
    hit = sum(asked.hit_tokens for asked in run.asked)
    again = sum(asked.again_tokens for asked in run.asked)
    waits, first = _since(run, "began_s"), _since(run, "first_token_s")
    ends_s = max(run.end_s, 1e-9)
    found = {
        "hit_rate": hit / prompt,
        "hit_tokens": float(hit),
        "reusable_share": again / prompt,
        "completion_mean_s": float(np.mean(run.completions_s)),
        "completion_p95_s": float(np.percentile(run.completions_s, 95)),
        "makespan_s": run.end_s,
        "ttft_mean_s": float(first.mean()),
        "ttft_p95_s": float(np.percentile(first, 95)),
        "queueing_mean_s": float(waits.mean()),
        "longest_wait_s": float(waits.max()),
        "throughput_tokens_per_s": run.output_tokens / ends_s,
        "workflows_per_s": len(run.completions_s) / ends_s,
        "preemptions": float(run.preemptions),
        "recomputed_tokens": float(max(0, run.prefilled_tokens - (prompt - again))),
        "iterations": float(run.iterations),
    }
    if run.loaded_tokens is not None:
        host = sum(asked.host_tokens for asked in run.asked)
        found |= {"hit_tokens_gpu": float(hit - host), "hit_tokens_host": float(host)}
        found["loaded_tokens"] = float(run.loaded_tokens)
    found |= {f"evicted_{kind}": float(count) for kind, count in run.evicted.items()}
    by_agent: dict[str, list[float]] = defaultdict(list)
    for asked, wait in zip(run.asked, first, strict=True):
        by_agent[asked.agent].append(float(wait))
    return found | {f"ttft_mean_s of {agent}": float(np.mean(by_agent[agent])) for agent in sorted(by_agent)}


def _since(run: PolicyRun, moment: str) -> NDArray[np.float64]:
    return np.asarray([getattr(asked, moment) - asked.came_s for asked in run.asked], np.float64)


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean, and its 95 % interval by Student's t; None for the interval of a single run."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return {"mean": mean, "ci95": None}
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return {"mean": mean, "ci95": [mean - half, mean + half]}


def over_seeds(runs: Sequence[Figures]) -> dict[str, Any]:
    """Each figure over runs that differ in their seed; of those that all runs have."""
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: interval([run[name] for run in runs]) for name in names}


def shares(
    policy: Mapping[int, Figures], stock: Mapping[int, Figures], oracle: Mapping[int, Figures]
) -> dict[str, float | None]:
    """Of what the oracle gains over stock, the share that a policy gains, figure by figure.

    Args:
        policy, stock, oracle: figures by seed; seeds that one of them lacks are left out.
    """
    seeds = sorted(policy.keys() & stock.keys() & oracle.keys())
    found: dict[str, float | None] = {}
    for name in (*HIGHER_IS_BETTER, *LOWER_IS_BETTER):
        best = [oracle[seed][name] - stock[seed][name] for seed in seeds]
        own = [policy[seed][name] - stock[seed][name] for seed in seeds]
        found[name] = sum(own) / sum(best) if seeds and _established(best) else None
    return found


def _established(differences: Sequence[float]) -> bool:
    limits = interval(differences)["ci95"]
    if limits is None:
        return abs(differences[0]) > 1e-12
    return bool(limits[0] > 0 or limits[1] < 0)


@dataclass(frozen=True)
class Timeline:
    """A run by windows of time; W windows.

    Attributes:
        begins_s: float64 [W].
        hit_rate: float64 [W], prompt tokens found in the cache, of those of requests first selected in the window; NaN
            where there was none.
        under_way: float64 [W], requests that had come and not ended, on average over the window.
    """

    begins_s: NDArray[np.float64]
    hit_rate: NDArray[np.float64]
    under_way: NDArray[np.float64]


def course(run: PolicyRun, window_s: float) -> Timeline:
    """A run in the course of time.

    Args:
        run: to its end.
        window_s: seconds of a window.
    """
    begins = np.arange(0.0, max(run.end_s, window_s), window_s)
    began = _column(run, "began_s")
    at = np.minimum((began // window_s).astype(int), len(begins) - 1)
    prompt = np.bincount(at, _column(run, "prompt_tokens"), len(begins))
    hit = np.bincount(at, _column(run, "hit_tokens"), len(begins))
    came, ended = _column(run, "came_s")[:, None], _column(run, "ended_s")[:, None]
    there = np.minimum(ended, begins + window_s) - np.maximum(came, begins)
    rate = np.divide(hit, prompt, out=np.full(len(begins), np.nan), where=prompt > 0)
    return Timeline(begins, rate, np.clip(there, 0.0, None).sum(axis=0) / window_s)


def _column(run: PolicyRun, name: str) -> NDArray[np.float64]:
    values: list[Any] = [getattr(asked, name) for asked in run.asked]
    return np.asarray(values, np.float64)
