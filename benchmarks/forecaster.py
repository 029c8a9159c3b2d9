"""What does a forecast cost an engine beyond the predictors themselves, and how much memory does a workflow take?

One thread, warm, medians; traces of a synthetic process, with a next-agent predictor and a length forest trained on
it. "Predictors" is their own forecast at one event, with carried states and nothing else. "Forecaster" is the event
as an engine reports it: find the workflow by name, read the request's values, check the answer, take the time, update
the counts. Events come from many concurrent workflows in turn.

    python benchmarks/forecaster.py [--law triage] [--under-way 1000]

Prints a table of microseconds per event and ratios, bytes per workflow, and one JSON line.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import gc
import json
import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa

from presage.datasets.synthetic.workflows import generate
from presage.features.lengths import LengthEncoder, length_rows
from presage.features.moment import COMPLETION, PREFILL
from presage.predictors.common.steps import log_tokens
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.predictors.quantiles.choice import QuantileConfig
from presage.serving_hooks.forecasting.forecaster import Forecaster
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.workflows import Workflow
from presage.serving_hooks.workflows.identity import Step
from presage.training.next_agent.train import train
from presage.training.training import median_us

ROUNDS = 4000
MEASURED_WORKFLOWS = 10_000
INPUTS = ("input_tokens", "input_text", "system_prompt", "model", "prefill_state")
OUTPUTS = ("output_tokens", "output_text", "completion_state")


def lengths_of(table: pa.Table) -> RemainingLengthPredictor:
    encoder = LengthEncoder.fit(table)
    rows = length_rows(table, encoder)
    held = rows.task % 5 == 0
    config = QuantileConfig(estimator="forest")
    return RemainingLengthPredictor(config, 0).fit(rows.take(~held), rows.take(held), encoder=encoder)


def alone(
    agents: NextAgentPredictor, lengths: RemainingLengthPredictor | None, step: dict[str, Any], under_way: int
) -> tuple[Any, Any]:
    """Times the predictors' own forecasts at both moments, of many workflows in turn."""
    workflows = [agents.open(step["workflow_type"]) for _ in range(under_way)]
    of_lengths = [lengths.open(step["workflow_type"]) for _ in range(under_way)] if lengths is not None else []
    out = np.empty((agents.horizon, agents.vocabulary.outcomes), np.float32)
    agent = agents.vocabulary.agent(step["agent"])

    def prefilled(i: int) -> None:
        state = agents.project(PREFILL, agents.source.of_step(step, PREFILL))
        agents.prefilled(workflows[i % under_way], agent, log_tokens(step, "input"), state, out)
        if lengths is not None:
            lengths.begun(of_lengths[i % under_way], step)

    def completed(i: int) -> None:
        state = agents.project(COMPLETION, agents.source.of_step(step, COMPLETION))
        agents.completed(workflows[i % under_way], log_tokens(step, "output"), state, out)
        if lengths is not None:
            of_lengths[i % under_way].completed(step)

    return prefilled, completed


def through(forecaster: Forecaster, step: dict[str, Any], under_way: int) -> tuple[Any, Any]:
    """Times the same events through a forecaster; each completion belongs to its own prefill."""
    workflows = [Workflow(Step(step["workflow_type"], f"workflow-{number}", "")) for number in range(under_way)]
    inputs, outputs = ({name: step[name] for name in names_of} for names_of in (INPUTS, OUTPUTS))

    def prefilled(i: int) -> None:
        forecaster.on_prefill(workflows[i % under_way], step["agent"], **inputs)

    def completed(i: int) -> None:
        forecaster.on_completion(workflows[i % under_way], **outputs)

    return prefilled, completed


def bytes_a_workflow(predictor: NextAgentPredictor, step: dict[str, Any]) -> tuple[float, int]:
    """Bytes per workflow over 10,000 workflows of four steps, and the predictor's own share of them."""
    forecaster = Forecaster(predictor, back_off=OnlineCounts())
    workflows = [Workflow(Step(step["workflow_type"], f"workflow-{n}", "")) for n in range(MEASURED_WORKFLOWS)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for workflow in workflows:
        for index in range(4):
            forecaster.on_prefill(workflow, step["agent"], step=index)
            forecaster.on_completion(workflow, output_tokens=100)
    gc.collect()
    taken = (tracemalloc.get_traced_memory()[0] - before) / MEASURED_WORKFLOWS
    tracemalloc.stop()
    return taken, predictor.open(step["workflow_type"]).nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--law", default="triage")
    parser.add_argument("--under-way", type=int, default=1000)
    chosen = parser.parse_args()
    table = generate(chosen.law, 400, 0, state_size=2560).table
    agents = train(table, None, baselines=()).predictor
    lengths = lengths_of(table)
    step = table.slice(0, 1).to_pylist()[0]
    # As a connector hands states on: arrays, no lists.
    step |= {name: np.array(step[name], np.float32) for name in ("prefill_state", "completion_state")}
    rows: dict[str, dict[str, float]] = {}
    for name, both in (("next agent", None), ("next agent and tokens left", lengths)):
        for kind, events in (
            ("predictors", alone(agents, both, step, chosen.under_way)),
            ("forecaster", through(Forecaster(agents, lengths=both), step, chosen.under_way)),
            (
                "forecaster with counts",
                through(Forecaster(agents, lengths=both, back_off=OnlineCounts()), step, chosen.under_way),
            ),
        ):
            prefilled, completed = events
            # A prefill for every workflow, then a completion for every workflow, as many times as there is need.
            taken = {"prefill_us": [], "completion_us": []}
            for _ in range(max(1, ROUNDS // chosen.under_way)):
                taken["prefill_us"].append(median_us(prefilled, chosen.under_way))
                taken["completion_us"].append(median_us(completed, chosen.under_way))
            rows[f"{name}: {kind}"] = {moment: float(np.median(of)) for moment, of in taken.items()}
    counts_alone = through(Forecaster(None, back_off=OnlineCounts()), step, chosen.under_way)
    rows["counts alone"] = {
        "prefill_us": median_us(counts_alone[0], chosen.under_way),
        "completion_us": median_us(counts_alone[1], chosen.under_way),
    }
    each, state = bytes_a_workflow(agents, step)
    print(
        f"{chosen.law}, {len(agents.vocabulary.agents)} agents, states of 2560, {chosen.under_way} workflows under way"
    )
    print(f"{each:,.0f} bytes a workflow with counts, {state:,} of them the next-agent predictor's state\n")
    print("| an event of | prefill µs | completion µs | over the predictors alone |")
    print("|---|---|---|---|")
    ratios = {}
    for name, of in rows.items():
        base = rows.get(name.split(":")[0] + ": predictors")
        ratio = sum(of.values()) / sum(base.values()) if base is not None else float("nan")
        ratios[name] = ratio
        told = "–" if base is None else f"{ratio:.2f}"
        print(f"| {name} | {of['prefill_us']:.1f} | {of['completion_us']:.1f} | {told} |")
    over = {name: ratio for name, ratio in ratios.items() if ratio == ratio}
    print(json.dumps({"benchmark": "forecaster", "us": rows, "ratio": over, "bytes": each, "state_bytes": state}))


if __name__ == "__main__":
    main()
