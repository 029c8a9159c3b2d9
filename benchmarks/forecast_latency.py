"""What does one next-agent forecast cost, beside the published model in plain torch?

One thread, warm, medians; 5,120-dimensional hidden states. A forecast advances the workflow by one step (history, GRU)
and covers all three horizons. "Projected" is a forecast whose state a worker has already projected. The plain model is
the published network with the same state size, eager, which computes H^(2) at every call as its equations say.

    python benchmarks/forecast_latency.py [--state-size 5120] [--law triage]

Prints a table of microseconds and ratios, and one JSON line.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

from presage.datasets.synthetic.workflows import generate
from presage.features.moment import PREFILL
from presage.features.prefixes import prefixes_of, transition_matrix
from presage.features.states import captured_source
from presage.features.vocabulary import Vocabulary
from presage.predictors.common.artefact import artefact_size_bytes
from presage.predictors.next_agent.baselines import PublishedConfig, PublishedNetwork
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.training.sets import tasks_apart
from presage.training.training import median_us

STEPS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-size", type=int, default=5120)
    parser.add_argument("--law", default="triage")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    drawn = generate(chosen.law, 1000, 0, state_size=chosen.state_size)
    vocabulary = Vocabulary.from_table(drawn.table)
    source = captured_source(drawn.table)
    prefixes = prefixes_of(drawn.table, vocabulary, 3).with_states(source.states(drawn.table))
    apart = tasks_apart(prefixes.task, prefixes.workflow_type, 0.15, 0)
    inner, validation = prefixes.take(np.flatnonzero(~apart)), prefixes.take(np.flatnonzero(apart))
    fitted = NextAgentPredictor(seed=0).fit(inner, validation, source=source)
    with tempfile.TemporaryDirectory() as folder:
        fitted.save(folder + "/model")
        size = artefact_size_bytes(Path(folder) / "model")
        load_us = median_us(lambda _: NextAgentPredictor.load(folder + "/model"), 20)
        model = NextAgentPredictor.load(folder + "/model")

    states = prefixes.states[PREFILL][:STEPS]
    agent = prefixes.agent[:STEPS]
    agents = agent.tolist()
    projected = [model.project(PREFILL, state) for state in states]
    out = np.empty((3, vocabulary.outcomes), np.float32)
    workflow = model.open(vocabulary.workflow_types[0])

    plain = PublishedNetwork(
        torch.from_numpy(transition_matrix(inner)),
        chosen.state_size,
        3,
        PublishedConfig(),
        torch.Generator().manual_seed(0),
    ).eval()
    tensor_states, tensor_agent = torch.from_numpy(states), torch.from_numpy(agent.astype(np.int64))
    earlier = torch.ones(STEPS, vocabulary.outcomes)

    def torch_forecast(rows: slice) -> None:
        with torch.inference_mode():
            torch.softmax(plain(tensor_agent[rows], earlier[rows], tensor_states[rows]), dim=-1)

    rows: dict[str, float] = {
        "one, with its state": median_us(
            lambda i: model.prefilled(workflow, agents[i % STEPS], 5.0, model.project(PREFILL, states[i % STEPS]), out),
            3000,
        ),
        "one, projected": median_us(
            lambda i: model.prefilled(workflow, agents[i % STEPS], 5.0, projected[i % STEPS], out), 3000
        ),
        "one, plain torch": median_us(lambda i: torch_forecast(slice(i % STEPS, i % STEPS + 1)), 500),
    }
    print(
        f"{chosen.law}, {len(vocabulary.agents)} agents, states of {chosen.state_size}, artefact {size:,} bytes, ",
        end="",
    )
    print(f"loads in {load_us / 1000:.1f} ms, states projected to {len(projected[0])}\n")
    print("| forecast | median µs | plain torch / this |")
    print("|---|---|---|")
    for name, taken in rows.items():
        print(f"| {name} | {taken:,.1f} | {rows['one, plain torch'] / taken:.1f} |")
    print(json.dumps({"benchmark": "forecast_latency", "us": rows, "artefact_bytes": size, "load_ms": load_us / 1000}))


if __name__ == "__main__":
    main()
