"""The compiled forecast against plain NumPy and plain Python, and the same numbers however it is asked for."""

from dataclasses import replace

import numpy as np
import pytest
from engine_samples import PREFIX, Sample, dense_logits, gru_step, random_sample
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from presage.features.inputs import inputs_size, sums_size
from presage.predictors import engine as e
from presage.predictors.common.probabilities import softmax
from presage.predictors.engine import with_shares
from presage.predictors.next_agent.kernels import (
    completed,
    exponential,
    forecast_row,
    forecast_trace,
    network_logits,
    opened,
    prefilled,
    softmax_rows,
    step_prefix,
    tree_logits,
)
from presage.predictors.next_agent.network_weights import encode_all, encoding_size
from presage.testing.prefixes import prefixes_from

WORDS = st.lists(st.text("abcx", min_size=1, max_size=7), min_size=1, max_size=5)
TWO_TYPES = ("t", "u")
NOTHING = np.empty(0, np.float32)


def sample_of(words: list[str], seed: int, horizon: int = 3, **more: object) -> Sample:
    types = [("t", "u", "other")[i % 3] for i in range(len(words))]
    prefixes = prefixes_from(words, agents="abc", types=types, known_types=TWO_TYPES, horizon=horizon)
    return random_sample(prefixes, seed, **more)  # type: ignore[arg-type]


def rows_of(sample: Sample) -> NDArray[np.float32]:
    """Workflow rows before their first step."""
    width = inputs_size(sample.agents, sample.tools, *sample.widths) + sums_size(*sample.widths) + PREFIX
    rows = np.full((sample.prefixes.workflows, width), 9, np.float32)
    for row, workflow_type in zip(rows, sample.prefixes.workflow_type, strict=True):
        opened(row, workflow_type, sample.engine)
    return rows


def by_trace(sample: Sample) -> NDArray[np.float32]:
    p = sample.prefixes
    out = np.full((2, p.steps, p.horizon, p.vocabulary.outcomes), np.nan, np.float32)
    forecast_trace(p.offsets, p.workflow_type, p.agent, p.sizes, p.called, *sample.states, sample.engine, out)
    return out


# --- arithmetic ---


def test_the_exponential_is_within_two_in_ten_million() -> None:
    x = np.concatenate([np.linspace(-87, 88, 400_001), [0.0, -87.0, 88.0, 1e-8, -1e-8]]).astype(np.float32)
    found = x.copy()
    exponential(found)
    wanted = np.exp(x.astype(float))
    assert np.abs(found / wanted - 1).max() < 2e-7
    assert found[np.flatnonzero(x == 0)].tolist() == [1.0] * int((x == 0).sum())


def test_the_exponential_beyond_its_range_stays_at_the_ends() -> None:
    x = np.array([-1e30, -200, -87.5, 89, 1e30, -np.inf, np.inf], np.float32)
    exponential(x)
    np.testing.assert_allclose(x, np.exp([-87, -87, -87, 88, 88, -87, 88]), rtol=1e-6)
    assert (x > 0).all()


@given(st.integers(1, 33), st.floats(0, 1e4), st.integers(0, 1000))
def test_rows_of_logits_become_positive_probabilities_that_sum_to_one(width: int, spread: float, seed: int) -> None:
    logits = (np.random.default_rng(seed).normal(size=(3, width)) * spread).astype(np.float32)
    found = logits.copy()
    softmax_rows(found)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, atol=1e-5)
    np.testing.assert_allclose(found, softmax(logits.astype(float)), rtol=2e-5, atol=1e-30)
    assert (found > 0).all()


def test_the_encoding_by_hand() -> None:
    # agents a b and the unknown; after "abb": counts, then 1 / (1 + steps since), position, run, run >= 2, 3, 4
    x = np.array([[1, 1, 0, -1, -1, 1, 2, 0, 2, 0, 99, 2, 2]], np.float32)
    found = encode_all(x, 2)
    assert found.shape == (1, encoding_size(2))
    wanted = [*np.log1p([1, 2, 0]), 1 / 3, 1, 1 / 100, *np.log1p([2, 2]), 1, 0, 0]
    np.testing.assert_allclose(found[0], wanted, rtol=1e-6)


def test_the_encoding_of_a_long_workflow_stays_at_its_cap() -> None:
    x = np.array([[0, 0, 0, 0, 0, 1e4, 300, 0, 0, 0, 99, 1e4, 1e4]], np.float32)
    found = encode_all(x, 2)[0]
    np.testing.assert_allclose(found[[0, 1, 6, 7]], np.log(256), rtol=1e-6)
    assert found[8:].tolist() == [1, 1, 1]


# --- trees ---


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.tuples(*[st.integers(0, 9)] * 7), st.integers(1, 5), st.integers(0, 7))
@example(0, (0, 0, 0, 0, 0, 0, 0), 1, 3)
@example(0, (0, 2, 3, 0, 9, 1, 2), 3, 1)
@example(0, (8, 3, 0, 4, 0, 0, 9), 3, 2)
@example(0, (9, 4, 17, 5, 8, 3, 2), 5, 0)
@example(0, (9, 4, 17, 5, 8, 3, 2), 5, 4)
def test_trees_are_their_comparisons_and_only_those_a_step_can_answer(
    seed: int, trees: tuple[int, ...], depth: int, pattern: int
) -> None:
    sample = sample_of(["abca", "bb"], seed, trees=trees, depth=depth)
    engine, rng = sample.engine, np.random.default_rng(seed)
    for moment in (0, 1):
        for _ in range(5):
            # Whole numbers meet the thresholds exactly: equal goes right.
            x = rng.integers(-2, 5, inputs_size(3, sample.tools, *sample.widths)).astype(np.float32)
            out = np.full(12, np.nan, np.float32)
            tree_logits(x, moment, pattern, engine, out)
            np.testing.assert_allclose(out, sample.tree_logits(x, moment, pattern), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("value", "side"), [(1.0, 1), (np.nextafter(np.float32(1), np.float32(0)), 0), (2, 1), (-5, 0)]
)
def test_a_value_equal_to_the_threshold_goes_right(value: float, side: int) -> None:
    sample = sample_of(["ab"], 0, trees=(1, 0, 0, 0, 0, 0, 0), depth=1)
    stump = replace(
        sample.trees["ids"],
        feature=np.array([[4]], np.int16),
        threshold=np.array([[1]], np.float32),
        leaves=np.array([[[-1] * 12, [1] * 12]], np.int8),
        scale=np.ones(12, np.float32),
        base=np.zeros(12, np.float32),
    )
    x = np.zeros(inputs_size(3, sample.tools, *sample.widths), np.float32)
    x[4] = value
    out = np.empty(12, np.float32)
    tree_logits(x, 0, 0, replace(sample, trees=sample.trees | {"ids": stump}).engine, out)
    assert out.tolist() == [(-1, 1)[side]] * 12


# --- the network ---


@settings(max_examples=30)
@given(WORDS, st.integers(0, 1000), st.sampled_from([(3, 2), (0, 0), (5, 0), (0, 4)]))
def test_network_and_prefix_are_their_equations(words: list[str], seed: int, widths: tuple[int, int]) -> None:
    sample = sample_of(words, seed, widths=widths)
    engine, inputs, prefixes = sample.engine, sample.inputs(), sample.prefixes
    for w in range(prefixes.workflows):
        hidden, wanted = np.zeros(PREFIX, np.float32), np.zeros(PREFIX)
        for row in range(prefixes.offsets[w], prefixes.offsets[w + 1]):
            for moment in (0, 1):
                out = np.empty(12, np.float32)
                network_logits(inputs[moment][row], hidden, moment, engine, out)
                np.testing.assert_allclose(
                    out, dense_logits(sample, inputs[moment][row], wanted, moment), rtol=1e-4, atol=1e-4
                )
            step_prefix(inputs[1][row], hidden, engine)
            wanted = gru_step(sample, inputs[1][row], wanted)
            np.testing.assert_allclose(hidden, wanted, rtol=1e-4, atol=1e-5)


def test_gates_driven_to_their_ends_stay_finite() -> None:
    sample = sample_of(["ab"], 0)
    wild = replace(
        sample, network=replace(sample.network, arrays={k: v * 1000 for k, v in sample.network.arrays.items()})
    )
    hidden = np.zeros(PREFIX, np.float32)
    for x in wild.inputs()[1]:
        step_prefix(x, hidden, wild.engine)
        assert (np.abs(hidden) <= 1).all()
    assert np.isfinite(by_trace(wild)).all()


# --- the mixture ---


@settings(max_examples=30)
@given(WORDS, st.integers(0, 1000), st.integers(1, 5))
def test_a_forecast_is_the_logarithmic_pool_of_those_that_know_enough(
    words: list[str], seed: int, horizon: int
) -> None:
    sample = sample_of(words, seed, horizon=horizon)
    engine, inputs, prefixes = sample.engine, sample.inputs(), sample.prefixes
    counted = sample.ngram.predict(prefixes, "prefill")
    hidden = np.random.default_rng(seed).normal(size=PREFIX).astype(np.float32)
    for row in range(prefixes.steps):
        enough = sample.evidence[prefixes.workflow_type[prefixes.workflow[row]], prefixes.agent[row]]
        for moment in (0, 1):
            x = inputs[moment][row]
            out = np.full((horizon, 4), np.nan, np.float32)
            assert forecast_row(x, hidden, moment, engine, out) == enough
            of_type = sample.evidence[prefixes.workflow_type[prefixes.workflow[row]]].sum()
            if enough < sample.enough and of_type < sample.enough:
                np.testing.assert_allclose(out, counted[row], rtol=1e-5)
                continue
            logits = np.empty(4 * horizon, np.float32)
            network_logits(x, hidden, moment, engine, logits)
            pattern = sample.pattern(x, moment)
            network, trees, ngram = sample.shares[pattern, moment, :, :, None].astype(float)
            if enough < sample.enough and prefixes.agent[row] != prefixes.vocabulary.unknown:
                network, ngram = 0 * network, network + ngram
            of_trees = sample.tree_logits(x, moment, pattern).reshape(horizon, 4)
            pooled = network * logits.reshape(horizon, 4) + trees * of_trees
            wanted = softmax(pooled + ngram * np.log(counted[row].astype(float)))
            np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-7)


def test_with_the_n_gram_alone_a_forecast_is_the_n_gram() -> None:
    sample = sample_of(["abca", "bbc", "cab"], 0)
    shares = np.zeros_like(sample.shares)
    shares[:, :, 2] = 1
    out = by_trace(replace(sample, shares=shares, enough=0))
    for moment in (0, 1):
        np.testing.assert_allclose(out[moment], sample.ngram.predict(sample.prefixes, "prefill"), rtol=1e-5)


def test_other_shares_leave_the_engine_as_it_was() -> None:
    sample = sample_of(["abca"], 0)
    engine, before = sample.engine, sample.engine.floats.copy()
    shares = np.ones_like(sample.shares)
    other = with_shares(engine, shares, 7)
    np.testing.assert_array_equal(engine.floats, before)
    assert engine.numbers[e.ENOUGH] == 2
    assert other.numbers[e.ENOUGH] == 7
    np.testing.assert_array_equal(other.floats, replace(sample, shares=shares).engine.floats)


# --- the same numbers ---


@settings(max_examples=60)
@given(WORDS, st.integers(0, 10_000), st.integers(1, 5), st.sampled_from([(3, 2), (0, 0), (5, 0), (0, 4)]))
def test_a_trace_and_a_workflow_alone_give_the_same_bits(
    words: list[str], seed: int, horizon: int, widths: tuple[int, int]
) -> None:
    sample = sample_of(words, seed, horizon=horizon, widths=widths)
    p, engine = sample.prefixes, sample.engine
    trace = by_trace(sample)
    assert not np.isnan(trace).any()
    assert (trace > 0).all()
    np.testing.assert_allclose(trace.sum(axis=-1), 1.0, atol=1e-5)
    sizes = np.nan_to_num(p.sizes)
    here, has_here, done, has_done = sample.states
    alone = rows_of(sample)
    out = np.empty(trace.shape[2:], np.float32)
    for step in range(max(map(len, words))):
        going = [w for w, word in enumerate(words) if step < len(word)]
        at = np.array([p.offsets[w] + step for w in going])
        for w, row in zip(going, at, strict=True):
            state = here[row] if has_here[row] else NOTHING
            evidence = prefilled(alone[w], p.agent[row], sizes[row, 0], state, engine, out)
            np.testing.assert_array_equal(out, trace[0, row])
            assert evidence == sample.evidence[p.workflow_type[w], p.agent[row]]
            state = done[row] if has_done[row] else NOTHING
            called = NOTHING if np.isnan(p.called[row, 0]) else p.called[row]
            completed(alone[w], sizes[row, 1], state, called, engine, out)
            np.testing.assert_array_equal(out, trace[1, row])


@settings(max_examples=20)
@given(WORDS, st.integers(0, 1000))
def test_the_order_of_workflows_does_not_matter(words: list[str], seed: int) -> None:
    sample = sample_of(words, seed)
    order = np.random.default_rng(seed).permutation(len(words))
    rows = np.concatenate([np.arange(*sample.prefixes.offsets[w : w + 2]) for w in order])
    here, has_here, done, has_done = sample.states
    moved = replace(
        sample,
        prefixes=sample.prefixes.take(order),
        states=(here[rows], has_here[rows], done[rows], has_done[rows]),
    )
    np.testing.assert_array_equal(by_trace(moved), by_trace(sample)[:, rows])


def test_a_workflow_opened_again_remembers_nothing() -> None:
    sample = sample_of(["abcabc"], 3)
    engine, row = sample.engine, rows_of(sample)[0]
    fresh, out = row.copy(), np.empty((3, 4), np.float32)
    for agent in (0, 1, 3, 2):
        prefilled(row, agent, 1.0, sample.states[0][0], engine, out)
        completed(row, 1.0, sample.states[2][0], np.ones(1 + sample.tools, np.float32), engine, out)
    opened(row, sample.prefixes.workflow_type[0], engine)
    np.testing.assert_array_equal(row, fresh)
