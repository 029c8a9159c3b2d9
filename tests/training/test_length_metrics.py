"""Pinball loss, coverage and width by hand and as laws."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from presage.predictors.common.bootstrap import pair_ratio_cis, ratio_ci
from presage.training.quantiles import QuantileFigures, discordance, measure, median_column

QUANTILES = (0.5, 0.9)


def judged(forecast: list[list[float]], truth: list[float], workflow: list[int], step: list[int]) -> QuantileFigures:
    arrays = (np.array(forecast), np.array(truth), np.array(workflow), np.array(step) == 0)
    return measure(*arrays, QUANTILES, np.random.default_rng(0))


BY_HAND = judged([[10, 20], [10, 12], [30, 90], [4, 8]], [10, 15, 100, 2], [0, 0, 1, 2], [0, 1, 0, 0])


def test_pinball_by_hand() -> None:
    # Errors 0, 5, 70, −2 at the median; −10, 3, 10, −6 at .9.
    assert BY_HAND.pinball[0].value == pytest.approx((0 + 2.5 + 35 + 1) / 4)
    assert BY_HAND.pinball[1].value == pytest.approx((1 + 2.7 + 9 + 0.6) / 4)
    assert BY_HAND.loss == pytest.approx(np.array([[2.5, 3.7], [35, 9], [1, 0.6]]))


def test_coverage_and_width_by_hand() -> None:
    assert [share.value for share in BY_HAND.coverage] == [2 / 4, 2 / 4], "a length equal to the quantile is covered"
    assert BY_HAND.covered.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert BY_HAND.width == pytest.approx((0, (10 + 2 + 60 + 4) / 4))
    assert BY_HAND.positions.tolist() == [2, 1, 1]


def test_rankings_by_hand() -> None:
    # Medians 10, 10, 30, 4 of truths 10, 15, 100, 2: one pair of six tied; at arrival three in order.
    assert BY_HAND.tau_distance["all"].value == pytest.approx(0.5 / 6)
    assert BY_HAND.tau_distance["arrival"].value == 0
    assert BY_HAND.wrong["all"].tolist() == [1, 0, 0]
    assert BY_HAND.pairs["arrival"].tolist() == [2, 2, 2]


def test_intervals_are_by_workflow() -> None:
    rng = np.random.default_rng(0)
    workflow = np.repeat(np.arange(40), 5)
    truth, forecast = rng.exponential(100, 200), np.tile([70.0, 230.0], (200, 1))
    found = measure(forecast, truth, workflow, np.tile(np.arange(5) == 0, 40), QUANTILES, np.random.default_rng(3))
    seed = int(np.random.default_rng(3).integers(2**63))
    expected = ratio_ci(found.loss[:, 1], found.positions, np.random.default_rng(seed))
    assert found.pinball[1].ci95 == pytest.approx(expected)
    low, high = found.coverage[1].ci95
    assert low < found.coverage[1].value < high


def test_when_everything_is_covered_the_interval_says_how_little_few_workflows_show() -> None:
    few = judged([[5, 9]] * 8, [1.0, 2, 3, 4] * 2, [0, 0, 1, 1, 2, 2, 3, 3], [0, 1] * 4)
    assert few.coverage[1].value == 1
    # Wilson's lower end at 4 of 4: 4 / (4 + 1.96²).
    assert few.coverage[1].ci95 == (pytest.approx(0.5101, abs=1e-4), 1.0)
    none = judged([[0, 0]] * 4, [1.0, 2, 3, 4], [0, 1, 2, 3], [0] * 4)
    assert none.coverage[1].ci95 == (0.0, pytest.approx(0.4899, abs=1e-4))


def test_what_was_not_judged_is_null_in_json() -> None:
    later = judged([[1, 2], [1, 2]], [1.0, 2], [0, 0], [1, 2]).to_dict()
    told = json.loads(json.dumps(later, allow_nan=False))
    assert (told["tau_distance"]["arrival"], told["tau_distance_ci95"]["arrival"]) == (None, [None, None])
    assert (told["workflows"], told["steps"]) == (1, 2)
    assert told["pinball"].keys() == told["coverage"].keys() == {"0.5", "0.9"}


def test_without_a_median_the_next_quantile_above_it_ranks() -> None:
    assert [median_column(q) for q in ((0.1, 0.5, 0.9), (0.9,), (0.25, 0.7, 0.99), (0.1, 0.2))] == [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("forecast", "truth"), [([[1.0, 2.0]], []), ([], []), ([[1.0]], [1.0]), ([[1.0, 2.0]], [np.nan])]
)
def test_what_does_not_fit_is_refused(forecast: list[list[float]], truth: list[float]) -> None:
    n = len(truth)
    with pytest.raises(ValueError, match=r"wanted|finite"):
        measure(
            np.array(forecast).reshape(len(forecast), 2 if not forecast else -1),
            np.array(truth),
            np.zeros(n, int),
            np.ones(n, bool),
            QUANTILES,
            np.random.default_rng(0),
        )


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.sampled_from([0.1, 0.5, 0.9]))
def test_law_no_constant_has_less_pinball_loss_than_the_quantile(lengths: list[int], q: float) -> None:
    truth = np.array(lengths, float)
    n = len(lengths)

    def loss(constant: float) -> float:
        found = measure(
            np.full((n, 1), constant), truth, np.arange(n), np.ones(n, bool), (q,), np.random.default_rng(0), 10
        )
        return found.pinball[0].value

    best = loss(float(np.quantile(truth, q, method="inverted_cdf")))
    assert all(best <= loss(constant) + 1e-9 for constant in range(0, 51, 5))


FEW = st.integers(2, 30).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 6).map(float), min_size=n, max_size=n)] * 2)
)


def distance(truth: ArrayLike, forecast: ArrayLike) -> float:
    wrong, pairs = discordance(np.asarray(truth), np.asarray(forecast))
    return wrong.sum() / pairs.sum() if pairs.any() else math.nan


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
        drawn.append(distance(truth[rows], forecast[rows]))
    expected = np.quantile(drawn, [0.025, 0.975])
    assert (low, high) == pytest.approx(expected, abs=0.15 * (expected[1] - expected[0]))


def test_a_difference_of_two_forecasts_may_be_negative_and_nothing_is_nan() -> None:
    ones = np.full((20, 1), 10.0)
    assert pair_ratio_cis(-ones / 5, ones, np.random.default_rng(0), 200) == [pytest.approx((-0.2, -0.2))]
    low, high = pair_ratio_cis(0 * ones, 0 * ones, np.random.default_rng(0), 200)[0]
    assert math.isnan(low)
    assert math.isnan(high)
