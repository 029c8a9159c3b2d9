"""Does each policy do what it should: at every load, cache and kind of prompt, on made and on recorded workflows?

    loops      a planner, rounds of retriever, reader and verifier, a writer (benchmarks/replay.py), two kinds of
               prompts, 4,000 blocks; overloaded, near the knee, idle. Models were trained on 400 other workflows.
    caches     the same with 2,500 and 6,000 blocks.
    real       autocoderover with its recorded tokens; half of the tasks are replayed, the other half trains.
    noise      loops with the truth mixed with 20 and 100 % of chance.
    queueing   who runs next: first come, shortest output, shortest total job by predictions and by the truth.

    python benchmarks/policies_replayed.py [--groups loops,caches,real,noise,queueing] [--real FOLDER]
                                           [--runs runs.jsonl] [--resume] [--again full,admission] [--workers 2]
                                           [--workflows 120] [--seeds 3] [--policies …]
                                           [--cells history-first/72/4000] [--forecasts trained]

Needs vLLM 0.32. --runs keeps each run as it is done; with --resume those in the file are not done again, but those of
--again are. --cells takes others in the place of the groups. A cell is printed when all of its runs are done, with
95 % intervals over seeds, seed by seed against stock, and its share of what oracle eviction gains. Then a line a cell,
and how many cells reach each goal. Ends with one JSON line. An interrupted grid prints what it has, and exits with 130.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from replayed_cells import GROUPS, LOOPS, TRAINED, Cell, cell, train_models, workload_of
from replayed_runs import Common, Kept, play
from replayed_table import compare, goals, show, summary

from presage.errors import PresageError
from presage.serving_hooks.replay.runs import check_vllm


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="loops,caches,noise,queueing", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--cells", help="instead of groups: WORKLOAD/LOAD/BLOCKS, separated by commas")
    parser.add_argument("--policies", help="of --cells; of groups, those of theirs that are run")
    parser.add_argument("--forecasts", default=TRAINED, help="of --cells")
    parser.add_argument("--real", type=Path, help="folder of the public traces")
    parser.add_argument("--workflows", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--runs", type=Path, help="file of finished runs")
    parser.add_argument("--resume", action="store_true", help="use what it holds")
    parser.add_argument("--again", default="", help="policies whose runs are done anew")
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> list[Cell]:
    """The cells that were asked for."""
    if args.cells:
        return [cell("cells", name, args.forecasts, args.policies or LOOPS) for name in args.cells.split(",")]
    unknown = sorted(set(args.groups.split(",")) - GROUPS.keys())
    if unknown:
        sys.exit(f"policies_replayed: no group {unknown[0]!r}; there are {', '.join(GROUPS)}")
    cells = [one for group in args.groups.split(",") for one in GROUPS[group]]
    return [only(one, args.policies.split(",")) for one in cells] if args.policies else cells


def only(one: Cell, policies: Collection[str]) -> Cell:
    """The cell with these of its policies."""
    return replace(one, policies=tuple(name for name in one.policies if name in policies))


def main() -> None:
    args = arguments()
    if args.runs is not None and args.runs.exists() and not args.resume:
        sys.exit(f"policies_replayed: {args.runs} holds runs already: give --resume to go on, or another file")
    check_vllm()
    cells, seeds = chosen(args), range(args.seeds)
    found: list[tuple[Cell, dict[str, Any]]] = []
    interrupted = False
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) if args.runs is None else args.runs.with_suffix(".models")
        common = Common(args.workflows, args.real, models)
        kept = Kept(args.runs, args.workflows, args.again.split(","))
        for name in dict.fromkeys(one.workload for one in cells if one.forecasts == TRAINED):
            train_models(workload_of(name, args.workflows, args.real).teaching, models / name)
        try:
            for one in play(cells, kept, seeds, args.workers, common):
                found.append((one, compare(one, kept, seeds)))
                show(*found[-1])
        except KeyboardInterrupt:
            interrupted = True
    tell(found, args, interrupted)


def tell(found: list[tuple[Cell, dict[str, Any]]], args: argparse.Namespace, interrupted: bool) -> None:
    """Summary, goals, and the JSON line."""
    for policies in dict.fromkeys(one.policies for one, _ in found):
        summary([(one, of) for one, of in found if one.policies == policies], policies)
    counted: dict[str, list[str | None]] = defaultdict(list)
    for one, of in found:
        for goal, reached in goals(one, of).items():
            counted[goal].append(None if reached else f"{one.name} {one.forecasts}")
    print()
    for goal, missed in sorted(counted.items()):
        where = [name for name in missed if name is not None]
        print(f"{len(missed) - len(where)} of {len(missed)} cells: {goal}" + "".join(f"; not {name}" for name in where))
    told = {
        "benchmark": "policies_replayed",
        "workflows": args.workflows,
        "seeds": args.seeds,
        "interrupted": interrupted,
        "cells": [
            {"group": one.group, "cell": one.name, "forecasts": one.forecasts, "policies": of, "goals": goals(one, of)}
            for one, of in found
        ],
    }
    print(json.dumps(told))
    if interrupted:
        sys.exit(130)


if __name__ == "__main__":
    try:
        main()
    except PresageError as error:
        sys.exit(f"policies_replayed: {error}")
