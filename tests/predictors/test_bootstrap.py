"""Intervals over workflows: against hand computation, a plain loop, and the coverage they promise."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.predictors.common import bootstrap
from presage.predictors.common.bootstrap import ratio_ci


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_two_workflows_by_hand() -> None:
    # Of the resamples of two workflows a quarter is (a, a), half (a, b), a quarter (b, b): 1/1, 1/4 and 0/3.
    low, high = ratio_ci(np.array([1, 0]), np.array([1, 3]), rng(), resamples=4000, level=0.9)
    assert (low, high) == (0.0, 1.0)
    low, high = ratio_ci(np.array([1, 0]), np.array([1, 3]), rng(), resamples=4000, level=0.4)
    assert (low, high) == (0.25, 0.25)


def test_agrees_with_every_resample_enumerated() -> None:
    correct, positions = np.array([3, 1, 4, 0, 2]), np.array([4, 4, 5, 2, 6])
    every = [
        correct[list(drawn)].sum() / positions[list(drawn)].sum() for drawn in itertools.product(range(5), repeat=5)
    ]
    found = ratio_ci(correct, positions, rng(), resamples=20_000, level=0.8)
    np.testing.assert_allclose(found, np.quantile(every, [0.1, 0.9]), atol=0.02)


def test_the_same_generator_state_gives_the_same_interval() -> None:
    correct, positions = rng(1).integers(0, 5, 30), np.full(30, 5)
    assert ratio_ci(correct, positions, rng()) == ratio_ci(correct, positions, rng())
    assert ratio_ci(correct, positions, rng()) != ratio_ci(correct, positions, rng(1))


def test_chunks_change_memory_and_not_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    correct, positions = rng(1).integers(0, 5, 30), np.full(30, 5)
    whole = ratio_ci(correct, positions, rng())
    monkeypatch.setattr(bootstrap, "CHUNK", 77)
    assert ratio_ci(correct, positions, rng()) == whole


def test_nothing_judged_gives_no_interval_and_unjudged_workflows_do_no_harm() -> None:
    assert np.isnan(ratio_ci(np.zeros(3), np.zeros(3), rng())).all()
    low, high = ratio_ci(np.array([2, 0, 0]), np.array([2, 0, 0]), rng())
    assert (low, high) == (1.0, 1.0)


@pytest.mark.parametrize("shapes", [((2,), (3,)), ((2, 2), (2, 2)), ((0,), (0,))])
def test_wrong_shapes_are_named(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="one number a workflow"):
        ratio_ci(np.zeros(shapes[0]), np.zeros(shapes[1]), rng())


def test_pairing_narrows_the_interval() -> None:
    hard = rng(2).binomial(10, rng(3).uniform(0, 1, 60))
    better = np.minimum(hard + 1, 10)
    positions = np.full(60, 10)
    low, high = ratio_ci(better - hard, positions, rng())
    alone = ratio_ci(hard, positions, rng())
    assert 0 < low < high <= 0.1
    assert high - low < (alone[1] - alone[0]) / 3


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=40), st.integers(0, 9))
def test_swapping_the_two_mirrors_the_interval(pairs: list[tuple[int, int]], seed: int) -> None:
    a, b = np.array(pairs).T
    positions = np.full(len(pairs), 5)
    low, high = ratio_ci(a - b, positions, rng(seed), resamples=50)
    mirrored = ratio_ci(b - a, positions, rng(seed), resamples=50)
    np.testing.assert_allclose(mirrored, (-high, -low), atol=1e-12)
    assert -1 <= low <= high <= 1


@pytest.mark.slow
def test_the_interval_covers_the_truth_as_often_as_promised() -> None:
    generator, covered, trials = rng(5), 0, 300
    for _ in range(trials):
        skill = generator.beta(6, 3, size=80)  # mean 2/3: workflows differ in how hard they are
        positions = generator.integers(1, 12, size=80)
        low, high = ratio_ci(generator.binomial(positions, skill), positions, generator, resamples=400)
        covered += low <= 2 / 3 <= high
    assert 0.90 <= covered / trials <= 0.98
