"""Runs of policies_replayed.py: which are wanted, kept line by line, in several processes.

What is wanted next follows from what is kept, so a grid that was interrupted goes on where it was. The best fixed
number of workflows at once is looked for among the numbers of `presage replay` in steps of four, then of two, then of
one around the best so far: right where completion has one valley over them.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple

from replayed_cells import Cell, policy_of, setting_of, workload_of

from presage.serving_hooks.replay.metrics import Figures
from presage.serving_hooks.replay.prompts import PromptIds
from presage.serving_hooks.replay.runs import best, most_at_once, run_one, tried

_MOST_REQUESTS: Final = 64


class Key(NamedTuple):
    """A run. `forecasts` is "-" where the policy asks for none, so cells share it."""

    cell: str
    forecasts: str
    policy: str
    seed: int
    at_once: int | None


@dataclass(frozen=True)
class Common:
    """What all runs have in common: how many workflows, where real traces and trained models lie."""

    workflows: int
    real: Path | None
    models: Path


class Kept:
    """Finished runs, in memory and as JSON lines.

    Args:
        file: they are added to; None keeps them in memory alone.
        workflows: runs of another number are left in the file and not used.
        again: policies whose runs are forgotten.
    """

    def __init__(self, file: Path | None, workflows: int, again: Collection[str] = ()) -> None:
        self._file, self._workflows = file, workflows
        self.runs: dict[Key, dict[str, Any]] = {}
        if file is None or not file.exists():
            return
        lines = [line for line in map(_read, file.read_text().splitlines()) if line and line["policy"] not in again]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for line in lines:
            if line["workflows"] == workflows:
                self.runs[Key(*(line[name] for name in Key._fields))] = line

    def add(self, key: Key, run: dict[str, Any]) -> None:
        """One more."""
        line = key._asdict() | {"workflows": self._workflows} | run
        self.runs[key] = line
        if self._file is not None:
            with self._file.open("a") as lines:
                lines.write(json.dumps(line) + "\n")

    def figures(self, one: Cell, policy: str, seeds: Sequence[int]) -> dict[int, Figures]:
        """Of a policy in a cell by seed; of a swept one with its best number."""
        at_once = self.best_of(one, policy) if policy_of(policy).swept else None
        keys = {seed: key_of(one, policy, seed, at_once) for seed in seeds}
        return {seed: self.runs[key]["figures"] for seed, key in keys.items() if key in self.runs}

    def best_of(self, one: Cell, policy: str, seed: int = 0) -> int | None:
        """The best number that was tried; None if none was."""
        runs = {
            key.at_once: run["figures"]
            for key, run in self.runs.items()
            if key.at_once is not None and key == key_of(one, policy, seed, key.at_once)
        }
        return best(runs) if runs else None


def _read(line: str) -> dict[str, Any] | None:
    try:
        return dict(json.loads(line))
    except json.JSONDecodeError:
        return None  # cut off when the grid was


def key_of(one: Cell, policy: str, seed: int, at_once: int | None = None) -> Key:
    """Of a run."""
    asked = "asked" in policy_of(policy).sources
    return Key(one.name, one.forecasts if asked else "-", policy, seed, at_once)


def wanted(one: Cell, kept: Kept, seeds: Sequence[int], workflows: int) -> list[Key]:
    """Runs of a cell that are missing and may begin; none if it is done."""
    missing = []
    for name in one.policies:
        if policy_of(name).swept:
            missing += _of_a_sweep(one, name, kept, seeds, workflows)
        else:
            missing += [key for seed in seeds if (key := key_of(one, name, seed)) not in kept.runs]
    return missing


def _of_a_sweep(one: Cell, name: str, kept: Kept, seeds: Sequence[int], workflows: int) -> list[Key]:
    most = most_at_once(one.at_once, _MOST_REQUESTS, range(workflows))
    numbers = [int(limited.at_once or 0) for limited in tried(policy_of(name), most)]
    places = list(range(len(numbers) - 1, -1, -4))
    for step in (2, 1, 0):
        keys = [key_of(one, name, seeds[0], numbers[place]) for place in places]
        missing = [key for key in keys if key not in kept.runs]
        if missing:
            return missing
        at = numbers.index(kept.best_of(one, name, seeds[0]))
        places = [place for place in (at - step, at + step) if 0 <= place < len(numbers)]
    return [key for seed in seeds if (key := key_of(one, name, seed, numbers[at])) not in kept.runs]


def play(cells: Sequence[Cell], kept: Kept, seeds: Sequence[int], workers: int, common: Common) -> Iterator[Cell]:
    """Runs what is missing, the first cells first; cells as they are done."""
    waiting, running = list(cells), dict[Future[dict[str, Any]], Key]()
    # Spawned: what a fork takes along of vLLM's and torch's threads is nobody's promise.
    with ProcessPoolExecutor(workers, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        try:
            while waiting:
                for one in [one for one in waiting if not wanted(one, kept, seeds, common.workflows)]:
                    waiting.remove(one)
                    yield one
                for one in waiting:
                    for key in wanted(one, kept, seeds, common.workflows):
                        if len(running) < workers and key not in running.values():
                            running[pool.submit(_run, one, key, common)] = key
                if running:
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        key = running.pop(future)
                        kept.add(key, future.result())
                        print(f"{key.cell} {key.policy} {key.seed} {key.at_once or ''}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise


def _run(one: Cell, key: Key, common: Common) -> dict[str, Any]:
    """In a process of several."""
    setting = setting_of(one, common.workflows, common.real, common.models)
    policy = policy_of(key.policy, workload_of(one.workload, common.workflows, common.real).learnt)
    if key.at_once is not None:
        policy = replace(policy, at_once=key.at_once)
    begun = time.process_time()
    done = run_one(setting, policy, key.seed, True, _prompts(one.workload, common))
    figures = {name: value for name, value in done.figures.items() if " of " not in name}
    return {
        "figures": figures,
        "off": list(done.off),
        "told": dict(done.forecasts),
        "cpu_s": time.process_time() - begun,
    }


@lru_cache(maxsize=2)
def _prompts(workload: str, common: Common) -> PromptIds:
    held = workload_of(workload, common.workflows, common.real)
    return PromptIds(held.jobs, held.convention)
