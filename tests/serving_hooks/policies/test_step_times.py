"""The costs of iterations are found among noise and mishaps; what was seen too little of is not spoken of."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.serving_hooks.policies.workload import (
    ENOUGH,
    ENOUGH_PREFILLS,
    ENOUGH_STEPS,
    MOST_TYPES,
    IterationCost,
    IterationCosts,
    WorkloadMeans,
)

COSTS = IterationCosts(0.012, 150e-6, 120e-6)


def iterations(costs: IterationCosts, n: int, seed: int, noise: float = 0.05, mishaps: float = 0.0) -> IterationCost:
    """A third prefills; a mishap takes half a second more."""
    draw, times = np.random.default_rng(seed), IterationCost()
    for _ in range(n):
        decode, prefill = int(draw.integers(0, 65)), int(draw.integers(1, 2048)) if draw.random() < 0.33 else 0
        seconds = costs[0] + costs[1] * decode + costs[2] * prefill
        seconds *= draw.lognormal(0.0, noise)
        times.observe(decode, prefill, seconds + 0.5 * (draw.random() < mishaps))
    return times


def test_without_noise_they_are_exact() -> None:
    assert iterations(COSTS, 200, 0, noise=0.0).fit() == pytest.approx(COSTS, rel=1e-3)


@given(
    st.floats(0.002, 0.1),
    st.floats(2e-5, 1e-3),
    st.floats(2e-5, 1e-3),
    st.integers(0, 1000),
    st.sampled_from([0, 0.05]),
)
@settings(max_examples=40, deadline=None)
def test_known_costs_are_found_among_noise_and_mishaps(
    iteration: float, decode: float, prefill: float, seed: int, mishaps: float
) -> None:
    """As times of iterations of all kinds, which is what they are for: one cost alone can drown in another's noise."""
    costs = IterationCosts(iteration, decode, prefill)
    found = iterations(costs, 1024, seed, mishaps=mishaps).fit()
    assert found is not None
    drowns = 0.02 * (np.array([1, 32, 340]) @ np.array(costs))  # of the mean iteration, whose noise is 5 %
    for decoded, prefilled in ((1, 0), (64, 0), (16, 500), (64, 2000)):
        kind = np.array([1, decoded, prefilled])
        assert kind @ np.array(found) == pytest.approx(kind @ np.array(costs), rel=0.1, abs=drowns)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 3000), st.floats(0, 10)), max_size=200))
def test_whatever_is_seen_no_cost_is_negative(seen: list[tuple[int, int, float]]) -> None:
    times = IterationCost(128)
    for one in seen:
        times.observe(*one)
    found = times.fit()
    assert found is None or (min(found) >= 0 and found.iteration_s > 0 and np.isfinite(found).all())


def test_too_few_iterations_and_too_few_prefills_say_nothing() -> None:
    assert iterations(COSTS, ENOUGH - 1, 0).fit() is None
    times = IterationCost()
    for number in range(500):
        times.observe(number % 7 + 1, 100 * (number < ENOUGH_PREFILLS - 1), 0.01)
        times.observe(0, 0, 0.01)
        times.observe(5, 50, 0.0)
    assert times.fit() is None


def test_where_iterations_are_all_alike_the_cost_stays_with_the_iteration() -> None:
    times = IterationCost()
    for number in range(200):
        times.observe(32, 50 if number % 4 == 0 else 0, 0.02 + 0.005 * (number % 4 == 0))
    found = times.fit()
    assert found is not None
    assert found.iteration_s == pytest.approx(0.02, rel=0.02)
    assert found.prefill_token_s == pytest.approx(1e-4, rel=0.02)


def test_an_engine_that_became_slower_is_believed() -> None:
    times = iterations(COSTS, 1024, 1)
    slower = IterationCosts(*(3 * cost for cost in COSTS))
    draw = np.random.default_rng(2)
    for _ in range(1024):
        decode, prefill = int(draw.integers(0, 65)), int(draw.integers(0, 2048))
        times.observe(decode, prefill, slower[0] + slower[1] * decode + slower[2] * prefill)
    assert times.fit() == pytest.approx(slower, rel=0.02)


def seen(steps: int, pauses: int) -> WorkloadMeans:
    workload = WorkloadMeans()
    for _ in range(steps):
        workload.new_tokens.observe(200)
        workload.output_tokens.observe(100)
        workload.read_tokens.observe(500)
        workload.own_tokens.observe(1000)
    workload.pauses_s.extend(4.0 if number % 2 else 2.0 for number in range(pauses))
    return workload


def test_rates_are_given_once_enough_was_seen_of_everything() -> None:
    enough = ENOUGH_STEPS
    rates = seen(enough, enough).rates(COSTS, 64, 8.0)
    assert rates is not None
    assert (rates.output_tokens, rates.new_tokens, rates.read_share, rates.end) == (100, 200, 0.5, 1 / 8)
    assert (rates.iteration_s, rates.decode_token_s, rates.prefill_token_s, rates.most_decoding) == (*COSTS, 64)
    assert rates.pauses_s.tolist() == [2.0] * (enough // 2) + [4.0] * (enough // 2)
    assert rates.to_dict()["pauses_s"] == 3.0
    assert seen(enough - 1, enough).rates(COSTS, 64, 8.0) is None
    assert seen(enough, enough - 1).rates(COSTS, 64, 8.0) is None
    assert seen(enough, enough).rates(None, 64, 8.0) is None


def test_the_lost_share_is_that_of_the_latest_cacheful() -> None:
    workload = WorkloadMeans()
    assert workload.miss_share == 0.0
    workload.reuses(1000, 1000, 1000)
    assert workload.miss_share == 1.0
    workload.reuses(1000, 0, 1000)
    assert workload.miss_share == pytest.approx(1 / 3)
    for _ in range(20):
        workload.reuses(1000, 0, 1000)
    assert workload.miss_share < 1e-5


def test_a_workflow_takes_the_steps_that_its_type_takes() -> None:
    means = WorkloadMeans().of_type("t")
    assert [means.expected_steps(steps) for steps in (0, 1, 9)] == [4.0, 4.0, 18.0], "nothing is known: twice as many"
    for steps in (10, 20):
        means.steps.observe(steps)
    assert [means.expected_steps(steps) for steps in (0, 15, 20)] == [15.0, 15.0, 27.5]


def test_what_is_known_of_a_type_begins_with_earlier_traces_and_follows_what_runs_here() -> None:
    workload = WorkloadMeans({"known": (20.0, 500.0)}.get)
    means = workload.of_type("known")
    assert [means.expected_steps(steps) for steps in (0, 15, 30)] == [20.0, 20.0, 40.0]
    assert means.growth.mean == 500.0
    assert (means.foreseen, workload.of_type("other").foreseen) == (True, False)
    for _ in range(8):  # as many workflows as the earlier traces count for
        means.steps.observe(10)
    assert means.expected_steps(0) == pytest.approx(15.0)
    for _ in range(8 * 20):
        means.growth.observe(100)
    assert means.growth.mean == pytest.approx(300.0)
    assert workload.of_type("other").expected_steps(9) == 18.0
    assert (workload.foresees(["known"]), workload.foresees(["known", "other"])) == (True, False)
    for _ in range(2 * ENOUGH_STEPS):
        workload.output_tokens.observe(100)
    assert not workload.foresees(["known"]), "by now it is measured, or never will be"


@given(
    st.floats(0.5, 2.0), st.lists(st.lists(st.integers(50, 5000), min_size=1, max_size=40), min_size=60, max_size=90)
)
@settings(max_examples=30)
def test_law_a_forecast_that_is_wrong_by_a_factor_is_found_out(factor: float, workflows: list[list[int]]) -> None:
    workload, left = WorkloadMeans(), [list(added) for added in workflows]
    for added in left:
        workload.foresees_growth("t", factor * sum(added))
    assert workload.growth_ratio("t") == 1.0
    while any(left):  # all run at once: the short ones end first
        for added in filter(None, left):
            grown = added.pop()
            workload.foresaw("t", grown, factor * grown)
    assert workload.growth_ratio("t") == pytest.approx(1 / factor, rel=0.2)
    assert workload.growth_ratio("never seen") == pytest.approx(1 / factor, rel=0.3)
    assert set(workload.forecast_growth()) == {"t"}


def test_what_was_foreseen_and_never_came_counts() -> None:
    workload = WorkloadMeans()
    for _ in range(100):
        workload.foresees_growth("t", 1000.0)
        workload.foresaw("t", 0.0, 1000.0)
    assert workload.growth_ratio("t") == pytest.approx(1 / 3)


def test_names_without_end_do_not_fill_the_memory() -> None:
    workload = WorkloadMeans()
    first = workload.of_type("t0")
    for number in range(1, MOST_TYPES + 50):
        workload.of_type(f"t{number}")
    assert workload.of_type(f"t{MOST_TYPES}") is workload.of_type(f"t{MOST_TYPES}")
    assert workload.of_type("t0") is not first
