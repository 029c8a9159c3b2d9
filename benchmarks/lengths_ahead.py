"""Does knowing who is expected next tell how much is left, and what does it cost?

A next-agent model is trained on the training part by ids alone, then the predictor of lengths with and without it, and
both are judged on the same steps: on the known law of lengths and, given a folder of public traces, on autocoderover,
five folds by task or fewer, and their mean. "In fold" is what becomes of it when the training rows are told by the
model that learnt from them. Differences are to "without"; below 0 the next-agent model helps. A request is all
quantiles from the steps of a running workflow, one thread, median.

    python benchmarks/lengths_ahead.py [FOLDER] [--workflows 600] [--folds 5] [--estimator auto]

Prints a table a set, and one JSON line at the end.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.datasets.length_law import generate_lengths
from presage.datasets.read import read_traces
from presage.datasets.tasks import task_of
from presage.predictors.ahead import GivenModel
from presage.predictors.remaining_length import RemainingLengthConfig
from presage.training.lengths.evaluate import difference
from presage.training.lengths.metrics import Share
from presage.training.lengths.train import LengthTraining, train_lengths
from presage.training.next_agent import train
from presage.training.training import median_us

FOLDS = 5
REQUESTS = 500


def requests_of(table: pa.Table) -> list[list[dict[str, object]]]:
    """The first steps of a trace as requests bring them: all steps so far, the last without its output."""
    columns = ["workflow_type", "workflow_id", "step", "agent", "kind", "model", "input_tokens", "output_tokens"]
    steps = table.select([*columns, "system_prompt", "input_text", "output_text"]).slice(0, 2000).to_pylist()
    blank = {"output_tokens": None, "output_text": None}
    return [[*steps[i - step["step"] : i], step | blank] for i, step in enumerate(steps) if step["kind"] == "llm"]


def told(share: Share, digits: int) -> str:
    return f"{share.value:+.{digits}f} [{share.ci95[0]:+.{digits}f}, {share.ci95[1]:+.{digits}f}]"


def compare(title: str, learnt: pa.Table, test: pa.Table, estimator: str, seed: int) -> dict[str, Any]:
    begun = time.perf_counter()
    next_agent = train(learnt, test, states="none", baselines=(), seed=seed)
    seconds = {"next-agent model": time.perf_counter() - begun}
    config = RemainingLengthConfig(estimator=estimator)  # type: ignore[arg-type]
    made: dict[str, LengthTraining] = {}
    rows: dict[str, dict[str, float]] = {}
    requests = requests_of(test)
    with tempfile.TemporaryDirectory() as folder:
        next_agent.save(Path(folder) / "next-agent")
        given = GivenModel.load(Path(folder) / "next-agent", "next-agent")
        in_fold = GivenModel.load(Path(folder) / "next-agent", "next-agent")
        in_fold.predictor.trained_on = np.zeros(0, np.uint64)  # it does not say what it learnt from
        for name, model in (("without", None), ("with", given), ("with, in fold", in_fold)):
            begun = time.perf_counter()
            made[name] = train_lengths(learnt, test, config, seed=seed, next_agent=model, baselines=())
            seconds[name] = time.perf_counter() - begun
            made[name].save(Path(folder) / name)
            forecast = made[name].predictor.forecast
            rows[name] = {
                "seconds": seconds[name],
                "bytes": made[name].metrics["size_bytes"],
                "request_us": median_us(lambda i, f=forecast: f(requests[i % len(requests)]), REQUESTS),
            }
    figures = {name: training.evaluation.figures for name, training in made.items()}
    gains = {name: difference(of, figures["without"], seed) for name, of in figures.items() if name != "without"}
    steps, copies = figures["with"].positions.sum(), made["with"].metrics["data"]["out of fold"]
    print(f"\n### {title}: {steps} steps judged; out of fold: {copies}\n")
    print("| | tau distance, all | at arrival | pinball .5 / .9 / .99 | request µs | training s | MB |")
    print("|---|---|---|---|---|---|---|")
    for name, of in figures.items():
        pinball = " / ".join(f"{share.value:.1f}" for share in of.pinball)
        tau = " | ".join(f"{of.tau_distance[scope].value:.4f}" for scope in ("all", "arrival"))
        cost = rows[name]
        print(
            f"| {name} ({made[name].predictor.estimator.name}) | {tau} | {pinball} | {cost['request_us']:.0f} | "
            f"{cost['seconds']:.1f} | {cost['bytes'] / 1e6:.2f} |"
        )
    for name, gain in gains.items():
        pinball = " / ".join(told(share, 1) for share in gain.pinball)
        tau = " | ".join(told(gain.tau_distance[scope], 4) for scope in ("all", "arrival"))
        more = rows[name]["request_us"] / rows["without"]["request_us"]
        print(f"| {name}, less without [95 %] | {tau} | {pinball} | ×{more:.1f} | | |", flush=True)
    return {
        **{name: {**rows[name], **figures[name].to_dict()} for name in figures},
        "differences": {
            name: {
                "tau_distance": {scope: [share.value, *share.ci95] for scope, share in gain.tau_distance.items()},
                "pinball": [[share.value, *share.ci95] for share in gain.pinball],
            }
            for name, gain in gains.items()
        },
        "next_agent_training_s": seconds["next-agent model"],
    }


def mean_differences(folds: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Of each way, the mean over folds of its differences to "without", and how far single folds lie apart."""
    print(f"\n### autocoderover, mean of {len(folds)} of {FOLDS} folds [least, greatest]\n")
    print("| less without | tau distance, all | at arrival | pinball .5 | .9 | .99 |")
    print("|---|---|---|---|---|---|")
    found = {}
    for name in folds[0]["differences"]:
        of = [fold["differences"][name] for fold in folds]
        columns = {
            **{scope: [one["tau_distance"][scope][0] for one in of] for scope in ("all", "arrival")},
            **{f"pinball_{place}": [one["pinball"][place][0] for one in of] for place in range(3)},
        }
        found[name] = {figure: [float(np.mean(one)), min(one), max(one)] for figure, one in columns.items()}
        digits = (4, 4, 1, 1, 1)
        cells = (
            f"{mean:+.{d}f} [{least:+.{d}f}, {most:+.{d}f}]"
            for (mean, least, most), d in zip(found[name].values(), digits, strict=True)
        )
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--workflows", type=int, default=600, help="of the law to learn from, half as many to judge on")
    parser.add_argument("--folds", type=int, default=FOLDS, choices=range(1, FOLDS + 1), help="judge so many of them")
    parser.add_argument("--estimator", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.folder is not None and not chosen.folder.is_dir():
        sys.exit(f"lengths_ahead: {chosen.folder} is no folder: name the one that holds the public traces")
    result: dict[str, object] = {"benchmark": "lengths_ahead", "seed": chosen.seed}
    if chosen.workflows:
        learnt, test = (
            generate_lengths(count, chosen.seed + i).table
            for i, count in enumerate((chosen.workflows, chosen.workflows // 2))
        )
        result["law"] = compare("Known law", learnt, test, chosen.estimator, chosen.seed)
    if chosen.folder is not None:
        table = read_traces([chosen.folder / "autocoderover.jsonl.gz"]).table
        code = pc.dictionary_encode(task_of(table).combine_chunks()).indices.to_numpy()
        fold = (np.random.default_rng(chosen.seed).permutation(code.max() + 1) % FOLDS)[code]
        folds = []
        for number in range(chosen.folds):
            inside = pa.array(fold == number)
            parts = table.filter(pc.invert(inside)), table.filter(inside)
            folds.append(compare(f"autocoderover, fold {number + 1}", *parts, chosen.estimator, chosen.seed))
        result["autocoderover"] = {"folds": folds, "mean_differences": mean_differences(folds)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
