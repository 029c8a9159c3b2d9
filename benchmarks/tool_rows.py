"""What do tool calls in traces cost a next-agent predictor, and what do they bring it?

One process, its workflows drawn without tool calls (`none`) and with rows of kind "tool" after its steps: `random`
ones, `several` at once, only in `some` workflows, and `telling` ones, which name the next agent four times in five.
Each trace trains a predictor; each is judged on the same later workflows as an engine serves them: LLM steps alone,
their agents and token counts, without the answers' tools and with them. Differences to `none` have intervals by
bootstrap over workflows, all seeds together.

    python benchmarks/tool_rows.py [--workflows 400] [--judged 400] [--seeds 3]

Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.schema import conform
from presage.datasets.schema.validate import validate
from presage.datasets.synthetic.workflows import generate
from presage.features.input_profiles import PROFILES
from presage.features.moment import COMPLETION
from presage.features.prefixes import prefixes_of
from presage.features.served_steps import served_steps
from presage.training.next_agent.train import fit_predictor

PROCESS, HORIZON, RESAMPLES = "retry", 3, 1000
TOOLS = ("search", "read", "run")
Calls = Callable[[np.random.Generator, str | None, bool], list[str]]
"""The tools after a step, from the next agent (None: the workflow ends) and whether the workflow uses any."""


def telling(rng: np.random.Generator, following: str | None, _: bool) -> list[str]:
    return [f"for_{following}" if rng.random() < 0.8 else str(rng.choice(TOOLS))] if following else []


KINDS: dict[str, Calls] = {
    "none": lambda rng, following, uses: [],
    "random": lambda rng, following, uses: rng.choice(TOOLS, rng.integers(0, 3)).tolist(),
    "several": lambda rng, following, uses: rng.choice(TOOLS, 3).tolist(),
    "some": lambda rng, following, uses: rng.choice(TOOLS, rng.integers(0, 3)).tolist() if uses else [],
    "telling": telling,
}


def with_tools(table: pa.Table, calls: Calls, seed: int) -> pa.Table:
    """The trace with a row of kind "tool" for each call; several calls of one step wait for it alone."""
    rng, rows = np.random.default_rng(seed), table.to_pylist()
    made: list[dict[str, Any]] = []
    number, uses = 0, True
    for row, later in zip(rows, [*rows[1:], None], strict=True):
        if row["step"] == 0:
            number, uses = 0, rng.random() < 0.5
        following = later["agent"] if later is not None and later["step"] else None
        made.append({**row, "step": number})
        for count, name in enumerate(calls(rng, following, uses), start=1):
            kept = {key: row[key] for key in ("workflow_type", "workflow_id", "task", "success", "complete")}
            made.append({**kept, "step": number + count, "agent": name, "kind": "tool"})
        number = made[-1]["step"] + 1
    names = [field.name for field in table.schema]
    found = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in made], schema=table.schema)
    return validate(conform(found, "with tools"), "with tools")


def hits(train: pa.Table, judged: pa.Table, answers: bool, seed: int) -> NDArray[np.float64]:
    """Right forecasts and judged ones after the output, float64 [workflows, 2, K]."""
    predictor = fit_predictor(train, states="none", horizon=HORIZON, seed=seed).predictor
    steps = served_steps(judged)
    prefixes = prefixes_of(steps, predictor.vocabulary, HORIZON)
    prefixes = predictor.observed(prefixes, PROFILES["engine" if answers else "ids+tokens"])
    best = predictor.predict(prefixes, COMPLETION).argmax(axis=2)
    known = prefixes.outcomes >= 0
    found = np.zeros((prefixes.workflows, 2, HORIZON))
    np.add.at(found[:, 0], prefixes.workflow, (best == prefixes.outcomes) & known)
    np.add.at(found[:, 1], prefixes.workflow, known)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workflows", type=int, default=400, help="that train each predictor")
    parser.add_argument("--judged", type=int, default=400, help="workflows that judge them")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[NDArray[np.float64]]] = {}
    for seed in range(args.seeds):
        train, judged = (
            generate(PROCESS, count, draw, state_size=16).table
            for count, draw in ((args.workflows, seed), (args.judged, 1000 + seed))
        )
        for name, calls in KINDS.items():
            rows, test = with_tools(train, calls, seed), with_tools(judged, calls, 1000 + seed)
            for answers in (False, True) if name != "none" else (False,):
                called = f"{name}, answers parsed" if answers else name
                found.setdefault(called, []).append(hits(rows, test, answers, seed))
    together = {name: np.concatenate(parts) for name, parts in found.items()}
    rng = np.random.default_rng(0)
    count = len(together["none"])
    drawn = rng.integers(0, count, (RESAMPLES, count))

    def accuracy(of: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(of[..., 0, :].sum(axis=-2) / of[..., 1, :].sum(axis=-2))

    again = {name: np.stack([accuracy(of[rows]) for rows in drawn]) for name, of in together.items()}
    print(f"accuracy after the output at 1 to {HORIZON} steps, and the difference to traces without tool rows")
    figures = {}
    for name, of in together.items():
        mine, gap = accuracy(of), again[name] - again["none"]
        low, high = np.quantile(gap, (0.025, 0.975), axis=0)
        difference = mine - accuracy(together["none"])
        figures[name] = {
            "accuracy": mine.round(4).tolist(),
            "difference": difference.round(4).tolist(),
            "ci95": np.stack([low, high], axis=1).round(4).tolist(),
        }
        shown = "  ".join(
            f"{a:.3f} ({d:+.3f} [{lo:+.3f}, {hi:+.3f}])"
            for a, d, lo, hi in zip(mine, difference, low, high, strict=True)
        )
        print(f"{name:26} {shown}")
    print(json.dumps({"benchmark": "tool_rows", "workflows": count, **figures}))


if __name__ == "__main__":
    main()
