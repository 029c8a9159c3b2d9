"""The order of a batch's calls: every call once, and no later end than operator by operator."""

from __future__ import annotations

import pytest
from hypothesis import given as given_that
from hypothesis import settings
from hypothesis import strategies as st

from presage.batch import Plan, call, given, join, template
from presage.batch.operators import Operator
from presage.batch.prefix_tree import field_tokens, tree_of
from presage.batch.schedule import Costs, PlannedCall, depths, planned_calls, soft_order


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
    assert costs.listed([0, 1, 2], 1) == pytest.approx(1.7 + 4 + (7 + 1) / 100)  # its delay is 4 token steps
    assert costs.listed([2, 1, 0], 1) == pytest.approx(
        (73 + 4 * 10 + 10) / 100 + 4 + 0.08
    )  # what is not ready holds nothing up


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
    calls, labels = planned_calls(plan, tree, 64 // len(plan.calls))
    costs = Costs(calls, 400_000.0)
    depth = depths(plan)
    one_by_one = sorted(
        range(len(calls)), key=lambda index: (depth[labels[index][1]], labels[index][1], labels[index][0])
    )
    ours = sorted(range(len(calls)), key=lambda index: order.place(*labels[index]))
    assert costs.listed(ours, workers) <= 1.0101 * costs.listed(one_by_one, workers)
    everything = {order.place(rank, node.key) for rank in range(len(rows)) for node in plan.calls}
    assert len(everything) == len(plan.calls) * len(rows)
