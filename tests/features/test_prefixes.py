"""Labels and transitions by hand, and that choosing and joining workflows moves whole rows."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from word_samples import prefixes_in, trace_of

from presage.datasets.schema import conform
from presage.features.prefixes import MASKED, Prefixes, join, prefixes_of, transition_matrix
from presage.features.vocabulary import Vocabulary

END, UNSEEN, NONE = 2, 3, MASKED  # over the agents a and b
WORDS = st.lists(st.text("abx", min_size=1, max_size=6), min_size=1, max_size=8)


def test_the_labels_of_a_complete_workflow_end_with_end_and_then_ask_nothing() -> None:
    assert prefixes_in(["abb"], "ab").outcomes.tolist() == [[1, 1, END], [1, END, NONE], [END, NONE, NONE]]


def test_a_cut_workflow_never_teaches_end() -> None:
    prefixes = prefixes_in(["abb", "ab"], "ab", cut=[0])
    assert prefixes.outcomes[:3].tolist() == [[1, 1, NONE], [1, NONE, NONE], [NONE, NONE, NONE]]
    assert prefixes.outcomes[3:].tolist() == [[1, END, NONE], [END, NONE, NONE]]


def test_an_agent_out_of_the_vocabulary_is_unknown_as_an_input_and_unseen_as_a_label() -> None:
    prefixes = prefixes_in(["axb"], "ab")
    assert prefixes.agent.tolist() == [0, 2, 1]
    assert prefixes.outcomes.tolist() == [[UNSEEN, 1, END], [1, END, NONE], [END, NONE, NONE]]


def test_a_horizon_longer_than_the_workflow_is_masked() -> None:
    assert prefixes_in(["a"], "ab", horizon=5).outcomes.tolist() == [[END, NONE, NONE, NONE, NONE]]
    assert prefixes_in(["ab"], "ab", horizon=1).outcomes.tolist() == [[1], [END]]


def plainly(word: str, complete: bool, horizon: int) -> list[list[int]]:
    codes = [{"a": 0, "b": 1}.get(agent, UNSEEN) for agent in word] + [END if complete else NONE] + [NONE] * horizon
    return [codes[step + 1 : step + 1 + horizon] for step in range(len(word))]


@given(WORDS, st.integers(1, 4), st.sets(st.integers(0, 7)))
def test_labels_are_those_of_a_plain_loop(words: list[str], horizon: int, cut: set[int]) -> None:
    prefixes = prefixes_in(words, "ab", horizon=horizon, cut=cut)
    wanted = [row for w, word in enumerate(words) for row in plainly(word, w not in cut, horizon)]
    assert prefixes.outcomes.tolist() == wanted
    assert not (prefixes.outcomes[np.isin(prefixes.workflow, list(cut))] == END).any()
    assert (prefixes.workflows, prefixes.steps, prefixes.horizon) == (len(words), sum(map(len, words)), horizon)
    assert prefixes.position.tolist() == [step for word in words for step in range(len(word))]


def test_equal_ids_of_two_workflow_types_are_two_workflows() -> None:
    rows = [{"workflow_type": t, "workflow_id": "w", "step": s, "agent": "ab"[s]} for t in "tu" for s in range(2)]
    vocabulary = Vocabulary(("t",), ("a", "b"))
    prefixes = prefixes_of(conform(pa.Table.from_pylist(rows), "test"), vocabulary, 1)
    assert prefixes.offsets.tolist() == [0, 2, 4]
    assert prefixes.workflow_type.tolist() == [0, 1]
    assert len(set(prefixes.task.tolist())) == 2


def test_workflows_of_one_task_share_a_number_and_those_without_stand_alone() -> None:
    table = trace_of(["ab", "ba", "a", "b"], tasks=["q", "r", "q", None])
    q, r, again, alone = prefixes_of(table, Vocabulary(("t",), ("a", "b")), 1).task.tolist()
    assert q == again
    assert len({q, r, alone}) == 3


def test_a_count_that_no_float_holds_is_rounded() -> None:
    row = {"workflow_type": "t", "workflow_id": "w", "step": 0, "agent": "a", "input_tokens": 2**31 - 1}
    table = conform(pa.Table.from_pylist([row]), "test")
    assert prefixes_of(table, Vocabulary(("t",), ("a",)), 1).sizes[0, 0] == pytest.approx(np.log(2.0**31))


def test_sizes_are_logarithms_and_nan_where_not_recorded() -> None:
    rows = [
        {"input_tokens": 0, "output_tokens": None, "input_text": "a text's length is no input"},
        {"input_tokens": 99, "output_tokens": 7, "input_text": None},
    ]
    keys = {"workflow_type": "t", "workflow_id": "w"}
    table = conform(pa.Table.from_pylist([keys | {"step": i, "agent": "a"} | r for i, r in enumerate(rows)]), "test")
    sizes = prefixes_of(table, Vocabulary(("t",), ("a", "b")), 1).sizes
    assert sizes.dtype == np.float32
    wanted = np.log1p([[0, np.nan], [99, 7]])
    np.testing.assert_allclose(sizes, wanted, rtol=1e-6)


def with_states(prefixes: Prefixes) -> Prefixes:
    """The row number as a state, so that a row is known again wherever it goes."""
    state: NDArray[np.float32] = np.arange(prefixes.steps, dtype=np.float32)[:, None]
    return prefixes.with_states({"prefill": state})


@given(WORDS, st.data())
def test_taking_workflows_takes_their_rows_in_the_order_asked(words: list[str], data: st.DataObject) -> None:
    prefixes = with_states(prefixes_in(words, "ab"))
    chosen = np.array(data.draw(st.lists(st.integers(0, len(words) - 1))), np.int64)
    taken = prefixes.take(chosen)
    rows = [row for w in chosen for row in range(prefixes.offsets[w], prefixes.offsets[w + 1])]
    assert taken.states["prefill"][:, 0].tolist() == rows
    assert np.diff(taken.offsets).tolist() == [len(words[w]) for w in chosen]
    for column in ("agent", "outcomes", "sizes"):
        np.testing.assert_array_equal(getattr(taken, column), getattr(prefixes, column)[rows])
    np.testing.assert_array_equal(taken.task, prefixes.task[chosen])


@given(WORDS, st.integers(0, 8))
def test_joining_is_the_inverse_of_taking_apart(words: list[str], at: int) -> None:
    prefixes = with_states(prefixes_in(words, "ab"))
    every = np.arange(prefixes.workflows)
    joined = join(prefixes.take(every[:at]), prefixes.take(every[at:]))
    for column in ("offsets", "workflow_type", "task", "agent", "outcomes", "sizes"):
        np.testing.assert_array_equal(getattr(joined, column), getattr(prefixes, column))
    np.testing.assert_array_equal(joined.states["prefill"], prefixes.states["prefill"])


def test_joining_keeps_the_moments_both_parts_have() -> None:
    prefixes = with_states(prefixes_in(["ab"], "ab"))
    assert join(prefixes, prefixes_in(["ab"], "ab")).states == {}


@pytest.mark.parametrize("chosen", [[], [1]])
def test_no_workflow_and_a_workflow_alone(chosen: list[int]) -> None:
    taken = prefixes_in(["ab", "bba"], "ab").take(np.array(chosen, np.int64))
    assert taken.workflows == len(chosen)
    assert taken.steps == 3 * len(chosen)
    assert taken.outcomes.shape == (taken.steps, 3)


WORDS = st.lists(st.text("abx", min_size=1, max_size=6), min_size=1, max_size=8)


def test_a_is_row_normalised_over_agents_alone() -> None:
    matrix = transition_matrix(prefixes_in(["aab", "ab", "ba"], "ab"))
    assert matrix.dtype == np.float32
    # a -> a once, a -> b twice; b -> a once, its two ENDs are no messages.
    np.testing.assert_allclose(matrix, [[1 / 3, 2 / 3, 0], [1, 0, 0], [0, 0, 0]], rtol=1e-6)


def test_an_agent_that_always_ends_has_an_empty_row() -> None:
    assert not transition_matrix(prefixes_in(["ab"], "ab"))[1].any()


def test_an_unknown_agent_and_the_end_are_no_messages() -> None:
    prefixes = prefixes_in(["ab", "axb"], "ab", cut=[0])
    assert transition_matrix(prefixes).tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]


@given(WORDS)
def test_rows_sum_to_one_or_to_nothing(words: list[str]) -> None:
    prefixes = prefixes_in(words, "ab")
    matrix = transition_matrix(prefixes)
    total = matrix.sum(axis=1)
    assert np.all(np.isclose(total, 1.0) | (total == 0.0))
    assert not matrix[-1].any()
    assert not matrix[:, -1].any()
    moves = [(one, after) for word in words for one, after in pairwise(word)]
    for one, row in zip("ab", matrix, strict=False):
        known = [after for before, after in moves if before == one and after != "x"]
        wanted = [known.count(after) / max(len(known), 1) for after in "ab"]
        np.testing.assert_allclose(row[:2], wanted, rtol=1e-6)
