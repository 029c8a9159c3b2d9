"""What does one forecast cost, and a thousand, against the published model in plain torch?

One thread, warm, medians; 5120-dimensional hidden states. "Projected" is a forecast whose state a worker has already
projected. The forecast moves the workflow by one step (history, GRU) and answers all three horizons. The plain model
is the network as published with the same state size, eager, its H^(2) computed at every call as its equations say.

    python benchmarks/forecast_latency.py [--state-size 5120] [--law triage]

Prints a table of microseconds and of ratios to plain torch, and one JSON line at the end.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from presage.datasets.law import generate
from presage.features.moment import PREFILL
from presage.features.prefixes import prefixes_of, transition_matrix
from presage.features.states import captured_source
from presage.features.vocabulary import Vocabulary
from presage.predictors.artefact import artefact_size_bytes
from presage.predictors.baselines import PublishedConfig, PublishedNetwork
from presage.predictors.next_agent import NextAgentPredictor
from presage.training.sets import split_validation
from presage.training.training import median_us

BATCH = 1024


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
    inner, validation = split_validation(prefixes, 0.15, 0)
    fitted = NextAgentPredictor(seed=0).fit(inner, validation, source=source)
    with tempfile.TemporaryDirectory() as folder:
        fitted.save(folder + "/model")
        size = artefact_size_bytes(Path(folder) / "model")
        load_us = median_us(lambda _: NextAgentPredictor.load(folder + "/model"), 20)
        model = NextAgentPredictor.load(folder + "/model")

    states = prefixes.states[PREFILL][:BATCH]
    agent = prefixes.agent[:BATCH]
    agents = agent.tolist()
    projected = [model.project(PREFILL, state) for state in states]
    out = np.empty((3, vocabulary.outcomes), np.float32)
    workflow = model.open(vocabulary.workflow_types[0])
    many = model.open_many([vocabulary.workflow_types[0]] * BATCH)
    size_of = np.full(BATCH, 5.0, np.float32)
    many_out, evidence = np.empty((BATCH, 3, vocabulary.outcomes), np.float32), np.empty(BATCH, np.int32)
    weights, bias = model.projection(PREFILL)
    half_states = torch.from_numpy(states).bfloat16()
    half_weights = torch.from_numpy(np.ascontiguousarray(weights.T)).bfloat16()
    stacked = np.stack(projected)

    plain = PublishedNetwork(
        torch.from_numpy(transition_matrix(inner)),
        chosen.state_size,
        3,
        PublishedConfig(),
        torch.Generator().manual_seed(0),
    ).eval()
    tensor_states, tensor_agent = torch.from_numpy(states), torch.from_numpy(agent.astype(np.int64))
    earlier = torch.ones(BATCH, vocabulary.outcomes)

    def torch_forecast(rows: slice) -> None:
        with torch.inference_mode():
            torch.softmax(plain(tensor_agent[rows], earlier[rows], tensor_states[rows]), dim=-1)

    def project_halves() -> np.ndarray:
        with torch.inference_mode():
            return torch.nn.functional.linear(half_states, half_weights).float().numpy() + bias

    def whole_batch(project: Callable[[], np.ndarray]) -> None:
        model.prefilled_many(many, agent, size_of, project(), many_out, evidence)

    rows: dict[str, float] = {
        "one, with its state": median_us(
            lambda i: model.prefilled(workflow, agents[i % BATCH], 5.0, model.project(PREFILL, states[i % BATCH]), out),
            3000,
        ),
        "one, projected": median_us(
            lambda i: model.prefilled(workflow, agents[i % BATCH], 5.0, projected[i % BATCH], out), 3000
        ),
        "one, plain torch": median_us(lambda i: torch_forecast(slice(i % BATCH, i % BATCH + 1)), 500),
        "1,024, with their states, fp32": median_us(
            lambda _: whole_batch(lambda: model.project_many(PREFILL, states)), 25
        ),
        "1,024, with their states, bf16": median_us(lambda _: whole_batch(project_halves), 25),
        "1,024, projected": median_us(lambda _: whole_batch(lambda: stacked), 25),
        "1,024, plain torch": median_us(lambda _: torch_forecast(slice(None)), 25),
    }
    print(
        f"{chosen.law}, {len(vocabulary.agents)} agents, states of {chosen.state_size}, artefact {size:,} bytes, ",
        end="",
    )
    print(f"loads in {load_us / 1000:.1f} ms, states projected to {len(projected[0])}\n")
    print("| forecast | median µs | plain torch / this |")
    print("|---|---|---|")
    for name, taken in rows.items():
        against = rows["one, plain torch"] if name.startswith("one") else rows["1,024, plain torch"]
        print(f"| {name} | {taken:,.1f} | {against / taken:.1f} |")
    print(json.dumps({"benchmark": "forecast_latency", "us": rows, "artefact_bytes": size, "load_ms": load_us / 1000}))


if __name__ == "__main__":
    main()
