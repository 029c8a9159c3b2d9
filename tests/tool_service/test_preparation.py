"""A tool is prepared when that costs least: compared with every beginning on a fine grid, and by golden cases."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from presage.tool_service.planning import spare_s, start_in

needed_times = st.lists(st.integers(0, 40).map(lambda quarter: quarter / 4), min_size=1, max_size=6)
shares = st.integers(1, 20).map(lambda part: part / 20)
setups = st.integers(1, 20).map(lambda quarter: quarter / 4)
costs = st.sampled_from([0.5, 1.0, 3.0, 10.0, 40.0])


def cost(begin: float, needed_s: list[float], share: float, setup_s: float, wait: float) -> float:
    """Of waiting and of idle time on average, where a tool that is not needed is idle as long as one that is needed
    latest of all."""
    latest = max(needed_s) + setup_s
    total = 0.0
    for needed in needed_s:
        ready = begin + setup_s
        total += share * (wait * (ready - needed) if ready > needed else needed - ready)
        total += (1 - share) * (latest - ready)
    return total / len(needed_s)


@given(needed_times, shares, setups, costs)
def test_no_beginning_costs_less(needed: list[float], share: float, setup: float, wait: float) -> None:
    chosen = start_in(needed, share, setup, wait)
    assume(chosen is not None)
    cheapest = min(cost(step / 8, needed, share, setup, wait) for step in range(8 * 11))
    assert cost(chosen or 0.0, needed, share, setup, wait) == pytest.approx(cheapest)


@given(needed_times, shares, setups, costs)
def test_a_tool_is_prepared_only_if_waiting_may_cost_more_than_its_idle_time(
    needed: list[float], share: float, setup: float, wait: float
) -> None:
    assert (start_in(needed, share, setup, wait) is None) == (share * wait < 1 - share - 1e-12)


@given(needed_times, shares, setups, costs)
def test_waiting_that_costs_more_never_begins_later(
    needed: list[float], share: float, setup: float, wait: float
) -> None:
    def begins(wait_cost: float) -> float:
        begin = start_in(needed, share, setup, wait_cost)
        return float("inf") if begin is None else begin

    assert begins(2 * wait) <= begins(wait)


@pytest.mark.parametrize(
    ("needed", "share", "setup", "wait", "begins"),
    [
        ([10.0], 1.0, 2.0, 10.0, 8.0),  # just in time
        ([1.0], 1.0, 2.0, 10.0, 0.0),  # late already
        ([10.0], 0.0, 2.0, 10.0, None),
        ([10.0], 0.05, 2.0, 10.0, None),  # 0.5 for a second of waiting, against 0.95 for one of idle time
        ([10.0], 0.5, 2.0, 10.0, 8.0),
        ([2.0, 30.0], 1.0, 2.0, 100.0, 0.0),  # for the early one, idle 28 s for the other
        ([2.0, 30.0], 0.1, 2.0, 15.0, 28.0),  # rarely needed: late, so that it is idle for a short time
    ],
)
def test_when_it_begins(needed: list[float], share: float, setup: float, wait: float, begins: float | None) -> None:
    assert start_in(needed, share, setup, wait) == begins


def test_a_spare_tool_is_kept_until_its_idle_time_has_cost_a_wait() -> None:
    assert spare_s(2.0, 10.0) == 20.0
