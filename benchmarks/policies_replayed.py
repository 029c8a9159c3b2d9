"""Does each policy do what it should, on workflows with retry loops: at every load, cache and kind of prompt?

The workflows are those of benchmarks/replay.py: a planner, rounds of retriever, reader and verifier, a writer. As many
others teach the trigram, the static graph and, with --forecasts trained, a next-agent model. A cell is a kind of
prompt, a number of workflows that want to run at once, and a cache; every policy runs in it with the same seeds.

    python benchmarks/policies_replayed.py [--cells history-first/72/4000,own-conversation/72/4000] [--seeds 3]
                                           [--policies …] [--forecasts markov-3] [--workflows 200] [--processes N]

Needs vLLM 0.32. Forecasts: markov-3, trained, oracle, noise:x, counts. A cell is printed as soon as it is done: means
over the seeds, and beside each policy its completion against stock (a ratio of means, and whether it is worse than
stock beyond the 95 % interval of the differences, seed by seed) and the share of the gain in hit rate of the oracle.
Ends with one JSON line: all of it, and which of the goals hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from replay import CONVENTIONS, draw

from presage.datasets.schema import conform
from presage.serving_hooks.replay.arrivals import Arrivals
from presage.serving_hooks.replay.engine_file import read_engine
from presage.serving_hooks.replay.metrics import Figures, interval, over_seeds, shares
from presage.serving_hooks.replay.policies import check_switches, named
from presage.serving_hooks.replay.runs import Done, Setting, check_vllm, run_all, settings_of_hooks
from presage.serving_hooks.replay.taught import teach
from presage.serving_hooks.replay.workload import Job

CELLS = ",".join(
    f"{prompts}/{at_once}/{blocks}"
    for prompts in CONVENTIONS
    for blocks in (2500, 4000, 6000)
    for at_once in (16, 32, 48, 72)
)
POLICIES = "stock,lifecycle,static-graph,hierarchical,admission,thunderagent,full,oracle,belady,best-fixed"
SHOWN = ("hit_rate", "completion_mean_s", "makespan_s", "ttft_mean_s", "longest_wait_s", "recomputed_tokens")
LATER_SEED = 1000
"""Of the workflows that teach."""


def traces(jobs: Sequence[Job]) -> pa.Table:
    """What a recorder would have written of them, one step a second."""
    start, rows = datetime(2026, 1, 1, tzinfo=UTC), []
    for job in jobs:
        for number, step in enumerate(job.steps):
            began = start + timedelta(seconds=number)
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
                    "ended_at": began + timedelta(seconds=0.5),
                    "complete": True,
                }
            )
    return conform(pa.Table.from_pylist(rows), "benchmark")


def trained(table: pa.Table, folder: Path) -> str:
    """A next-agent model of the defaults, with a fifth of the workflows to validate on."""
    from presage.datasets.split import split
    from presage.features.prefixes import prefixes_of
    from presage.features.vocabulary import Vocabulary
    from presage.predictors.next_agent import NextAgentPredictor

    parts, vocabulary = split(table, 0.2, 0), Vocabulary.from_table(table)
    train, validation = (prefixes_of(part, vocabulary, 3) for part in (parts.train, parts.test))
    NextAgentPredictor().fit(train, validation).save(folder)
    return str(folder)


def compare(done: Sequence[Done]) -> dict[str, Any]:
    """Of each policy: means, intervals, and how it stands to stock and to the oracle."""
    runs: dict[str, dict[int, Figures]] = {}
    for one in done:
        runs.setdefault(one.policy, {})[one.seed] = one.figures
    found: dict[str, Any] = {}
    for name, of in runs.items():
        means = over_seeds(list(of.values()))
        found[name] = {figure: means[figure] for figure in SHOWN}
        found[name]["off"] = sorted({switch for one in done if one.policy == name for switch in one.off})
        found[name]["at_once"] = next((one.at_once for one in done if one.policy == name), None)
        if "stock" in runs and name != "stock":
            found[name] |= against(of, runs["stock"])
            if "oracle" in runs:
                found[name]["share_of_oracle"] = shares(of, runs["stock"], runs["oracle"])["hit_rate"]
    return found


def against(policy: Mapping[int, Figures], stock: Mapping[int, Figures]) -> dict[str, Any]:
    """Completion and makespan against stock; worse beyond the interval of the differences of the same seeds."""
    found: dict[str, Any] = {}
    for figure in ("completion_mean_s", "makespan_s"):
        seeds = sorted(policy.keys() & stock.keys())
        found[f"{figure} ratio"] = sum(policy[seed][figure] for seed in seeds) / sum(stock[s][figure] for s in seeds)
        limits = interval([policy[seed][figure] - stock[seed][figure] for seed in seeds])
        low = limits["mean"] if limits["ci95"] is None else limits["ci95"][0]
        found[f"{figure} worse"] = bool(low > 0)
    return found


def goals(prompts: str, at_once: int, of: Mapping[str, Any]) -> dict[str, bool]:
    """The goals that a cell says something about."""

    def mean(policy: str, figure: str) -> float:
        return float(of[policy][figure]["mean"])

    found = {}
    for name in of.keys() - {"stock", "best-fixed", "belady", "thunderagent", "static-graph", "oracle"}:
        found[f"{name} is never worse than stock"] = not of[name]["completion_mean_s worse"]
    if {"full", "best-fixed"} <= of.keys():
        ratio = mean("best-fixed", "completion_mean_s") / mean("full", "completion_mean_s")
        found["full reaches 90 % of the mean completion of best-fixed"] = ratio >= 0.9
        ratio = mean("best-fixed", "makespan_s") / mean("full", "makespan_s")
        found["full reaches 90 % of the throughput of best-fixed"] = ratio >= 0.9
    if "full" in of and prompts == "history-first" and at_once == 72 and mean("stock", "hit_rate") < 0.25:
        found["overloaded: 3 times the hit rate"] = mean("full", "hit_rate") >= 3 * mean("stock", "hit_rate")
        found["overloaded: makespan 1.4 times shorter"] = of["full"]["makespan_s ratio"] <= 1 / 1.4
    share = of.get("hierarchical", {}).get("share_of_oracle")
    if share is not None:
        found["hierarchical gains 80 % of the oracle's hit rate"] = share >= 0.8
    return found


def show(cell: str, of: Mapping[str, Any]) -> None:
    print(f"\n{cell}\n{'policy':16}" + "".join(f"{name:>20}" for name in (*SHOWN, "completion/stock", "oracle's gain")))
    for name, figures in of.items():
        ratio, share = figures.get("completion_mean_s ratio"), figures.get("share_of_oracle")
        shown = [
            f"{figures[figure]['mean']:.3f}" if figure == "hit_rate" else f"{figures[figure]['mean']:.1f}"
            for figure in SHOWN
        ]
        shown.append("–" if ratio is None else f"{ratio:.3f}{' worse' if figures['completion_mean_s worse'] else ''}")
        shown.append("–" if share is None else f"{share:.0%}")
        more = f"  {figures['at_once']} at once" if figures["at_once"] else ""
        print(f"{name:16}" + "".join(f"{one:>20}" for one in shown) + more, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--forecasts", default="markov-3")
    parser.add_argument("--workflows", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    check_vllm()
    policies = named(args.policies)
    check_switches(policies, settings_of_hooks())
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for cell in args.cells.split(","):
            prompts, at_once, blocks = cell.split("/")
            convention = CONVENTIONS[prompts]
            learnt = draw(args.workflows, convention, LATER_SEED)
            forecasts = args.forecasts
            if forecasts == "trained":
                forecasts = trained(traces(learnt), Path(folder) / prompts)
            setting = Setting(
                draw(args.workflows, convention),
                convention,
                Arrivals(int(at_once)),
                read_engine("invented", int(blocks) * 16),
                forecasts,
                None,
                teach(traces(learnt), learnt),
            )
            done, interrupted = run_all(setting, policies, range(args.seeds), args.processes)
            of = compare(done)
            show(cell, of)
            if interrupted:
                sys.exit(130)
            found[cell] = {"policies": of, "goals": goals(prompts, int(at_once), of)}
            for goal, reached in found[cell]["goals"].items():
                if not reached:
                    print(f"  not reached: {goal}", flush=True)
    counted: dict[str, list[bool]] = {}
    for of in found.values():
        for goal, reached in of["goals"].items():
            counted.setdefault(goal, []).append(reached)
    print()
    for goal, reached_in in sorted(counted.items()):
        print(f"{sum(reached_in)} of {len(reached_in)} cells: {goal}")
    told = {"benchmark": "policies_replayed", "forecasts": args.forecasts, "seeds": args.seeds, "cells": found}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
