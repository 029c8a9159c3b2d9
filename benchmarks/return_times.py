"""How well is the time of a workflow's next request forecast on traces, beside counting by agent, reason and tool?

    python benchmarks/return_times.py FOLDER                  # claude_code, swe_agent_glm and autocoderover in FOLDER
    python benchmarks/return_times.py FOLDER --names mine     # FOLDER/mine.jsonl.gz

Folds by task: each workflow is judged by a predictor that saw no run of its task. Prints pinball loss (log seconds) as
a ratio to the baseline `agent-and-reason`, coverage of the quantiles, the tau distance of the median, the Brier score
of END as a ratio to the base rate, and the time of one forecast and of a batch of 1,024. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from presage.datasets.read import read_traces
from presage.datasets.tasks import task_folds, task_keys
from presage.features.return_times import return_rows
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
            "latency_us": statistics.median(run["latency_us"] for run in runs),
            "batch_ms": statistics.median(run["batch_ms"] for run in runs),
        }
    head = [f"{figure} {q}" for figure in ("pinball", "within") for q in SHOWN]
    print("\n" + " | ".join(["traces", "steps", *head, "tau", "END", "µs", "ms"]))
    for name, run in found.items():
        cells = [f"{run['ratio'][q]:.3f}" for q in SHOWN] + [f"{run['coverage'][q]:.3f}" for q in SHOWN]
        cells += [f"{run['tau']:.3f}", f"{run['end']:.2f}", f"{run['latency_us']:.0f}", f"{run['batch_ms']:.1f}"]
        print(" | ".join([name, f"{run['steps']:,}", *cells]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
