"""Bins of what was said and what came, and their intervals."""

import numpy as np
import pytest

from presage.features.prefixes import MASKED
from presage.predictors.reliability import calibration_error
from presage.training.metrics import Claims, claims_of_forecasts, claims_of_labels, reliability


def test_bins_by_hand() -> None:
    found = reliability(np.array([0.05, 0.5, 0.52, 1.0]), np.array([0, 1, 0.5, 1]))
    assert [row.positions for row in found] == [1, 2, 1]
    assert [row.confidence for row in found] == pytest.approx([0.05, 0.51, 1.0])
    assert [row.accuracy for row in found] == pytest.approx([0, 0.75, 1])
    assert calibration_error(found) == pytest.approx((0.05 + 2 * 0.24) / 4)


def test_claims_of_forecasts_are_of_the_likeliest_outcome_where_there_is_something_to_know() -> None:
    probabilities = np.array([[[0.7, 0.3], [0.1, 0.9]], [[0.4, 0.6], [0.8, 0.2]]], np.float32)
    outcomes = np.array([[0, 0], [1, MASKED]], np.int32)
    workflow = np.array([0, 1])
    first = claims_of_forecasts(probabilities, outcomes, workflow, 1)
    assert first.said.tolist() == pytest.approx([0.7, 0.6])
    assert first.truth.tolist() == [True, True]
    second = claims_of_forecasts(probabilities, outcomes, workflow, 2)
    assert (second.said.tolist(), second.truth.tolist(), second.group.tolist()) == (pytest.approx([0.9]), [False], [0])


def test_claims_of_labels_leave_out_what_is_not_known_and_belong_to_their_prompt() -> None:
    claims = claims_of_labels(np.array([[0.2, 0.4], [0.6, 0.8]]), np.array([[1, np.nan], [0, 1]]))
    assert claims.said.tolist() == [0.2, 0.6, 0.8]
    assert claims.truth.tolist() == [1, 0, 1]
    assert claims.group.tolist() == [0, 1, 1]


def test_claims_that_go_together_are_less_sure_than_as_many_alone() -> None:
    rng = np.random.default_rng(0)
    truth = np.repeat(rng.random(40) < 0.5, 10)
    said = np.full(len(truth), 0.5)
    together = Claims(said, truth, np.repeat(np.arange(40), 10)).ci95(np.random.default_rng(1))[0]
    alone = Claims(said, truth, np.arange(len(truth))).ci95(np.random.default_rng(1))[0]
    assert together[1] - together[0] > 2 * (alone[1] - alone[0])
    assert together[0] < truth.mean() < together[1]


def test_there_is_an_interval_for_every_bin_also_where_all_came() -> None:
    claims = Claims(np.array([0.9, 0.91, 0.1]), np.array([1.0, 1.0, 0.0]), np.array([0, 1, 2]))
    ends = claims.ci95(np.random.default_rng(0))
    assert len(ends) == len(claims.bins()) == 2
    assert ends[0][0] == 0 < ends[0][1]
    assert ends[1][0] < 1 == ends[1][1]
