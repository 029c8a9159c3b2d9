"""kNN against brute force, the linear probe against counting, and the vectors both read."""

import numpy as np
import pytest
from baseline_samples import ASKED, TRACES, plain, with_random_states
from paper_baselines.linear_probe import LinearProbe
from paper_baselines.nearest import NearestPrefixes
from paper_baselines.reduction import reduce_states
from paper_baselines.vectors import PrefixVectors

from presage.features.history import RECENT
from presage.features.moment import MOMENTS
from presage.features.prefixes import Prefixes, join


def with_states_that_tell(prefixes: Prefixes) -> Prefixes:
    """Random states whose first number is the next outcome."""
    drawn = with_random_states(prefixes)
    states = {moment: state.copy() for moment, state in drawn.states.items()}
    for state in states.values():
        state[:, 0] += 3 * prefixes.outcomes[:, 0]
    return drawn.with_states(states)


@pytest.mark.parametrize("moment", MOMENTS)
def test_votes_are_those_of_a_search_by_hand(moment: str) -> None:
    words = ("abcab", "bca", "ccab", "abcc", "axb", "cabcabca", "bbca", "acca", "abca", "bcc", "baab")
    told = with_states_that_tell(plain(words, cut={1, 3}))
    train, validation = told.take(np.arange(8)), told.take(np.arange(8, 11))
    fitted = NearestPrefixes(3).fit(train, validation)
    weight = fitted.weight[moment]  # type: ignore[index]
    assert weight > 0  # else many prefixes are equally near, and any of them may vote
    kept = join(train, validation)

    def rows(prefixes):  # type: ignore[no-untyped-def]
        vectors = PrefixVectors().fit(train, 0)(prefixes, moment)  # type: ignore[arg-type]
        agents = vectors.recent.reshape(prefixes.steps, RECENT, -1) * (0.5 ** np.arange(RECENT))[:, None]
        states = np.hstack([vectors.state, vectors.earlier]) * weight
        return np.hstack([agents.reshape(prefixes.steps, -1), vectors.workflow_type, states])

    stored, asked = rows(kept), rows(ASKED)
    forecasts = fitted.predict(ASKED, moment)  # type: ignore[arg-type]
    size = train.vocabulary.outcomes
    for k in range(3):
        known = np.flatnonzero((kept.outcomes[:, k] >= 0) & (kept.outcomes[:, k] < size))
        share = np.bincount(kept.outcomes[known, k], minlength=size) / len(known)
        for row in range(ASKED.steps):
            nearest = known[np.argsort(np.square(stored[known] - asked[row]).sum(axis=1), kind="stable")[:3]]
            votes = np.bincount(kept.outcomes[nearest, k], minlength=size) + share
            np.testing.assert_allclose(forecasts[row, k], votes / 4, atol=1e-5)


def test_fewer_prefixes_than_neighbours_all_vote() -> None:
    train = plain(("ab", "ba"), agents="ab")
    forecasts = NearestPrefixes(20).fit(train, train).predict(train, "prefill")
    np.testing.assert_allclose(forecasts, np.broadcast_to(forecasts[0], forecasts.shape), atol=1e-6)


def test_a_probe_on_agents_alone_learns_what_counting_finds() -> None:
    rng = np.random.default_rng(0)
    words = tuple("ab" if rng.random() < 0.3 else "ac" for _ in range(600))
    train = plain(words)
    forecasts = LinearProbe().fit(train, train).predict(plain(("a", "b")), "prefill")
    share = np.mean([word == "ab" for word in words])
    np.testing.assert_allclose(forecasts[0, 0], [0, share, 1 - share, 0], atol=0.01)
    np.testing.assert_allclose(forecasts[1, 0], [0, 0, 0, 1], atol=0.01)
    np.testing.assert_allclose(forecasts[0, 1], [0, 0, 0, 1], atol=1e-6)  # two steps ahead END alone was seen


def test_what_training_never_saw_says_nothing() -> None:
    train = TRACES["both states"]
    vectors = PrefixVectors().fit(train, 0)(ASKED, "prefill")
    unknown = ASKED.agent == train.vocabulary.unknown
    assert unknown.any()
    assert not vectors.recent.reshape(ASKED.steps, RECENT, -1)[unknown, 0].any()
    assert not vectors.workflow_type.any()
    assert not vectors.state[:, 5:].any(), "no prefill knows its completion state"


def test_components_that_hardly_vary_are_not_blown_up() -> None:
    rng = np.random.default_rng(0)
    prefixes = plain(("abc",) * 200)
    states = rng.standard_normal((prefixes.steps, 6)).astype(np.float32)
    states[:, 3:] *= 0.01
    states[0] = np.nan
    projection = reduce_states(prefixes.with_states({"prefill": states + 50}), 0)["prefill"]
    reduced = projection(states + 50)
    assert not reduced[0].any()
    np.testing.assert_allclose(reduced[1:].mean(axis=0), 0, atol=0.05)
    assert (reduced[:, :3].std(axis=0) > 0.8).all()
    assert (reduced[:, 3:].std(axis=0) < 0.1).all()
