"""What forecasts of context growth bring to admission, in the cells of `regimes.py`.

    counts   steps and growth of workflow types, counted while the engine serves
    model    a context-growth model: recorded sessions are forecast by the one of two models that was trained on the
             other half of the cell's sessions, by task; made-up ones by a model of workflows drawn with other seeds
    truth    the largest context that each workflow still reaches, from the trace

All policies are on, other forecasts are online counts. Completion is over that of vLLM alone, seed by seed.

    python benchmarks/context_growth.py [--real FOLDER] [--cells swe,mixed] [--seeds 2]

Needs vLLM 0.32. `--real` is the folder of the public traces; without it their cells are left out. Prints a table and
one JSON line.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from regimes import CELLS, played, policies_of

from presage.datasets.schema import conform
from presage.predictors.length.context import ContextGrowthPredictor
from presage.replay.runs import Setting, check_vllm
from presage.replay.workload import ReplayJob
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.forecasting.context_growth import ContextForecaster
from presage.serving_hooks.workflows import EndReason
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import LiveLengths
from presage.training.length.train import fit_lengths

PATIENT: Final = Budget(deadline_s=math.inf, hang_s=None)
OTHER_SEEDS: Final = range(11, 15)
Clock = Callable[[], float]


def fitted(jobs: Sequence[ReplayJob]) -> ContextGrowthPredictor:
    """A model of these workflows, by their token counts."""
    rows = [
        {"workflow_type": job.workflow_type, "workflow_id": f"{number}", "step": at, "agent": step.agent}
        | {"input_tokens": step.prompt_tokens, "output_tokens": step.output_tokens}
        for number, job in enumerate(jobs)
        for at, step in enumerate(job.steps)
    ]
    found = fit_lengths(conform(pa.Table.from_pylist(rows), "replayed"), target="final-context", texts="none").predictor
    assert isinstance(found, ContextGrowthPredictor)
    return found


class CrossFitted:
    """Each workflow is forecast by the model that it is assigned to; the means of a type are those over all models."""

    def __init__(self, models: Sequence[ContextGrowthPredictor], model_of: Mapping[str, int], clock: Clock) -> None:
        self._forecasters = [ContextForecaster(model, budget=PATIENT, clock=clock) for model in models]
        self._model_of = model_of

    def arrived(self, step: Step, input_tokens: int) -> LiveLengths:
        """See `Contexts.arrived`."""
        return self._of(step).arrived(step, input_tokens)

    def completed(self, step: Step, output_tokens: int) -> LiveLengths:
        """See `Contexts.completed`."""
        return self._of(step).completed(step, output_tokens)

    def ended(self, step: Step, reason: EndReason) -> None:
        """See `Contexts.ended`."""
        self._of(step).ended(step, reason)

    def of_type(self, stats_key: str) -> tuple[float, float] | None:
        """See `Contexts.of_type`."""
        steps, growth = np.mean([one.of_type(stats_key) for one in self._forecasters], axis=0).tolist()
        return steps, growth

    def _of(self, step: Step) -> ContextForecaster:
        return self._forecasters[self._model_of.get(step.workflow_id, 0)]


class Truth:
    """Knows the largest context that a workflow still reaches, and the means of its type."""

    def __init__(self, jobs: Sequence[ReplayJob]) -> None:
        self._jobs = {(job.workflow_type, job.workflow_id): job.steps for job in jobs}
        self._means: dict[str, tuple[float, float]] = {}
        for name in {job.workflow_type for job in jobs}:
            of = [job.steps for job in jobs if job.workflow_type == name]
            grown = sum(max(step.prompt_tokens for step in steps) - steps[0].prompt_tokens for steps in of)
            self._means[name] = mean([len(steps) for steps in of]), grown / max(1, sum(len(steps) - 1 for steps in of))

    def arrived(self, step: Step, input_tokens: int) -> LiveLengths:
        """See `Contexts.arrived`."""
        return self._grows(step, 0)

    def completed(self, step: Step, output_tokens: int) -> LiveLengths:
        """See `Contexts.completed`."""
        return self._grows(step, output_tokens)

    def ended(self, step: Step, reason: EndReason) -> None:
        """Nothing to forget."""

    def of_type(self, stats_key: str) -> tuple[float, float] | None:
        """See `Contexts.of_type`."""
        return self._means[stats_key]

    def _grows(self, step: Step, produced: int) -> LiveLengths:
        steps = self._jobs[step.workflow_type, step.workflow_id][step.number or 0 :]
        most = max(one.prompt_tokens + one.output_tokens for one in steps)
        return LiveLengths("champion", 1, (0.5,), (max(0.0, most - steps[0].prompt_tokens - produced),), 0, None)


def sources(cell: str, jobs: Sequence[ReplayJob]) -> dict[str, Callable[[Clock], Any] | None]:
    """Where the contexts of a cell's workflows are forecast from."""
    drawn = [CELLS[cell].jobs(None, seed) for seed in OTHER_SEEDS]
    others = [job for one in drawn if one is not None for job in one[0]]
    if others:
        models, model_of = [fitted(others)], {}
    else:
        tasks = sorted({task_of(job) for job in jobs})
        half = dict(zip(tasks, np.random.default_rng(0).permutation(len(tasks)) % 2, strict=True))
        model_of = {job.workflow_id: int(half[task_of(job)]) for job in jobs}
        models = [fitted([job for job in jobs if model_of[job.workflow_id] != of]) for of in (0, 1)]
    return {
        "counts": None,
        "model": lambda clock: CrossFitted(models, model_of, clock),
        "truth": lambda clock: Truth(jobs),
    }


def task_of(job: ReplayJob) -> str:
    """The task of a recorded session, whose id ends with it."""
    return job.workflow_id.rpartition("/")[2]


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, help="folder of the public traces")
    parser.add_argument("--cells", default=",".join(CELLS), help="of regimes.py, separated by commas")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    check_vllm()
    print(f"{'cell':10} {'contexts':9} completion    p99  makespan  hits  recomputing  start p99 s  later p99 s")
    rows: list[dict[str, Any]] = []
    for name in args.cells.split(","):
        cell = CELLS[name]
        alone, found = [], dict[str, list[dict[str, float]]]()
        for seed in range(args.seeds):
            jobs = cell.jobs(args.real, seed)
            if jobs is None:
                continue
            stock, full = policies_of("full")
            setting = Setting(*jobs, cell.arrivals, cell.engine, "counts")
            alone.append(played(setting, stock, seed))
            for contexts, source in sources(name, jobs[0]).items():
                found.setdefault(contexts, []).append(played(replace(setting, contexts=source), full, seed))
        if not alone:
            print(f"{name:10} left out: --real names no folder with its traces")
        for contexts, runs in found.items():
            over = {
                key: mean([one[key] / base[key] for one, base in zip(runs, alone, strict=True)])
                for key in ("completion_s", "completion_p99_s", "makespan_s")
            }
            row = {"cell": name, "contexts": contexts, "seeds": args.seeds, "over_stock": over}
            row |= {key: mean([one[key] for one in runs]) for key in runs[0]}
            rows.append(row)
            completion, p99, makespan = over.values()
            print(
                f"{name:10} {contexts:9} {completion:10.3f} {p99:6.3f} {makespan:9.3f} {row['hit_rate']:5.3f} "
                f"{row['recomputing']:12.0%} {row['start_p99_s']:12.1f} {row['later_p99_s']:12.1f}",
                flush=True,
            )
    print(json.dumps({"benchmark": "context_growth", "rows": rows}))


if __name__ == "__main__":
    main()
