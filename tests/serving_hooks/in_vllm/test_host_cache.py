"""The host keeps what was used last, and of what follows each other the first."""

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed; the host's cache is a connector of its scheduler")

from presage.replay.host_tier import HostCache

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

SEQUENCES = st.lists(st.integers(0, 9).map(lambda number: bytes([number])), unique=True, max_size=6)


@given(st.lists(SEQUENCES, max_size=30), st.integers(1, 8), SEQUENCES)
def test_it_finds_the_first_in_a_row_of_the_last_so_many_that_were_used(
    used: list[list[bytes]], blocks: int, asked: list[bytes]
) -> None:
    host, order = HostCache(blocks), list[bytes]()
    for sequence in used:
        host.keep(sequence)
        for block in asked:
            host.found([block])  # to ask is no use
        order += reversed(sequence)
    last = list(dict.fromkeys(reversed(order)))[:blocks]
    assert host.found(asked) == len(list(takewhile(last.__contains__, asked)))
