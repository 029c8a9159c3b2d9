"""Records of a run, its figures, and their means and intervals over seeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.serving_hooks.policies.scaling import ScalingTick


class VirtualClock:
    """Virtual time in seconds. The replay engine advances `now`; schedulers and policies call the clock."""

    now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


@dataclass(slots=True)
class RequestOutcome:
    """The record of a request; times in seconds of the virtual clock.

    Attributes:
        job, step: numbers of the job and of the step in it.
        again_tokens: prompt tokens, in whole blocks, that an endless cache would have had.
        hit_tokens: prompt tokens found at the first selection, in the GPU's cache or the host's.
        began_s: first selection.
        host_tokens: hit tokens that were loaded from the host.
        engine: number of the engine that served it.
        placed_s: when the router placed it there.
        starts: whether it is the first of its workflow.
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
    engine: int = 0
    placed_s: float = 0.0
    starts: bool = False


@dataclass
class PolicyRun:
    """One run of a workload under a policy.

    Attributes:
        asked: requests, in the order in which they ended.
        completions_s: seconds from arrival to end, pauses included, by job.
        end_s: end of the last job.
        prefilled_tokens: prompt tokens computed, and output tokens computed again after preemptions.
        evicted: evicted blocks by class; empty if not counted.
        loaded_tokens: from the host, including prefetches and reloads after preemptions; None without a host tier.
        busy_s: seconds of all iterations.
        recomputing_s: of these, what tokens cost that had been computed before.
        scaling: what the autoscaler of a fleet saw and did.
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
    busy_s: float = 0.0
    recomputing_s: float = 0.0
    scaling: list[ScalingTick] = field(default_factory=list)

    def add_counters(self, other: PolicyRun) -> None:
        """Adds the counters of one engine."""
        for name in ("iterations", "fast_iterations", "prefilled_tokens", "preemptions", "busy_s", "recomputing_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.loaded_tokens is not None:
            self.loaded_tokens = (self.loaded_tokens or 0) + other.loaded_tokens


Figures = dict[str, float]


def figures(run: PolicyRun, with_pauses: bool = False) -> Figures:
    """The figures of one run, by name.

    Args:
        with_pauses: whether completion times include pauses, in which a workflow has no request in the engine.

    Returns:
        hit_rate: share of prompt tokens found at the first selection, in the GPU's cache or the host's.
        hit_tokens: their number.
        hit_tokens_gpu, hit_tokens_host: the same by tier; only with a host tier.
        loaded_tokens: from the host, including prefetches and reloads after preemptions; only with a host tier.
        reusable_share: hit rate of an endless cache, an upper bound for every policy.
        completion_mean_s, completion_p50_s, completion_p95_s, completion_p99_s: of workflows, from arrival to end,
            without pauses unless `with_pauses`.
        makespan_s: end of the last workflow.
        ttft_mean_s, ttft_p50_s, ttft_p95_s, ttft_p99_s: of requests, from arrival to the first token; "ttft_mean_s of
            AGENT" for an agent.
        later_ttft_mean_s, later_ttft_p99_s: the same of requests that do not start a workflow; if there are any.
        start_delay_mean_s, start_delay_p99_s: from the arrival of a workflow to the selection of its first request.
        queueing_mean_s, longest_wait_s: from arrival to the first selection.
        throughput_tokens_per_s, workflows_per_s: output tokens and workflows divided by makespan.
        preemptions: of running requests.
        recomputed_tokens: prefilled although they had been computed before.
        recomputing_share: what they cost, as a share of the seconds of all iterations. It says how much can be gained:
            where it is a tenth or less, no policy has shortened completion by more than a fifth.
        iterations: of the engine.
        evicted_blank, evicted_retired, evicted_active: evicted blocks by class, see `engine.Evictions`; if counted.

    `runs` adds promotions: how often ageing raised a request by a level; only if requests are ranked.
    """
    prompt = sum(asked.prompt_tokens for asked in run.asked)
    hit = sum(asked.hit_tokens for asked in run.asked)
    again = sum(asked.again_tokens for asked in run.asked)
    came = _column(run, "came_s")
    waits, first = _column(run, "began_s") - came, _column(run, "first_token_s") - came
    starts = _column(run, "starts").astype(bool)
    ends_s = max(run.end_s, 1e-9)
    completions_s = run.completions_s if with_pauses else in_engine_s(run)
    measured = {
        "hit_rate": hit / prompt,
        "hit_tokens": float(hit),
        "reusable_share": again / prompt,
        "completion_mean_s": float(np.mean(completions_s)),
        **{f"completion_p{share}_s": float(np.percentile(completions_s, share)) for share in (50, 95, 99)},
        "makespan_s": run.end_s,
        "ttft_mean_s": float(first.mean()),
        **{f"ttft_p{share}_s": float(np.percentile(first, share)) for share in (50, 95, 99)},
        **_mean_and_p99("later_ttft", first[~starts]),
        **_mean_and_p99("start_delay", waits[starts]),
        "queueing_mean_s": float(waits.mean()),
        "longest_wait_s": float(waits.max()),
        "throughput_tokens_per_s": run.output_tokens / ends_s,
        "workflows_per_s": len(run.completions_s) / ends_s,
        "preemptions": float(run.preemptions),
        "recomputed_tokens": float(max(0, run.prefilled_tokens - (prompt - again))),
        "recomputing_share": run.recomputing_s / max(run.busy_s, 1e-9),
        "iterations": float(run.iterations),
    }
    if run.loaded_tokens is not None:
        host = sum(asked.host_tokens for asked in run.asked)
        measured |= {"hit_tokens_gpu": float(hit - host), "hit_tokens_host": float(host)}
        measured["loaded_tokens"] = float(run.loaded_tokens)
    measured |= {f"evicted_{kind}": float(count) for kind, count in run.evicted.items()}
    by_agent: dict[str, list[float]] = defaultdict(list)
    for asked, wait in zip(run.asked, first, strict=True):
        by_agent[asked.agent].append(float(wait))
    return measured | {f"ttft_mean_s of {agent}": float(np.mean(by_agent[agent])) for agent in sorted(by_agent)}


def _mean_and_p99(name: str, seconds: NDArray[np.float64]) -> Figures:
    if not len(seconds):
        return {}
    return {f"{name}_mean_s": float(seconds.mean()), f"{name}_p99_s": float(np.percentile(seconds, 99))}


def in_engine_s(run: PolicyRun) -> list[float]:
    """Seconds in which a job had at least one request waiting or running, by job: its completion without pauses."""
    busy_s: dict[int, float] = defaultdict(float)
    until_s: dict[int, float] = {}
    for request in sorted(run.asked, key=lambda request: request.came_s):
        ended_s = request.came_s if request.ended_s is None else request.ended_s
        before_s = until_s.get(request.job, request.came_s)
        busy_s[request.job] += max(0.0, ended_s - max(request.came_s, before_s))
        until_s[request.job] = max(before_s, ended_s)
    return list(busy_s.values())


def interval(values: Sequence[float], low: float = -math.inf, high: float = math.inf) -> dict[str, Any]:
    """Mean and its 95 % interval by Student's t; the interval of a single run is None.

    Args:
        low, high: the values that are possible. The interval is cut there, which leaves its coverage as it is.
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return {"mean": mean, "ci95": None}
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return {"mean": mean, "ci95": [max(low, mean - half), min(high, mean + half)]}


_RATES: Final = ("hit_rate", "reusable_share", "recomputing_share")


def over_seeds(runs: Sequence[Figures]) -> dict[str, Any]:
    """Mean and interval of each figure that all runs have, over runs of different seeds; none is below 0."""
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: interval([run[name] for run in runs], 0.0, 1.0 if name in _RATES else math.inf) for name in names}


def gained(runs: Sequence[Figures], than: Sequence[Figures]) -> dict[str, Any]:
    """Mean differences of runs to others with the same seeds, with 95 % intervals, paired by seed."""
    names = [name for name in runs[0] if all(name in run for run in (*runs, *than))]
    return {name: interval([run[name] - other[name] for run, other in zip(runs, than, strict=True)]) for name in names}


_SHARED: Final = (
    "hit_rate",
    "throughput_tokens_per_s",
    "workflows_per_s",
    "completion_mean_s",
    "completion_p95_s",
    "makespan_s",
    "ttft_mean_s",
    "ttft_p95_s",
    "later_ttft_p99_s",
    "start_delay_p99_s",
    "queueing_mean_s",
    "longest_wait_s",
    "preemptions",
    "recomputed_tokens",
    "recomputing_share",
)


def shares(
    policy: Mapping[int, Figures], stock: Mapping[int, Figures], oracle: Mapping[int, Figures]
) -> dict[str, float | None]:
    """A policy's gain over stock divided by the oracle's, figure by figure: a ratio of differences paired by seed.

    None where the 95 % interval of the oracle's gain contains 0.

    Args:
        policy, stock, oracle: figures by seed; seeds that one of them lacks are left out.
    """
    seeds = sorted(policy.keys() & stock.keys() & oracle.keys())
    by_figure: dict[str, float | None] = {}
    for name in _SHARED:
        if any(name not in by_seed[seed] for by_seed in (policy, stock, oracle) for seed in seeds):
            continue
        best = [oracle[seed][name] - stock[seed][name] for seed in seeds]
        own = [policy[seed][name] - stock[seed][name] for seed in seeds]
        by_figure[name] = sum(own) / sum(best) if seeds and _established(best) else None
    return by_figure


def _established(differences: Sequence[float]) -> bool:
    limits = interval(differences)["ci95"]
    if limits is None:
        return abs(differences[0]) > 1e-12
    return bool(limits[0] > 0 or limits[1] < 0)


@dataclass(frozen=True)
class Timeline:
    """A run by windows of time, float64 [W].

    Attributes:
        hit_rate: of requests first selected in the window; NaN if there is none.
        under_way: mean number of requests that had arrived and not ended.
    """

    begins_s: NDArray[np.float64]
    hit_rate: NDArray[np.float64]
    under_way: NDArray[np.float64]


def course(run: PolicyRun, window_s: float) -> Timeline:
    """A finished run over time, in windows of `window_s` seconds."""
    begins = np.arange(0.0, max(run.end_s, window_s), window_s)
    began = _column(run, "began_s")
    window = np.minimum((began // window_s).astype(int), len(begins) - 1)
    prompt = np.bincount(window, _column(run, "prompt_tokens"), len(begins))
    hit = np.bincount(window, _column(run, "hit_tokens"), len(begins))
    came, ended = _column(run, "came_s")[:, None], _column(run, "ended_s")[:, None]
    there = np.minimum(ended, begins + window_s) - np.maximum(came, begins)
    rate = np.divide(hit, prompt, out=np.full(len(begins), np.nan), where=prompt > 0)
    return Timeline(begins, rate, np.clip(there, 0.0, None).sum(axis=0) / window_s)


def _column(run: PolicyRun, name: str) -> NDArray[np.float64]:
    values: list[Any] = [getattr(asked, name) for asked in run.asked]
    return np.asarray(values, np.float64)
