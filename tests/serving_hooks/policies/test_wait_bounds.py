"""How long policies may delay a request."""

import math
from typing import Final

import pytest

from presage.serving_hooks.policies.priority import ShortestTotalJobFirst, vllm_priority
from presage.serving_hooks.policies.wait_bounds import ENOUGH_REQUESTS, Objective, Objectives, WaitBounds, presses
from presage.serving_hooks.workflows.identity import Step, scoped

STEP: Final = Step("chat", "w", "a")


def measured(objectives: Objectives, waited_s: float = 3.0, prefill_s: float = 1.0) -> WaitBounds:
    bounds = WaitBounds(objectives)
    for _ in range(ENOUGH_REQUESTS):
        bounds.observe(waited_s, prefill_s)
    return bounds


def test_the_default_is_a_multiple_of_the_measured_time_to_first_token() -> None:
    assert WaitBounds(Objectives()).default_s == math.inf
    bounds = measured(Objectives(factor=2.5))
    assert (bounds.default_s, bounds.of(STEP), bounds.of(None)) == (pytest.approx(10.0), None, None)


def test_an_objective_replaces_the_default_and_a_first_token_leaves_time_for_the_prefill() -> None:
    bounds = measured(Objectives(workflow_types={"chat": Objective(first_token_s=5.0)}))
    assert bounds.of(STEP) == pytest.approx(4.0)
    assert measured(Objectives(Objective(max_hold_s=2.0, first_token_s=5.0))).of(STEP) == 2.0
    assert measured(Objectives(Objective(first_token_s=0.5))).of(STEP) == 0.0


def test_the_objective_of_a_type_precedes_its_tenants_and_that_one_the_default() -> None:
    own = Objective(3.0, deadline_s=60.0)
    objectives = Objectives(Objective(1.0), tenants={"key-1": Objective(2.0)}, workflow_types={"chat": own})
    steps = [
        Step(name, scoped(tenant, "w"), "a") for name, tenant in (("chat", "key-1"), ("code", "key-1"), ("code", ""))
    ]
    bounds = WaitBounds(objectives)
    assert [bounds.of(step) for step in (*steps, None)] == [3.0, 2.0, 1.0, 1.0]
    assert [bounds.deadline_s(step) for step in steps] == [60.0, math.inf, math.inf]


def test_a_deadline_presses_from_twice_what_is_needed_until_it_is_missed() -> None:
    assert [presses(left_s, 10.0) for left_s in (math.inf, 21.0, 19.0, 1.0, 0.0, -1.0)] == [0, 0, 1, 1, 0, 0]


def test_an_overdue_request_precedes_all_others() -> None:
    order = ShortestTotalJobFirst()
    order.add("long", 0, 0.0, "t", 1e6)
    order.add("short", 0, 1.0, "t", 1.0)
    for iteration in range(5000):
        order.age(iteration)
        order.selected([], iteration)
    assert order.key("short") < order.key("long")
    key = order.overdue("long")
    assert key < order.key("short")
    assert vllm_priority(key.level, key.remaining_tokens) < vllm_priority(*order.key("short")[:2])
