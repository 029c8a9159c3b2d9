"""A prefetch takes the likeliest first, and nothing that others need: no prefill's time, no active blocks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.serving_hooks.policies.prefetch import PrefetchConfig, plan

SPARE, MOVED = 100, 120.0  # blocks: free, and moved in a step
CONFIG = PrefetchConfig()


def test_the_likeliest_prompt_comes_first_and_the_last_one_in_part() -> None:
    missing = [(0.2, 10), (0.4, 60), (0.7, 50), (0.1, 10)]  # the last is below the least value
    assert plan(CONFIG, SPARE, MOVED, missing) == [(2, 50), (1, 50)]
    assert plan(CONFIG, 51, MOVED, missing) == [(2, 50), (1, 1)]
    assert plan(CONFIG, 200, MOVED, missing) == [(2, 50), (1, 60), (0, 10)]
    assert plan(PrefetchConfig(most_blocks=70), 200, MOVED, missing) == [(2, 50), (1, 20)]


def test_prompts_of_equal_value_keep_their_order() -> None:
    assert plan(CONFIG, SPARE, MOVED, [(0.5, 5), (0.6, 1), (0.5, 7)]) == [(1, 1), (0, 5), (2, 7)]


@pytest.mark.parametrize(
    ("spare", "moved"), [(0, MOVED), (-3, MOVED), (SPARE, 0.6), (SPARE, math.nan), (SPARE, math.inf)]
)
def test_where_nothing_lies_idle_nothing_is_fetched(spare: int, moved: float) -> None:
    assert plan(CONFIG, spare, moved, [(1.0, 5)]) == []


def test_nothing_likely_nothing_fetched() -> None:
    assert plan(CONFIG, SPARE, MOVED, []) == []
    assert plan(CONFIG, SPARE, MOVED, [(0.1, 5), (0.0, 5), (1.0, 0)]) == []


prompts = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40)))


@given(st.integers(0, 60), st.floats(0, 500), prompts)
def test_a_plan_never_exceeds_what_lies_idle_and_leaves_nothing_better_behind(
    spare: int, moved: float, missing: list[tuple[float, int]]
) -> None:
    fetches = plan(CONFIG, spare, moved, missing)
    assert sum(blocks for _, blocks in fetches) <= min(spare, moved)
    taken = [missing[at][0] for at, _ in fetches]
    assert taken == sorted(taken, reverse=True)
    assert all(value >= CONFIG.least_value for value in taken)
    fetched = dict(fetches)
    for at, (value, blocks) in enumerate(missing):
        assert fetched.get(at, 0) <= blocks
        if fetches and value >= CONFIG.least_value and fetched.get(at, 0) < blocks:
            assert taken[-1] >= value  # what was left out is worth no more than what was taken last
