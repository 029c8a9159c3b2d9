"""How accurate is the next-agent predictor on real traces, beside every baseline?

Five folds by task: each task is forecast once, by a model that saw no run of it. Vocabulary, states, early stopping
and mixture come from the training folds alone. Accuracy is over all steps of all folds; intervals are bootstrapped
over workflows (1,000 resamples); the last column is the paired interval of the difference to the best baseline. A
second row of ours, "engine", is the same model with an engine's inputs: without texts.

    python benchmarks/real_traces.py FOLDER [--sets autocoderover,hyperagent] [--paper] [--folds 1]

FOLDER has the public traces as .jsonl.gz. Prints a Markdown table per set and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from paper_baselines import ALL as PAPER

from presage.datasets.read import read_traces
from presage.datasets.tasks import task_of
from presage.features.input_profiles import PROFILES
from presage.features.moment import MOMENTS
from presage.features.prefixes import prefixes_of
from presage.predictors.common.bootstrap import ratio_ci
from presage.training.baselines import choose, find
from presage.training.metrics import Figures
from presage.training.next_agent.evaluate import Predict, evaluate
from presage.training.next_agent.train import fit_predictor

FOLDS = 5
HORIZON = 3
SETS = {
    "autocoderover": ("autocoderover", None),
    "ag2_gsmplus_impr_topology": ("ag2_gsm", "ag2_gsmplus_impr_topology"),
    "hyperagent": ("hyperagent", None),
    "chatdev": ("chatdev", None),
    "taubench": ("taubench", None),
    "magentic_whowhen": ("magentic_whowhen", None),
    "captain_agent_team": ("magentic_whowhen", "captain_agent_team"),
}
OURS, ENGINE = "presage", "presage, profile engine"


def traces_of(folder: Path, name: str) -> pa.Table:
    """One of the sets."""
    file, kind = SETS[name]
    table = read_traces([folder / f"{file}.jsonl.gz"]).table
    return table if kind is None else table.filter(pc.equal(table["workflow_type"], kind))


def folds_of(table: pa.Table, seed: int) -> np.ndarray:
    """A fold for each row, the same for all rows of a task."""
    code = pc.dictionary_encode(task_of(table).combine_chunks()).indices.to_numpy()
    return (np.random.default_rng(seed).permutation(code.max() + 1) % FOLDS)[code]


def judge(
    table: pa.Table, fold: np.ndarray, number: int, seed: int, baselines: Sequence[str]
) -> dict[str, dict[str, Figures]]:
    train, test = table.filter(pa.array(fold != number)), table.filter(pa.array(fold == number))
    fitted = fit_predictor(train, horizon=HORIZON, seed=seed)
    ours = fitted.predictor
    print(f"    states: {fitted.choice.name}", file=sys.stderr)
    held = prefixes_of(test, ours.vocabulary, HORIZON).with_states(ours.source.states(test))
    predict: dict[str, Predict] = {}
    for name in baselines:
        begun = time.perf_counter()
        predict[name] = find(name).fit(seed, fitted.learning, fitted.inner, fitted.validation).predict
        print(f"    {name} fitted in {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    both, engine = ours.predict_both(held), ours.predict_both(ours.observed(held, PROFILES["engine"]))
    predict[ENGINE] = lambda _, moment: engine[moment]
    judged = evaluate(lambda _, moment: both[moment], held, np.random.default_rng(seed), baselines=predict, resamples=1)
    return {OURS: dict(judged.moments), **{name: dict(by) for name, by in judged.baselines.items()}}


def pooled(folds: list[Figures], figure: str) -> np.ndarray:
    return np.concatenate([getattr(f, figure) for f in folds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--baselines", default="default", help="default, none, or names")
    parser.add_argument("--paper", action="store_true", help="compare with the families of PBKV's table 3 as well")
    parser.add_argument("--folds", type=int, default=FOLDS, choices=range(1, FOLDS + 1), help="judge so many of them")
    chosen = parser.parse_args()
    if not chosen.folder.is_dir():
        sys.exit(f"real_traces: {chosen.folder} is no folder: name the one that holds the public traces")
    baselines = choose(",".join([chosen.baselines, *(PAPER if chosen.paper else ())]))
    result: dict[str, object] = {"benchmark": "real_traces", "folds": chosen.folds, "seed": chosen.seed, "sets": {}}
    for name in chosen.sets.split(","):
        table = traces_of(chosen.folder, name)
        begun = time.perf_counter()
        fold = folds_of(table, chosen.seed)
        judged = []
        for number in range(chosen.folds):
            judged.append(judge(table, fold, number, chosen.seed, baselines))
            print(f"{name}: fold {number + 1} of {chosen.folds}, {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        result["sets"][name] = table_of(name, judged, chosen.seed)  # type: ignore[index]
    print(json.dumps(result))


def table_of(name: str, judged: list[dict[str, dict[str, Figures]]], seed: int) -> dict[str, object]:
    workflows = sum(len(fold[OURS]["prefill"].positions) for fold in judged)
    print(f"\n### {name}: {workflows} workflows, {len(judged)} of {FOLDS} folds by task\n")
    print("| model | moment | accuracy at 1 / 2 / 3 steps (95 % interval) | by workflow | NLL at 1 | ECE at 1 |")
    print("|---|---|---|---|---|---|")
    figures: dict[str, object] = {"workflows": workflows}
    for model in judged[0]:
        for moment in MOMENTS:
            folds = [fold[model][moment] for fold in judged]
            correct, positions = pooled(folds, "correct"), pooled(folds, "positions")
            accuracy = correct.sum(axis=0) / positions.sum(axis=0)
            ends = [ratio_ci(correct[:, k], positions[:, k], np.random.default_rng(seed)) for k in range(HORIZON)]
            weight = np.array([f.positions.sum(axis=0) for f in folds], float)
            weight /= weight.sum(axis=0)
            nll, ece = ((np.array([getattr(f, n) for f in folds]) * weight).sum(axis=0) for n in ("nll", "ece"))
            by_workflow = (correct / np.maximum(positions, 1)).sum(axis=0) / (positions > 0).sum(axis=0)
            figures[f"{model}/{moment}"] = {
                "accuracy": accuracy.round(4).tolist(),
                "ci95": [[round(e, 4) for e in pair] for pair in ends],
                "accuracy_by_workflow": by_workflow.round(4).tolist(),
                "nll": nll.round(4).tolist(),
                "ece": ece.round(4).tolist(),
            }
            told = " / ".join(f"{a:.3f} ({lo:.3f}–{hi:.3f})" for a, (lo, hi) in zip(accuracy, ends, strict=True))
            told_by = " / ".join(f"{a:.3f}" for a in by_workflow)
            print(f"| {model} | {moment} | {told} | {told_by} | {nll[0]:.3f} | {ece[0]:.3f} |")
    for moment in MOMENTS:
        ours = [fold[OURS][moment] for fold in judged]
        differences = []
        for k in range(HORIZON):
            rivals = {
                m: pooled([f[m][moment] for f in judged], "correct") for m in judged[0] if m not in (OURS, ENGINE)
            }
            best = max(rivals, key=lambda m: rivals[m][:, k].sum())
            positions = pooled(ours, "positions")[:, k]
            mine = pooled(ours, "correct")[:, k]
            low, high = ratio_ci(mine - rivals[best][:, k], positions, np.random.default_rng(seed))
            gain = (mine.sum() - rivals[best][:, k].sum()) / positions.sum()
            differences.append(
                {"best": best, "difference": round(float(gain), 4), "ci95": [round(low, 4), round(high, 4)]}
            )
            print(f"\n{moment}, {k + 1} ahead: {gain:+.3f} ({low:+.3f} to {high:+.3f}) against {best}", end="")
        figures[f"difference/{moment}"] = differences
    print(flush=True)
    return figures


if __name__ == "__main__":
    main()
