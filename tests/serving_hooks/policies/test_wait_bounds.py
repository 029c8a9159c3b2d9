"""How long policies may delay a request."""

import math
from dataclasses import replace
from typing import Final

import pytest
from crowds import Workflow, decide
from hypothesis import given
from hypothesis import strategies as st

from presage.serving_hooks.policies.admission import Admission, Phase
from presage.serving_hooks.policies.priority import ShortestTotalJobFirst, vllm_priority
from presage.serving_hooks.policies.throughput import Rates
from presage.serving_hooks.policies.wait_bounds import ENOUGH_REQUESTS, Objective, Objectives, WaitBounds
from presage.serving_hooks.workflows.identity import Step

RATES: Final = Rates(0.012, 150e-6, 120e-6, 110, 230, 1500, 1.5, 64)
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


def crowded() -> Admission:
    """A cache that loses everything with more than a few workflows."""
    admission = Admission(10_000)
    admission.observe(0, 100_000, 0.0, load=0.9)
    admission.observe(95_000, 100_000, 0.0, load=3.0)
    return admission


@given(st.lists(st.floats(0, 30), min_size=5, max_size=30), st.floats(1, 20))
def test_no_ready_request_is_held_beyond_its_bound(ages: list[float], bound_s: float) -> None:
    now = 100.0
    crowd = [Workflow(f"w{i}", Phase.READY, now - age, 2000.0, 500.0) for i, age in enumerate(ages)]
    held = decide(crowded(), crowd, RATES, now, bound_s).held
    assert not [one.id for one in crowd if now - one.since >= bound_s and one.id in held]


def test_an_overdue_workflow_takes_the_place_of_one_that_was_admitted() -> None:
    admission = crowded()
    crowd = [Workflow(f"w{i}", Phase.READY, 90.0, 2000.0, 100.0 * i) for i in range(12)]
    first = decide(admission, crowd, RATES, 100.0)
    assert first.held
    assert first.run
    late = max(first.held, key=lambda name: int(name[1:]))
    crowd = [replace(one, bound_s=5.0 if one.id == late else None) for one in crowd]
    then = decide(admission, crowd, RATES, 101.0)
    assert late in then.run
    assert len(then.run) == len(first.run)


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
