"""Schedules: every call once, after what it reads, and as short as the best of all."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given as given_that
from hypothesis import settings
from hypothesis import strategies as st

from presage.batch import Plan, call, given, join, template
from presage.batch.operators import Operator
from presage.batch.prefix_tree import field_tokens, tree_of
from presage.batch.schedule import Costs, PlannedCall, depths, planned_calls, schedule, soft_order

CACHE = 1000.0


@st.composite
def plans(draw: st.DrawFn, most: int = 12) -> list[PlannedCall]:
    calls: list[PlannedCall] = []
    for number in range(draw(st.integers(1, most))):
        after = tuple(sorted(draw(st.sets(st.integers(0, number - 1), max_size=2)))) if number else ()
        top = draw(st.integers(0, 2))
        path = ((top, 100.0 * (top + 1)), (100 + number, float(draw(st.integers(1, 300)))))
        calls.append(PlannedCall(path, float(draw(st.integers(1, 100))), after))
    return calls


@given_that(plans(), st.integers(1, 3), st.sampled_from([0, 200]))
@settings(deadline=None)
def test_every_call_is_there_once_and_nothing_waits_for_itself(
    calls: list[PlannedCall], workers: int, moves: int
) -> None:
    found = schedule(calls, workers, CACHE, moves=moves)
    assert sorted(index for worker in found.workers for index in worker) == list(range(len(calls)))
    costs = Costs(calls, CACHE)
    assert found.makespan == costs.makespan(found.workers) < float("inf")
    assert found.makespan >= max(costs.usage(index, index) for index in range(len(calls)))
    assert schedule(calls, workers, CACHE, moves=moves) == found


@given_that(plans(most=5))
@settings(deadline=None, max_examples=12)
def test_one_workers_schedule_is_the_best_of_all_orders(calls: list[PlannedCall]) -> None:
    costs = Costs(calls, CACHE)
    best = min(costs.makespan([order]) for order in permutations(range(len(calls))))
    assert schedule(calls, 1, CACHE).makespan == pytest.approx(best)


def test_the_cost_model_is_the_papers() -> None:
    """By hand: two calls share 30 tokens; outputs of 4 and 2; the second reads nothing of the first."""
    calls = [
        PlannedCall(((1, 30.0), (2, 10.0)), 4.0, ()),
        PlannedCall(((1, 30.0), (3, 5.0)), 2.0, ()),
        PlannedCall(((4, 7.0),), 1.0, (0,)),
    ]
    costs = Costs(calls, 100.0)
    assert costs.usage(0, None) == pytest.approx((4 * 40 + 10) / 100)
    assert costs.usage(1, 0) == pytest.approx((2 * 5 + 3) / 100)
    assert costs.usage(1, None) == pytest.approx((2 * 35 + 3) / 100)
    assert costs.makespan([[0, 1, 2]]) == pytest.approx(1.7 + 4 + (7 + 1) / 100)  # its delay is 4 token steps
    assert costs.makespan([[2], [1, 0]]) == pytest.approx((73 + 4 * 10 + 10) / 100 + 4 + 0.08)
    assert costs.makespan([[2, 0], [1]]) == float("inf")


@st.composite
def small_batches(draw: st.DrawFn) -> tuple[Plan, list[dict[str, str]]]:
    made: list[Operator] = []
    for number in range(draw(st.integers(1, 5))):
        read = [other for other in made if draw(st.booleans())]
        prompt = template("{q}{d}", q=given("q") if draw(st.booleans()) else "", d=join(read) if read else "none")
        system = draw(st.sampled_from(["", "be brief " * 40, f"you are {number} " * 20]))
        made.append(call(f"agent {number}", prompt, system=system, output_tokens=float(draw(st.integers(5, 300)))))
    rows = [{"q": f"row {row} " * draw(st.integers(1, 60))} for row in range(draw(st.integers(1, 40)))]
    return Plan("small", **{f"o{number}": operator for number, operator in enumerate(made)}), rows


@given_that(small_batches(), st.integers(1, 3))
@settings(max_examples=25)
def test_what_runs_is_never_worse_than_operator_by_operator(
    batch: tuple[Plan, list[dict[str, str]]], workers: int
) -> None:
    """In the cost model, over the rows that it is compared on, but for the 1 % by which groups may stay."""
    plan, rows = batch
    tree = tree_of(plan, field_tokens(plan, rows))
    order = soft_order(plan, tree, rows, workers=workers)
    whole = len(plan.calls) * len(rows) <= 64
    calls, labels = planned_calls(plan, tree, len(rows) if whole else 64 // len(plan.calls))
    costs = Costs(calls, 8192.0 if whole else 400_000.0)
    depth = depths(plan)
    one_by_one = sorted(
        range(len(calls)), key=lambda index: (depth[labels[index][1]], labels[index][1], labels[index][0])
    )
    ours = sorted(range(len(calls)), key=lambda index: order.place(order.rows[labels[index][0]], *labels[index]))
    assert costs.listed(ours, workers) <= 1.0101 * costs.listed(one_by_one, workers)
    everything = {order.place(number, rank, node.key) for rank, number in enumerate(order.rows) for node in plan.calls}
    assert len(everything) == len(plan.calls) * len(rows)
