"""What does admission gain or lose where nothing else acts: against everybody at once, and against a fixed number?

A small engine in virtual time (tests/serving_hooks/policies/closed_loop.py): an LRU cache, a cost model, and a closed
loop of 72 workflows with retry loops. "shared": a prompt is the common history of its workflow; "own": each agent
continues its own conversation. "best fixed" is the best of 16, 24 and 32 workflows at once; "half", "double" and
"noise" are admission with contexts forecast wrong.

    python benchmarks/admission_alone.py [--workflows 150] [--blocks 2500 4000 6000]

Prints seconds until the last workflow has ended over those of everybody at once, with the hit rates, then one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "serving_hooks" / "policies"))

from closed_loop import Loop, draw

from presage.serving_hooks.policies.admission import Admission

BLOCK, AT_ONCE, FIXED = 16, 72, (16, 24, 32)
NOISE = random.Random(0)
ERRORS: dict[str, Callable[[], float]] = {
    "admission": lambda: 1.0,
    "half": lambda: 0.5,
    "double": lambda: 2.0,
    "noise": lambda: NOISE.uniform(0.3, 3.0),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workflows", type=int, default=150)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2500, 4000, 6000], help="of 16 tokens, in the cache")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def run(prompts: str, blocks: int, at_once: int, admission: Admission | None, error: Callable[[], float]) -> Loop:
        loop = Loop(draw(args.workflows, seed=0), prompts, BLOCK * blocks, at_once, admission)
        loop.context_error = error
        loop.makespan()
        return loop

    print(f"{'prompts':9}{'blocks':>7}  {'':12}{'makespan':>9}{'hit rate':>9}")
    for prompts in ("shared", "own"):
        for blocks in args.blocks:
            exact = ERRORS["admission"]
            fixed = [run(prompts, blocks, number, None, exact) for number in FIXED]
            loops = {
                "everybody": run(prompts, blocks, AT_ONCE, None, exact),
                "best fixed": min(fixed, key=lambda loop: loop.now),
                **{
                    name: run(prompts, blocks, AT_ONCE, Admission(BLOCK * blocks), error)
                    for name, error in ERRORS.items()
                },
            }
            for name, loop in loops.items():
                over = loop.now / loops["everybody"].now
                row = {"prompts": prompts, "blocks": blocks, "who": name, "makespan": round(over, 3)}
                rows.append(row | {"hit_rate": round(loop.hit_rate(), 3)})
                print(f"{prompts:9}{blocks:7}  {name:12}{over:9.3f}{loop.hit_rate():9.3f}", flush=True)
    print(json.dumps({"benchmark": "admission_alone", "workflows": args.workflows, "runs": rows}))


if __name__ == "__main__":
    main()
