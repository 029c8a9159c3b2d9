"""A tool is prepared when that costs least: compared with every beginning on a fine grid, and by golden cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.serving_hooks.policies.preparation import spare_s, start_in

needed_times = st.lists(st.integers(0, 40).map(lambda quarter: quarter / 4), min_size=1, max_size=6)
shares = st.integers(0, 20).map(lambda part: part / 20)
setups = st.integers(1, 20).map(lambda quarter: quarter / 4)
costs = st.sampled_from([0.5, 1.0, 3.0, 10.0, 40.0])


def cost(begin: float | None, needed_s: list[float], share: float, setup_s: float, idle: float, wait: float) -> float:
    """Simulated: what one workflow costs on average if preparing begins then; None: when it is asked for."""
    total = 0.0
    for needed in needed_s:
        if begin is None or begin >= needed:
            total += share * wait * setup_s
            continue
        ready = begin + setup_s
        total += share * (wait * (ready - needed) if ready > needed else idle * (needed - ready))
        total += (1 - share) * idle * (needed - begin)
    return total / len(needed_s)


@given(needed_times, shares, setups, costs, costs)
def test_no_beginning_costs_less(needed: list[float], share: float, setup: float, idle: float, wait: float) -> None:
    chosen = start_in(needed, share, setup, idle_cost=idle, wait_cost=wait)
    grid = [None, *(step / 8 for step in range(8 * 11))]
    cheapest = min(cost(begin, needed, share, setup, idle, wait) for begin in grid)
    assert cost(chosen, needed, share, setup, idle, wait) == pytest.approx(cheapest)


@given(needed_times, shares, setups, costs, costs)
def test_waiting_that_costs_more_never_begins_later(
    needed: list[float], share: float, setup: float, idle: float, wait: float
) -> None:
    def begins(wait_cost: float) -> float:
        begin = start_in(needed, share, setup, idle_cost=idle, wait_cost=wait_cost)
        return float("inf") if begin is None else begin

    assert begins(2 * wait) <= begins(wait) + 1e-9


@given(needed_times, shares, setups, costs, costs)
def test_only_the_ratio_of_the_costs_counts(
    needed: list[float], share: float, setup: float, idle: float, wait: float
) -> None:
    one = start_in(needed, share, setup, idle_cost=idle, wait_cost=wait)
    assert start_in(needed, share, setup, idle_cost=4 * idle, wait_cost=4 * wait) == one


@pytest.mark.parametrize(
    ("needed", "share", "setup", "wait", "begins"),
    [
        ([10.0], 1.0, 2.0, 10.0, 8.0),  # just in time
        ([1.0], 1.0, 2.0, 10.0, 0.0),  # late already
        ([10.0], 0.0, 2.0, 10.0, None),
        ([10.0], 0.05, 2.0, 10.0, None),  # 0.1 s of waiting at most, against idle time where it is not needed
        ([10.0], 0.5, 2.0, 10.0, 8.0),
        ([2.0, 30.0], 1.0, 2.0, 100.0, 0.0),  # for the early one, idle 14 s on average
        ([2.0, 30.0], 1.0, 2.0, 5.0, 28.0),  # idle 28 s in half of the cases would cost more than waiting 2 s
        ([0.0], 1.0, 2.0, 10.0, None),  # needed now: preparing begins as it is asked for
    ],
)
def test_when_it_begins(needed: list[float], share: float, setup: float, wait: float, begins: float | None) -> None:
    assert start_in(needed, share, setup, idle_cost=1.0, wait_cost=wait) == begins


def test_a_spare_tool_is_kept_until_its_idle_time_has_cost_a_wait() -> None:
    assert spare_s(2.0, idle_cost=1.0, wait_cost=10.0) == 20.0
    assert spare_s(2.0, idle_cost=4.0, wait_cost=2.0) == 1.0
