"""Kendall's tau distance by hand, against SciPy and against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau, somersd

from presage.predictors.bootstrap import pair_ratio_cis
from presage.training.lengths.ranking import discordance, tau_distance

FEW = st.integers(2, 30).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 6).map(float), min_size=n, max_size=n)] * 2)
)


def distance(truth: list[float], forecast: list[float]) -> float:
    return tau_distance(np.array(truth), np.array(forecast))


def test_by_hand() -> None:
    assert distance([1, 2, 3], [10, 20, 30]) == 0
    assert distance([1, 2, 3], [3, 2, 1]) == 1
    assert distance([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    assert distance([1, 2, 3], [7, 7, 7]) == 0.5, "a constant ranks nothing"
    assert distance([1, 2, 3], [5, 5, 9]) == pytest.approx((0.5 + 0 + 0) / 3)
    assert distance([1, 1, 2], [9, 3, 5]) == pytest.approx(1 / 2), "equal truths have no order"
    assert math.isnan(distance([4, 4], [1, 2]))
    assert math.isnan(distance([4], [1]))


def test_the_pairs_of_each_step_by_hand() -> None:
    wrong, pairs = discordance(np.array([1.0, 2.0, 3.0, 3.0]), np.array([2.0, 1.0, 1.0, 5.0]))
    # 0-1 and 0-2 are wrong, 1-2 is tied by the forecast, 2-3 by the truth.
    assert wrong.tolist() == [2, 1.5, 1.5, 0]
    assert pairs.tolist() == [3, 3, 2, 2]


@given(FEW)
def test_law_it_is_what_scipy_says(drawn: tuple[list[float], list[float]]) -> None:
    truth, forecast = (np.array(values) for values in drawn)
    found = tau_distance(truth, forecast)
    if len(set(drawn[0])) < 2:
        assert math.isnan(found)
        return
    # Somers' D leaves out pairs tied in the first argument, and counts those tied in the second as neither.
    if len(set(drawn[1])) > 1:
        assert found == pytest.approx((1 - somersd(truth, forecast).statistic) / 2)
    else:
        assert found == 0.5
    assert tau_distance(truth, -forecast) == pytest.approx(1 - found)
    assert tau_distance(truth, truth) == 0


def test_without_ties_it_is_kendall_s_tau_turned_round() -> None:
    rng = np.random.default_rng(0)
    truth = rng.lognormal(6, 1.5, 3000).astype(np.float32)
    forecast = truth * rng.lognormal(0, 1, 3000)
    assert tau_distance(truth, forecast) == pytest.approx((1 - kendalltau(truth, forecast).statistic) / 2, abs=1e-6)


@given(FEW)
def test_law_each_step_has_the_pairs_a_plain_loop_counts(drawn: tuple[list[float], list[float]]) -> None:
    truth, forecast = drawn
    wrong, pairs = discordance(np.array(truth), np.array(forecast))
    for i in range(len(truth)):
        others = [j for j in range(len(truth)) if truth[j] != truth[i]]
        right = [np.sign(truth[j] - truth[i]) * np.sign(forecast[j] - forecast[i]) for j in others]
        assert wrong[i] == sum((1 - sign) / 2 for sign in right)
        assert pairs[i] == len(others)


def test_the_interval_is_that_of_ranking_every_resample() -> None:
    rng = np.random.default_rng(0)
    workflows, steps = 120, 6
    level = np.repeat(rng.normal(size=workflows), steps)
    truth = np.exp(level + rng.normal(size=workflows * steps))
    forecast = np.exp(0.5 * level + rng.normal(size=workflows * steps))
    workflow = np.repeat(np.arange(workflows), steps)
    wrong, pairs = (np.bincount(workflow, of)[:, None] for of in discordance(truth, forecast))
    ((low, high),) = pair_ratio_cis(wrong, pairs, np.random.default_rng(1), 1000)
    drawn = []
    for _ in range(400):
        rows = (rng.integers(workflows, size=workflows)[:, None] * steps + np.arange(steps)).ravel()
        drawn.append(tau_distance(truth[rows], forecast[rows]))
    expected = np.quantile(drawn, [0.025, 0.975])
    assert (low, high) == pytest.approx(expected, abs=0.15 * (expected[1] - expected[0]))


def test_a_difference_of_two_forecasts_may_be_negative_and_nothing_is_nan() -> None:
    ones = np.full((20, 1), 10.0)
    assert pair_ratio_cis(-ones / 5, ones, np.random.default_rng(0), 200) == [pytest.approx((-0.2, -0.2))]
    low, high = pair_ratio_cis(0 * ones, 0 * ones, np.random.default_rng(0), 200)[0]
    assert math.isnan(low)
    assert math.isnan(high)
