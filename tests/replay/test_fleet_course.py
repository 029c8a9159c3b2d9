"""A fleet over time: means over windows add up to the seconds of requests, and series are bounded."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.replay.fleet_course import MOST_SHOWN, WINDOWS, fleet_course
from presage.replay.metrics import PolicyRun, RequestOutcome

TIMES = st.tuples(st.floats(0, 90), st.floats(0, 5), st.floats(0.01, 5), st.integers(0, 2))


def request(came_s: float, held_s: float, took_s: float, engine: int) -> RequestOutcome:
    made = RequestOutcome(0, 0, "a", came_s, 10, 0, engine=engine)
    made.placed_s = came_s + held_s
    made.ended_s = made.placed_s + took_s
    return made


def course(asked: list[RequestOutcome], used: list[tuple[list[float], list[float]]], end_s: float) -> dict[str, Any]:
    loops: Any = [SimpleNamespace(used_s=array("d", at), used=array("d", values)) for at, values in used]
    run = PolicyRun(asked=asked, end_s=end_s)
    return fleet_course(run, loops, [f"e{number}" for number in range(len(loops))])


@given(st.lists(TIMES, min_size=1, max_size=30))
def test_windows_add_up_to_the_seconds_of_requests(given_: list[tuple[float, float, float, int]]) -> None:
    asked = [request(*one) for one in given_]
    found = course(asked, [([], [])] * 3, 100.0)
    near = {"abs": 100.0 * 0.0005 + 1e-6}  # series are rounded
    assert sum(found["held"]) * found["window_s"] == pytest.approx(
        sum(one.placed_s - one.came_s for one in asked), **near
    )
    for number in range(3):
        took_s = sum((one.ended_s or 0.0) - one.placed_s for one in asked if one.engine == number)
        assert sum(found["under_way"][f"e{number}"]) * found["window_s"] == pytest.approx(took_s, **near)


def test_a_share_of_the_cache_stays_until_the_next_one_is_noted() -> None:
    found = course([], [([15.0, 30.0], [0.5, 0.0]), ([], [])], 60.0)
    assert found["window_s"] == 1.0
    assert found["cache_in_use"]["e0"] == [0.0] * 15 + [0.5] * 15 + [0.0] * 30
    assert found["cache_in_use"]["e1"] == [0.0] * 60


def test_many_engines_have_three_series() -> None:
    few, many = (course([request(0, 0, 60, 1)], [([0.0], [0.1])] * n, 60.0) for n in (MOST_SHOWN, 300))
    assert len(few["under_way"]) == len(few["cache_in_use"]) == MOST_SHOWN
    assert list(many["under_way"]) == ["least", "mean", "most"]
    assert many["under_way"]["most"] == [1.0] * WINDOWS
    assert many["under_way"]["least"] == [0.0] * WINDOWS
