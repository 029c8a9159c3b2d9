"""The multilevel feedback queue of mlfq.py: who falls, who returns to the top, and who runs first."""

from hypothesis import given
from hypothesis import strategies as st
from mlfq import FeedbackQueue


def serve(queue: FeedbackQueue, request: str, iterations: int, since: int = 1) -> list[int]:
    """Iterations after which the request fell a level."""
    return [at for at in range(since, since + iterations) if queue.selected([request], at)]


def test_each_level_has_twice_the_quantum_of_the_one_above_and_the_last_keeps_its_requests() -> None:
    queue = FeedbackQueue(quantum=4, levels=3)
    queue.add("a", 0, 0.0, "t", None)
    assert serve(queue, "a", 100) == [4, 4 + 8]
    assert queue.key("a").level == 2
    assert queue.demoted == 2


def test_a_new_request_runs_before_one_that_has_been_served_and_equals_run_by_arrival() -> None:
    queue = FeedbackQueue(quantum=2)
    for arrival, name in enumerate("abc"):
        queue.add(name, 0, float(arrival), "t", 1000.0 - arrival)  # remaining tokens do not count
    serve(queue, "a", 2)
    assert sorted("abc", key=queue.key) == ["b", "c", "a"]


def test_a_starved_request_returns_to_the_top_with_its_whole_quantum() -> None:
    queue = FeedbackQueue(quantum=2, starved_after=10)
    queue.add("a", 0, 0.0, "t", None)
    serve(queue, "a", 3)  # fell in iteration 2, last served in 3
    assert queue.age(13) == []
    assert queue.age(14) == ["a"]
    assert queue.key("a").level == 0
    assert serve(queue, "a", 2, since=14) == [15]


@given(st.lists(st.sets(st.sampled_from("abcdef")), max_size=60), st.integers(1, 5), st.integers(1, 4))
def test_levels_stay_within_bounds_and_nothing_is_left_of_requests_that_left(
    turns: list[set[str]], quantum: int, levels: int
) -> None:
    queue = FeedbackQueue(quantum, levels, starved_after=7)
    for arrival, name in enumerate("abcdef"):
        queue.add(name, 0, float(arrival), "t", None)
    for at, chosen in enumerate(turns, 1):
        queue.age(at)
        queue.selected(chosen, at)
        assert all(0 <= queue.key(name).level < levels for name in "abcdef")
    for name in "abcdef":
        queue.remove(name)
    assert queue.debug_state() == {"priority keys": 0}
