"""Mixture weights: the better component is believed, none is negative, and no evidence leaves the prior."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from presage.features.prefixes import MASKED
from presage.predictors.common.probabilities import cross_entropy, label_probability, outcome_shift, softmax
from presage.predictors.next_agent.predictor import fit_weights

PRIOR = (0.5, 0.5, 0.1)


def drawn(rows: int, seed: int, horizon: int = 2) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Forecasts, and labels drawn from them: the forecasts are right."""
    rng = np.random.default_rng(seed)
    right = softmax(rng.normal(size=(rows, horizon, 4)) * 1.5).astype(np.float32)
    labels = (rng.random((rows, horizon, 1)) > right.cumsum(axis=2)).sum(axis=2)
    return right, np.minimum(labels, 3).astype(np.int32)


def pool(components: list[NDArray[np.float32]], weights: NDArray[np.float32]) -> NDArray[np.float64]:
    logits = sum(w[None, :, None] * np.log(p.astype(float)) for p, w in zip(components, weights, strict=True))
    return softmax(np.asarray(logits))


def test_the_component_that_is_right_gets_weight_one_and_noise_none() -> None:
    right, labels = drawn(6000, 0)
    noise = drawn(6000, 1)[0]
    uniform = np.full_like(right, 0.25)
    weights = fit_weights([noise, right, uniform], labels, PRIOR)
    assert weights.shape == (3, 2)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights[1], 1.0, atol=0.06)
    np.testing.assert_allclose(weights[0], 0.0, atol=0.06)


def test_each_horizon_has_weights_of_its_own() -> None:
    right, labels = drawn(3000, 0)
    noise = drawn(3000, 1)[0]
    first, second = right.copy(), noise.copy()
    first[:, 1], second[:, 1] = noise[:, 1], right[:, 1]
    weights = fit_weights([first, second], labels, (0.5, 0.5))
    np.testing.assert_allclose(weights, np.eye(2), atol=0.08)


def test_forecasts_that_are_too_unsure_are_sharpened() -> None:
    right, labels = drawn(4000, 0)
    unsure = softmax(np.log(right) / 2)
    assert fit_weights([unsure], labels, (1.0,)).min() > 1.8


def test_where_no_label_counts_the_prior_stands() -> None:
    right, labels = drawn(200, 0)
    labels[:, 1] = MASKED
    labels[::2, 0] = 4  # an agent out of the vocabulary
    weights = fit_weights([right] * 3, labels, PRIOR)
    np.testing.assert_allclose(weights[:, 1], PRIOR, rtol=1e-6)
    empty = fit_weights([right[:0]] * 3, labels[:0], PRIOR)
    np.testing.assert_allclose(empty, np.stack([PRIOR, PRIOR], axis=1), rtol=1e-6)


def test_masked_labels_and_unseen_agents_count_for_nothing() -> None:
    right, labels = drawn(300, 0)
    noise = drawn(300, 1)[0]
    labels[::3] = MASKED
    labels[1::3] = 4
    kept = slice(2, None, 3)
    whole = fit_weights([right, noise], labels, (0.5, 0.5))
    np.testing.assert_allclose(whole, fit_weights([right[kept], noise[kept]], labels[kept], (0.5, 0.5)), atol=1e-6)


def test_a_handful_of_steps_cannot_silence_a_component() -> None:
    right, labels = drawn(5, 0)
    wrong = np.roll(right, 1, axis=2)
    assert fit_weights([right, wrong], labels, (0.5, 0.5)).min() > 0.1


@settings(max_examples=50)
@given(st.integers(0, 60), st.integers(0, 10_000), st.integers(1, 3))
def test_weights_are_finite_never_negative_and_never_worse_than_the_prior(rows: int, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    components = [softmax(rng.normal(size=(rows, 2, 4)) * 6).astype(np.float32) for _ in range(count)]
    components[0][: rows // 4] = np.eye(4, dtype=np.float32)[0]  # certain of one outcome, impossible the others
    labels = rng.integers(-1, 5, (rows, 2)).astype(np.int32)
    prior = PRIOR[:count]
    weights = fit_weights(components, labels, prior)
    assert np.isfinite(weights).all()
    assert (weights >= 0).all()
    floored = [np.maximum(p, 1e-9) for p in components]
    at_prior = np.tile(np.array(prior, np.float32)[:, None], (1, 2))
    assert cross_entropy(pool(floored, weights), labels) <= cross_entropy(pool(floored, at_prior), labels) + 1e-4


@given(st.integers(0, 1000), st.floats(-80, 80))
def test_softmax_sums_to_one_and_ignores_a_shift(seed: int, shift: float) -> None:
    logits = np.random.default_rng(seed).normal(size=(5, 2, 4)) * 10
    p = softmax(logits)
    np.testing.assert_allclose(p.sum(axis=-1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(softmax(logits + shift), p, rtol=1e-9)


def test_cross_entropy_by_hand_over_the_labels_that_count() -> None:
    p = np.array([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], [[1.0, 0.0, 0.0], [0.2, 0.2, 0.6]]])
    labels = np.array([[1, MASKED], [3, 2]], np.int32)
    given_to, counts = label_probability(p, labels)
    assert counts.tolist() == [[True, False], [False, True]]
    assert given_to[counts].tolist() == [0.25, 0.6]
    assert cross_entropy(p, labels) == -(np.log(0.25) + np.log(0.6)) / 2
    assert cross_entropy(p, np.full((2, 2), MASKED, np.int32)) == 0.0
    impossible = cross_entropy(p[1:, :1], np.array([[2]], np.int32))
    assert np.isfinite(impossible)


def test_shifted_logits_forecast_each_outcome_as_often_as_it_comes() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(4000, 2, 4)).astype(np.float32), rng.integers(0, 2, (4000, 2)).astype(np.int32)
    shifted = softmax(logits + outcome_shift(logits, labels)).mean(axis=0)
    np.testing.assert_allclose(shifted, [[0.5, 0.5, 0, 0]] * 2, atol=0.02)
    assert shifted.min() > 0
    np.testing.assert_allclose(outcome_shift(logits, np.full_like(labels, MASKED)), 0.0, atol=1e-5)
