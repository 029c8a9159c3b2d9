"""Labels and transitions by hand, and that choosing and joining workflows moves whole rows."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from word_samples import prefixes_in, trace_of

from presage.datasets.schema import conform
from presage.features.prefixes import MASKED, Prefixes, join, prefixes_of, transition_matrix
from presage.features.vocabulary import Vocabulary

END, UNSEEN, NONE = 2, 3, MASKED  # over the agents a and b
WORDS = st.lists(st.text("abx", min_size=1, max_size=6), min_size=1, max_size=8)


def plainly(word: str, complete: bool, horizon: int) -> list[list[int]]:
    codes = [{"a": 0, "b": 1}.get(agent, UNSEEN) for agent in word] + [END if complete else NONE] + [NONE] * horizon
    return [codes[step + 1 : step + 1 + horizon] for step in range(len(word))]


@given(WORDS, st.integers(1, 4), st.sets(st.integers(0, 7)))
def test_labels_are_those_of_a_plain_loop(words: list[str], horizon: int, cut: set[int]) -> None:
    prefixes = prefixes_in(words, "ab", horizon=horizon, cut=cut)
    wanted = [row for w, word in enumerate(words) for row in plainly(word, w not in cut, horizon)]
    assert prefixes.outcomes.tolist() == wanted
    assert prefixes.agent.tolist() == ["abx".index(agent) for word in words for agent in word], "x is unknown"
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


@given(WORDS, st.sets(st.integers(0, 47)), st.sets(st.integers(0, 7)))
def test_without_steps_workflows_are_those_that_never_had_them(words: list[str], drop: set[int], cut: set[int]) -> None:
    prefixes = prefixes_in(words, "ab", cut=cut)
    rows = iter(range(prefixes.steps))
    kept = {at: left for at, word in enumerate(words) if (left := "".join(a for a in word if next(rows) not in drop))}
    assume(kept)
    remaining = prefixes.without_steps(np.isin(np.arange(prefixes.steps), list(drop)))
    wanted = prefixes_in(list(kept.values()), "ab", cut={place for place, at in enumerate(kept) if at in cut})
    for column in ("offsets", "workflow_type", "agent", "outcomes"):
        np.testing.assert_array_equal(getattr(remaining, column), getattr(wanted, column))
    np.testing.assert_array_equal(remaining.task, prefixes.task[list(kept)])


def test_joining_keeps_the_moments_both_parts_have() -> None:
    prefixes = with_states(prefixes_in(["ab"], "ab"))
    assert join(prefixes, prefixes_in(["ab"], "ab")).states == {}


@given(WORDS)
def test_rows_sum_to_one_or_to_nothing(words: list[str]) -> None:
    prefixes = prefixes_in(words, "ab", cut=[0])
    matrix = transition_matrix(prefixes)
    assert matrix.dtype == np.float32
    total = matrix.sum(axis=1)
    assert np.all(np.isclose(total, 1.0) | (total == 0.0))
    assert not matrix[-1].any()
    assert not matrix[:, -1].any()
    moves = [(one, after) for word in words for one, after in pairwise(word)]
    for one, row in zip("ab", matrix, strict=False):
        known = [after for before, after in moves if before == one and after != "x"]
        wanted = [known.count(after) / max(len(known), 1) for after in "ab"]
        np.testing.assert_allclose(row[:2], wanted, rtol=1e-6)
