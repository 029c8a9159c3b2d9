"""How far from Markov-1 to the best possible forecast does the predictor get on synthetic processes?

Each synthetic process computes the Bayes-optimal forecast beside its traces. Means over the processes; "gap" is the
share of the way from Markov-1 to Bayes one step ahead, so Markov-1 is always among the baselines.

    python benchmarks/synthetic_processes.py [--workflows 100,1000] [--seeds 1] [--state-size 64] [--paper]

Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np
from paper_baselines import ALL as PAPER

from presage.datasets.synthetic.processes import PROCESSES
from presage.datasets.synthetic.workflows import generate
from presage.features.moment import MOMENTS
from presage.features.prefixes import prefixes_of
from presage.features.states import captured_source
from presage.features.vocabulary import Vocabulary
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.training.baselines import choose, find
from presage.training.metrics import measure
from presage.training.sets import tasks_apart

TEST_WORKFLOWS = 2000
TEST_SEED = 1_000_003
FIGURES = ("accuracy", "nll", "ece")
OURS = "presage"


def judge(
    law: str, workflows: int, seed: int, state_size: int, baselines: Sequence[str]
) -> dict[str, dict[str, list[float]]]:
    """Accuracy, NLL and ECE at each horizon of every model on one process, by "model/moment"."""
    drawn = generate(law, workflows, seed, state_size=state_size)
    test = generate(law, TEST_WORKFLOWS, TEST_SEED + seed, state_size=state_size)
    vocabulary = Vocabulary.from_table(drawn.table)
    source = captured_source(drawn.table)
    learning, held = (prefixes_of(t, vocabulary, 3).with_states(source.states(t)) for t in (drawn.table, test.table))
    apart = tasks_apart(learning.task, learning.workflow_type, 0.15, seed)
    inner, validation = learning.take(np.flatnonzero(~apart)), learning.take(np.flatnonzero(apart))
    ours = NextAgentPredictor(seed=seed).fit(inner, validation, source=source).predict_both(held)
    models = {OURS: ours.__getitem__, "bayes": test.forecasts.__getitem__}
    for name in baselines:
        begun = time.perf_counter()
        fitted = find(name).fit(seed, learning, inner, validation)
        models[name] = lambda moment, fitted=fitted: fitted.predict(held, moment)
        print(f"{law}, {workflows} workflows: {name} fitted in {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    result = {}
    for name, forecasts in models.items():
        for moment in MOMENTS:
            p = np.asarray(forecasts(moment), np.float32)
            if p.shape[2] != vocabulary.outcomes:
                raise SystemExit(
                    f"synthetic_processes: {workflows} workflows of {law} do not contain every agent; use more"
                )
            figures = measure(p, held.outcomes, held.workflow, np.random.default_rng(0), resamples=1)
            result[f"{name}/{moment}"] = {f: list(getattr(figures, f)) for f in FIGURES}
    return result


def differences(mean: dict[str, dict[str, np.ndarray]], baselines: Sequence[str]) -> dict[str, list[dict[str, object]]]:
    """Accuracy of ours minus the best baseline, by moment and horizon."""
    found: dict[str, list[dict[str, object]]] = {}
    for moment in MOMENTS:
        found[moment] = []
        for k in range(3):
            accuracy = {name: mean[f"{name}/{moment}"]["accuracy"][k] for name in (OURS, *baselines)}
            best = max(baselines, key=accuracy.__getitem__)
            gain = accuracy[OURS] - accuracy[best]
            found[moment].append({"best": best, "difference": round(float(gain), 4)})
            print(f"\n{moment}, {k + 1} ahead: {gain:+.3f} against {best}", end="")
    print(flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workflows", default="100,1000")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--state-size", type=int, default=64)
    parser.add_argument("--baselines", default="markov-1,markov-2,markov-3,published-graphsage")
    parser.add_argument("--paper", action="store_true", help="compare with the families of PBKV's table 3 as well")
    chosen = parser.parse_args()
    baselines = choose(",".join(["markov-1", chosen.baselines, *(PAPER if chosen.paper else ())]))
    result: dict[str, object] = {"benchmark": "synthetic_processes", "laws": list(PROCESSES), "seeds": chosen.seeds}
    for workflows in map(int, chosen.workflows.split(",")):
        runs = [
            judge(law, workflows, seed, chosen.state_size, baselines)
            for law in PROCESSES
            for seed in range(chosen.seeds)
        ]
        mean = {
            key: {figure: np.mean([run[key][figure] for run in runs], axis=0) for figure in FIGURES} for key in runs[0]
        }
        print(f"\n### {workflows} workflows, {len(PROCESSES)} laws, {TEST_WORKFLOWS} test workflows each\n")
        print("| model | moment | accuracy at 1 / 2 / 3 | NLL at 1 / 2 / 3 | ECE at 1 / 2 / 3 | gap at 1 / 2 / 3 |")
        print("|---|---|---|---|---|---|")
        told: dict[str, object] = {}
        for key, figures in mean.items():
            name, moment = key.split("/")
            low, high = mean[f"markov-1/{moment}"]["accuracy"], mean[f"bayes/{moment}"]["accuracy"]
            gap = (figures["accuracy"] - low) / (high - low)
            columns = [" / ".join(f"{x:.3f}" for x in figures[f]) for f in FIGURES]
            print(f"| {name} | {moment} | {' | '.join(columns)} | {' / '.join(f'{x:.0%}' for x in gap)} |", flush=True)
            told[key] = {**{f: figures[f].round(4).tolist() for f in figures}, "gap": gap.round(3).tolist()}
        told["differences"] = differences(mean, baselines)
        result[str(workflows)] = told
    print(json.dumps(result))


if __name__ == "__main__":
    main()
