"""The gateway's demand forecast: requests in flight now, and those that running workflows will make."""

import pytest

from presage.gateway.exporters.demand_watch import MOST_MODELS, DemandWatch


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> DemandWatch:
    return DemandWatch(10.0, clock, min_evidence=3)


def demand(watch: DemandWatch, model: str, horizon_s: float = 0.0, quantile: float = 0.5) -> float:
    (found,) = (one.requests[quantile] for one in watch.demands() if (one.model, one.horizon_s) == (model, horizon_s))
    return found


def arrive(watch: DemandWatch, workflow: str, agent: str, model: str, request: str) -> None:
    watch.arrived(workflow, "review", agent, model, request, {}, 0.0)


def test_requests_in_flight_are_counted_by_model(watch: DemandWatch) -> None:
    arrive(watch, "w", "coder", "big", "1")
    arrive(watch, "w", "coder", "big", "2")
    arrive(watch, "v", "coder", "small", "3")
    assert (demand(watch, "big"), demand(watch, "small")) == (2.0, 1.0)
    watch.left("w", "1")
    assert (demand(watch, "big"), demand(watch, "small")) == (1.0, 1.0)


def test_a_workflow_that_ends_in_flight_leaves_nothing_behind(watch: DemandWatch) -> None:
    arrive(watch, "w", "coder", "big", "1")
    watch.ended("w")
    watch.left("w", "1")
    watch.left("unknown", "1")
    watch.ended("w")
    assert demand(watch, "big") == 0.0
    assert watch.debug_state()["demand_workflows"] == 0


def run(watch: DemandWatch, clock: Clock, name: str, until_s: float = 100.0) -> None:
    """A workflow: a coder on `small` for 2 s, 8 s away, then a tester on `big` for 4 s."""
    began = clock.now
    for at, agent, model in ((0.0, "coder", "small"), (10.0, "tester", "big")):
        if at > until_s:
            return
        clock.now = began + at
        arrive(watch, name, agent, model, f"{name}{agent}")
        clock.now = began + at + (2.0 if agent == "coder" else 4.0)
        watch.left(name, f"{name}{agent}")
    watch.ended(name)


def test_a_model_is_wanted_before_its_requests_come(watch: DemandWatch, clock: Clock) -> None:
    for number in range(6):
        run(watch, clock, f"w{number}")
        clock.now += 600.0
    run(watch, clock, "late", until_s=5.0)
    assert (demand(watch, "big"), demand(watch, "small")) == (0.0, 0.0)
    assert demand(watch, "big", 5.0) == pytest.approx(0.0, abs=0.1)
    assert demand(watch, "big", 10.0) == pytest.approx(1.0, abs=0.1)


def test_no_horizon_without_evidence(watch: DemandWatch, clock: Clock) -> None:
    run(watch, clock, "only")
    assert {one.horizon_s for one in watch.demands()} == {0.0}


def test_models_are_bounded(watch: DemandWatch) -> None:
    for number in range(MOST_MODELS + 5):
        arrive(watch, f"w{number}", "coder", f"m{number}", str(number))
        watch.left(f"w{number}", str(number))
        watch.ended(f"w{number}")
    assert watch.debug_state() == {"demand_workflows": 0, "demand_models": MOST_MODELS}
