"""How far from Markov-1 to the best possible forecast does the predictor get, where that is known?

The traces come from laws whose Bayes-optimal forecast is computed beside them. Mean over the laws; "gap" is the share
of the way from Markov-1 to Bayes at one step.

    python benchmarks/known_law.py [--workflows 100,1000] [--seeds 1] [--state-size 64]

Prints a table, and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np

from presage.datasets.law import LAWS, generate
from presage.features.moment import MOMENTS
from presage.features.prefixes import prefixes_of
from presage.features.states import fit_states
from presage.features.vocabulary import Vocabulary
from presage.predictors.baselines.published import PublishedGraphSage
from presage.predictors.next_agent import NextAgentPredictor
from presage.predictors.ngram import BackoffNgram
from presage.training.metrics import measure
from presage.training.validation_split import split_validation

TEST_WORKFLOWS = 2000
TEST_SEED = 1_000_003


def judge(law: str, workflows: int, seed: int, state_size: int) -> dict[str, dict[str, list[float]]]:
    """Accuracy and ECE at each horizon of every model on one law, by "model/moment"."""
    drawn = generate(law, workflows, seed, state_size=state_size)
    test = generate(law, TEST_WORKFLOWS, TEST_SEED + seed, state_size=state_size)
    vocabulary = Vocabulary.from_table(drawn.table)
    source = fit_states(drawn.table, states="captured", seed=seed)
    learning, held = (prefixes_of(t, vocabulary, 3).with_states(source.states(t)) for t in (drawn.table, test.table))
    inner, validation = split_validation(learning, 0.15, seed)
    ours = NextAgentPredictor(seed=seed).fit(inner, validation, source=source).predict_both(held)
    models = {"presage": ours.__getitem__, "bayes": test.forecasts.__getitem__}
    for order in (1, 2, 3):
        ngram = BackoffNgram(order).fit(learning, validation)
        models[ngram.name] = lambda moment, ngram=ngram: ngram.predict(held, moment)
    published = PublishedGraphSage().fit(inner, validation)
    models[published.name] = lambda moment: published.predict(held, moment)
    result = {}
    for name, forecasts in models.items():
        for moment in MOMENTS:
            p = np.asarray(forecasts(moment), np.float32)
            if p.shape[2] != vocabulary.outcomes:
                raise SystemExit(f"known_law: {workflows} workflows of {law} do not name every agent; ask for more")
            figures = measure(p, held.outcomes, held.workflow, np.random.default_rng(0), resamples=1)
            result[f"{name}/{moment}"] = {"accuracy": list(figures.accuracy), "ece": list(figures.ece)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workflows", default="100,1000")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--state-size", type=int, default=64)
    chosen = parser.parse_args()
    result: dict[str, object] = {"benchmark": "known_law", "laws": list(LAWS), "seeds": chosen.seeds}
    for workflows in map(int, chosen.workflows.split(",")):
        runs = [judge(law, workflows, seed, chosen.state_size) for law in LAWS for seed in range(chosen.seeds)]
        mean = {
            key: {figure: np.mean([run[key][figure] for run in runs], axis=0) for figure in ("accuracy", "ece")}
            for key in runs[0]
        }
        print(f"\n### {workflows} workflows, {len(LAWS)} laws, {TEST_WORKFLOWS} test workflows each\n")
        print("| model | moment | accuracy at 1 / 2 / 3 | ECE at 1 / 2 / 3 | gap at 1 / 2 / 3 |")
        print("|---|---|---|---|---|")
        told: dict[str, object] = {}
        for key, figures in mean.items():
            name, moment = key.split("/")
            low, high = mean[f"markov-1/{moment}"]["accuracy"], mean[f"bayes/{moment}"]["accuracy"]
            gap = (figures["accuracy"] - low) / (high - low)
            columns = [" / ".join(f"{x:.3f}" for x in figures[f]) for f in ("accuracy", "ece")]
            print(
                f"| {name} | {moment} | {columns[0]} | {columns[1]} | {' / '.join(f'{x:.0%}' for x in gap)} |",
                flush=True,
            )
            told[key] = {**{f: figures[f].round(4).tolist() for f in figures}, "gap": gap.round(3).tolist()}
        result[str(workflows)] = told
    print(json.dumps(result))


if __name__ == "__main__":
    main()
