"""Blocks are counted once, exactly while they are few, and nearly so in little memory when they are many."""

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.serving_hooks.policies.distinct import Distinct


def hashes(blocks: list[int]) -> list[bytes]:
    """As an engine has them: of each block together with all before it."""
    found = itertools.accumulate(blocks, lambda before, b: hashlib.sha256(before + b"%d" % b).digest(), initial=b"")
    return list(found)[1:]


prompts = st.lists(st.integers(0, 2), max_size=12)


@given(st.lists(prompts, max_size=30), prompts)
def test_few_are_a_set(added: list[list[int]], asked: list[int]) -> None:
    distinct, model = Distinct(), set[bytes]()
    for one in added:
        distinct.add(hashes(one))
        model.update(hashes(one))
        assert len(distinct) == len(model)
    assert distinct.known(hashes(asked)) == len(model & set(hashes(asked)))


@given(st.lists(prompts, max_size=40), prompts)
def test_of_many_no_more_of_a_prompt_is_known_than_was_computed(added: list[list[int]], asked: list[int]) -> None:
    distinct, model = Distinct(32), set[bytes]()
    for one in added:
        distinct.add(hashes(one))
        model.update(hashes(one))
        assert distinct.kept <= 32
    assert distinct.known(hashes(asked)) <= len(model & set(hashes(asked)))


def test_many_are_nearly_counted_in_a_tree_that_has_an_end() -> None:
    distinct, long = Distinct(1024), hashes(list(range(60_000)))
    for step in range(50):
        distinct.add(long[: 1000 * (step + 1)])
        assert distinct.kept <= 1024
    assert len(distinct) == pytest.approx(50_000, rel=0.01)
    assert distinct.known(long[:20_000]) == pytest.approx(20_000, rel=0.01)
    assert distinct.known(long) == pytest.approx(50_000, rel=0.01)
    assert distinct.known(long[:10]) <= 10
    assert distinct.known(hashes([1, *range(20_000)])) == 0


def test_of_long_conversations_with_one_beginning_each_is_known_nearly() -> None:
    distinct, branches = Distinct(1024), [hashes([*range(3000), branch, *range(3000)]) for branch in (-1, -2)]
    for prompt in branches:
        distinct.add(prompt)
    assert len(distinct) == pytest.approx(9000, rel=0.01)
    assert [distinct.known(prompt) for prompt in branches] == pytest.approx([6000, 6000], rel=0.01)


def test_what_no_later_prompt_reads_is_counted_nearly_too() -> None:
    """The output of each step stands behind an instruction that moves: a run for each step."""
    distinct, model = Distinct(1024), set[bytes]()
    history: list[int] = []
    for step in range(400):
        history += range(10 * step, 10 * step + 1 + step % 4)
        prompt = hashes([*history, -1, *range(-3 - step % 5, -2)])
        distinct.add(prompt)
        model.update(prompt)
    assert distinct.kept <= 1024
    assert len(distinct) == pytest.approx(len(model), rel=0.12)
    assert distinct.known(prompt) == pytest.approx(len(prompt), rel=0.02)


def test_short_hashes_are_hashes() -> None:
    distinct = Distinct()
    distinct.add([b"a", b"bcd"])
    assert (distinct.known([b"a", b"bcd", b"d"]), len(distinct)) == (2, 2)
    assert distinct.known([b"a", b"bc"]) == 1
