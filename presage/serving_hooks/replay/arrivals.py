"""When jobs come: as recorded, at random, in bursts, or one for each that ends.

An order of jobs and, for each, a time; or no times and a number of jobs under way at once. Everything random comes
from the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from presage.errors import ConfigurationError, TraceError
from presage.serving_hooks.replay.workload import Job

STAGGER_S: Final = 5.0
"""The first jobs of a closed loop come within so many seconds: an engine is not hit by all of them at once."""


@dataclass(frozen=True)
class Arrivals:
    """How jobs come; exactly one of the three.

    Attributes:
        concurrency: jobs under way at once, the next comes when one ends.
        rate: jobs a second, gaps gamma distributed.
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
                f"{given} ways for workflows to come were given; give one of --concurrency, --rate and --as-recorded"
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigurationError(f"concurrency is {self.concurrency}; at least 1 workflow has to be under way")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigurationError(f"rate is {self.rate}; give workflows a second, above 0")
        if not 0 < self.cv <= 100:
            raise ConfigurationError(f"cv is {self.cv}; give a coefficient of variation above 0, at most 100")

    @property
    def random(self) -> bool:
        """Whether two seeds differ."""
        return not self.as_recorded


@dataclass(frozen=True)
class Schedule:
    """Which job comes when.

    Attributes:
        first: (seconds, number of the job), by time.
        then: numbers of the jobs that come one by one as others end.
    """

    first: tuple[tuple[float, int], ...]
    then: tuple[int, ...] = ()


def schedule(arrivals: Arrivals, jobs: Sequence[Job], seed: int) -> Schedule:
    """The arrivals of all jobs. But for those as recorded, the jobs come in an order drawn from the seed.

    Raises:
        TraceError: as recorded is wanted, and a job has no time.
    """
    if arrivals.as_recorded:
        untimed = sum(job.arrives_s is None for job in jobs)
        if untimed:
            raise TraceError(
                f"{untimed} of {len(jobs)} workflows have no recorded times, so when they came cannot be replayed: "
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
