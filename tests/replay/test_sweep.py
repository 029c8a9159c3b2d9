"""The numbers that a sweep tries, and the one that it takes."""

from itertools import pairwise

import pytest

from presage.replay.policies import POLICIES
from presage.replay.runs import best, most_at_once, tried


@pytest.mark.parametrize("most", [1, 3, 4, 5, 72, 500])
def test_numbers_rise_by_a_quarter_to_the_most_and_each_is_tried_once(most: int) -> None:
    numbers = [policy.at_once for policy in tried(POLICIES["best-fixed"], most)]
    assert numbers == sorted(set(numbers))  # type: ignore[type-var]
    assert numbers[-1] == most
    assert all(b <= max(a + 1, 1.25 * a) for a, b in pairwise(numbers))  # type: ignore[operator]


def test_the_soonest_completion_wins_and_of_equals_the_smaller_number() -> None:
    assert best({n: {"completion_mean_s": s} for n, s in ((8, 5.0), (16, 3.0), (24, 3.0), (32, 4.0))}) == 16


def test_there_are_never_more_at_once_than_workflows() -> None:
    assert most_at_once(72, 64, range(200)) == 72
    assert most_at_once(None, 64, range(200)) == 128
    assert most_at_once(72, 64, range(10)) == 10
