"""Evidence by hand, its bound in simulation, and that a change is seen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.serving_hooks.monitoring.drift import SHARES, Detectors
from presage.serving_hooks.monitoring.promoted import Side


def test_evidence_by_hand() -> None:
    detectors = Detectors([0.5], ["below"])
    assert detectors.evidence.tolist() == [0.0]
    detectors.add(np.array([0.0]))
    # Bets of at most 1 / (1 − .5) = 2 on numbers below .5: each e is 1 + 2 · share · .5, and R = (0 + 1) · e.
    first = [1.0 + share for share in SHARES]
    assert detectors.evidence[0] == pytest.approx(sum(first) / 6)
    detectors.add(np.array([1.0]))
    second = [(before + 1.0) * (1.0 - share) for before, share in zip(first, SHARES, strict=True)]
    assert detectors.evidence[0] == pytest.approx(sum(second) / 6)


def test_a_figure_without_a_number_is_not_bet_on() -> None:
    detectors = Detectors([0.5, 0.5], ["below", "above"])
    detectors.add(np.array([0.0, np.nan]))
    assert detectors.evidence[0] > 1
    assert detectors.evidence[1] == 0


@pytest.mark.parametrize("side", ["above", "below"])
def test_no_limit_allows_a_bet_that_loses_everything(side: Side) -> None:
    for limit in (0.0, 1e-9, 0.5, 1.0):
        detectors = Detectors([limit], [side])
        for _ in range(3000):
            detectors.add(np.array([1.0 if side == "above" else 0.0]))
        assert np.isfinite(detectors.evidence).all()
        detectors.add(np.array([0.0 if side == "above" else 1.0]))
        assert (detectors.evidence > 0).all()


def share_of_runs_past(alpha: float, workflows: int, draw: np.ndarray, side: Side, limit: float) -> float:
    """Each column of `draw` [workflows, runs] is a run: how many reach workflows / alpha."""
    detectors = Detectors([limit] * draw.shape[1], [side] * draw.shape[1])
    past = np.zeros(draw.shape[1], bool)
    for numbers in draw:
        detectors.add(numbers)
        past |= detectors.evidence >= workflows / alpha
    return float(past.mean())


@pytest.mark.parametrize("side", ["above", "below"])
@pytest.mark.parametrize("law", ["a coin", "rare", "shares", "heavy at the ends"])
def test_law_at_the_limit_itself_no_more_than_alpha_of_the_runs_alarm(law: str, side: Side) -> None:
    rng, size, alpha = np.random.default_rng(5), (1000, 2000), 0.05
    draw, limit = {
        "a coin": lambda: ((rng.random(size) < 0.7).astype(float), 0.7),
        "rare": lambda: ((rng.random(size) < 0.01).astype(float), 0.01),
        "shares": lambda: (rng.binomial(8, 0.6, size) / 8, 0.6),
        "heavy at the ends": lambda: (rng.beta(0.1, 0.3, size), 0.25),
    }[law]()
    assert share_of_runs_past(alpha, 1000, draw, side, limit) <= alpha


def test_a_drop_is_seen_soon_also_after_a_long_time_without_one() -> None:
    rng = np.random.default_rng(6)
    for quiet in (0, 5000):
        detectors = Detectors([0.7], ["below"])
        for number in rng.random(quiet) < 0.75:
            detectors.add(np.array([float(number)]))
        seen = 0
        while detectors.evidence[0] < 1e5:
            detectors.add(np.array([float(rng.random() < 0.4)]))
            seen += 1
        assert seen < 120


@given(st.lists(st.floats(0, 1), max_size=50), st.floats(0, 1), st.sampled_from(["above", "below"]))
def test_law_evidence_is_a_number_and_never_negative(numbers: list[float], limit: float, side: Side) -> None:
    detectors = Detectors([limit], [side])
    for number in numbers:
        detectors.add(np.array([number]))
        assert 0 <= detectors.evidence[0] < np.inf
