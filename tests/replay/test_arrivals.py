"""Workflows come as asked for, and the same seed gives the same times."""

import numpy as np
import pytest
from replay_samples import chain

from presage.errors import ConfigurationError, TraceError
from presage.replay.workload import STAGGER_S, Arrivals, PromptConvention, ReplayJob, schedule

JOBS = [chain(number, "p", PromptConvention()) for number in range(4000)]


def test_at_random_the_gaps_have_the_rate_and_the_variation() -> None:
    for cv in (0.5, 1.0, 3.0):
        times = [at for at, _ in schedule(Arrivals(rate=2.0, cv=cv), JOBS, 0).first]
        gaps = np.diff(times)
        assert gaps.mean() == pytest.approx(0.5, rel=0.2)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.2)


def test_in_a_closed_loop_so_many_come_at_first_and_all_come_once() -> None:
    made = schedule(Arrivals(concurrency=7), JOBS, 1)
    assert len(made.first) == 7
    assert all(0 <= at <= STAGGER_S for at, _ in made.first)
    assert sorted([number for _, number in made.first] + list(made.then)) == list(range(len(JOBS)))


def test_a_seed_decides_and_another_differs() -> None:
    for arrivals in (Arrivals(rate=1.0), Arrivals(concurrency=5)):
        assert schedule(arrivals, JOBS, 0) == schedule(arrivals, JOBS, 0)
        assert schedule(arrivals, JOBS, 0) != schedule(arrivals, JOBS, 1)


def test_as_recorded_is_as_recorded() -> None:
    steps = JOBS[0].steps
    jobs = [ReplayJob("t", "a", steps, 3.0), ReplayJob("t", "b", steps, 0.0)]
    assert schedule(Arrivals(as_recorded=True), jobs, 0).first == ((0.0, 1), (3.0, 0))
    with pytest.raises(TraceError, match="1 of 3 workflows have no recorded times"):
        schedule(Arrivals(as_recorded=True), [*jobs, ReplayJob("t", "c", steps)], 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "0 kinds of arrivals"),
        ({"concurrency": 1, "rate": 1.0}, "2 kinds of arrivals"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"rate": 0.0}, "rate is 0"),
        ({"rate": 1.0, "cv": 0.0}, "cv is 0"),
    ],
)
def test_what_cannot_be_is_refused(given: dict, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Arrivals(**given)
