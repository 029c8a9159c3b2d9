"""Load that changes, and what becomes of a run in the course of it.

Workflows come in phases, each with a rate of its own; the figures are those of windows of time, so that one sees where
a policy gains and what the load before has left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError
from presage.serving_hooks.replay.records import Run
from presage.serving_hooks.replay.workload import Job


@dataclass(frozen=True)
class Phased:
    """Jobs that come in phases.

    Attributes:
        jobs: in the order in which they come, with their times; to be replayed as recorded.
        ends_s: of each phase, when its last job comes.
    """

    jobs: tuple[Job, ...]
    ends_s: tuple[float, ...]


def phased(jobs: Sequence[Job], phases: Sequence[tuple[float, float]], seed: int) -> Phased:
    """Draws when jobs come: a Poisson process whose rate changes from phase to phase.

    Args:
        jobs: in any order; the order they come in is drawn.
        phases: (share of the jobs, jobs a second), one after the other.
        seed: of order and times.

    Raises:
        ConfigurationError: shares do not add up to 1, or a rate is not above 0.
    """
    shares = np.asarray([share for share, _ in phases])
    if not phases or not np.isclose(shares.sum(), 1.0) or (shares < 0).any():
        raise ConfigurationError(f"phases have shares {shares.tolist()} of the workflows; they have to add up to 1")
    if any(not 0 < rate < float("inf") for _, rate in phases):
        raise ConfigurationError("a phase has no rate; give workflows a second, above 0")
    rng = np.random.default_rng([seed, len(jobs)])
    order = rng.permutation(len(jobs))
    last = np.round(np.cumsum(shares) * len(jobs)).astype(int)
    rates = np.concatenate(
        [np.full(end - begin, rate) for begin, end, (_, rate) in zip([0, *last[:-1]], last, phases, strict=True)]
    )
    times = np.cumsum(rng.exponential(1.0, len(jobs)) / rates)
    come = tuple(replace(jobs[number], arrives_s=float(at_s)) for number, at_s in zip(order, times, strict=True))
    return Phased(come, tuple(float(times[end - 1]) if end else 0.0 for end in last))


@dataclass(frozen=True)
class Course:
    """A run by windows of time; W windows.

    Attributes:
        begins_s: float64 [W].
        hit_rate: float64 [W], prompt tokens found in the cache, of those of requests first selected in the window; NaN
            where there was none.
        under_way: float64 [W], requests that had come and not ended, on average over the window.
    """

    begins_s: NDArray[np.float64]
    hit_rate: NDArray[np.float64]
    under_way: NDArray[np.float64]


def course(run: Run, window_s: float) -> Course:
    """A run in the course of time.

    Args:
        run: to its end.
        window_s: seconds of a window.
    """
    begins = np.arange(0.0, max(run.end_s, window_s), window_s)
    began = _of(run, "began_s")
    at = np.minimum((began // window_s).astype(int), len(begins) - 1)
    prompt = np.bincount(at, _of(run, "prompt_tokens"), len(begins))
    hit = np.bincount(at, _of(run, "hit_tokens"), len(begins))
    came, ended = _of(run, "came_s")[:, None], _of(run, "ended_s")[:, None]
    there = np.minimum(ended, begins + window_s) - np.maximum(came, begins)
    rate = np.divide(hit, prompt, out=np.full(len(begins), np.nan), where=prompt > 0)
    return Course(begins, rate, np.clip(there, 0.0, None).sum(axis=0) / window_s)


def _of(run: Run, name: str) -> NDArray[np.float64]:
    values: list[Any] = [getattr(asked, name) for asked in run.asked]
    return np.asarray(values, np.float64)
