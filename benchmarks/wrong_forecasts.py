"""What do wrong contexts and wrong pauses cost, in the cells of `regimes.py`?

All policies are on; remaining tokens, return times and contexts are known, next agents are counted. Wrong are:

    contexts × f   every workflow is expected to grow by f times what it does
    pauses × f     every pause is expected to last f times what it does, by admission and by the order of free blocks

Completion is over that of vLLM alone, seed by seed.

    python benchmarks/wrong_forecasts.py [--real FOLDER] [--cells swe,mixed] [--seeds 1]

Needs vLLM 0.32. `--real` is the folder of the public traces; without it their cells are left out. Prints a table and
one JSON line. Everything takes about 15 minutes on one core.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from context_growth import Truth, mean
from regimes import CELLS, played, policies_of

from presage.serving_hooks.forecasting.live import LiveReturn
from presage.serving_hooks.policies.workload import Rates, WorkloadMeans
from presage.serving_hooks.replay.forecasts import OracleReturnTimes
from presage.serving_hooks.replay.runs import Setting, check_vllm
from presage.serving_hooks.replay.workload import ReplayJob
from presage.serving_hooks.workflows.identity import Step

FACTORS: Final = (0.5, 1 / 1.5, 1.5, 2.0)
CELLS_ASKED: Final = "swe,swe-burst,swe-calm,claude,mixed,shared"


class WrongContexts(Truth):
    """Knows contexts, and says `factor` times how far they grow."""

    def __init__(self, jobs: Sequence[ReplayJob], factor: float) -> None:
        super().__init__([replace(job, steps=grown(job, factor)) for job in jobs])


def grown(job: ReplayJob, factor: float) -> tuple[Any, ...]:
    """Its steps, with prompts that grow by `factor` times what they do."""
    first = job.steps[0].prompt_tokens
    return tuple(
        replace(step, prompt_tokens=round(first + factor * (step.prompt_tokens - first)), output_tokens=0)
        for step in job.steps
    )


class WrongPauses(OracleReturnTimes):
    """Knows pauses, and says `factor` times their length."""

    def __init__(self, jobs: Sequence[ReplayJob], factor: float) -> None:
        super().__init__(jobs)
        self._factor = factor

    def completed(self, step: Step, output_tokens: int, finish_reason: str | None, now: float) -> LiveReturn:
        """See `ReturnTimes.completed`."""
        said = super().completed(step, output_tokens, finish_reason, now)
        return replace(said, seconds=tuple(self._factor * one for one in said.seconds))


@contextmanager
def admission_believes(factor: float) -> Iterator[None]:
    """Admission takes every pause that it has seen for `factor` times as long."""
    rates = WorkloadMeans.rates

    def wrong(self: WorkloadMeans, *args: Any) -> Rates | None:
        found = rates(self, *args)
        return found and replace(found, pauses_s=factor * found.pauses_s)

    with patch.object(WorkloadMeans, "rates", wrong):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, help="folder of the public traces")
    parser.add_argument("--cells", default=CELLS_ASKED, help="of regimes.py, separated by commas")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    check_vllm()
    stock, right = policies_of("truth")
    asked = [("right", 1.0), *((wrong, factor) for wrong in ("contexts", "pauses") for factor in FACTORS)]
    print(f"{'cell':10} " + " ".join(f"{wrong + f' × {factor:.2f}':>15}" for wrong, factor in asked))
    rows: list[dict[str, Any]] = []
    for name in args.cells.split(","):
        cell = CELLS[name]
        found: dict[tuple[str, float], list[float]] = {one: [] for one in asked}
        for seed in range(args.seeds):
            jobs = cell.jobs(args.real, seed)
            if jobs is None:
                continue
            setting = Setting(*jobs, cell.arrivals, cell.engine, "counts")
            alone = played(setting, stock, seed)["completion_s"]
            for wrong, factor in asked:
                of_contexts, of_pauses = (factor if wrong == kind else 1.0 for kind in ("contexts", "pauses"))
                contexts = WrongContexts(jobs[0], of_contexts)
                policy = replace(
                    right, returns=lambda given, clock, of=of_pauses: WrongPauses(given, of), forecasts="asked"
                )
                with admission_believes(of_pauses):
                    ran = played(replace(setting, contexts=lambda clock, of=contexts: of), policy, seed)
                found[wrong, factor].append(ran["completion_s"] / alone)
        if not found["right", 1.0]:
            print(f"{name:10} left out: --real names no folder with its traces")
            continue
        over = {one: mean(ratios) for one, ratios in found.items()}
        print(f"{name:10} " + " ".join(f"{ratio:15.3f}" for ratio in over.values()), flush=True)
        rows += [
            {"cell": name, "wrong": wrong, "factor": factor, "seeds": args.seeds, "completion_over_stock": ratio}
            for (wrong, factor), ratio in over.items()
        ]
    print(json.dumps({"benchmark": "wrong_forecasts", "rows": rows}))


if __name__ == "__main__":
    main()
