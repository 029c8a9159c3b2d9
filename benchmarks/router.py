"""How accurate is the router, beside one plain classifier per model, neighbours, and the best single model?

On the synthetic process, with the true probabilities as the oracle. With a folder of public outcomes also on each set
there, folds by prompt: each prompt is judged once, by models that did not train on it; figures are over all judged
prompts. Intervals are 95 %, bootstrapped over prompts; differences are paired. The best single model is chosen on the
judged prompts themselves.

    python benchmarks/router.py [FOLDER] [--folds 5] [--sets gsm8k,mmlu_pro] [--prompts 4000]

Prints a Markdown table per set and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np

from presage.datasets.outcomes import Outcomes
from presage.datasets.outcomes.files import read_outcomes
from presage.datasets.outcomes.split import choose_models, families, split_outcomes
from presage.datasets.synthetic.outcomes import generate_outcomes
from presage.predictors.router.predictor import RouterConfig, RouterPredictor
from presage.training.router.baselines import BASELINES
from presage.training.router.evaluate import RouterFigures, differences, judge
from presage.training.router.train import CALIBRATION_FRACTION

FOLDS = 5
OURS = "presage"
PLAIN = "tfidf-logistic"

Said = dict[str, tuple[np.ndarray, np.ndarray]]
"""Probabilities [n, M] and picks [n] by router."""


def answers(train: Outcomes, prompts: tuple[str, ...], seed: int) -> Said:
    inner, calibration = split_outcomes(train, CALIBRATION_FRACTION, seed)
    begun = time.perf_counter()
    ours = RouterPredictor(RouterConfig(), seed).fit(
        inner.prompts,
        inner.correct,
        calibration.prompts,
        calibration.correct,
        models=train.models,
        groups=families(inner.task),
    )
    print(f"  {len(train)} prompts in {time.perf_counter() - begun:.1f} s, trust {ours.trust}", file=sys.stderr)
    routers = {OURS: ours} | {name: make().fit(train.prompts, train.correct) for name, make in BASELINES.items()}
    found = {}
    for name, router in routers.items():
        said = router.probabilities(prompts)
        found[name] = (said, router.picks(said))
    return found


def by_fold(outcomes: Outcomes, folds: int, seed: int) -> tuple[Outcomes, Said]:
    """The prompts of the first `folds` of five folds, with forecasts by models of the other four."""
    fold = np.random.default_rng(seed).permutation(len(outcomes)) % FOLDS
    held = [np.flatnonzero(fold == k) for k in range(folds)]
    rest = [outcomes.take(np.flatnonzero(fold != k)) for k in range(folds)]
    found = [answers(rest[k], outcomes.take(held[k]).prompts, seed + k) for k in range(folds)]
    joined = {name: tuple(np.concatenate([of[name][i] for of in found]) for i in (0, 1)) for name in found[0]}
    return outcomes.take(np.concatenate(held)), joined  # type: ignore[return-value]


def report(title: str, figures: Mapping[str, RouterFigures], seed: int) -> dict[str, object]:
    ours = figures[OURS].picking
    print(f"\n### {title}: {figures[OURS].ranking.prompts} prompts, {len(figures[OURS].ranking.by_model)} models\n")
    print(
        f"Best single model {ours.best_single:.4f}, random {ours.random:.4f}, oracle {ours.oracle:.4f} "
        f"({ours.prompts_with_every_label} prompts with every label).\n"
    )
    print("| router | macro mAP | picked accuracy | picked − best single | ECE | Brier |")
    print("|---|---|---|---|---|---|")
    for name, of in figures.items():
        ranking, picking = of.ranking, of.picking
        print(
            f"| {name} | {ranking.macro_map:.4f} {span(ranking.macro_map_ci95)} | {picking.picked_accuracy:.4f} "
            f"{span(picking.picked_accuracy_ci95)} | {picking.picked_accuracy - picking.best_single:+.4f} "
            f"{span(picking.gain_over_best_single_ci95)} | {ranking.ece:.4f} | {ranking.brier:.4f} |"
        )
    gains = differences(figures[OURS], figures[PLAIN], seed) if PLAIN in figures else {}
    for figure, (value, interval) in gains.items():
        print(f"\nOurs minus {PLAIN}, {figure}: {value:+.4f} {span(interval)}")
    sys.stdout.flush()
    return {
        "routers": {name: brief(of) for name, of in figures.items()},
        "best_single": ours.best_single,
        "random": ours.random,
        "oracle": ours.oracle,
        "ours_minus_plain": {figure: [value, *interval] for figure, (value, interval) in gains.items()},
    }


def brief(of: RouterFigures) -> dict[str, object]:
    return {
        "macro_map": of.ranking.macro_map,
        "macro_map_ci95": of.ranking.macro_map_ci95,
        "picked_accuracy": of.picking.picked_accuracy,
        "picked_ci95": of.picking.picked_accuracy_ci95,
        "ece": of.ranking.ece,
        "brier": of.ranking.brier,
    }


def span(interval: tuple[float, float]) -> str:
    return f"[{interval[0]:.4f}, {interval[1]:.4f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--folds", type=int, default=FOLDS, choices=range(1, FOLDS + 1), help="judge so many of them")
    parser.add_argument("--sets", help="names of files, without endings; default: all of the folder")
    parser.add_argument("--prompts", type=int, default=4000, help="training prompts on the law; 0: not the law")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.folder is not None and not chosen.folder.is_dir():
        sys.exit(f"router: {chosen.folder} is no folder: name the one that holds the public outcomes")
    result: dict[str, object] = {"benchmark": "router", "seed": chosen.seed, "folds": chosen.folds}
    if chosen.prompts:
        train, test = generate_outcomes(chosen.prompts, chosen.seed).outcomes, generate_outcomes(4000, chosen.seed + 1)
        truth = test.probabilities.astype(np.float32)
        said = {"oracle of the law": (truth, truth.argmax(axis=1))}
        said |= answers(train, test.outcomes.prompts, chosen.seed)
        figures = {name: judge(*of, test.outcomes, chosen.seed) for name, of in said.items()}
        result["law"] = report(f"Known law, {chosen.prompts} prompts to learn from", figures, chosen.seed)
    if chosen.folder is not None:
        files = sorted(chosen.folder.glob("*.jsonl.gz"))
        names = chosen.sets.split(",") if chosen.sets else [file.name.removesuffix(".jsonl.gz") for file in files]
        for name in names:
            outcomes = choose_models(read_outcomes([chosen.folder / f"{name}.jsonl.gz"]).outcomes).outcomes
            judged, said = by_fold(outcomes, chosen.folds, chosen.seed)
            figures = {router: judge(*of, judged, chosen.seed) for router, of in said.items()}
            result[name] = report(f"{name}, {chosen.folds} of {FOLDS} folds by prompt", figures, chosen.seed)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
