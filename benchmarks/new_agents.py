"""After a release that renames, splits or adds agents: what do the hooks forecast rightly, by the names that are sent?

The model is trained on half of the tasks. The workflows of the other half are served one by one, in random order, to
the forecaster of the hooks, as `releases` change them, and no system prompt tells what a new name stands for:

- unchanged: as they are
- renamed: 30 % of the agents get other names
- split: the agent with most steps gets one of two names at each step, at random: nothing tells which comes next
- added: a new agent comes after every step of the agent with most steps
- never seen: the training leaves out all workflows with one agent, and those with it are served; `known`: the same
  workflows, and a model that was trained with it

Rows: the model alone, online counts alone, and both, as an engine forecasts. A forecast after an output is right if the
agent that it holds most likely comes next by this name, or the workflow ends. 95 % intervals over workflows.

    python benchmarks/new_agents.py FOLDER [--sets hyperagent,magentic_whowhen,…] [--seed 0]

FOLDER has the public traces as .jsonl.gz; a name that is no file there is a synthetic process, of 400 workflows.
Prints a table per set and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np
import pyarrow as pa
from continual import added, traces
from real_traces import SETS, traces_of

from presage.datasets.schema import workflow_codes
from presage.datasets.split import split
from presage.features.served_steps import served_steps
from presage.predictors.common.bootstrap import ratio_ci
from presage.predictors.common.probabilities import calibration_error, reliability
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.forecasting.forecaster import Forecaster
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.workflows import Workflow
from presage.serving_hooks.workflows.identity import Step
from presage.training.next_agent.change import CHANGES
from presage.training.next_agent.train import fit_predictor

PATIENT = Budget(deadline_s=60.0)
ROWS = ("model", "counts", "both")
SHARE = (0.05, 0.7)
"""Of the workflows, in which an agent is that a training leaves out."""


def left_out(train: pa.Table, test: pa.Table) -> str | None:
    """The agent with most steps among those in some workflows and not in most."""
    steps, held = Counter(train["agent"].to_pylist()), set(test["agent"].to_pylist())
    workflows = Counter(name for _, name in set(zip(workflow_codes(train), train["agent"].to_pylist(), strict=True)))
    low, high = (share * (int(workflow_codes(train).max()) + 1) for share in SHARE)
    able = [name for name, count in workflows.items() if low <= count <= high and name in held]
    return min(able, key=lambda name: (-steps[name], name), default=None)


def workflows_with(table: pa.Table, agent: str, *, wanted: bool) -> pa.Table:
    codes = workflow_codes(table)
    having = np.unique(codes[np.array(table["agent"].to_pylist()) == agent])
    return table.filter(pa.array(np.isin(codes, having) == wanted))


def in_order(table: pa.Table, seed: int) -> list[list[dict[str, Any]]]:
    """The steps of each workflow; workflows in random order."""
    codes = workflow_codes(table)
    rows = table.to_pylist()
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    parts = [rows[start:end] for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]
    return [parts[place] for place in np.random.default_rng(seed).permutation(len(parts))]


def serve(workflows: list[list[dict[str, Any]]], predictor: NextAgentPredictor | None, counted: bool) -> dict[str, Any]:
    """Accuracy and calibration of the likeliest outcome after each output."""
    monitor = ForecastMonitor() if counted and predictor is not None else None
    forecaster = Forecaster(
        predictor,
        None if predictor is None else 1,
        back_off=OnlineCounts() if counted else None,
        monitor=monitor,
        budget=PATIENT,
    )
    right, judged = np.zeros(len(workflows)), np.zeros(len(workflows))
    sure: list[float] = []
    hits: list[bool] = []
    for number, steps in enumerate(workflows):
        workflow = Workflow(Step(steps[0]["workflow_type"], steps[0]["workflow_id"], ""))
        for place, step in enumerate(steps):
            forecaster.on_prefill(
                workflow,
                step["agent"],
                step=place,
                input_tokens=step["input_tokens"],
                input_text=step.get("input_text"),
                prefill_state=state_of(step, "prefill_state"),
            )
            live = forecaster.on_completion(
                workflow,
                output_tokens=step["output_tokens"],
                output_text=step.get("output_text"),
                completion_state=state_of(step, "completion_state"),
            )
            last = place + 1 == len(steps)
            if last and not step["complete"]:
                continue
            came = None if last else steps[place + 1]["agent"]
            judged[number] += 1
            if len(live.probabilities):
                top = int(live.probabilities[0].argmax())
                hit = (live.agents[top] if top < len(live.agents) else None) == came
                right[number] += hit
                sure.append(float(live.probabilities[0, top]))
                hits.append(hit)
        forecaster.close(workflow)
    ends = ratio_ci(right, judged, np.random.default_rng(0))
    bins = reliability(np.array(sure), np.array(hits)) if sure else ()
    return {
        "accuracy": round(right.sum() / judged.sum(), 4),
        "ci95": [round(float(end), 4) for end in ends],
        "ece": round(calibration_error(bins), 4) if sure else None,
    }


def state_of(step: dict[str, Any], column: str) -> np.ndarray | None:
    state = step.get(column)
    return None if state is None else np.array(state, np.float32)


def judge(name: str, table: pa.Table, seed: int) -> dict[str, Any]:
    parts = split(table, 0.5, seed)
    predictor = fit_predictor(parts.train, seed=seed).predictor
    served: dict[str, tuple[pa.Table, NextAgentPredictor]] = {"unchanged": (parts.test, predictor)}
    for place, (called, change) in enumerate({"renamed": "agents renamed", "split": "an agent split in two"}.items()):
        changed, _ = CHANGES[change](parts.test, np.random.default_rng([seed, place]))
        served[called] = changed, predictor
    served["added"] = added(parts.test, (seed,)), predictor
    agent = left_out(parts.train, parts.test)
    if agent is not None:
        with_it = workflows_with(parts.test, agent, wanted=True)
        without = fit_predictor(workflows_with(parts.train, agent, wanted=False), seed=seed).predictor
        served |= {"known": (with_it, predictor), "never seen": (with_it, without)}
    print(f"\n### {name}\n\n| release | workflows | {' | '.join(ROWS)} | ECE of both |\n|---|---|---|---|---|---|")
    found: dict[str, Any] = {}
    for release, (traces_, model) in served.items():
        workflows = in_order(traces_, seed)
        pairs = ((model, False), (None, True), (model, True))
        rows = {row: serve(workflows, *pair) for row, pair in zip(ROWS, pairs, strict=True)}
        found[release] = {"workflows": len(workflows), **rows}
        cells = " | ".join(f"{of['accuracy']:.3f} ({of['ci95'][0]:.3f}–{of['ci95'][1]:.3f})" for of in rows.values())
        print(f"| {release} | {len(workflows)} | {cells} | {rows['both']['ece']:.3f} |", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", default="hyperagent,magentic_whowhen,chatdev,captain_agent_team,retry")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if not chosen.folder.is_dir():
        sys.exit(f"new_agents: {chosen.folder} is no folder: name the one that holds the public traces")
    result: dict[str, Any] = {"benchmark": "new_agents", "seed": chosen.seed}
    for name in chosen.sets.split(","):
        in_set = name in SETS and SETS[name][1] is not None  # one type of a file
        table = served_steps(traces_of(chosen.folder, name)) if in_set else traces(chosen.folder, name, chosen.seed)
        result[name] = judge(name, table, chosen.seed)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
