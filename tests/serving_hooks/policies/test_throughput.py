"""The fluid's steps a second are the solution of its own equations, and misses are read off what was measured."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.errors import InputError
from presage.serving_hooks.policies.throughput import ENOUGH_TOKENS, MissCurve, Rates
from presage.serving_hooks.policies.throughput import steps_per_s as steps_per_s_of_many

RATES = Rates(0.01, 0.0001, 0.0001, 100, 200, 1000, 2.0, 10_000)
HUGE = 1e12


def steps_per_s(rates: Rates, cache_tokens: float, workflows: int, miss_share: float) -> float:
    return steps_per_s_of_many(rates, cache_tokens, np.array([float(workflows)]), np.array([miss_share])).item()


class Curve(MissCurve):
    def at(self, load: float, now: float) -> float:
        return self.share(np.array([load]), now).item()


def test_by_hand() -> None:
    """s = .01 + .02 = .03; alone 2 + 1 = 3 s; n = 100: .06 X² − 6 X + 100 = 0, X = 50 · (1 − √(1/3))."""
    assert steps_per_s(RATES, HUGE, 100, 0.0) == pytest.approx(50 * (1 - (1 / 3) ** 0.5))
    assert steps_per_s(replace(RATES, pause_s=0.0), HUGE, 100, 0.0) == pytest.approx(100 / (1 + 3))
    assert steps_per_s(RATES, HUGE, 0, 0.5) == 0


def test_one_workflow_alone_takes_its_pause_its_iterations_and_its_prefill() -> None:
    """Up to the fluid's idea that a workflow may meet itself, which small numbers make small."""
    assert steps_per_s(RATES, HUGE, 1, 0.0) == pytest.approx(1 / 3.03, rel=0.01)


@pytest.mark.parametrize(("rates", "cache"), [(replace(RATES, most_decoding=4), HUGE), (RATES, 4 * 1300.0)])
def test_a_batch_that_is_full_bounds_the_steps_whether_by_setting_or_by_cache(rates: Rates, cache: float) -> None:
    """Four at once: 100 iterations of .0104 s / 4, and .02 s of prefill a step."""
    assert steps_per_s(rates, cache, 10_000, 0.0) == pytest.approx(1 / (100 * 0.0104 / 4 + 0.02))


seconds = st.floats(1e-5, 0.1)
tokens = st.floats(1, 3000)
rates = st.builds(Rates, seconds, seconds, seconds, tokens, tokens, tokens, st.floats(0, 20), st.just(10**9))


@given(rates, st.integers(1, 500), st.floats(0, 1))
def test_what_comes_out_balances_the_workflows(rates: Rates, n: int, miss: float) -> None:
    x = steps_per_s(rates, 1e15, n, miss)
    prefill_s = rates.prefill_token_s * (rates.new_tokens + miss * rates.reusable_tokens)
    busy = x * (rates.decode_token_s * rates.output_tokens + prefill_s)
    iteration_s = rates.iteration_s / (1 - busy)
    assert 0 < busy < 1
    assert x * (rates.pause_s + rates.output_tokens * iteration_s) == pytest.approx(n, rel=1e-3)
    assert steps_per_s(rates, 1e15, n + 1, miss) >= x
    assert steps_per_s(rates, 1e15, n, min(1.0, miss + 0.1)) <= x * (1 + 1e-9)


@pytest.mark.parametrize("wrong", [{"pause_s": -1.0}, {"output_tokens": float("nan")}, {"output_tokens": 0.0}])
def test_rates_that_were_not_measured_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=r"measured|measure before"):
        replace(RATES, **wrong)


def test_nothing_measured_nothing_lost_and_beyond_the_highest_load_seen_it_stays() -> None:
    curve = Curve(600)
    assert curve.at(5.0, 0) == 0
    curve.observe(2.0, 0.8 * ENOUGH_TOKENS, ENOUGH_TOKENS, 0)
    assert curve.at(0.75, 0) == 0
    assert curve.at(2.0625, 0) == curve.at(9.0, 0) == pytest.approx(0.8)
    assert curve.at(1.40625, 0) == pytest.approx(0.4)  # half way from 0.75 to 2.0625


def test_losses_seen_at_a_low_load_count_there_and_no_lower() -> None:
    """Forecasts that are too small by half make the cache look half as full as it is."""
    curve = Curve(600)
    curve.observe(0.5, 0.6 * ENOUGH_TOKENS, ENOUGH_TOKENS, 0)
    assert curve.at(0.6, 0) == curve.at(0.75, 0) == pytest.approx(0.6)
    assert curve.at(0.5, 0) == pytest.approx(0.3)
    assert curve.at(0.4, 0) == 0


def test_where_more_load_seems_to_lose_less_the_two_are_one() -> None:
    curve = Curve(600)
    curve.observe(1.0, 0.5 * ENOUGH_TOKENS, ENOUGH_TOKENS, 0)
    curve.observe(2.0, 0.6 * ENOUGH_TOKENS, 3 * ENOUGH_TOKENS, 0)
    at = (1.0625 + 3 * 2.0625) / 4
    assert curve.at(at, 0) == curve.at(5, 0) == pytest.approx(1.1 / 4)
    assert curve.at((0.75 + at) / 2, 0) == pytest.approx(1.1 / 8)


def test_too_little_seen_does_not_count_until_its_neighbours_make_it_enough() -> None:
    curve = Curve(600)
    for load in (1.0, 1.5, 2.0):
        curve.observe(load, 0.2 * ENOUGH_TOKENS, 0.4 * ENOUGH_TOKENS, 0)
        assert curve.at(9, 0) == (pytest.approx(0.5) if load == 2.0 else 0)
    curve.observe(3.0, 1, 0, 0)
    assert curve.at(1.5625, 0) == curve.at(9, 0) == pytest.approx(0.5)


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1), st.integers(1, 3 * ENOUGH_TOKENS)), max_size=20),
    st.lists(st.floats(0, 6), min_size=2),
)
def test_more_load_never_loses_less(seen: list[tuple[float, float, int]], loads: list[float]) -> None:
    curve = Curve(600)
    for load, share, tokens in seen:
        curve.observe(load, share * tokens, tokens, 0)
    shares = curve.share(np.array(sorted(loads)), 0)
    assert (np.diff(shares) >= -1e-12).all()
    assert ((shares >= 0) & (shares <= 1)).all()


def test_the_past_is_outweighed_and_at_last_forgotten() -> None:
    curve = Curve(100)
    curve.observe(2.0, 0.8 * ENOUGH_TOKENS, ENOUGH_TOKENS, 0)
    curve.observe(2.0, 0.2 * ENOUGH_TOKENS, ENOUGH_TOKENS, 50)
    assert curve.at(3, 50) == pytest.approx((0.4 + 0.2) / 1.5)
    assert curve.at(3, 151) == 0
