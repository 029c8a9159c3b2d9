"""PBKV's predictor against its equations written out step by step, and what it cannot see."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from presage.errors import ConfigurationError
from presage.features.prefixes import Prefixes, transition_matrix
from presage.predictors.next_agent.baselines import (
    PublishedConfig,
    PublishedGraphSage,
    PublishedNetwork,
    earlier_agents,
)
from presage.predictors.next_agent.ngram import BackoffNgram
from presage.testing.prefixes import prefixes_from
from presage.training.metrics import measure


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on a busy machine wait for each other longer than these small products take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


QUICK = PublishedConfig(dim=8, epochs=3)


def sample(state_size: int = 0) -> Prefixes:
    prefixes = prefixes_from(["abcab", "b", "cca", "abc"] * 5, agents="abc")
    if not state_size:
        return prefixes
    states = np.random.default_rng(0).standard_normal((prefixes.steps, state_size)).astype(np.float32)
    return prefixes.with_states({"prefill": states})


def test_eq_3_and_4_step_by_step() -> None:
    prefixes = sample(state_size=4)
    network = PublishedGraphSage(QUICK).fit(prefixes, prefixes).network
    p = {name: value.detach() for name, value in network.state_dict().items()}
    A = torch.from_numpy(transition_matrix(prefixes))
    H = p["H0"]
    for W in (p["W1"], p["W2"]):
        nodes = []
        for v in range(len(H)):
            neighbours = sum((A[v, u] * H[u] for u in range(len(H))), torch.zeros(8))
            nodes.append(torch.relu(W @ torch.cat([H[v], neighbours])))
        H = torch.stack(nodes)
    torch.testing.assert_close(network.embeddings().detach(), H)

    forecasts = PublishedGraphSage(QUICK).fit(prefixes, prefixes).predict(prefixes, "prefill")
    for w in range(4):
        for row in range(prefixes.offsets[w], prefixes.offsets[w + 1]):
            current = H[prefixes.agent[row]]
            before = [H[v] for v in prefixes.agent[prefixes.offsets[w] : row]]
            weight = [torch.exp((p["Wq"] @ current) @ key / math.sqrt(8)) for key in before]
            path = sum((a / sum(weight) * key for a, key in zip(weight, before, strict=True)), torch.zeros(8))
            text = torch.relu(p["Wt"] @ torch.from_numpy(prefixes.states["prefill"][row]))
            hidden = torch.relu(p["hidden"] @ torch.cat([current, path, text]) + p["hidden_bias"])
            logits = (p["out"] @ hidden + p["out_bias"]).view(3, 4)
            np.testing.assert_allclose(forecasts[row], logits.softmax(dim=-1).numpy(), atol=1e-5)


def test_size_at_5120_dimensions_is_about_what_the_paper_says() -> None:
    network = PublishedNetwork(torch.zeros(8, 8), 5120, 3, PublishedConfig(), torch.Generator())
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(350_000, rel=0.1)


def test_earlier_agents_counts_within_the_workflow_and_not_the_step_itself() -> None:
    prefixes = prefixes_from(["aab", "ba"], agents="ab")
    assert earlier_agents(prefixes).tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [0, 0, 0], [0, 1, 0]]


def test_the_seed_decides_everything_and_the_global_generator_nothing() -> None:
    prefixes = sample(state_size=4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = PublishedGraphSage(QUICK).fit(prefixes, prefixes).predict(prefixes, "prefill")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = PublishedGraphSage(QUICK).fit(prefixes, prefixes).predict(prefixes, "prefill")
    other = PublishedGraphSage(PublishedConfig(dim=8, epochs=3, seed=1)).fit(prefixes, prefixes)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other.predict(prefixes, "prefill"))


def test_it_knows_one_moment() -> None:
    prefixes = sample(state_size=4)
    fitted = PublishedGraphSage(QUICK).fit(prefixes, prefixes)
    np.testing.assert_array_equal(fitted.predict(prefixes, "prefill"), fitted.predict(prefixes, "completion"))


def test_a_missing_state_is_the_zero_vector_and_states_may_be_absent_altogether() -> None:
    prefixes = sample(state_size=4)
    fitted = PublishedGraphSage(QUICK).fit(prefixes, prefixes)
    nothing = {"prefill": np.full((prefixes.steps, 4), np.nan, np.float32)}
    zeros = {"prefill": np.zeros((prefixes.steps, 4), np.float32)}
    expected = fitted.predict(prefixes.with_states(zeros), "prefill")
    np.testing.assert_array_equal(fitted.predict(prefixes.with_states(nothing), "prefill"), expected)
    np.testing.assert_array_equal(fitted.predict(prefixes.with_states({}), "prefill"), expected)
    without = PublishedGraphSage(QUICK).fit(sample(), sample()).predict(prefixes, "prefill")
    np.testing.assert_allclose(without.sum(axis=-1), 1, atol=1e-5)


def test_unknown_agents_unseen_outcomes_and_cut_workflows_are_no_obstacle() -> None:
    prefixes = prefixes_from(["axb", "ab", "x", "b"], agents="ab", cut={1, 3})
    forecasts = PublishedGraphSage(QUICK).fit(prefixes, prefixes).predict(prefixes, "prefill")
    assert np.isfinite(forecasts).all()


def test_early_stopping_keeps_the_best_epoch_of_the_validation() -> None:
    rng = np.random.default_rng(0)
    noise = ["".join(rng.choice(list("abc"), 6)) for _ in range(40)]
    train, validation = prefixes_from(noise[:20], agents="abc"), prefixes_from(noise[20:], agents="abc")
    losses = {}
    for patience in (3, None):
        config = PublishedConfig(epochs=60, learning_rate=0.01, patience=patience)
        fitted = PublishedGraphSage(config).fit(train, validation)
        forecasts = fitted.predict(validation, "prefill")
        losses[fitted.name] = measure(forecasts, validation.outcomes, validation.workflow, rng, 10).nll[0]
    assert losses["published-graphsage"] < losses["published-graphsage-60-epochs"] - 0.2


def test_attention_is_blind_to_order_where_a_trigram_sees() -> None:
    # After "c" comes whichever of "a" and "b" came first: the counts say nothing, the order says all.
    prefixes = prefixes_from(["abca", "bacb"] * 60, agents="abc")
    at_c = np.flatnonzero(prefixes.agent == 2)
    right = {}
    config = PublishedConfig(epochs=10, patience=None)
    for model in (BackoffNgram(3), BackoffNgram(1), PublishedGraphSage(config)):
        forecasts = model.fit(prefixes, prefixes).predict(prefixes, "prefill")
        right[model.name] = (forecasts[at_c, 0].argmax(axis=-1) == prefixes.outcomes[at_c, 0]).mean()
    assert right == {"markov-3": 1.0, "markov-1": 0.5, "published-graphsage-10-epochs": 0.5}


def test_a_configuration_out_of_range_is_refused_by_fit() -> None:
    with pytest.raises(ConfigurationError, match="dropout"):
        PublishedGraphSage(PublishedConfig(dropout=1.0)).fit(sample(), sample())
