"""Parts of the router against references and laws: ridge, factors, calibration, choice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import random as random_sparse
from sklearn.linear_model import LogisticRegression, Ridge

from presage.predictors.router.calibration import PRIOR_LABELS, Calibration
from presage.predictors.router.choice import learn_trust, pick
from presage.predictors.router.factors import Factors, base_rates, logit, sigmoid
from presage.predictors.router.linear import RidgePath, Rows


@pytest.mark.parametrize("penalty", [0.5, 4.0, 64.0])
def test_the_ridge_path_is_ridge_regression(penalty: float) -> None:
    rng = np.random.default_rng(0)
    sparse = random_sparse(200, 150, 0.1, "csr", np.float32, rng)
    rows = Rows(sparse, rng.normal(size=(200, 5)).astype(np.float32))
    targets = rng.normal(size=(200, 3)).astype(np.float32)
    found = RidgePath.fit(rows, targets, steps=60).weights([penalty] * 3)
    inputs = np.concatenate([sparse.toarray(), rows.dense], axis=1)
    wanted = Ridge(alpha=penalty, fit_intercept=False).fit(inputs, targets).coef_.T
    np.testing.assert_allclose(found, wanted, atol=2e-3)


def test_targets_may_have_different_penalties_and_be_empty() -> None:
    rng = np.random.default_rng(1)
    rows = Rows(random_sparse(50, 40, 0.2, "csr", np.float32, rng), np.zeros((50, 0), np.float32))
    targets = np.stack([rng.normal(size=50), np.zeros(50)], axis=1).astype(np.float32)
    path = RidgePath.fit(rows, targets)
    mixed = path.weights([1.0, 8.0])
    np.testing.assert_array_equal(mixed[:, 0], path.weights([1.0, 1.0])[:, 0])
    assert not mixed[:, 1].any()


def test_factors_find_what_models_share() -> None:
    rng = np.random.default_rng(0)
    ease = rng.normal(size=2000)
    correct = (rng.random((2000, 6)) < sigmoid(ease[:, None] * 2)).astype(np.float32)
    factors = Factors.fit(correct, 3)
    np.testing.assert_allclose(factors.loadings @ factors.loadings.T, np.eye(3), atol=1e-5)
    assert (factors.loadings[0] > 0.3).all()
    assert np.corrcoef(factors.targets(correct)[:, 0], ease)[0, 1] > 0.8
    missing = correct.copy()
    missing[rng.random(correct.shape) < 0.5] = np.nan
    again = Factors.fit(missing, 3)
    assert (again.loadings[0] > 0.2).all()
    assert np.corrcoef(again.targets(missing)[:, 0], ease)[0, 1] > 0.65


def test_base_rates_are_smoothed_shares_of_the_labels_there_are() -> None:
    correct = np.float32([[1, np.nan], [1, np.nan], [0, np.nan]])
    np.testing.assert_allclose(base_rates(correct), [3 / 5, 1 / 2])


def test_calibration_mends_a_slope_and_a_shift() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(6000, 3)) + np.array([0.5, -0.5, 1.0])
    correct = (rng.random(truth.shape) < sigmoid(truth)).astype(np.float32)
    skewed = (3.0 * truth + 2.0).astype(np.float32)
    fitted = Calibration.fit(skewed, correct)
    np.testing.assert_allclose(fitted.probabilities(skewed), sigmoid(truth), atol=0.06)


def test_with_many_labels_a_line_is_platts() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40_000, 1)).astype(np.float32)
    correct = (rng.random(logits.shape) < sigmoid(0.5 + 2 * logits)).astype(np.float32)
    wanted = LogisticRegression(C=np.inf).fit(logits, correct[:, 0])
    fitted = Calibration.fit(logits, correct)
    np.testing.assert_allclose(fitted.probabilities(logits)[:, 0], wanted.predict_proba(logits)[:, 1], atol=0.01)
    assert fitted.slope[0] == pytest.approx(wanted.coef_[0, 0], rel=0.02)


def test_a_model_with_few_labels_takes_the_slope_of_all() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3000, 3)).astype(np.float32)
    correct = (rng.random(logits.shape) < sigmoid(0.5 * logits)).astype(np.float32)
    correct[10:, 2] = np.nan
    correct[:10, 2] = logits[:10, 2] < 0  # against the others
    fitted = Calibration.fit(logits, correct)
    assert fitted.slope[2] == pytest.approx(fitted.slope[:2].mean(), abs=10 / PRIOR_LABELS * 4)
    correct[:, 2] = np.nan
    none = Calibration.fit(logits, correct)
    assert none.shift[2] == 0
    assert none.slope[:2].min() - 0.1 <= none.slope[2] <= none.slope[:2].max() + 0.1


def test_scores_that_say_the_opposite_are_not_believed() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5000, 2)).astype(np.float32)
    correct = (rng.random(logits.shape) < sigmoid(-logits)).astype(np.float32)
    fitted = Calibration.fit(logits, correct)
    assert (fitted.slope == 0).all()


@given(st.integers(0, 1000))
def test_probabilities_rise_with_log_odds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(80, 2)) * 10 ** rng.uniform(-2, 2)).astype(np.float32)
    fitted = Calibration.fit(logits, (rng.random(logits.shape) < 0.6).astype(np.float32))
    said = fitted.probabilities(np.sort(logits, axis=0))
    assert ((said >= 0) & (said <= 1)).all()
    assert (np.diff(said, axis=0) >= 0).all()


def test_trust_goes_from_the_best_single_model_to_the_likeliest() -> None:
    base = np.array([0.7, 0.6])
    said = np.float32([[0.70, 0.72], [0.3, 0.9], [0.9, 0.1]])
    assert pick(said, base, 0.0).tolist() == [0, 0, 0]
    assert pick(said, base, 1.0).tolist() == said.argmax(axis=1).tolist()
    assert pick(np.float32([[0, 1], [1, 0]]), base, 1.0).tolist() == [1, 0]
    assert logit(np.array([0.5]))[0] == 0


def test_trust_is_learnt_where_picks_gain_and_not_where_they_do_not() -> None:
    rng = np.random.default_rng(0)
    chance = rng.random((2000, 3)) ** np.array([0.5, 1.0, 1.0])
    correct = (rng.random(chance.shape) < chance).astype(np.float32)
    base = base_rates(correct)
    assert learn_trust(chance.astype(np.float32), correct, base) >= 0.5
    assert learn_trust(rng.random(chance.shape).astype(np.float32), correct, base) == 0
    correct[:, 0] = np.nan
    assert learn_trust(chance.astype(np.float32), correct, base) == 0  # no prompt with every label
