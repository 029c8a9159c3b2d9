"""Runs that differ in more than policy and seed, in processes side by side: versions of a model, settings, loads.

`runs.run_all` has one setting for all of its runs and keeps what was run when somebody interrupts; here each run has its
own, and the answer is all of them or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from presage.serving_hooks.replay.policies import Policy
from presage.serving_hooks.replay.runs import Done, Setting, run_one

Task = tuple[Setting, Policy, int]
"""What is run, by whom, and the seed of its arrivals."""


def side_by_side(
    tasks: Sequence[Task],
    processes: int,
    progress: Callable[[str, float | None], None] = lambda doing, share: None,
) -> list[Done]:
    """Every task, in the order given. Needs vLLM.

    Args:
        tasks: to be run.
        processes: side by side; with 1 everything is done in this one.
        progress: told what is being done and the share that is done.
    """
    done: list[Done] = []
    doing = f"replaying {len(tasks)} runs"
    progress(doing, 0.0)
    for one in _each(tasks, min(processes, len(tasks))):
        done.append(one)
        progress(doing, len(done) / len(tasks))
    return done


def _each(tasks: Sequence[Task], processes: int) -> Iterator[Done]:
    if processes == 1:
        yield from map(_run, tasks)
        return
    # Spawned: what a fork takes along of vLLM's and torch's threads is nobody's promise.
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    try:
        yield from pool.map(_run, tasks)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run(task: Task) -> Done:
    return run_one(*task)
