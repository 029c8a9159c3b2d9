"""When jobs arrive: as recorded, at random, in phases of load, or whenever another ends (closed loop)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from presage.errors import ConfigurationError, TraceError
from presage.serving_hooks.replay.workload import ReplayJob

STAGGER_S: Final = 5.0
"""The first jobs of a closed loop arrive within this time, not all at once."""


@dataclass(frozen=True)
class Arrivals:
    """How jobs arrive; give exactly one of `concurrency`, `rate` and `as_recorded`.

    Attributes:
        concurrency: closed loop of this many jobs.
        rate: jobs per second, with gamma-distributed gaps.
        cv: coefficient of variation of the gaps; 1 is a Poisson process, more is bursts.
        as_recorded: as in the trace.
    """

    concurrency: int | None = None
    rate: float | None = None
    cv: float = 1.0
    as_recorded: bool = False

    def __post_init__(self) -> None:
        given = (self.concurrency is not None) + (self.rate is not None) + self.as_recorded
        if given != 1:
            raise ConfigurationError(
                f"{given} kinds of arrivals were given; give one of --concurrency, --rate and --as-recorded"
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigurationError(f"concurrency is {self.concurrency}; give 1 workflow or more")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigurationError(f"rate is {self.rate}; give workflows per second, above 0")
        if not 0 < self.cv <= 100:
            raise ConfigurationError(f"cv is {self.cv}; give a coefficient of variation above 0, at most 100")

    @property
    def random(self) -> bool:
        """Whether arrivals depend on the seed."""
        return not self.as_recorded


@dataclass(frozen=True)
class Schedule:
    """When each job arrives.

    Attributes:
        first: (seconds, number of the job), by time.
        then: numbers of the jobs that arrive one by one as others end.
    """

    first: tuple[tuple[float, int], ...]
    then: tuple[int, ...] = ()


def schedule(arrivals: Arrivals, jobs: Sequence[ReplayJob], seed: int) -> Schedule:
    """The arrivals of all jobs, in an order drawn from the seed unless they are as recorded.

    Raises:
        TraceError: arrivals as recorded, and a job has no time.
    """
    if arrivals.as_recorded:
        untimed = sum(job.arrives_s is None for job in jobs)
        if untimed:
            raise TraceError(
                f"{untimed} of {len(jobs)} workflows have no recorded times, so their arrivals cannot be replayed: "
                "give --concurrency or --rate, or traces with started_at and ended_at"
            )
        return Schedule(tuple(sorted((job.arrives_s or 0.0, number) for number, job in enumerate(jobs))))
    rng = np.random.default_rng(seed)
    order = [int(number) for number in rng.permutation(len(jobs))]
    if arrivals.concurrency is not None:
        now = order[: arrivals.concurrency]
        times = np.sort(rng.uniform(0.0, STAGGER_S, len(now)))
        return Schedule(tuple(zip(times.tolist(), now, strict=True)), tuple(order[len(now) :]))
    shape = 1.0 / arrivals.cv**2
    gaps = rng.gamma(shape, 1.0 / (float(arrivals.rate or 0.0) * shape), len(jobs))
    return Schedule(tuple(zip(np.cumsum(gaps).tolist(), order, strict=True)))


@dataclass(frozen=True)
class Phased:
    """Jobs that arrive in phases.

    Attributes:
        jobs: in the order of their arrival, with times; replay them as recorded.
        ends_s: arrival of the last job of each phase.
    """

    jobs: tuple[ReplayJob, ...]
    ends_s: tuple[float, ...]


def phased(jobs: Sequence[ReplayJob], phases: Sequence[tuple[float, float]], seed: int) -> Phased:
    """Draws arrivals by a Poisson process whose rate changes from phase to phase.

    Args:
        jobs: in any order; their order is drawn too.
        phases: (share of the jobs, jobs per second), one after the other.
        seed: of order and times.

    Raises:
        ConfigurationError: shares do not add up to 1, or a rate is not above 0.
    """
    shares = np.asarray([share for share, _ in phases])
    if not phases or not np.isclose(shares.sum(), 1.0) or (shares < 0).any():
        raise ConfigurationError(f"phases have shares {shares.tolist()} of the workflows; they must add up to 1")
    if any(not 0 < rate < float("inf") for _, rate in phases):
        raise ConfigurationError("a phase has no rate; give workflows per second, above 0")
    rng = np.random.default_rng([seed, len(jobs)])
    order = rng.permutation(len(jobs))
    last = np.round(np.cumsum(shares) * len(jobs)).astype(int)
    rates = np.concatenate(
        [np.full(end - begin, rate) for begin, end, (_, rate) in zip([0, *last[:-1]], last, phases, strict=True)]
    )
    times = np.cumsum(rng.exponential(1.0, len(jobs)) / rates)
    come = tuple(replace(jobs[number], arrives_s=float(at_s)) for number, at_s in zip(order, times, strict=True))
    return Phased(come, tuple(float(times[end - 1]) if end else 0.0 for end in last))
