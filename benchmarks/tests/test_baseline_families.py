"""What every baseline keeps to: distributions, no look ahead, no END that was not seen, the seed; and it learns."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from baseline_samples import (
    ASKED,
    BY_NAME,
    EVERY,
    NEURAL,
    READS_COMPLETION,
    TRACES,
    fitted,
    make,
    plain,
    with_random_states,
)
from numpy.typing import NDArray
from paper_baselines.nearest import NearestPrefixes
from paper_baselines.neural import NeuralConfig
from paper_baselines.tcn import Tcn

from presage.datasets.synthetic.workflows import generate
from presage.errors import ConfigurationError
from presage.features.moment import MOMENTS, Moment
from presage.features.prefixes import MASKED, Prefixes, prefixes_of
from presage.features.states import captured_source
from presage.features.vocabulary import Vocabulary
from presage.predictors.next_agent.ngram import BackoffNgram
from presage.training.baselines import NextAgentEstimator

ONE_EACH = list({name.partition("-")[0]: name for name in reversed(EVERY)}.values())
"""A member of each family."""


def test_every_baseline_answers_to_its_name() -> None:
    for name in EVERY:
        assert BY_NAME[name].make(0, 100).name == name


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("name", EVERY)
def test_forecasts_are_distributions_whatever_the_trace(name: str, trace: str) -> None:
    train, estimator = TRACES[trace], fitted(name, trace)
    asked = replace(ASKED, vocabulary=train.vocabulary, outcomes=ASKED.outcomes[:, : train.horizon])
    agents = np.minimum(ASKED.agent, train.vocabulary.unknown)
    types = np.minimum(ASKED.workflow_type, len(train.vocabulary.workflow_types))
    same_width = {m: s[:, : train.states[m].shape[1]] for m, s in asked.states.items() if m in train.states}
    asked = replace(asked, agent=agents, workflow_type=types, states=same_width)
    for prefixes in (train, asked, asked.with_states({})):
        for moment in MOMENTS:
            forecasts = estimator.predict(prefixes, moment)
            assert forecasts.shape == (prefixes.steps, train.horizon, train.vocabulary.outcomes)
            assert forecasts.dtype == np.float32
            assert np.isfinite(forecasts).all()
            assert (forecasts >= 0).all()
            np.testing.assert_allclose(forecasts.sum(axis=-1), 1, atol=1e-5)


def both(estimator: NextAgentEstimator, prefixes: Prefixes) -> dict[Moment, NDArray[np.float32]]:
    return {moment: estimator.predict(prefixes, moment) for moment in MOMENTS}


@pytest.mark.parametrize("name", EVERY)
def test_a_forecast_does_not_depend_on_what_comes_later(name: str) -> None:
    estimator = fitted(name, "both states")
    now = with_random_states(plain(("abcabc", "cbacba", "bbbaaa")), 1)
    later = with_random_states(plain(("abccba", "cbabca", "bbbbcb")), 2)  # the first three steps are the same
    first = now.position < 3
    states = {}
    for moment, known in (("prefill", first), ("completion", now.position < 2)):  # the third step's output comes later
        states[moment] = np.where(known[:, None], now.states[moment], later.states[moment])
    later = replace(later, states=states, outcomes=np.full_like(later.outcomes, MASKED))
    before, after = both(estimator, now), both(estimator, later)
    np.testing.assert_allclose(before["prefill"][first], after["prefill"][first], atol=1e-6)
    second = now.position < 2
    np.testing.assert_allclose(before["completion"][second], after["completion"][second], atol=1e-6)
    assert np.abs(before["prefill"][~first] - after["prefill"][~first]).max() > 0


@pytest.mark.parametrize("name", EVERY)
def test_a_workflow_is_forecast_alone_as_among_others(name: str) -> None:
    estimator = fitted(name, "both states")
    together = both(estimator, ASKED)
    for w in range(ASKED.workflows):
        alone = both(estimator, ASKED.take(np.array([w])))
        for moment in MOMENTS:
            rows = slice(ASKED.offsets[w], ASKED.offsets[w + 1])
            np.testing.assert_allclose(alone[moment], together[moment][rows], atol=1e-5)


@pytest.mark.parametrize("name", ONE_EACH)
def test_the_seed_decides_and_nothing_global_is_touched(name: str) -> None:
    train = TRACES["both states"]
    torch.manual_seed(1)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first = both(make(name, seed=3).fit(train, train), train)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    torch.manual_seed(2)
    np.random.seed(5)
    again = both(make(name, seed=3).fit(train, train), train)
    for moment in MOMENTS:
        np.testing.assert_array_equal(first[moment], again[moment])
    if name in NEURAL:
        other = both(make(name, seed=4).fit(train, train), train)
        assert np.abs(other["prefill"] - first["prefill"]).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_EACH)
def test_a_cut_workflow_teaches_no_end(name: str) -> None:
    words = ("abc", "bac", "cab", "acb") * 25
    whole, cut = plain(words), plain(words, cut=range(len(words)))
    ended, never = (make(name, epochs=15).fit(p, p).predict(whole, "prefill")[:, 0, -1] for p in (whole, cut))
    last = whole.position == 2
    assert ended[last].mean() > 0.3
    assert never[last].mean() < 0.12, "END was never seen, and never taught"


@pytest.mark.slow
@pytest.mark.parametrize("name", READS_COMPLETION)
def test_an_output_that_tells_is_read_at_completion_alone(name: str) -> None:
    rng = np.random.default_rng(0)
    words = ["a" + next_one for next_one in rng.choice(["b", "c"], 160)]
    prefixes = plain(tuple(words))
    comes = np.where(prefixes.outcomes[:, :1] == 1, 1.0, -1.0) * (prefixes.agent[:, None] == 0)
    noise = rng.standard_normal((prefixes.steps, 2)).astype(np.float32) * 0.3
    prefixes = prefixes.with_states({"prefill": noise, "completion": (noise + comes).astype(np.float32)})
    train, validation, test = (prefixes.take(np.arange(*ends)) for ends in ((0, 90), (90, 110), (110, 160)))
    estimator = make(name, epochs=15).fit(train, validation)
    at_a = test.agent == 0
    right = {
        moment: (estimator.predict(test, moment)[at_a, 0].argmax(axis=-1) == test.outcomes[at_a, 0]).mean()
        for moment in MOMENTS
    }
    assert right["completion"] > 0.9
    assert right["prefill"] < 0.75


@pytest.mark.parametrize("name", NEURAL)
def test_without_states_at_completion_both_moments_say_the_same(name: str) -> None:
    forecasts = both(fitted(name, "prefill states alone"), TRACES["prefill states alone"])
    np.testing.assert_array_equal(forecasts["prefill"], forecasts["completion"])


@pytest.mark.parametrize("name", [n for n in EVERY if n.startswith(("knn", "linear", *NEURAL))])
def test_sizes_are_no_input_and_a_missing_state_is_the_mean_one(name: str) -> None:
    estimator = fitted(name, "both states")
    sized = replace(ASKED, sizes=np.ones_like(ASKED.sizes))
    gone = ASKED.with_states({moment: np.full_like(states, np.nan) for moment, states in ASKED.states.items()})
    for moment in MOMENTS:
        np.testing.assert_array_equal(estimator.predict(sized, moment), estimator.predict(ASKED, moment))
        np.testing.assert_array_equal(estimator.predict(gone, moment), estimator.predict(ASKED.with_states({}), moment))


def test_what_cannot_be_is_refused_by_fit() -> None:
    train = plain()
    with pytest.raises(ConfigurationError, match="dropout from 0 to less than 1"):
        Tcn("small", NeuralConfig(dropout=1.0)).fit(train, train)
    with pytest.raises(ConfigurationError, match="neighbours is 0"):
        NearestPrefixes(0).fit(train, train)


@cache
def law(name: str, workflows: int) -> tuple[Prefixes, Prefixes, Prefixes]:
    """Training, validation and test prefixes of a known law, with states of 24 numbers."""
    drawn = generate(name, workflows + 400, 0, state_size=24).table
    vocabulary = Vocabulary.from_table(drawn)
    source = captured_source(drawn)
    prefixes = prefixes_of(drawn, vocabulary, 3).with_states(source.states(drawn))
    ends = (0, round(0.85 * workflows), workflows, workflows + 400)
    train, validation, test = (prefixes.take(np.arange(*pair)) for pair in pairwise(ends))
    return train, validation, test


def accuracy(estimator: NextAgentEstimator, test: Prefixes, moment: Moment) -> float:
    asked = test.outcomes[:, 0] != MASKED
    likeliest = estimator.predict(test, moment)[asked, 0].argmax(axis=-1)
    return float((likeliest == test.outcomes[asked, 0]).mean())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tcn-small", "transformer-1", "rgcn"])
def test_what_reads_the_steps_in_order_beats_counting_pairs(name: str) -> None:
    train, validation, test = law("triage", 250)
    markov = accuracy(BackoffNgram(1).fit(train, validation), test, "prefill")
    estimator = BY_NAME[name].make(0, train.steps).fit(train, validation)
    assert accuracy(estimator, test, "prefill") > markov + 0.07
    assert accuracy(estimator, test, "completion") > markov + 0.15


@pytest.mark.slow
@pytest.mark.parametrize("name", ["knn-5", "linear-probe", "mlp-small"])
def test_what_reads_one_vector_beats_the_commonest_outcome(name: str) -> None:
    train, validation, test = law("retry", 250)
    known = test.outcomes[:, 0] != MASKED
    commonest = np.bincount(test.outcomes[known, 0]).max() / known.sum()
    estimator = BY_NAME[name].make(0, train.steps).fit(train, validation)
    at_prefill, at_completion = (accuracy(estimator, test, moment) for moment in MOMENTS)
    assert at_prefill > commonest + 0.3
    assert at_completion > at_prefill + 0.03
