"""Schedules: every call once, after what it reads, and as short as the best of all."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given as given_that
from hypothesis import settings
from hypothesis import strategies as st

from presage.batch.schedule import Costs, PlannedCall, schedule

CACHE = 1000.0


@st.composite
def plans(draw: st.DrawFn, most: int = 12) -> list[PlannedCall]:
    calls: list[PlannedCall] = []
    for number in range(draw(st.integers(1, most))):
        after = tuple(sorted(draw(st.sets(st.integers(0, number - 1), max_size=2)))) if number else ()
        top = draw(st.integers(0, 2))
        path = ((top, 100.0 * (top + 1)), (100 + number, float(draw(st.integers(1, 300)))))
        calls.append(PlannedCall(path, float(draw(st.integers(1, 100))), after))
    return calls


@given_that(plans(), st.integers(1, 3), st.sampled_from([0, 200]))
@settings(deadline=None)
def test_every_call_is_there_once_and_nothing_waits_for_itself(
    calls: list[PlannedCall], workers: int, moves: int
) -> None:
    found = schedule(calls, workers, CACHE, moves=moves)
    assert sorted(index for worker in found.workers for index in worker) == list(range(len(calls)))
    costs = Costs(calls, CACHE)
    assert found.makespan == costs.makespan(found.workers) < float("inf")
    assert found.makespan >= max(costs.usage(index, index) for index in range(len(calls)))
    assert schedule(calls, workers, CACHE, moves=moves) == found


@given_that(plans(most=5))
@settings(deadline=None, max_examples=40)
def test_one_workers_schedule_is_the_best_of_all_orders(calls: list[PlannedCall]) -> None:
    costs = Costs(calls, CACHE)
    best = min(costs.makespan([order]) for order in permutations(range(len(calls))))
    assert schedule(calls, 1, CACHE).makespan == pytest.approx(best)


def test_the_cost_model_is_the_papers() -> None:
    """By hand: two calls share 30 tokens; outputs of 4 and 2; the second reads nothing of the first."""
    calls = [
        PlannedCall(((1, 30.0), (2, 10.0)), 4.0, ()),
        PlannedCall(((1, 30.0), (3, 5.0)), 2.0, ()),
        PlannedCall(((4, 7.0),), 1.0, (0,)),
    ]
    costs = Costs(calls, 100.0)
    assert costs.usage(0, None) == pytest.approx((4 * 40 + 10) / 100)
    assert costs.usage(1, 0) == pytest.approx((2 * 5 + 3) / 100)
    assert costs.usage(1, None) == pytest.approx((2 * 35 + 3) / 100)
    assert costs.makespan([[0, 1, 2]]) == pytest.approx(1.7 + 4 + (7 + 1) / 100)  # its delay is 4 token steps
    assert costs.makespan([[2], [1, 0]]) == pytest.approx((73 + 4 * 10 + 10) / 100 + 4 + 0.08)
    assert costs.makespan([[2, 0], [1]]) == float("inf")
