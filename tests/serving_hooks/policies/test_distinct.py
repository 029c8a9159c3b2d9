"""Blocks are counted once, exactly while they are few, and nearly so in little memory when they are many."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.serving_hooks.policies.distinct import Distinct


def hashes(start: int, blocks: int) -> list[bytes]:
    return [hashlib.sha256(str(i).encode()).digest() for i in range(start, start + blocks)]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30), st.integers(0, 50), st.integers(0, 20))
def test_few_are_a_set(added: list[tuple[int, int]], start: int, blocks: int) -> None:
    distinct, model = Distinct(), set[bytes]()
    for one in added:
        distinct.add(hashes(*one))
        model.update(hashes(*one))
    assert len(distinct) == len(model)
    assert distinct.known(hashes(start, blocks)) == len(model & set(hashes(start, blocks)))


def test_many_are_nearly_counted_in_a_set_that_has_an_end() -> None:
    distinct = Distinct(1024)
    for step in range(50):
        distinct.add(hashes(0, 1000 * (step + 1)))
        assert len(distinct._kept) <= 8 * 1024
    assert len(distinct) == pytest.approx(50_000, rel=0.12)
    assert distinct.known(hashes(0, 20_000)) == pytest.approx(20_000, rel=0.2)
    assert distinct.known(hashes(0, 10)) <= 10
    assert distinct.known(hashes(50_000, 20_000)) == 0
