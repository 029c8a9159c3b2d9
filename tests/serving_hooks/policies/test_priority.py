"""Short workflows go first, nobody starves, and silence about one's length gains nothing."""

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from presage.serving_hooks.policies.priority import (
    MOST_TOKENS,
    PriorityConfig,
    ShortestTotalJobFirst,
    vllm_priority,
)


def queue(starved_after: int = 3, quantum: int = 2, **medians: float) -> ShortestTotalJobFirst:
    return ShortestTotalJobFirst(PriorityConfig(starved_after, quantum), medians)


def order(queue: ShortestTotalJobFirst, *requests: str) -> list[str]:
    return sorted(requests, key=queue.key)


def test_the_workflow_with_least_left_goes_first_and_arrival_breaks_ties() -> None:
    stjf = queue()
    for request, arrival, remaining in (("late", 2.0, 50), ("long", 0.0, 900), ("early", 1.0, 50)):
        stjf.add(request, 0, arrival, "coding", remaining)
    assert order(stjf, "late", "long", "early") == ["early", "late", "long"]
    stjf.forecast("long", "coding", 10)
    assert order(stjf, "late", "long", "early") == ["long", "early", "late"]


def test_s_iterations_without_selection_promote_and_q_selected_ones_demote() -> None:
    stjf = queue(starved_after=3, quantum=2)
    stjf.add("long", 0, 0.0, "coding", 900)
    assert [stjf.age(i) for i in range(4)] == [[], [], [], ["long"]]
    stjf.add("short", 3, 1.0, "coding", 5)
    assert order(stjf, "short", "long") == ["long", "short"]
    assert stjf.selected(["long"], 3) == []
    assert stjf.selected(["long"], 4) == ["long"]
    assert order(stjf, "short", "long") == ["short", "long"]
    assert (stjf.promoted, stjf.demoted) == (1, 1)


def test_a_selection_starts_the_wait_anew() -> None:
    stjf = queue(starved_after=3)
    stjf.add("a", 0, 0.0, "coding", 5)
    stjf.selected(["a"], 1)
    assert [stjf.age(i) for i in range(2, 6)] == [[], [], [], ["a"]]


def test_without_a_forecast_a_request_stands_at_its_types_median_then_in_the_middle_then_behind() -> None:
    stjf = queue(coding=400.0, support=100.0, research=2000.0)
    assert stjf.add("a", 0, 0.0, "support", None).remaining_tokens == 100
    assert stjf.add("b", 0, 0.0, "unheard of", None).remaining_tokens == 400
    assert stjf.add("c", 0, 0.0, "support", math.nan).remaining_tokens == 100
    blank = queue()
    blank.add("silent", 0, 0.0, "support", None)
    blank.add("long", 0, 1.0, "support", 10_000_000)
    assert order(blank, "silent", "long") == ["long", "silent"]


def test_a_finished_request_leaves_nothing_behind_that_ages_its_successor_early() -> None:
    stjf = queue(starved_after=3)
    stjf.add("a", 0, 0.0, "coding", 5)
    stjf.remove("a")
    stjf.remove("a")
    assert len(stjf) == 0
    stjf.add("a", 2, 0.0, "coding", 5)
    assert [stjf.age(i) for i in range(3, 6)] == [[], [], ["a"]]
    assert len(stjf) == 1


def test_a_name_that_comes_again_while_its_predecessor_was_in_the_batch_has_a_quantum_of_its_own() -> None:
    stjf = queue(starved_after=2, quantum=3)
    stjf.add("a", 0, 0.0, "coding", 5)
    assert [stjf.age(i) for i in (1, 2)] == [[], ["a"]]
    stjf.selected(["a"], 2)
    stjf.selected(["a"], 3)
    stjf.remove("a")
    stjf.add("a", 4, 0.0, "coding", 5)
    assert [stjf.age(i) for i in (5, 6)] == [[], ["a"]]
    assert [stjf.selected(["a"], i) for i in (6, 7, 8)] == [[], [], ["a"]]


jobs = st.lists(
    st.tuples(st.integers(0, 25), st.integers(1, 12), st.integers(0, 40)),  # arrival, iterations of work, forecast
    min_size=1,
    max_size=25,
)


@given(jobs, st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_nothing_starves(
    jobs: list[tuple[int, int, int]], places: int, starved_after: int, quantum: int, preempts: bool
) -> None:
    """The bound of the module, whatever the forecasts claim; running requests may or may not keep their places."""
    stjf = queue(starved_after, quantum)
    left = {f"r{i}": work for i, (_, work, _) in enumerate(jobs)}
    waits = {}  # since when, what it may have to wait for
    running: list[str] = []
    iteration = 0
    while left:
        for i, (arrival, _, forecast) in enumerate(jobs):
            if arrival == iteration:
                stjf.add(f"r{i}", iteration, arrival, "coding", forecast)
        stjf.age(iteration)
        here = [f"r{i}" for i, job in enumerate(jobs) if job[0] <= iteration and f"r{i}" in left]
        for request in here:
            if request not in waits:
                soon = [f"r{i}" for i, job in enumerate(jobs) if job[0] < iteration + starved_after]
                waits[request] = (iteration, sum(left.get(other, 0) for other in soon if other != request))
        kept = [] if preempts else running
        chosen = kept + [r for r in sorted(here, key=stjf.key) if r not in kept][: places - len(kept)]
        for request in set(here) - set(chosen):
            since, work = waits[request]
            assert iteration + 1 - since <= work // places
        stjf.selected(chosen, iteration)
        for request in chosen:
            waits.pop(request)
            left[request] -= 1
            if not left[request]:
                del left[request]
                stjf.remove(request)
        running = [request for request in chosen if request in left]
        iteration += 1


@given(st.lists(st.sets(st.integers(0, 4)), max_size=40), st.integers(1, 5), st.integers(1, 4))
def test_the_heap_finds_whom_a_scan_finds(selections: list[set[int]], starved_after: int, quantum: int) -> None:
    stjf, level, unselected, served = queue(starved_after, quantum), [0] * 5, [0] * 5, [0] * 5
    for request in range(5):
        stjf.add(f"r{request}", 0, request, "coding", 1)
    for iteration, selection in enumerate(selections):
        stjf.age(iteration)
        for request in range(5):
            if unselected[request] == starved_after:
                level[request], unselected[request], served[request] = level[request] - 1, 0, 0
        assert [stjf.key(f"r{request}").level for request in range(5)] == level
        stjf.selected([f"r{request}" for request in sorted(selection)], iteration)
        for request in range(5):
            unselected[request] = 0 if request in selection else unselected[request] + 1
            if request in selection and level[request] < 0:
                served[request] += 1
                if served[request] == quantum:
                    level[request], served[request] = level[request] + 1, 0


ranks = st.tuples(st.integers(-1000, 0), st.one_of(st.integers(0, MOST_TOKENS), st.just(math.inf)))


@given(st.lists(ranks, min_size=2))
def test_one_number_keeps_the_order_of_the_key(ranks: list[tuple[int, float]]) -> None:
    ranks = sorted(set(ranks))
    assert all(vllm_priority(*a) <= vllm_priority(*b) for a, b in pairwise(ranks))


def test_the_lower_number_runs_first_in_vllm() -> None:
    assert vllm_priority(-1, 900) < vllm_priority(0, 5) < vllm_priority(0, 6) < vllm_priority(0, math.inf)
    assert isinstance(vllm_priority(0, 5.7), int)
