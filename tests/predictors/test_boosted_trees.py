"""Boosted trees: what they may see at each moment, and data too small or too plain to learn from."""

from dataclasses import replace

import numpy as np
import pytest

from presage.features.prefixes import Prefixes
from presage.predictors.next_agent.baselines import BoostedTrees
from presage.testing.prefixes import prefixes_from


def telling(words: int = 120) -> Prefixes:
    """After "a" comes "b" or "c" at random; the prefill state hints at it, the completion state tells it."""
    rng = np.random.default_rng(0)
    prefixes = prefixes_from([f"a{next_one}" for next_one in rng.choice(["b", "c"], words)], agents="abc")
    comes = np.where(prefixes.outcomes[:, :1] == 1, 1.0, -1.0)
    noise = rng.standard_normal((prefixes.steps, 2))
    return prefixes.with_states(
        {"prefill": (0.5 * comes + noise).astype(np.float32), "completion": (4 * comes + noise).astype(np.float32)}
    )


def test_each_moment_sees_its_own_states_and_no_later_ones() -> None:
    prefixes = telling()
    train, test = prefixes.take(np.arange(80)), prefixes.take(np.arange(80, 120))
    at_a = test.agent == 0
    right = {}
    for model in (BoostedTrees(threads=1), BoostedTrees(use_states=False, threads=1)):
        model.fit(train, test)
        for moment in ("prefill", "completion"):
            likeliest = model.predict(test, moment)[at_a, 0].argmax(axis=-1)
            right[model.name, moment] = (likeliest == test.outcomes[at_a, 0]).mean()
    assert right["boosted-trees", "completion"] == 1.0
    assert right["boosted-trees", "prefill"] < 0.9
    assert right["boosted-trees-ids", "completion"] == right["boosted-trees-ids", "prefill"] < 0.7


def test_output_sizes_are_known_at_completion_alone() -> None:
    prefixes = telling().with_states({})
    sizes = prefixes.sizes.copy()
    sizes[:, 1] = prefixes.outcomes[:, 0]  # output_tokens give it away
    leaking = replace(prefixes, sizes=sizes)
    model = BoostedTrees(threads=1).fit(leaking, leaking)
    at_a = prefixes.agent == 0
    truth = prefixes.outcomes[at_a, 0]
    assert (model.predict(leaking, "completion")[at_a, 0].argmax(axis=-1) == truth).all()
    assert (model.predict(leaking, "prefill")[at_a, 0].argmax(axis=-1) == truth).mean() < 0.7


@pytest.mark.parametrize(
    "words",
    [["ab", "ba", "a"], ["a", "a", "a"], ["ab"] * 30, ["ax", "xb", "b"]],
    ids=["three workflows", "END alone", "one class a horizon", "unknown agents"],
)
def test_data_too_small_to_learn_from_still_gives_distributions(words: list[str]) -> None:
    prefixes = prefixes_from(words, agents="abc")
    model = BoostedTrees(threads=1).fit(prefixes, prefixes)
    forecasts = model.predict(prefixes_from(["abc", "x"], agents="abc"), "completion")
    assert forecasts.shape == (4, 3, 4)
    np.testing.assert_allclose(forecasts.sum(axis=-1), 1, atol=1e-5)


def test_a_horizon_where_nothing_is_known_is_uniform() -> None:
    prefixes = prefixes_from(["ab", "ba"], agents="ab", cut={0, 1})
    forecasts = BoostedTrees(threads=1).fit(prefixes, prefixes).predict(prefixes, "prefill")
    np.testing.assert_allclose(forecasts[:, 2], 1 / 3)


def test_outcomes_that_came_a_few_times_only_do_not_spoil_the_rest() -> None:
    # "a" and "b" in turn, one step in forty is one of forty others: a class for each, seen once or twice.
    rng = np.random.default_rng(0)
    rare = [chr(ord("A") + i) for i in range(26)] + [chr(ord("k") + i) for i in range(14)]
    words = ["".join(rng.choice(rare) if rng.random() < 1 / 40 else "ab"[i % 2] for i in range(24)) for _ in range(150)]
    prefixes = prefixes_from(words, agents="ab" + "".join(rare))
    train, test = prefixes.take(np.arange(100)), prefixes.take(np.arange(100, 150))
    forecasts = BoostedTrees(threads=1).fit(train, train).predict(test, "prefill")[:, 0]
    right = forecasts.argmax(axis=-1) == test.outcomes[:, 0]
    assert right.mean() > 0.95


def test_states_that_are_missing_in_the_test_are_unknown_and_not_zero() -> None:
    prefixes = telling()
    model = BoostedTrees(threads=1).fit(prefixes, prefixes)
    gone = {moment: np.full_like(states, np.nan) for moment, states in prefixes.states.items()}
    np.testing.assert_array_equal(
        model.predict(prefixes.with_states(gone), "completion"), model.predict(prefixes.with_states({}), "completion")
    )


def test_the_seed_decides() -> None:
    prefixes = telling(40)
    first, again = (
        BoostedTrees(seed=1, threads=1).fit(prefixes, prefixes).predict(prefixes, "prefill") for _ in range(2)
    )
    np.testing.assert_array_equal(first, again)
