"""How well is the time of a workflow's next request forecast on traces, beside counting by agent, reason and tool?

    python benchmarks/return_times.py FOLDER                  # claude_code, swe_agent_glm and autocoderover in FOLDER
    python benchmarks/return_times.py FOLDER --names mine     # FOLDER/mine.jsonl.gz

Folds by task: each workflow is judged by a predictor that saw no run of its task. Prints pinball loss (log seconds) as
a ratio to the baseline `agent-and-reason`, coverage of the quantiles, the tau distance of the median, the Brier score
of END as a ratio to the base rate, and the time of one forecast and of a batch of 1,024.

Then the held-out workflows run live, all at their recorded times, through the forecaster of an engine: with the model
and parsed answers, with the model and what vLLM's scheduler knows alone, and with online counts, which begin empty and
are told the recorded reasons. Prints the loss of the median as a ratio to the same baseline, coverage, and the
microseconds of both events of a step, on the caller's thread. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from presage.datasets.read import read_traces
from presage.datasets.tasks import task_folds, task_keys
from presage.features.return_times import ENGINE_REASONS, LEAST_MS, return_rows
from presage.predictors.return_time.predictor import ReturnTimePredictor
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.forecasting.return_times import ReturnTimeForecaster
from presage.serving_hooks.workflows import Workflow
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import LiveReturn
from presage.training.return_time.train import train_return_times

RIVAL = "agent-and-reason"
SHOWN = ("0.1", "0.5", "0.9", "0.99")
BATCH = 1024


def table_of(path: Path) -> pa.Table:
    """A trace file; `stop`, as one public file calls it, is read as the finish reason."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "traces.jsonl"
        with gzip.open(path, "rt", encoding="utf-8") as lines, copy.open("w", encoding="utf-8") as out:
            for line in lines:
                row = json.loads(line)
                out.write(json.dumps({**row, "finish_reason": row.pop("stop", None)}) + "\n")
        return read_traces(copy).table


def run_live(
    table: pa.Table, label: np.ndarray, predictor: ReturnTimePredictor | None, answers: bool
) -> dict[str, Any]:
    """Loss of the median (log seconds), coverage and cost of live forecasts; `label` is that of the LLM steps, ms."""
    every = table.select(["workflow_type", "workflow_id", "agent", "kind", "started_at", "ended_at", "input_tokens",
                          "output_tokens", "finish_reason"]).to_pylist()  # fmt: skip
    places = [place for place, row in enumerate(every) if row["kind"] == "llm"]
    rows, events, left = [every[place] for place in places], [], Counter[tuple[str, str]]()
    for at, row in enumerate(rows):
        if row["started_at"] is not None and row["ended_at"] is not None:
            events += [(row["started_at"].timestamp(), at, 0), (row["ended_at"].timestamp(), at, 1)]
            left[row["workflow_type"], row["workflow_id"]] += 1
    forecaster = ReturnTimeForecaster(predictor, budget=Budget(deadline_s=1.0, hang_s=None))
    lost, within, taken, arriving = [], Counter[str](), [], {}
    workflows: dict[str, Workflow] = {}
    for now, at, completes in sorted(events):
        row, step = rows[at], Step(rows[at]["workflow_type"], rows[at]["workflow_id"], rows[at]["agent"], at)
        workflow = workflows.setdefault(step.workflow, Workflow(step))
        begun = time.perf_counter()
        if not completes:
            forecaster.arrived(workflow, step, row["input_tokens"], now)
            arriving[at] = time.perf_counter() - begun
            continue
        reason = row["finish_reason"] if predictor is None or row["finish_reason"] in ENGINE_REASONS else "stop"
        live: LiveReturn | None = forecaster.completed(workflow, step, row["output_tokens"], reason, now)
        taken.append(1e6 * (arriving.pop(at) + time.perf_counter() - begun))
        if answers:
            calls = every[places[at] + 1 : [*places, len(every)][at + 1]]
            tools = [call["agent"] for call in calls if call["workflow_id"] == row["workflow_id"]]
            live = forecaster.answered(workflow, step, row["finish_reason"], tools) or live
        if live is not None and live.quantiles and np.isfinite(label[at]):
            quantiles = dict(zip((f"{q:g}" for q in live.quantiles), live.seconds, strict=True))
            actual = label[at] / 1e3
            lost.append(0.5 * abs(np.log(actual / max(quantiles["0.5"], LEAST_MS / 1e3))))
            within.update(q for q in SHOWN if actual <= max(quantiles[q], LEAST_MS / 1e3))
        left[row["workflow_type"], row["workflow_id"]] -= 1
        if not left[row["workflow_type"], row["workflow_id"]]:
            forecaster.ended(workflow)
    coverage = {q: within[q] / len(lost) for q in SHOWN}
    return {"loss": float(np.mean(lost)), "coverage": coverage, "us": statistics.median(taken), "judged": len(lost)}


LIVE = ("model, answers", "model, engine alone", "counts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--names", nargs="+", default=["claude_code", "swe_agent_glm", "autocoderover"])
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = {}
    for name in arguments.names:
        table = table_of(arguments.folder / f"{name}.jsonl.gz")
        fold = task_folds(np.unique(task_keys(table), return_inverse=True)[1], arguments.seed, arguments.folds)
        runs = []
        for held in range(arguments.folds):
            inside = pa.array(fold == held)
            training = train_return_times(
                table.filter(pa.array(fold != held)),
                table.filter(inside),
                seed=arguments.seed,
                baselines=("constant", RIVAL, "agent-and-tool"),
            )
            of, rival = training.metrics, training.metrics["baselines"]
            rows = return_rows(table.filter(inside), training.predictor.encoder)
            batch = rows.take(np.arange(BATCH) % len(rows))
            taken = []
            for _ in range(9):
                begun = time.perf_counter()
                training.predictor.predict(batch)
                training.predictor.predict_end(batch)
                taken.append(1e3 * (time.perf_counter() - begun))
            held_out, label = table.filter(inside), rows.label.astype(np.float64)
            live = {
                name: run_live(held_out, label, None if name == "counts" else training.predictor, "answers" in name)
                for name in LIVE
            }
            end = of["end"]
            runs.append(
                {
                    "steps": of["steps"],
                    "ratio": {q: of["pinball"][q] / rival[RIVAL]["pinball"][q] for q in SHOWN},
                    "engine": of["profiles"]["engine"]["pinball"]["0.5"] / rival[RIVAL]["pinball"]["0.5"],
                    "to_tool": of["pinball"]["0.5"] / rival["agent-and-tool"]["pinball"]["0.5"],
                    "coverage": {q: of["coverage"][q] for q in SHOWN},
                    "tau": of["tau_distance"]["all"],
                    "end": end["brier"] / end["brier_base_rate"] if end else None,
                    "latency_us": of["latency_us"],
                    "batch_ms": statistics.median(taken),
                    "chosen": of["config"]["chosen"],
                    "live": {
                        name: {**one, "ratio": one["loss"] / rival[RIVAL]["pinball"]["0.5"]}
                        for name, one in live.items()
                    },
                }
            )
            print(name, held, json.dumps(runs[-1]), flush=True)
        weights = [run["steps"] for run in runs]
        found[name] = {
            "steps": sum(weights),
            "ratio": {q: float(np.average([run["ratio"][q] for run in runs], weights=weights)) for q in SHOWN},
            "coverage": {q: float(np.average([run["coverage"][q] for run in runs], weights=weights)) for q in SHOWN},
            "tau": float(np.average([run["tau"] for run in runs], weights=weights)),
            "end": statistics.median(run["end"] for run in runs if run["end"] is not None),
            "engine": float(np.average([run["engine"] for run in runs], weights=weights)),
            "live": {
                name: {
                    "ratio": float(np.average([run["live"][name]["ratio"] for run in runs], weights=weights)),
                    "us": statistics.median(run["live"][name]["us"] for run in runs),
                    "coverage": {
                        q: float(np.average([run["live"][name]["coverage"][q] for run in runs], weights=weights))
                        for q in SHOWN
                    },
                }
                for name in LIVE
            },
            "latency_us": statistics.median(run["latency_us"] for run in runs),
            "batch_ms": statistics.median(run["batch_ms"] for run in runs),
        }
    head = [f"{figure} {q}" for figure in ("pinball", "within") for q in SHOWN]
    print("\n" + " | ".join(["traces", "steps", *head, "tau", "END", "µs", "ms"]))
    for name, run in found.items():
        cells = [f"{run['ratio'][q]:.3f}" for q in SHOWN] + [f"{run['coverage'][q]:.3f}" for q in SHOWN]
        cells += [f"{run['tau']:.3f}", f"{run['end']:.2f}", f"{run['latency_us']:.0f}", f"{run['batch_ms']:.1f}"]
        print(" | ".join([name, f"{run['steps']:,}", *cells]))
    print("\nlive | pinball 0.5 | " + " | ".join(f"within {q}" for q in SHOWN) + " | µs of both events")
    for name, run in found.items():
        for way, one in run["live"].items():
            cells = [f"{one['ratio']:.3f}", *(f"{one['coverage'][q]:.3f}" for q in SHOWN), f"{one['us']:.0f}"]
            print(" | ".join([f"{name}: {way}", *cells]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
