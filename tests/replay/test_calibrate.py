"""A fit finds the costs that step times were made up by, in spite of noise and pauses, and says how far off it is."""

import numpy as np
import pytest
from step_time_samples import TRUE, iterations, measured, times_of

from presage.errors import TraceError
from presage.replay.calibrate import calibrate, fit


def test_without_noise_the_costs_are_found_exactly() -> None:
    tokens = iterations(1000)
    assert fit(tokens, times_of(tokens)) == pytest.approx(TRUE, rel=1e-6)
    found = calibrate(measured(tokens, times_of(tokens)), "our rack")
    assert (found.fitted_to, found.held_out) == (808, 192)
    assert found.median_error < 1e-9
    assert found.total_error == pytest.approx(0.0, abs=1e-9)
    cost = found.cost
    names = ("iteration_s", "prefill_token_s", "decode_token_s", "context_token_s", "attention_pair_s")
    assert [cost[name] for name in names] == pytest.approx(TRUE)
    summary = "our rack; fitted to 808 iterations of made-up on cpu with vLLM 0.32.0; median error"
    assert str(cost["source"]).startswith(summary)


def test_a_tenth_of_the_iterations_being_pauses_moves_nothing() -> None:
    tokens, rng = iterations(2000), np.random.default_rng(1)
    seconds = times_of(tokens)
    paused = rng.random(len(seconds)) < 0.1
    seconds[paused] += rng.uniform(0.5, 5.0, paused.sum())
    assert fit(tokens, seconds) == pytest.approx(TRUE, rel=1e-3)
    found = calibrate(measured(tokens, seconds))
    assert found.median_error < 1e-3
    assert found.total_error < -0.5  # what steps take together has the pauses in it


def test_the_error_is_that_of_iterations_kept_out() -> None:
    tokens = iterations(8000)
    noisy = times_of(tokens) * np.random.default_rng(2).uniform(0.8, 1.2, len(tokens))
    found = calibrate(measured(tokens, noisy))
    assert found.median_error == pytest.approx(0.1, abs=0.01)  # of |uniform on ±0.2|
    assert found.p90_error == pytest.approx(0.19, abs=0.02)
    assert abs(found.total_error) < 0.03


def test_no_cost_is_below_zero() -> None:
    tokens, rng = iterations(2000), np.random.default_rng(3)
    free = np.asarray([0.01, 5e-5, 0.0, 0.0, 0.0])
    found = fit(tokens, times_of(tokens, free) * rng.uniform(0.9, 1.1, len(tokens)))
    assert (found >= 0).all()
    assert found[:2] == pytest.approx(free[:2], rel=0.1)


def test_an_engine_file_takes_what_was_fitted_though_an_iteration_be_free() -> None:
    tokens = iterations(1000)
    assert (
        calibrate(measured(tokens, times_of(tokens, np.asarray([0.0, 1e-4, 1e-4, 0.0, 0.0])))).cost["iteration_s"] > 0
    )


def test_step_times_without_pairs_give_a_cost_model_without_them() -> None:
    """Files of earlier versions hold none."""
    tokens = iterations(1000)
    tokens[:, 3] = 0
    assert fit(tokens, times_of(tokens)) == pytest.approx([*TRUE[:4], 0.0], rel=1e-6)


@pytest.mark.parametrize(
    ("count", "prefills", "said"),
    [
        (300, 0.3, "300 iterations; a fit needs at least 320"),
        (400, 0.0, "0 of 400 iterations prefill"),
        (400, 1.0, "only decode"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(count: int, prefills: float, said: str) -> None:
    tokens = iterations(count, prefills=prefills)
    with pytest.raises(TraceError, match=said):
        calibrate(measured(tokens, times_of(tokens)))
