"""The host keeps what was used last, and of what follows each other the first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed; the host's cache is a connector of its scheduler")

from presage.replay.host_tier import HostCache

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

A, B, C, D = b"a", b"b", b"c", b"d"


def test_the_least_recently_used_goes_first() -> None:
    host = HostCache(3)
    host.keep([A])
    host.keep([B])
    host.keep([C])
    host.keep([A])
    host.keep([D])
    assert [host.found([one]) for one in (A, B, C, D)] == [1, 0, 1, 1]


def test_of_a_sequence_the_end_goes_first() -> None:
    host = HostCache(2)
    host.keep([A, B, C])
    assert host.found([A, B, C]) == 2
    host.keep([D])
    assert host.found([A, B]) == 1


def test_what_is_found_are_the_first_in_a_row() -> None:
    host = HostCache(4)
    host.keep([A, C])
    assert (host.found([A, B, C]), host.found([B, A]), host.found([])) == (1, 0, 0)


@given(st.lists(st.lists(st.integers(0, 9), unique=True, max_size=6), max_size=30), st.integers(1, 8))
def test_it_is_the_last_so_many_that_were_used(used: list[list[int]], blocks: int) -> None:
    host, order = HostCache(blocks), []
    for sequence in used:
        host.keep([bytes([one]) for one in sequence])
        order += reversed(sequence)
    last = list(dict.fromkeys(reversed(order)))[:blocks]
    assert {one for one in range(10) if host.found([bytes([one])])} == set(last)


def test_to_ask_is_no_use() -> None:
    host = HostCache(2)
    host.keep([A])
    host.keep([B])
    host.found([A])
    host.keep([C])
    assert host.found([A]) == 0
