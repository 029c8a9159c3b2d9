"""Autoscaling: demand is forecast from what runs, engines come before it and leave when nothing needs them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.serving_hooks.policies.routing.fleet import Fleet, FleetEngine
from presage.serving_hooks.policies.scaling import END, Autoscaler, DemandForecast, ScalingConfig

MODELS = ("large", "small")


def fleet(large: int = 2, small: int = 6) -> Fleet:
    models = ["large"] * large + ["small"] * small
    return Fleet([FleetEngine(f"e{n}", 10_000, 8, 0.01, 1e-4, model=model) for n, model in enumerate(models)])


def config(**more: object) -> ScalingConfig:
    return ScalingConfig(**{"requests_per_engine": 4, "load_s": 10, "keep_s": 0, **more})  # type: ignore[arg-type]


def plans(demand: DemandForecast, name: str, at_s: float, explorers: int = 8, plan_s: float = 30.0) -> None:
    """A workflow that has run: a planner, then explorers at once for 20 s."""
    demand.arrived(name, "t", "planner", "large", "p", at_s)
    demand.answered(name, "p", at_s + plan_s)
    for number in range(explorers):
        demand.arrived(name, "t", "explorer", "small", number, at_s + plan_s + 1)
    for number in range(explorers):
        demand.answered(name, number, at_s + plan_s + 21)
    demand.ended(name, at_s + plan_s + 21)


def taught(**more: float) -> DemandForecast:
    """A forecast 10 s ahead that has seen ten workflows, the last one long ago."""
    demand = DemandForecast(MODELS, 10.0, 300.0, 5)
    for number in range(10):
        plans(demand, f"w{number}", 0.0, **more)  # type: ignore[arg-type]
    return demand


def test_a_planner_near_its_end_announces_its_explorers() -> None:
    demand = taught()
    demand.arrived("new", "t", "planner", "large", "p", 1000.0)
    for age_s, large, small in ((5.0, 1.0, 0.0), (22.0, 0.0, 8.0)):
        made = demand.ahead(1000.0 + age_s)
        assert made is not None
        assert made[0][-1].round(1).tolist() == [pytest.approx(large, abs=0.2), pytest.approx(small, abs=0.2)]


def test_there_is_no_forecast_before_workflows_have_ended_nor_of_an_unknown_type() -> None:
    demand = DemandForecast(MODELS, 10.0, 300.0, 5)
    demand.arrived("w", "t", "planner", "large", "p", 0.0)
    assert demand.ahead(1.0) is None
    demand = taught()
    demand.arrived("other", "u", "planner", "large", "p", 1000.0)
    assert demand.ahead(1001.0) is None


def test_a_workflow_in_an_unknown_phase_counts_as_it_is() -> None:
    demand = taught()
    demand.arrived("new", "t", "critic", "small", 0, 1000.0)
    made = demand.ahead(1001.0)
    assert made is not None
    assert made[0][:, 1].round(1).tolist() == [1.0] * len(demand.horizons)


def test_the_forecast_of_the_next_agent_weighs_what_may_follow() -> None:
    demand = DemandForecast(MODELS, 10.0, 300.0, 5)
    for number in range(10):
        plans(demand, f"w{number}", 0.0, explorers=8 if number % 2 else 0)
    demand.arrived("new", "t", "planner", "large", "p", 1000.0)
    found = []
    for chances in ({}, {"explorer": 1.0}, {"explorer": 0.25, END: 0.75}, {"unheard of": 1.0}):
        demand.expect("new", chances)
        made = demand.ahead(1025.0)
        assert made is not None
        found.append(float(made[0][-1, 1]))
    assert found == [pytest.approx(4.0), pytest.approx(8.0), pytest.approx(2.0), pytest.approx(4.0)]


def test_the_third_visit_of_an_agent_is_not_the_first() -> None:
    demand = DemandForecast(MODELS, 10.0, 300.0, 5)

    def steps(name: str, at_s: float, planners: int) -> None:
        for number in range(planners):
            demand.arrived(name, "t", "planner", "large", number, at_s + 20 * number)
            demand.answered(name, number, at_s + 20 * number + 12)

    for number in range(10):
        steps(f"w{number}", 0.0, 3)
        demand.arrived(f"w{number}", "t", "explorer", "small", "e", 60.0)
        demand.answered(f"w{number}", "e", 80.0)
        demand.ended(f"w{number}", 80.0)
    for planners, small in ((1, 0.0), (2, 0.0), (3, 1.0)):
        steps(f"new {planners}", 1000.0, planners)
        made = demand.ahead(1000.0 + 20 * planners - 5)  # 5 s before what follows
        assert made is not None
        assert made[0][-1, 1] == pytest.approx(small, abs=0.1)
        demand.ended(f"new {planners}", 1000.0 + 20 * planners - 5)


def test_new_workflows_are_expected_at_the_rate_of_late() -> None:
    demand = DemandForecast(MODELS, 10.0, 100.0, 5)
    for number in range(50):
        plans(demand, f"w{number}", 2.0 * number, explorers=0, plan_s=1e-3 if number < 40 else 30.0)
    demand.arrived("new", "t", "planner", "large", "p", 100.0)
    made = demand.ahead(100.0)
    assert made is not None
    assert 1.0 < made[0][-1, 0] < 1.0 + 0.51 * 10
    assert (np.diff(made[1][:, 0]) > 0).all()  # the further ahead, the less is known


def test_reactive_scaling_follows_requests_in_flight_and_drains_by_exclusion() -> None:
    of = fleet()
    scaler = Autoscaler(config(policy="reactive", keep_s=5), of)
    assert [engine.open for engine in of.engines] == [True, False, True] + [False] * 5  # one of each model
    for number in range(9):
        scaler.demand.arrived("w", "t", "a", "small", number, 1.0)
    assert scaler.tick(of, 1.0) == []
    assert (scaler.ticks[-1].engines, scaler.ticks[-1].loading) == ((1, 1), (0, 2))
    assert scaler.tick(of, 11.0) == [3, 4]
    of.engines[3].requests, of.engines[4].requests = 2, 1
    for number in range(9):
        scaler.demand.answered("w", number, 12.0)
    scaler.tick(of, 13.0)
    assert [engine.open for engine in of.engines[2:5]] == [True, True, True]  # needed 5 s ago
    scaler.tick(of, 17.0)
    assert [engine.open for engine in of.engines[2:5]] == [False, True, False]
    assert scaler.ticks[-1].engines == (1, 2)  # 4 has a request: it drains
    of.engines[4].requests = 0
    scaler.tick(of, 18.0)
    assert scaler.ticks[-1].engines == (1, 1)


def test_a_draining_engine_is_taken_back_before_another_is_asked_for() -> None:
    of = fleet(1, 3)
    scaler = Autoscaler(config(policy="reactive", load_s=0, least={"small": 2, "large": 0}), of)
    of.engines[1].requests = of.engines[2].requests = 1
    scaler.config = scaler.config.model_copy(update={"least": {"small": 1, "large": 0}})
    scaler.tick(of, 1.0)
    assert [engine.open for engine in of.engines] == [False, True, False, False]
    for number in range(5):
        scaler.demand.arrived("w", "t", "a", "small", number, 2.0)
    assert scaler.tick(of, 2.0) == []  # its cache is still warm
    assert [engine.open for engine in of.engines] == [False, True, True, False]
    assert scaler.starts == 0


def test_an_engine_is_ready_when_the_explorers_come() -> None:
    of = fleet()
    scaler = Autoscaler(config(), of)
    for number in range(10):
        plans(scaler.demand, f"w{number}", 0.0)
    for name in ("a", "b"):
        scaler.demand.arrived(name, "t", "planner", "large", "p", 1000.0)
    for now in range(1000, 1031):
        scaler.tick(of, float(now))
    at = [tick.now for tick in scaler.ticks if tick.loading[1]]
    assert 1015 <= at[0] <= 1022
    assert sum(engine.open for engine in of.engines if engine.model == "small") >= 4
    assert sum(engine.open for engine in of.engines if engine.model == "large") == 1


def test_no_more_engines_than_the_pool_has_and_no_fewer_than_the_least() -> None:
    of = fleet(1, 2)
    scaler = Autoscaler(config(policy="reactive", least={"small": 2}), of)
    for number in range(100):
        scaler.demand.arrived("w", "t", "a", "large", number, 0.0)
    for now in range(20):
        scaler.tick(of, float(now))
    assert scaler.ticks[-1].engines == (1, 2)


def test_seconds_are_paid_from_asking_until_empty() -> None:
    of = fleet(1, 2)
    scaler = Autoscaler(config(policy="reactive"), of)
    for number in range(5):
        scaler.demand.arrived("w", "t", "a", "small", number, 0.0)
    scaler.tick(of, 5.0)
    assert scaler.finish(25.0) == [25.0, 25.0, 20.0]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(("forecast", "last-window", "reactive")),
    st.floats(0, 40),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(("a", "b", "c")), st.integers(1, 9)), max_size=60),
)
def test_engines_are_off_loading_open_or_draining_whatever_comes(
    policy: str, load_s: float, events: list[tuple[int, str, int]]
) -> None:
    of = fleet(2, 3)
    scaler = Autoscaler(config(policy=policy, load_s=load_s, least={"large": 0}, min_evidence=1), of)
    now, running = 0.0, {}
    for number, (workflow, agent, seconds) in enumerate(events):
        name = f"w{workflow}"
        if name in running:
            scaler.demand.answered(name, running.pop(name), now)
            if number % 3 == 0:
                scaler.demand.ended(name, now)
        scaler.demand.arrived(name, "t", agent, MODELS[agent == "a"], number, now)
        running[name] = number
        for _ in range(seconds):
            now += 1.0
            scaler.tick(of, now)
            tick = scaler.ticks[-1]
            assert sum(tick.demand) == len(running)
            assert all(
                0 <= have + coming <= most
                for have, coming, most in zip(tick.engines, tick.loading, (2, 3), strict=True)
            )
            assert all(math.isnan(low) or 0 <= low <= high for low, high in zip(tick.low, tick.high, strict=True))
            assert sum(engine.open for engine in of.engines) <= sum(tick.engines)
    assert all(0 <= seconds <= now for seconds in scaler.finish(now))
