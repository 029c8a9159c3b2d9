"""Does a model that goes on training keep what it knows, and learn a changed application from a tenth of the traces?

Five folds by task; in each, week 1 is four fifths of the tasks outside the fold. Week 2 is a tenth as many of the
remaining tasks, after a release: `renamed`, 30 % of the agents get other names and the one with most steps is split in
two, at random step by step; or `added`, a new agent comes after every step of the one with most steps. The test tasks
of the fold are judged as they were in week 1 and as they are in week 2, after the output, with intervals over workflows
(1,000 resamples):

- old: trained on week 1, as it is
- few: trained anew on week 2
- both: trained anew on both weeks, which needs the traces of week 1
- started: started from old, on week 2 alone (`train-predictor next-agent --start-from`)

    python benchmarks/continual.py FOLDER [--sets hyperagent,magentic_whowhen,retry] [--folds 2] [--seed 0]
        [--releases renamed,added]

FOLDER has the public traces as .jsonl.gz; a name that is no file there is a synthetic process, of 400 workflows.
Prints a table per set and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.datasets.read import read_traces
from presage.datasets.schema import workflow_codes
from presage.datasets.synthetic.workflows import generate
from presage.datasets.tasks import task_of
from presage.features.moment import COMPLETION
from presage.features.prefixes import prefixes_of
from presage.features.served_steps import served_steps
from presage.predictors.common.bootstrap import ratio_ci
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.training.metrics import Figures, measure
from presage.training.next_agent.change import CHANGES
from presage.training.next_agent.continual import continue_predictor
from presage.training.next_agent.train import FittedPredictor, fit_predictor

FOLDS = 5
WORKFLOWS = 400
ROWS = ("old", "few", "both", "started")
WEEKS = ("week 2", "week 1")


def traces(folder: Path, name: str, seed: int) -> pa.Table:
    file = folder / f"{name}.jsonl.gz"
    if file.exists():
        return served_steps(read_traces([file]).table)
    return served_steps(generate(name, WORKFLOWS, seed, state_size=16).table)


def renamed(table: pa.Table, seed: Sequence[int]) -> pa.Table:
    for place, name in enumerate(("agents renamed", "an agent split in two")):
        table, _ = CHANGES[name](table, np.random.default_rng([*seed, place]))
    return table


def added(table: pa.Table, seed: Sequence[int]) -> pa.Table:
    agents = np.array(table["agent"].to_pylist())
    names, counts = np.unique(agents, return_counts=True)
    rows = np.repeat(np.arange(len(agents)), 1 + (agents == names[counts.argmax()]))
    new = np.diff(rows, prepend=-1) == 0
    first = np.maximum.accumulate(
        np.where(np.diff(workflow_codes(table)[rows], prepend=-1) != 0, np.arange(len(rows)), 0)
    )
    longer = table.take(pa.array(rows))
    for column, values in (("agent", np.where(new, "added", agents[rows])), ("step", np.arange(len(rows)) - first)):
        field = longer.schema.field(column)
        longer = longer.set_column(longer.schema.get_field_index(column), field, pa.array(values.tolist(), field.type))
    return longer


RELEASES = {"renamed": renamed, "added": added}


def joined(week_1: pa.Table, week_2: pa.Table) -> pa.Table:
    """Both in canonical order: by workflow type and id, as they are read."""
    both = pa.concat_tables([week_1, week_2])
    return both.sort_by([(column, "ascending") for column in ("workflow_type", "workflow_id", "step")])


def judge(predictor: NextAgentPredictor, table: pa.Table) -> Figures:
    held = prefixes_of(table, predictor.vocabulary, 3).with_states(predictor.source.states(table))
    forecasts = predictor.predict(held, COMPLETION)
    return measure(forecasts, held.outcomes, held.workflow, np.random.default_rng(0), resamples=1)


def fold_of(table: pa.Table, release: str, number: int, seed: int) -> dict[str, tuple[dict[str, Figures], float]]:
    """Figures by week, and seconds of training, of every row."""
    after = RELEASES[release](table, (seed, number))
    tasks = np.unique(task_of(table).to_pylist())
    fold = np.random.default_rng(seed).permutation(len(tasks)) % FOLDS
    others = np.random.default_rng([seed, number]).permutation(np.flatnonzero(fold != number))
    first = round(0.8 * len(others))

    def of(source: pa.Table, chosen: np.ndarray) -> pa.Table:
        return source.filter(pc.is_in(task_of(source), pa.array(tasks[chosen])))

    week_1, week_2 = of(table, others[:first]), of(after, others[first : first + max(4, first // 10)])
    test = np.flatnonzero(fold == number)
    tests = dict(zip(WEEKS, (of(after, test), of(table, test)), strict=True))
    fits: dict[str, Callable[[], FittedPredictor]] = {
        "old": lambda: fit_predictor(week_1, seed=seed),
        "few": lambda: fit_predictor(week_2, seed=seed),
        "both": lambda: fit_predictor(joined(week_1, week_2), seed=seed),
        "started": lambda: continue_predictor(old, week_2, seed=seed),
    }
    found = {}
    for row in ROWS:
        begun = time.perf_counter()
        predictor = fits[row]().predictor
        seconds = time.perf_counter() - begun
        if row == "old":
            old = predictor
        print(f"    {row}: {seconds:.0f} s, states {predictor.source.kind}", file=sys.stderr)
        found[row] = {week: judge(predictor, test) for week, test in tests.items()}, seconds
    return found


def table_of(name: str, release: str, folds: list[dict[str, tuple[dict[str, Figures], float]]]) -> dict[str, object]:
    told: dict[str, object] = {"workflows": sum(len(fold["old"][0]["week 1"].positions) for fold in folds)}
    print(f"\n### {name}, {release}: {told['workflows']} test workflows in {len(folds)} of {FOLDS} folds\n")
    print("| model | week 2, 1 / 2 / 3 steps ahead (95 % interval) | week 1, the same | seconds |\n|---|---|---|---|")
    pools: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]] = {}
    for row in ROWS:
        cells = []
        for week in WEEKS:
            of = [fold[row][0][week] for fold in folds]
            correct, positions = (np.concatenate([getattr(f, part) for f in of]) for part in ("correct", "positions"))
            pools[row, week] = correct, positions
            share, ends = pooled(correct, positions)
            told[f"{row}/{week}"] = {"accuracy": share, "ci95": ends}
            cells.append(" / ".join(f"{a:.3f} ({lo:.3f}–{hi:.3f})" for a, (lo, hi) in zip(share, ends, strict=True)))
        seconds = float(np.mean([fold[row][1] for fold in folds]))
        told[f"{row}/seconds"] = round(seconds, 1)
        print(f"| {row} | {' | '.join(cells)} | {seconds:.0f} |")
    for what, row, other, week in (
        ("started minus few", "started", "few", "week 2"),
        ("started minus both", "started", "both", "week 2"),
        ("forgotten: old minus started", "old", "started", "week 1"),
    ):
        correct, positions = pools[row, week]
        share, ends = pooled(correct - pools[other, week][0], positions)
        told[what] = {"difference": share, "ci95": ends}
        cells = [f"{a:+.3f} ({lo:+.3f} to {hi:+.3f})" for a, (lo, hi) in zip(share, ends, strict=True)]
        print(f"\n{week}, {what}: {' / '.join(cells)}", flush=True)
    return told


def pooled(correct: np.ndarray, positions: np.ndarray) -> tuple[list[float], list[list[float]]]:
    ends = [ratio_ci(correct[:, k], positions[:, k], np.random.default_rng(0)) for k in range(correct.shape[1])]
    share = correct.sum(axis=0) / positions.sum(axis=0)
    return share.round(4).tolist(), [[round(end, 4) for end in pair] for pair in ends]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", default="hyperagent,magentic_whowhen,retry")
    parser.add_argument("--releases", default=",".join(RELEASES))
    parser.add_argument("--folds", type=int, default=2, choices=range(1, FOLDS + 1), help="judge so many of them")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if not chosen.folder.is_dir():
        sys.exit(f"continual: {chosen.folder} is no folder: name the one that holds the public traces")
    result: dict[str, object] = {"benchmark": "continual", "folds": chosen.folds, "seed": chosen.seed}
    for name in chosen.sets.split(","):
        table = traces(chosen.folder, name, chosen.seed)
        print(name, file=sys.stderr)
        for release in chosen.releases.split(","):
            folds = [fold_of(table, release, number, chosen.seed) for number in range(chosen.folds)]
            result[f"{name}, {release}"] = table_of(name, release, folds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
