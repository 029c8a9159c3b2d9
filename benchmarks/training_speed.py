"""How long does a training take, and how much memory, for 1,000 workflows of about ten steps?

Thirty epochs of the network (no early stopping), 5,120-dimensional states at both moments, everything included:
projections, trees of both moments, n-gram, mixture. Once without refitting on all workflows, once with (the default),
beside thirty epochs of the published network on the same states. At most two threads. Compiled code is warmed up on a
small trace first.

    python benchmarks/training_speed.py [--state-size 5120] [--no-published]

Prints a table and one JSON line.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")

import argparse
import json
import resource
import time
from dataclasses import replace

import numpy as np

from presage.datasets.synthetic.workflows import generate
from presage.features.prefixes import Prefixes, prefixes_of
from presage.features.states import StateSource, captured_source
from presage.features.vocabulary import Vocabulary
from presage.predictors.next_agent.baselines import PublishedConfig, PublishedGraphSage
from presage.predictors.next_agent.network_weights import NetworkConfig
from presage.predictors.next_agent.parts import NextAgentConfig
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.training.sets import tasks_apart


def prepared(workflows: int, state_size: int) -> tuple[Prefixes, Prefixes, StateSource]:
    table = generate("research", workflows, 0, state_size=state_size).table
    source = captured_source(table)
    prefixes = prefixes_of(table, Vocabulary.from_table(table), 3).with_states(source.states(table))
    apart = tasks_apart(prefixes.task, prefixes.workflow_type, 0.15, 0)
    return prefixes.take(np.flatnonzero(~apart)), prefixes.take(np.flatnonzero(apart)), source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-size", type=int, default=5120)
    parser.add_argument("--no-published", action="store_true", help="leave out the published network, the slow one")
    chosen = parser.parse_args()
    config = NextAgentConfig(refit=False, network=NetworkConfig(epochs=30, patience=30))
    small = prepared(30, 64)
    NextAgentPredictor(config).fit(small[0], small[1], source=small[2])
    inner, validation, source = prepared(1000, chosen.state_size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken: dict[str, float] = {}

    begun = time.perf_counter()
    NextAgentPredictor(config).fit(inner, validation, source=source)
    taken["presage, learning once"] = time.perf_counter() - begun
    begun = time.perf_counter()
    NextAgentPredictor(replace(config, refit=True)).fit(inner, validation, source=source)
    taken["presage, and again on all"] = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if not chosen.no_published:
        begun = time.perf_counter()
        PublishedGraphSage(PublishedConfig(patience=None)).fit(inner, validation)
        taken["as published, plain torch"] = time.perf_counter() - begun

    print(f"{inner.workflows + validation.workflows} workflows, {inner.steps + validation.steps} steps\n")
    print("| training | seconds |\n|---|---|")
    for name, seconds in taken.items():
        print(f"| {name} | {seconds:.1f} |")
    print(f"\npeak memory {peak / 1024:,.0f} MiB, of which {before / 1024:,.0f} before training (states and libraries)")
    print(json.dumps({"benchmark": "training_speed", "seconds": taken, "peak_mib": peak / 1024}))


if __name__ == "__main__":
    main()
