"""How much of Belady's gain does each source of return times bring, on recorded sessions of agents?

    python benchmarks/return_time_eviction.py FOLDER [--traces claude_code,swe_agent_glm,autocoderover]
        [--cells 24x1000000,…] [--policies …] [--workflows 60] [--seeds 2] [--processes 2]

FOLDER holds the public traces. Half of the tasks train the models, workflows of the other half are replayed through
vLLM's scheduler (needs vLLM) in a closed loop. A cell is CONCURRENCYxCACHE_TOKENS. Policies:

    stock            vLLM alone: least recently used
    lifecycle        blocks of ended workflows first
    ttl:60           a fixed time to live of 60 s, after which a workflow counts as ended; sweep it in hindsight
    reason           the order by expected wait, with the training median by finish reason as a certain return time
    counts           with counts learnt online, of next agents and return times
    trained          with trained models
    pbkv-he          PBKV's eviction with the trained next-agent model
    oracle           with the recorded future of the workflow
    belady           evicts the block whose next use is furthest away in the trace

A share is that of Belady's gain over stock, seed by seed. Ends with one JSON line.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from presage.datasets.read import read_traces
from presage.datasets.split import split
from presage.replay.forecasts import OracleReturnTimes
from presage.replay.policies import POLICIES, Policy
from presage.replay.runs import Setting, check_vllm, side_by_side
from presage.replay.workload import Arrivals, PromptConvention, ReplayJob, workload
from presage.serving_hooks.engine_file import Cost, EngineFile
from presage.serving_hooks.workflows.live import NO_RETURN, LiveReturn

LEVELS = (0.25, 0.5, 0.9, 0.99)
FIGURES = ("hit_rate", "ttft_mean_s", "completion_mean_s", "recomputed_tokens")
COST = Cost(
    source="invented; only comparisons of policies mean anything",
    iteration_s=0.01,
    prefill_token_s=2e-5,
    decode_token_s=5e-5,
    context_token_s=2e-9,
)
CELLS = {
    "claude_code": "24x600000,24x1000000,24x1500000,40x1000000,40x1500000,40x2500000",
    "swe_agent_glm": "16x200000,16x300000",
    "autocoderover": "24x128000,48x256000",
}
SWEEP = "stock,lifecycle,ttl:10,ttl:60,ttl:300,ttl:1800,reason,counts,trained,pbkv-he,oracle,belady"


class MedianByReason(OracleReturnTimes):
    """The median return time by finish reason as a certain one: what a fixed table would know."""

    def __init__(self, jobs: Sequence[ReplayJob], medians: dict[str | None, float]) -> None:
        super().__init__(jobs)
        self._medians = medians

    def completed(self, step: Any, output_tokens: int, finish_reason: str | None, now: float) -> LiveReturn:
        """The median of this reason."""
        seconds = self._medians.get(finish_reason)
        return NO_RETURN if seconds is None else LiveReturn("champion", 1, 0.0, LEVELS, (seconds,) * 4, None)


def medians(jobs: Sequence[ReplayJob]) -> dict[str | None, float]:
    """Median seconds until the next step by finish reason, over steps with one child that waits for them alone."""
    found = defaultdict(list)
    for job in jobs:
        for step in job.steps:
            if len(step.parents) == 1:
                found[job.steps[step.parents[0]].finish_reason].append(step.pause_s)
    return {reason: float(np.median(of)) for reason, of in found.items()}


def by_reason(known: dict[str | None, float], jobs: Sequence[ReplayJob], clock: Callable[[], float]) -> MedianByReason:
    return MedianByReason(jobs, known)


def policy_of(name: str, setting: Setting, known: dict[str | None, float]) -> tuple[Setting, Policy]:
    """A policy by its name, and the setting that it runs in."""
    ours = POLICIES["next-use"]
    if name.startswith("ttl:"):
        return setting, replace(POLICIES["lifecycle"], name=name, more={"time_to_live_s": float(name[4:])})
    if name == "reason":
        return setting, replace(POLICIES["lifecycle"], name=name, returns=partial(by_reason, known))
    if name == "counts":
        return replace(setting, forecasts="counts", returns="counts"), replace(ours, name=name)
    if name == "trained":
        return setting, replace(ours, name=name)
    return setting, POLICIES[name]


def read(path: Path) -> pa.Table:
    """The steps of a public trace; its `stop` is the finish reason."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file, gzip.open(path, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            if "stop" in row:
                row["finish_reason"] = row.pop("stop")
            file.write(json.dumps(row) + "\n")
        file.flush()
        return read_traces([Path(file.name)]).table


def train(table: pa.Table, folder: Path) -> None:
    """A next-agent and a return-time model of the defaults, by ids and numbers, in two folders."""
    from presage.training.next_agent.train import train as train_agents
    from presage.training.return_time.train import train_return_times

    for name in ("system_prompt", "input_text", "output_text"):
        place = table.column_names.index(name)
        table = table.set_column(place, name, pa.nulls(len(table), pa.string()))
    train_agents(table, None, states="none", baselines=()).save(folder / "next-agent")
    train_return_times(table, None, baselines=()).save(folder / "return-time")


def share(mine: Sequence[float], none: Sequence[float], best: Sequence[float]) -> dict[str, float]:
    """Mean share of the best gain over seeds, and half of its 95 % interval (Student's t; 0 for one seed)."""
    shares = [(a - b) / (c - b) for a, b, c in zip(mine, none, best, strict=True)]
    if len(shares) < 2:
        return {"mean": shares[0], "half": 0.0}
    from scipy.stats import t

    error = float(np.std(shares, ddof=1)) / len(shares) ** 0.5
    return {"mean": float(np.mean(shares)), "half": error * float(t.ppf(0.975, len(shares) - 1))}


def compared(done: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Mean figures of each policy, and its share of Belady's gain."""
    hits = {name: [one["hit_rate"] for one in runs] for name, runs in done.items()}
    found: dict[str, Any] = {}
    for name, runs in done.items():
        found[name] = {figure: float(np.mean([one[figure] for one in runs])) for figure in FIGURES}
        if {"stock", "belady"} <= done.keys():
            found[name]["share_of_belady"] = share(hits[name], hits["stock"], hits["belady"])
            sooner = [1 - a["ttft_mean_s"] / b["ttft_mean_s"] for a, b in zip(runs, done["stock"], strict=True)]
            found[name]["ttft_sooner"] = float(np.mean(sooner))
    return found


def show(cell: str, found: dict[str, Any]) -> None:
    print(
        f"\n### {cell}\n\n| policy | hit rate | share of Belady's gain | first token s | sooner | recomputed tokens |"
    )
    print("|---|---|---|---|---|---|")
    for name, of in found.items():
        part = of.get("share_of_belady", {"mean": float("nan"), "half": 0.0})
        print(
            f"| {name} | {of['hit_rate']:.3f} | {part['mean']:.0%} ± {part['half']:.0%} | {of['ttft_mean_s']:.3f} "
            f"| {of.get('ttft_sooner', 0):.0%} | {of['recomputed_tokens']:.3g} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--traces", default=",".join(CELLS))
    parser.add_argument("--cells", help="of all traces; by default each trace has its own")
    parser.add_argument("--policies", default=SWEEP)
    parser.add_argument("--workflows", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    check_vllm()
    result: dict[str, Any] = {"benchmark": "return_time_eviction", "workflows": asked.workflows, "seeds": asked.seeds}
    names = asked.policies.split(",")
    for trace in asked.traces.split(","):
        parts = split(read(asked.folder / f"{trace}.jsonl.gz"), 0.5, 0, by="task")
        convention = PromptConvention()
        cells = [tuple(map(int, cell.split("x"))) for cell in (asked.cells or CELLS[trace]).split(",")]
        room = min(tokens for _, tokens in cells)
        held = workload(parts.test, convention).jobs
        jobs = [job for job in held if max(step.prompt_tokens + step.output_tokens for step in job.steps) < room]
        print(
            f"{trace}: {len(held) - len(jobs)} of {len(held)} workflows left out: a prompt exceeds the smallest cache"
        )
        chosen = sorted(np.random.default_rng(0).permutation(len(jobs))[: asked.workflows].tolist())
        with tempfile.TemporaryDirectory() as folder:
            train(parts.train, Path(folder))
            known = medians(workload(parts.train, convention).jobs)
            for at_once, tokens in cells:
                engine = EngineFile(
                    cache_tokens=tokens, block_tokens=64, most_requests=256, most_tokens=16384, cost=COST
                )
                setting = Setting(
                    tuple(jobs[number] for number in chosen),
                    convention,
                    Arrivals(at_once),
                    engine,
                    str(Path(folder) / "next-agent"),
                    returns=str(Path(folder) / "return-time"),
                )
                tasks = [(*policy_of(name, setting, known), seed) for name in names for seed in range(asked.seeds)]
                done: dict[str, list[dict[str, float]]] = defaultdict(list)
                for one in side_by_side(tasks, asked.processes):
                    done[one.policy].append(dict(one.figures))
                found = compared(done)
                show(f"{trace}, {len(chosen)} workflows, {at_once} at once, {tokens:,} tokens", found)
                result.setdefault("cells", {})[f"{trace}/{at_once}x{tokens}"] = found
    print(json.dumps(result))


if __name__ == "__main__":
    main()
