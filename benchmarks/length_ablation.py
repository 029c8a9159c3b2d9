"""What is each group of features worth to the forecast of remaining lengths?

The predictor is trained with all features, and once without each group that the traces have: withheld from training,
selection and evaluation, as if the trace did not record it. If two groups carry the same information, withholding one
of them has no effect, although it may matter when the other is absent. Intervals are 95 %, paired, bootstrapped over
workflows. The synthetic process by default; of your own traces a fifth of the tasks is held out.

    python benchmarks/length_ablation.py [TRACES] [--workflows 600] [--seed 0]

Prints a Markdown table and one JSON line. `notebooks/remaining_length.ipynb` draws the same.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from presage.datasets.read import read_traces
from presage.datasets.synthetic.lengths import generate_lengths
from presage.features.history import PROGRESS
from presage.features.lengths import LengthEncoder, length_rows
from presage.features.rows import PROMPT, LabelledRows
from presage.features.served_steps import served_steps
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.quantiles.choice import QuantileConfig
from presage.report.blocks import signed_interval
from presage.training.length.evaluate import evaluate
from presage.training.length.train import fit_lengths
from presage.training.quantile_trainings import SELECTION_FRACTION
from presage.training.quantiles import QuantileDifference, QuantileFigures, difference, median_column
from presage.training.sets import set_apart, tasks_apart

AGENTS: Final = "agents, this one and before"
MODEL: Final = "model"

GROUPS: Final = {
    "sizes of the prompt": PROMPT,
    "words of the prompt": ("prompt_",),
    "words of the last answer": ("answer_",),
    "progress and tokens so far": PROGRESS,
    AGENTS: ("agent_", "calls_", "since_"),
    MODEL: (),
}
"""Columns of `LengthEncoder.names` by group; a name that ends in "_" is a prefix. The step's agent and the model are
replaced by names unknown to training. The workflow type is in no group, because quantiles are calibrated by it."""


def ablate(table: pa.Table, test: pa.Table, config: QuantileConfig, *, seed: int = 0) -> dict[str, QuantileDifference]:
    """By group, the figures on `test` (other tasks) without it minus those with all features; above 0 it helps.

    With the estimator "auto", the estimators may differ.
    """
    fitted = fit_lengths(table, config, seed=seed)
    encoder, learning = fitted.predictor.encoder, fitted.learning
    apart = tasks_apart(learning.task, learning.workflow_type, SELECTION_FRACTION, seed)
    held = length_rows(fitted.counts.fill(served_steps(test)).table, encoder)

    def figures(group: str) -> QuantileFigures:
        rows, judged = (without(of, encoder, group) for of in (learning, held))
        predictor = RemainingLengthPredictor(config, seed).fit(rows.take(~apart), rows.take(apart), encoder=encoder)
        return evaluate(predictor.predict, judged, config.quantiles, seed).figures

    whole = evaluate(fitted.predictor.predict, held, config.quantiles, seed).figures
    groups = [group for group in GROUPS if varies(learning, encoder, group)]
    return {group: difference(figures(group), whole, seed) for group in groups}


def without(rows: LabelledRows, encoder: LengthEncoder, group: str) -> LabelledRows:
    """The same rows with a group of `GROUPS` unknown."""
    numbers = rows.numbers.copy()
    numbers[:, columns(encoder, group)] = np.nan
    agent, model = len(encoder.vocabulary.agents), len(encoder.models)
    return replace(
        rows,
        numbers=numbers,
        agent=np.full_like(rows.agent, agent) if group == AGENTS else rows.agent,
        model=np.full_like(rows.model, model) if group == MODEL else rows.model,
    )


def varies(rows: LabelledRows, encoder: LengthEncoder, group: str) -> bool:
    """Whether there is anything to withhold."""
    if group in (AGENTS, MODEL):
        values = rows.agent if group == AGENTS else rows.model
        return bool((values != values[0]).any())
    numbers = rows.numbers[:, columns(encoder, group)]
    return bool(not np.isnan(numbers).all() and (numbers != numbers[:1]).any())


def columns(encoder: LengthEncoder, group: str) -> list[int]:
    """The numbers of the columns of a group."""
    wanted, named = GROUPS[group], PROMPT + PROGRESS
    begin = tuple(name for name in wanted if name not in named)
    # "prompt_tokens" is a size, not a word of the prompt: a full name precedes a prefix.
    return [
        i for i, name in enumerate(encoder.names) if name in wanted or (name not in named and name.startswith(begin))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="*", help="a store, files or folders of your own traces")
    parser.add_argument("--workflows", type=int, default=600, help="of the synthetic process, to train and to judge on")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.traces:
        parts = set_apart(read_traces(chosen.traces).table, None, chosen.seed)
        table, test = parts.train, parts.test
    else:
        table, test = (generate_lengths(chosen.workflows, seed).table for seed in (chosen.seed, chosen.seed + 1))
    config = QuantileConfig()
    found = ablate(table, test, config, seed=chosen.seed)
    median = median_column(config.quantiles)
    figures = {group: (of.tau_distance["all"], of.pinball[median]) for group, of in found.items()}
    print("| withheld | tau distance, more without | pinball of the median, more tokens without |\n|---|---|---|")
    for group, (tau, tokens) in sorted(figures.items(), key=lambda one: -one[1][0].value):
        print(f"| {group} | {signed_interval(*tau)} | {signed_interval(*tokens, 1)} |")
    told = {group: {"tau": tau.to_dict(), "pinball": tokens.to_dict()} for group, (tau, tokens) in figures.items()}
    print(json.dumps({"benchmark": "length_ablation", "seed": chosen.seed, "groups": told}))


if __name__ == "__main__":
    main()
