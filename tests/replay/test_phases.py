"""Load in phases, and a run by windows of time, against figures reckoned by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_samples import chain

from presage.errors import ConfigurationError
from presage.replay.metrics import PolicyRun, RequestOutcome, course
from presage.replay.workload import PromptConvention, phased

JOBS = tuple(chain(number, "pq", PromptConvention()) for number in range(400))


def test_each_phase_has_its_share_and_its_rate() -> None:
    found = phased(JOBS, ((0.25, 1.0), (0.75, 10.0)), 0)
    assert sorted(job.workflow_id for job in found.jobs) == sorted(job.workflow_id for job in JOBS)
    times = np.asarray([job.arrives_s for job in found.jobs])
    assert (np.diff(times) > 0).all()
    calm, all_of_it = found.ends_s
    assert (times[99], times[-1]) == (calm, all_of_it)
    assert calm / 100 == pytest.approx(1.0, rel=0.3)
    assert (all_of_it - calm) / 300 == pytest.approx(0.1, rel=0.2)


@given(st.integers(0, 5), st.integers(1, 9))
def test_the_same_seed_draws_the_same_and_no_job_is_lost(seed: int, many: int) -> None:
    thirds = ((1 / 3, 1.0), (1 / 3, 2.0), (1 / 3, 1.0))
    found = phased(JOBS[:many], thirds, seed)
    assert found == phased(JOBS[:many], thirds, seed)
    assert len({job.workflow_id for job in found.jobs}) == many


@pytest.mark.parametrize("phases", [(), ((0.5, 1.0),), ((1.0, 0.0),), ((1.5, 1.0), (-0.5, 1.0))])
def test_phases_that_cannot_be_are_refused(phases: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"phases? ha"):
        phased(JOBS, phases, 0)


def asked(came_s: float, began_s: float, ended_s: float, prompt: int, hit: int) -> RequestOutcome:
    return RequestOutcome(0, 0, "p", came_s, prompt, 0, hit, began_s, began_s, ended_s)


def test_windows_hold_what_began_in_them_and_how_much_was_there() -> None:
    run = PolicyRun(asked=[asked(0, 1, 5, 100, 0), asked(0, 1, 25, 300, 100), asked(21, 22, 25, 50, 50)], end_s=25.0)
    found = course(run, 10.0)
    assert found.begins_s.tolist() == [0, 10, 20]
    assert found.hit_rate[[0, 2]].tolist() == [0.25, 1.0]
    assert np.isnan(found.hit_rate[1])  # nothing began
    assert found.under_way == pytest.approx([1.5, 1.0, (5 + 4) / 10])
