"""The queue by hand, and what must hold of any queue."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.datasets.synthetic.lengths import generate_lengths
from presage.features.lengths import LengthEncoder, length_rows
from presage.training.length.queue import (
    FIRST_COME,
    ORACLE,
    SHORTEST_STEP,
    compare,
    completions,
    queued,
)

LENGTHS = st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=5), min_size=1, max_size=8)


def done(work: list[list[float]], keys: list[list[float]], arrivals: list[float]) -> list[float]:
    offsets = np.cumsum([0, *map(len, work)])
    found = completions(np.concatenate(work), np.concatenate(keys), offsets, np.array(arrivals, float))
    return found.tolist()


def remaining(steps: list[float]) -> list[float]:
    return [sum(steps[place:]) for place in range(len(steps))]


def test_first_come_takes_requests_in_turn() -> None:
    # 0 comes first and runs until 4; 1 has waited since 1, so the second step of 0 waits until 4 + 3.
    assert done([[4, 2], [3]], [[0, 0], [0]], [0, 1]) == [9, 7]


def test_a_step_is_not_interrupted_and_the_lower_key_goes_next() -> None:
    assert done([[4, 2], [3]], [[6, 2], [3]], [0, 1]) == [6, 9]
    assert done([[4, 2], [3]], [[0, 5], [3]], [0, 1]) == [9, 7]


def test_the_server_waits_for_who_comes_later() -> None:
    assert done([[2], [3]], [[0], [0]], [0, 10]) == [2, 13]
    assert done([[2], [3]], [[0], [0]], [10, 0]) == [12, 3]


def test_the_shortest_first_by_hand() -> None:
    # All at once: totals 5, 1, 3 run as 1, 3, 5.
    work = [[2.0, 3.0], [1.0], [3.0]]
    assert done(work, [remaining(steps) for steps in work], [0, 0, 0]) == [9, 1, 4]


def test_among_equals_who_waits_longest_goes_first() -> None:
    assert done([[5], [1], [1]], [[0], [7], [7]], [0, 2, 1]) == [5, 7, 6]


@given(LENGTHS, st.integers(0, 2**32 - 1))
def test_law_all_at_once_no_order_beats_the_shortest_total(work: list[list[float]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    at_once = [0.0] * len(work)
    best = np.mean(done(work, [remaining(steps) for steps in work], at_once))
    first = np.mean(done(work, [[0.0] * len(steps) for steps in work], at_once))
    other = np.mean(done(work, [rng.integers(0, 9, len(steps)).tolist() for steps in work], at_once))
    assert best <= first + 1e-9
    assert best <= other + 1e-9


@given(LENGTHS, st.integers(0, 2**32 - 1))
def test_law_the_server_idles_only_when_nobody_waits(work: list[list[float]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrivals = rng.uniform(0, 30, len(work)).tolist()
    ends = {max(done(work, [rng.integers(0, 9, len(steps)).tolist() for steps in work], arrivals)) for _ in range(3)}
    assert max(ends) == pytest.approx(min(ends)), "every order is through at the same moment"
    assert all(
        end >= came + sum(steps) - 1e-9
        for end, came, steps in zip(done(work, [[0.0] * len(s) for s in work], arrivals), arrivals, work, strict=True)
    )


PREDICTED = "predicted"


def drawn(workflows: int, noise: float) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 8, workflows)
    offsets = np.append(0, np.cumsum(sizes))
    work = rng.lognormal(5, 1, sizes.sum())
    left = np.concatenate([np.cumsum(work[a:b][::-1])[::-1] for a, b in pairwise(offsets)])
    return work, {PREDICTED: left * rng.lognormal(0, noise, len(left))}, offsets


def test_a_better_forecast_is_worth_more_and_the_truth_most() -> None:
    found = compare(*drawn(300, 0.0), seed=0)
    assert found.completion[PREDICTED] == found.completion[ORACLE]
    some = compare(*drawn(300, 1.0), seed=0)
    assert some.completion[ORACLE] == found.completion[ORACLE], "the same arrivals"
    assert some.completion[ORACLE] < some.completion[PREDICTED] < some.completion[FIRST_COME]
    assert some.completion[SHORTEST_STEP] < some.completion[FIRST_COME]
    told = some.to_dict()
    assert told["workflows"] == 300
    assert told["saved"][FIRST_COME] == 0
    assert told["saved"][ORACLE] == pytest.approx(1 - some.completion[ORACLE] / some.completion[FIRST_COME])


def test_a_queue_without_work_is_through_at_once() -> None:
    nothing = compare(np.zeros(3), {}, np.array([0, 2, 3]), seed=0)
    assert set(nothing.completion.values()) == {0.0}
    assert nothing.to_dict()["saved"][ORACLE] == 0


TABLE = generate_lengths(120, 0, censored=0.3).table
ROWS = length_rows(TABLE, LengthEncoder.fit(TABLE))


def test_only_workflows_whose_every_step_is_known_stand_in_the_queue() -> None:
    waiting = queued(ROWS)
    assert waiting is not None
    whole = np.asarray(TABLE["complete"].to_numpy(), bool)
    assert np.array_equal(waiting.taken, whole)
    assert waiting.work == pytest.approx(TABLE["output_tokens"].to_numpy()[whole], abs=0.5)  # labels are float32 sums
    assert len(waiting.offsets) - 1 == len(set(TABLE["workflow_id"].filter(TABLE["complete"]).to_pylist()))


def test_a_trace_of_cut_workflows_has_no_queue() -> None:
    assert queued(ROWS.take(ROWS.lower_bound)) is None
