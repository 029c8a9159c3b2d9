"""How accurate is the remaining-length predictor, beside the oracle and the baselines?

On the synthetic process: rows of fresh workflows, with the true quantiles as the oracle. With a folder of public
traces also on autocoderover, five folds by task: each task is forecast once, by a model that saw no run of it. Tau
distance counts pairs of steps in the wrong order (ties half), over all steps and at arrival; pinball losses are in
tokens; intervals are bootstrapped over workflows. Texts are read as `train-predictor` reads them. Each estimator is
tested with all inputs and, "engine", with an engine's inputs: without texts and model names. Standard error names the
estimator that "auto" chose.

    python benchmarks/remaining_length.py [FOLDER] [--rows 5000] [--folds 5] [--estimators auto,forest]

Prints a Markdown table per set and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.stats import kendalltau

from presage.datasets.read import read_traces
from presage.datasets.synthetic.lengths import generate_lengths
from presage.datasets.tasks import task_of
from presage.features.input_profiles import PROFILES
from presage.features.lengths import LengthEncoder, length_rows
from presage.features.rows import LabelledRows
from presage.predictors.common.bootstrap import share_ci
from presage.predictors.length.baselines import LENGTH_BASELINES
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.quantiles.choice import ESTIMATORS, QuantileConfig
from presage.training.length.train import choose_texts
from presage.training.quantile_trainings import SELECTION_FRACTION
from presage.training.sets import tasks_apart

QUANTILES = (0.5, 0.9, 0.99)
FOLDS = 5
STEPS_A_WORKFLOW = 4.0


def tau_distance(truth: np.ndarray, said: np.ndarray) -> float:
    """Share of pairs with different outcomes in the wrong order; equal forecasts count half."""
    if len(np.unique(said)) < 2:
        return 0.5
    # tau-b is (C − D) / √((pairs that differ in truth) (pairs that differ in answers)).
    pairs, of_truth, of_said = (len(truth) * (len(truth) - 1) / 2, _ties(truth), _ties(said))
    surplus = kendalltau(truth, said).statistic * np.sqrt((pairs - of_truth) * (pairs - of_said))
    return float((1 - surplus / (pairs - of_truth)) / 2)


def _ties(values: np.ndarray) -> float:
    counts = np.unique(values, return_counts=True)[1].astype(float)
    return float((counts * (counts - 1) / 2).sum())


def figures(rows: LabelledRows, said: np.ndarray) -> dict[str, float]:
    truth, arrival = rows.label, rows.step == 0
    above = truth[:, None].astype(float) - said
    levels = np.array(QUANTILES)
    covered = above <= 0
    found = {
        "tau": tau_distance(truth, said[:, 0]),
        "tau_arrival": tau_distance(truth[arrival], said[arrival, 0]),
        "worst_type_0.99": min(covered[rows.workflow_type == t, 2].mean() for t in np.unique(rows.workflow_type)),
    }
    loss = np.maximum(levels * above, (levels - 1) * above).mean(axis=0)
    for i, level in enumerate(QUANTILES):
        found |= {f"pinball_{level}": float(loss[i]), f"coverage_{level}": float(covered[:, i].mean())}
    return found


def coverage_cis(judged: Sequence[tuple[LabelledRows, np.ndarray]], seed: int) -> dict[str, tuple[float, float]]:
    """95 % intervals of the coverage, by bootstrap over all workflows."""
    positions = np.concatenate([np.bincount(rows.workflow) for rows, _ in judged])
    seen = positions > 0
    found = {}
    for i, level in enumerate(QUANTILES):
        hits = np.concatenate([np.bincount(rows.workflow, rows.label <= said[:, i]) for rows, said in judged])
        found[f"ci95_{level}"] = share_ci(hits[seen], positions[seen], np.random.default_rng(seed))
    return found


def judge(
    train: pa.Table, test: pa.Table, estimators: Sequence[str], seed: int
) -> tuple[LabelledRows, dict[str, np.ndarray]]:
    encoder = LengthEncoder.fit(train)
    rows = length_rows(train, encoder)
    held = tasks_apart(rows.task, rows.workflow_type, SELECTION_FRACTION, seed)
    choice = choose_texts(train, encoder, rows, held, "auto", seed, lambda _: None)
    encoder, rows, fresh = choice.encoder, choice.rows, length_rows(test, choice.encoder)
    print(f"  texts: {choice.name}", file=sys.stderr)
    learning, selection = rows.take(~held), rows.take(held)
    said = {name: fit(rows, QUANTILES)(fresh) for name, fit in LENGTH_BASELINES.items()}
    for name in estimators:
        begun = time.perf_counter()
        config = QuantileConfig(estimator=name, quantiles=QUANTILES)  # type: ignore[arg-type]
        fitted = RemainingLengthPredictor(config, seed).fit(learning, selection, encoder=encoder)
        seconds = time.perf_counter() - begun
        print(f"  {name} ({fitted.estimator.name}): {len(rows)} rows in {seconds:.1f} s", file=sys.stderr)
        said[f"Presage, {name}"] = fitted.predict(fresh)
        said[f"Presage, {name}, engine"] = fitted.predict(encoder.observed(fresh, PROFILES["engine"]))
    return fresh, said


def table_of(title: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"\n### {title}\n")
    print(
        "| model | tau distance | at arrival | pinball .5 / .9 / .99 | P(Y ≤ q) at .5 / .9 / .99 | worst type at .99 |"
    )
    print("|---|---|---|---|---|---|")
    for name, of in found.items():
        pinball = " / ".join(f"{of[f'pinball_{q}']:.1f}" for q in QUANTILES)
        coverage = " / ".join(
            f"{of[f'coverage_{q}']:.3f} [{of[f'ci95_{q}'][0]:.3f}, {of[f'ci95_{q}'][1]:.3f}]" for q in QUANTILES
        )
        print(
            f"| {name} | {of['tau']:.4f} | {of['tau_arrival']:.4f} | {pinball} | {coverage} | "
            f"{of['worst_type_0.99']:.3f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--rows", default="5000", help="training rows on the law, one or more numbers; 0: not the law")
    parser.add_argument("--folds", type=int, default=FOLDS, choices=range(1, FOLDS + 1), help="judge so many of them")
    parser.add_argument("--estimators", default="auto", help=f"auto, or some of {', '.join(ESTIMATORS)}")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.folder is not None and not chosen.folder.is_dir():
        sys.exit(f"remaining_length: {chosen.folder} is no folder: name the one that holds the public traces")
    estimators = chosen.estimators.split(",")
    result: dict[str, object] = {"benchmark": "remaining_length", "seed": chosen.seed}
    for rows in filter(None, map(int, chosen.rows.split(","))):
        train = generate_lengths(round(rows / STEPS_A_WORKFLOW), chosen.seed)
        test = generate_lengths(1500, chosen.seed + 1)
        fresh, said = judge(train.table, test.table, estimators, chosen.seed)
        found = {
            name: figures(fresh, q) | coverage_cis([(fresh, q)], chosen.seed)
            for name, q in ({"oracle": test.oracle(QUANTILES)} | said).items()
        }
        table_of(f"Known law, {train.table.num_rows} rows to learn from, {len(fresh)} to judge on", found)
        result[f"law_{rows}"] = found
    if chosen.folder is not None:
        table = read_traces([chosen.folder / "autocoderover.jsonl.gz"]).table
        code = pc.dictionary_encode(task_of(table).combine_chunks()).indices.to_numpy()
        fold = (np.random.default_rng(chosen.seed).permutation(code.max() + 1) % FOLDS)[code]
        judged: list[tuple[LabelledRows, dict[str, np.ndarray]]] = []
        for number in range(chosen.folds):
            inside = pa.array(fold == number)
            judged.append(judge(table.filter(pc.invert(inside)), table.filter(inside), estimators, chosen.seed))
        found = {}
        for name in judged[0][1]:
            answers = [(fresh, said[name]) for fresh, said in judged]
            each = [figures(*answer) for answer in answers]
            mean = {figure: float(np.mean([f[figure] for f in each])) for figure in each[0]}
            found[name] = mean | coverage_cis(answers, chosen.seed)
        table_of(f"autocoderover, mean of {len(judged)} of {FOLDS} folds by task", found)
        result["autocoderover"] = found
    print(json.dumps(result))


if __name__ == "__main__":
    main()
