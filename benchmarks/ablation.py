"""What does each part of the next-agent predictor bring on public traces, and what after a release that renames?

Half of the tasks train, the others are judged; for each part the predictor is trained and judged again without it, on
the same workflows with the same states. Columns: the part's gain one step ahead after the output, whole predictor minus
the one without, paired, with 95 % intervals over workflows: as they are, with 30 % of the agents renamed, and with
other workflow types; a forecast of a renamed agent counts as right under its old name, as in `presage study change`.

    python benchmarks/ablation.py FOLDER [--sets all] [--seed 0]

FOLDER has the public traces as .jsonl.gz. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np
import pyarrow as pa
from real_traces import SETS, traces_of

from presage.datasets.split import split
from presage.features.moment import COMPLETION
from presage.features.prefixes import prefixes_of
from presage.features.served_steps import served_steps
from presage.predictors.next_agent.parts import COMPONENTS, Component, NextAgentConfig
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.training.metrics import Figures, differences, measure
from presage.training.next_agent.change import CHANGES, by_role
from presage.training.next_agent.train import fit_predictor

WHOLE = NextAgentConfig()


def without(component: Component) -> NextAgentConfig:
    return replace(WHOLE, mixture=tuple(name for name in COMPONENTS if name != component))


PARTS: Mapping[str, NextAgentConfig] = {
    "GraphSAGE": replace(WHOLE, network=replace(WHOLE.network, graph=False)),
    **{component: without(component) for component in COMPONENTS},
}
STATES = "states"
UNCHANGED = "as they are"
RELEASES: Mapping[str, Callable[[pa.Table, int], pa.Table]] = {
    UNCHANGED: lambda table, seed: table,
    "agents renamed": lambda table, seed: CHANGES["agents renamed"](table, np.random.default_rng([seed, 0]))[0],
    "types renamed": lambda table, seed: CHANGES["workflow types renamed"](table, np.random.default_rng([seed, 2]))[0],
}


def judge(predictor: NextAgentPredictor, table: pa.Table, seed: int) -> dict[str, Figures]:
    unchanged = prefixes_of(table, predictor.vocabulary, 3)
    found = {}
    for release, change in RELEASES.items():
        changed = change(table, seed)
        held = prefixes_of(changed, predictor.vocabulary, 3).with_states(predictor.source.states(changed))
        forecasts = by_role(predictor.predict, unchanged, held)(held, COMPLETION)
        found[release] = measure(
            forecasts, unchanged.named_outcomes, held.workflow, np.random.default_rng(0), resamples=1
        )
    return found


def ablated(table: pa.Table, seed: int) -> dict[str, Any]:
    parts = split(table, 0.5, seed)

    def fit(config: NextAgentConfig, states: Any) -> NextAgentPredictor:
        return fit_predictor(parts.train, config, seed=seed, states=states).predictor

    whole = fit(WHOLE, "auto")
    kind = whole.source.kind
    same = kind if kind in ("captured", "none") else "text"
    before = judge(whole, parts.test, seed)
    rows = {part: judge(fit(config, same), parts.test, seed) for part, config in PARTS.items()}
    if kind != "none":
        rows[STATES] = judge(fit(WHOLE, "none"), parts.test, seed)
    found: dict[str, Any] = {
        "workflows": len(before[UNCHANGED].positions),
        "accuracy": {release: round(figures.accuracy[0], 4) for release, figures in before.items()},
    }
    for part, after in rows.items():
        gains = differences({release: (before[release], after[release]) for release in RELEASES}, seed)
        found[part] = {
            release: [round(of.difference[0], 4), *(round(end, 4) for end in of.ci95[0])]
            for release, of in gains.items()
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if not chosen.folder.is_dir():
        sys.exit(f"ablation: {chosen.folder} is no folder: name the one that holds the public traces")
    result: dict[str, Any] = {"benchmark": "ablation", "seed": chosen.seed}
    print(f"| traces, test workflows | without | {' | '.join(RELEASES)} |\n|---|---|{'---|' * len(RELEASES)}")
    for name in chosen.sets.split(","):
        found = ablated(served_steps(traces_of(chosen.folder, name)), chosen.seed)
        result[name] = found
        whole = " | ".join(f"{found['accuracy'][release]:.3f}" for release in RELEASES)
        print(f"| {name}, {found['workflows']} | nothing | {whole} |")
        for part in (part for part in (*PARTS, STATES) if part in found):
            cells = " | ".join(
                f"{gain:+.3f} [{low:+.3f}, {high:+.3f}]" for gain, low, high in map(found[part].get, RELEASES)
            )
            print(f"|  | {part} | {cells} |", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
