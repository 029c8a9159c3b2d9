"""The call graph counted by hand."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from word_samples import prefixes_in

from presage.features.call_graph import transition_counts, transition_matrix

WORDS = st.lists(st.text("abx", min_size=1, max_size=6), min_size=1, max_size=8)


def test_transitions_and_ends_by_hand() -> None:
    counts = transition_counts(prefixes_in(["aab", "ab", "b"], "ab"))
    assert counts.tolist() == [[1, 2, 0], [0, 0, 3], [0, 0, 0]]
    assert counts.dtype == np.int64


def test_a_is_row_normalised_over_agents_alone() -> None:
    matrix = transition_matrix(prefixes_in(["aab", "ab", "ba"], "ab"))
    assert matrix.dtype == np.float32
    # a -> a once, a -> b twice; b -> a once, its two ENDs are no messages.
    np.testing.assert_allclose(matrix, [[1 / 3, 2 / 3, 0], [1, 0, 0], [0, 0, 0]], rtol=1e-6)


def test_an_agent_that_always_ends_has_an_empty_row() -> None:
    assert not transition_matrix(prefixes_in(["ab"], "ab"))[1].any()


def test_a_cut_workflow_counts_no_end_and_an_unknown_agent_is_no_message() -> None:
    prefixes = prefixes_in(["ab", "axb"], "ab", cut=[0])
    assert transition_counts(prefixes).tolist() == [[0, 1, 0], [0, 0, 1], [0, 1, 0]]
    assert transition_matrix(prefixes).tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]


@given(WORDS)
def test_rows_sum_to_one_or_to_nothing(words: list[str]) -> None:
    prefixes = prefixes_in(words, "ab")
    matrix = transition_matrix(prefixes)
    total = matrix.sum(axis=1)
    assert np.all(np.isclose(total, 1.0) | (total == 0.0))
    assert not matrix[-1].any()
    assert not matrix[:, -1].any()
    counted = sum(word[i] in "abx" and word[i + 1] != "x" for word in words for i in range(len(word) - 1))
    assert transition_counts(prefixes).sum() == counted + len(words)  # every workflow here ends
