"""Back-off n-grams: Witten–Bell by hand, by a plain dictionary, and the laws every forecast keeps."""

from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.errors import ConfigurationError
from presage.features.prefixes import Prefixes
from presage.predictors.next_agent.ngram import START, BackoffNgram, lookup
from presage.testing.prefixes import prefixes_from

WORDS = st.lists(st.text("abcx", min_size=1, max_size=7), min_size=1, max_size=12)


def fitted(prefixes: Prefixes, order: int = 3) -> BackoffNgram:
    return BackoffNgram(order).fit(prefixes, prefixes)


def test_witten_bell_by_hand() -> None:
    # "ab", "aab" over one type: outcomes one step ahead are b END a b END, at a: b a b, at b: END END.
    model = fitted(prefixes_from(["ab", "aab"], agents="ab", horizon=1), order=1)
    ahead = model.predict(prefixes_from(["ab"], agents="ab", horizon=1), "prefill")[:, 0]
    uniform = np.full(3, 1 / 3)
    all_types = (np.array([1, 2, 2]) + 3 * uniform) / (5 + 3)  # a, b and END: T = 3
    of_type = (np.array([1, 2, 2]) + 3 * all_types) / (5 + 3)
    np.testing.assert_allclose(of_type, [0.21875, 0.390625, 0.390625])
    np.testing.assert_allclose(ahead[0], (np.array([1, 2, 0]) + 2 * of_type) / (3 + 2), rtol=1e-6)
    np.testing.assert_allclose(ahead[1], (np.array([0, 0, 2]) + 1 * of_type) / (2 + 1), rtol=1e-6)
    np.testing.assert_allclose(ahead[0], [0.2875, 0.55625, 0.15625], rtol=1e-6)


def test_each_horizon_counts_its_own_step_ahead_and_nothing_after_end() -> None:
    model = fitted(prefixes_from(["aab"], agents="ab", horizon=3), order=1)
    at_a = model.predict(prefixes_from(["a"], agents="ab", horizon=3), "prefill")[0]
    # Counted at a: one step ahead a b, two steps b END, three steps END alone (the second a has nothing there).
    assert at_a[0].argmin() == 2
    assert at_a[1].argmin() == 0
    assert at_a[2].argmax() == 2


def test_the_start_is_a_symbol_and_ends_the_context() -> None:
    model = fitted(prefixes_from(["ab", "ca", "aab"], agents="abc"), order=3)
    rows = model.rows_at(prefixes_from(["aa", "caa"], agents="abc"))
    first, again, _, _, elsewhere = rows
    assert first == lookup(model.table.keys, model.table.values, 0, 0, START, START)
    assert model.table.evidence[rows].tolist() == [2, 1, 1, 1, 1]
    assert again == lookup(model.table.keys, model.table.values, 0, 0, 0, START)
    assert elsewhere == lookup(model.table.keys, model.table.values, 0, 0, 0, 2) != again  # "aa", not from the start


def test_an_unknown_workflow_type_is_answered_over_all_types() -> None:
    words, both = ["ab", "ba"], ("s", "t")
    model = fitted(prefixes_from(words, agents="ab", types=both, known_types=both), order=1)
    unknown = prefixes_from(["ab"], agents="ab", types=["?"], known_types=both)
    ahead = model.predict(unknown, "prefill")[:, 0]
    all_types = (np.array([1, 1, 2]) + 3 * np.full(3, 1 / 3)) / (4 + 3)
    np.testing.assert_allclose(ahead[0], (np.array([0, 1, 1]) + 2 * all_types) / (2 + 2), rtol=1e-6)
    known = model.predict(prefixes_from(["ab"], agents="ab", types=["s"], known_types=both), "prefill")[:, 0]
    assert known[0].argmax() == 1
    assert known[0, 1] > ahead[0, 1]


def test_nothing_to_count_gives_the_uniform_distribution() -> None:
    model = fitted(prefixes_from(["a"], agents="ab", cut={0}))
    np.testing.assert_allclose(model.predict(prefixes_from(["ab"], agents="ab"), "completion"), 1 / 3)


def _by_dictionary(train: Prefixes, words: list[str], order: int) -> list[list[Fraction]]:
    """One step ahead at each step of `words`, with exact fractions and one dictionary: the definition, slowly."""
    size = train.vocabulary.outcomes
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    symbols = [[*train.agent[a:b].tolist()] for a, b in zip(train.offsets, train.offsets[1:], strict=False)]

    def contexts(before: list[int]) -> list[tuple[int, ...]]:
        """Every context of a step, longest first: its type's (0), then over all types (1)."""
        reach = [*reversed(before), START][:order]
        known = next((i for i, a in enumerate(reach) if a == train.vocabulary.unknown), len(reach))
        return [(owner, *reach[:length]) for owner in (0, 1) for length in range(known, -1, -1)]

    row = 0
    for agents in symbols:
        for step in range(len(agents)):
            if 0 <= (came := int(train.outcomes[row, 0])) < size:
                for context in contexts(agents[: step + 1]):
                    counts[context][came] += 1
            row += 1

    def probability(chain: list[tuple[int, ...]], outcome: int) -> Fraction:
        if not chain:
            return Fraction(1, size)
        if len(chain) > 1 and len(chain[0]) == 1:
            chain = [chain[0], (1,)]  # the empty context of a type backs off to that of all types
        counted = counts[chain[0]]
        prior = probability(chain[1:], outcome)
        total, distinct = sum(counted.values()), len(counted)
        return (counted[outcome] + distinct * prior) / (total + distinct) if total else prior

    answers = []
    for word in words:
        agents = [train.vocabulary.agent(a) for a in word]
        for step in range(len(word)):
            chain = contexts(agents[: step + 1])
            answers.append([probability(chain, outcome) for outcome in range(size)])
    return answers


@settings(max_examples=40)
@given(WORDS, WORDS, st.integers(1, 3))
def test_agrees_with_the_definition_in_exact_fractions(words: list[str], queries: list[str], order: int) -> None:
    train = prefixes_from(words, agents="abc", cut={1})
    found = fitted(train, order).predict(prefixes_from(queries, agents="abc"), "prefill")[:, 0]
    np.testing.assert_allclose(found, np.array(_by_dictionary(train, queries, order), float), rtol=1e-5)


@settings(max_examples=40)
@given(WORDS, WORDS, st.integers(1, 3))
def test_every_forecast_is_a_distribution_without_zeros(words: list[str], queries: list[str], order: int) -> None:
    found = fitted(prefixes_from(words, agents="abc"), order).predict(prefixes_from(queries, agents="abc"), "prefill")
    assert found.min() > 0
    np.testing.assert_allclose(found.sum(axis=-1), 1, atol=1e-5)


@settings(max_examples=40)
@given(WORDS, st.integers(0, 99), st.integers(1, 3))
def test_the_order_of_the_workflows_does_not_matter(words: list[str], seed: int, order: int) -> None:
    types = ["s" if word[0] == "a" else "t" for word in words]
    train = prefixes_from(words, agents="abc", types=types, known_types=("s", "t"))
    shuffled = np.random.default_rng(seed).permutation(len(words))
    first, second = fitted(train, order), fitted(train.take(shuffled), order)
    np.testing.assert_array_equal(first.predict(train, "prefill"), second.predict(train, "prefill"))
    for name, tensor in first.to_tensors().items():
        np.testing.assert_array_equal(tensor, second.to_tensors()[name])


@settings(max_examples=40)
@given(WORDS, WORDS, st.integers(1, 3))
def test_an_artefact_gives_back_the_same_forecasts(words: list[str], queries: list[str], order: int) -> None:
    model = fitted(prefixes_from(words, agents="abc"), order)
    again = BackoffNgram.from_tensors(model.to_tensors(), model.vocabulary, model.horizon)
    asked = prefixes_from(queries, agents="abc")
    np.testing.assert_array_equal(again.predict(asked, "prefill"), model.predict(asked, "prefill"))
    np.testing.assert_array_equal(again.table.evidence, model.table.evidence)
    assert (again.name, again.order) == (model.name, order)


def test_an_artefact_of_30_agents_and_1000_workflows_of_10_steps_is_small() -> None:
    rng = np.random.default_rng(0)
    agents = [chr(ord("A") + i) for i in range(30)]
    # Three likely successors an agent, any other one time in ten.
    words = []
    for _ in range(1000):
        word = [int(rng.integers(30))]
        while len(word) < 10:
            stray = rng.random() < 0.1
            word.append(int(rng.integers(30)) if stray else (word[-1] * 7 + int(rng.integers(3))) % 30)
        words.append("".join(agents[a] for a in word))
    tensors = fitted(prefixes_from(words, agents="".join(agents))).to_tensors()
    assert sum(tensor.nbytes for tensor in tensors.values()) < 150_000


@pytest.mark.parametrize("order", [0, 4])
def test_an_order_out_of_range_is_refused_by_fit(order: int) -> None:
    with pytest.raises(ConfigurationError, match="1 to 3"):
        fitted(prefixes_from(["ab"], agents="ab"), order)


def test_too_many_names_are_refused() -> None:
    types = tuple(f"t{i}" for i in range(2**14))
    with pytest.raises(ConfigurationError, match="run numbers"):
        fitted(prefixes_from(["ab"], agents="ab", known_types=types))
