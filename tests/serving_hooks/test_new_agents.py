"""Agents that a model does not know: found by the place that they take, or counted."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_name import Forecaster
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_samples import Clock
from tool_samples import QUICK, llm, trace

from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.explain import LastForecasts, reasons
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.forecasting.online_counts import BackoffConfig, OnlineCounts
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.workflows import EndReason
from presage.serving_hooks.workflows.identity import Step, scoped
from presage.serving_hooks.workflows.live import LiveForecast
from presage.training.next_agent.train import fit_predictor

PLANS = (("plan", "code", "test", "code", "test", "write"), ("plan", "read", "read", "write"))
PATIENT = Budget(deadline_s=60.0)


@cache
def predictor() -> NextAgentPredictor:
    workflows = [[llm(agent) for agent in PLANS[number % 3 == 0]] for number in range(90)]
    return fit_predictor(trace(*workflows), QUICK, states="none").predictor


def forecaster(counts: OnlineCounts | None = None) -> Forecaster:
    return Forecaster(predictor(), 1, back_off=counts or OnlineCounts(), budget=PATIENT, clock=Clock())


@cache
def of_made_up() -> NextAgentPredictor:
    """Of an application that makes up two experts for each task."""
    workflows = [[llm(agent) for agent in experts(str(number))] for number in range(60)]
    return fit_predictor(trace(*workflows), states="none").predictor


def experts(task: str) -> tuple[str, ...]:
    x, y = f"expert of {task}", f"critic of {task}"
    return ("plan", x, y, x, y, x, "write")


def serve(
    to: Forecaster,
    agents: tuple[str, ...],
    number: int,
    *,
    workflow_type: str = "app",
    tenant: str = "",
    reason: EndReason = EndReason.FINISHED,
) -> list[LiveForecast]:
    """The forecasts after each output of a workflow."""
    key = workflow_type, scoped(tenant, f"w{number}")
    lives = []
    for place, agent in enumerate(agents):
        to.on_prefill(*key, agent, step=place)
        lives.append(to.on_completion(*key))
    to.close(*key, reason)
    return lives


def likeliest(live: LiveForecast) -> str:
    top = int(live.probabilities[0].argmax())
    return live.agents[top] if top < len(live.agents) else "END"


def of(live: LiveForecast, agent: str, ahead: int = 0) -> float:
    return float(live.probabilities[ahead, live.agents.index(agent)])


def called(plan: tuple[str, ...], names: dict[str, str]) -> tuple[str, ...]:
    return tuple(names.get(agent, agent) for agent in plan)


def test_a_renamed_agent_is_forecast_by_its_new_name_and_read_as_the_old_one() -> None:
    to, names = forecaster(), {"code": "implement"}
    for number in range(8):
        serve(to, called(PLANS[number % 2], names), number)
    renamed, before = serve(to, called(PLANS[0], names), 98), serve(forecaster(), PLANS[0], 99)
    assert [likeliest(live) for live in renamed] == [names.get(likeliest(live), likeliest(live)) for live in before]
    assert [live.known_as for live in renamed] == [None, "code", None, "code", None, None]
    assert [(live.source, live.evidence) for live in renamed] == [(live.source, live.evidence) for live in before]


def test_agents_of_one_workflow_alone_are_forecast_by_their_names_once_they_were_called(tmp_path: Path) -> None:
    predictor, agents = of_made_up(), experts("beekeeping")
    to = Forecaster(predictor, 1, back_off=OnlineCounts(), budget=PATIENT, clock=Clock())
    lives = serve(to, agents, 0)
    assert [likeliest(live) for live in lives[2:]] == [*agents[3:], "END"]
    assert not {*agents[1:3]} & {*lives[0].agents}, "nobody knows the names before"
    assert lives[-1].source == "champion"
    predictor.save(tmp_path / "artefact")
    for loaded in (predictor, NextAgentPredictor.load(tmp_path / "artefact")):
        steps = [{"workflow_type": "app", "agent": agent} for agent in agents]
        for place, live in enumerate(lives):
            given = [*steps[:place], {**steps[place], "output_tokens": None, "output_text": "."}]
            by_name = loaded.forecast(given).agents[0]
            assert by_name == {name: of(live, name) for name in live.agents}


def test_a_new_agent_of_many_workflows_is_forecast_before_its_first_call() -> None:
    to = Forecaster(of_made_up(), 1, back_off=OnlineCounts(), budget=PATIENT, clock=Clock())
    for number in range(40):
        lives = serve(to, ("plan", "audit", *experts(str(number))[1:]), number)
    assert of(lives[0], "audit") > 0.5
    assert not to.errors


def test_a_renamed_agent_that_begins_workflows_is_found() -> None:
    to, names = forecaster(), {"plan": "orchestrate"}
    for number in range(8):
        serve(to, called(PLANS[number % 2], names), number)
    renamed = serve(to, called(PLANS[0], names), 98)
    assert renamed[0].known_as == "plan"
    assert renamed[0].evidence == serve(forecaster(), PLANS[0], 99)[0].evidence


def test_one_of_two_after_a_split_is_as_likely_as_it_comes() -> None:
    to = forecaster()
    for number in range(24):
        serve(to, called(PLANS[0], {"code": "code a" if number % 4 else "code b"}), number)
    live = serve(to, ("plan",), 99)[0]
    a, b = of(live, "code a"), of(live, "code b")
    assert 2 < a / b < 4
    assert of(live, "code") < b / 4
    assert likeliest(live) == "code a"


def test_an_agent_that_works_beside_the_likeliest_one_does_not_stand_for_it() -> None:
    to = forecaster()
    plan = ("plan", "lint", "code", "lint", "test", "write")  # after plan and code, where code and test are expected
    for number in range(40):
        lives = serve(to, plan, number)
    assert all(live.known_as is None for live in lives)
    assert [likeliest(live) for live in lives[:4]] == ["lint", "code", "lint", "test"]


def test_a_new_agent_is_as_likely_as_it_comes_and_the_rest_is_forecast_as_before() -> None:
    to = forecaster()
    for number in range(40):
        serve(to, ("plan", "check", *PLANS[0][1:]) if number % 2 else PLANS[0], number)
    live, before = serve(to, ("plan",), 98)[0], serve(forecaster(), ("plan",), 99)[0]
    share = of(live, "check")
    assert 0.35 < share < 0.65
    assert of(live, "code") / (1 - share) > of(before, "code"), "it always comes, which counts know"
    for live, same in zip(serve(to, PLANS[0], 98)[1:], serve(forecaster(), PLANS[0], 99)[1:], strict=True):
        assert likeliest(live) == likeliest(same)


def test_after_each_agent_the_better_of_model_and_counts_has_the_say() -> None:
    to = forecaster()
    for number in range(30):  # with the release, code is written once and tests are followed by a check or the end
        serve(to, ("plan", "code", "test", *(("check",) if number % 2 else ())), number)
    after_plan, after_code, after_test = serve(to, ("plan", "code", "test"), 99)
    assert likeliest(after_plan) == "code"
    assert likeliest(after_code) == "test"
    assert of(after_test, "check") + after_test.probabilities[0, -1] > 0.9, "the model expects code or write"


def test_where_all_agents_are_known_forecasts_stay_as_they_are() -> None:
    alone = Forecaster(predictor(), 1, budget=PATIENT, clock=Clock())
    to = forecaster()
    for number in range(4):
        for live, same in zip(serve(to, PLANS[0], number), serve(alone, PLANS[0], number), strict=True):
            assert live.agents == same.agents
            assert np.array_equal(live.probabilities, same.probabilities)


def test_other_workflow_types_and_tenants_do_not_see_it() -> None:
    to = forecaster()
    for number in range(8):
        serve(to, called(PLANS[0], {"code": "implement"}), number, tenant="acme")
    assert "implement" in serve(to, ("plan",), 97, tenant="acme")[0].agents
    assert "implement" not in serve(to, ("plan",), 98, tenant="other")[0].agents
    assert "implement" not in serve(to, ("plan",), 99, workflow_type="another", tenant="acme")[0].agents


def test_what_an_aborted_workflow_ran_decides_nothing() -> None:
    to = forecaster()
    for number in range(8):
        serve(to, called(PLANS[0], {"code": "implement"}), number, reason=EndReason.ABORTED)
    assert serve(to, ("plan", "implement"), 99)[1].known_as is None


def test_the_old_name_comes_back_in_a_rollback() -> None:
    to = forecaster()
    for number in range(8):
        serve(to, called(PLANS[0], {"code": "implement"}), number)
    for number in range(8, 60):
        lives = serve(to, PLANS[0], number)
    assert likeliest(lives[0]) == "code"
    assert likeliest(lives[1]) == "test"


def test_an_explanation_says_as_which_agent_it_is_forecast() -> None:
    to, kept = forecaster(), LastForecasts(10, Clock())
    for number in range(8):
        serve(to, called(PLANS[0], {"code": "implement"}), number)
    step = Step("app", "w99", "implement", 1)
    kept.add(step, serve(to, ("plan", "implement"), 99)[1])
    rest: dict[str, Any] = dict.fromkeys(("admission", "blocks", "position", "growth", "returns"))
    told = reasons({"modes": {}, "alive": True, "requests": [], "forecasts": kept.of(step.workflow), **rest})
    assert "its agent 'implement' is forecast as 'code', whose place it takes" in told


def test_the_log_says_who_stands_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    to = forecaster()
    with caplog.at_level(logging.INFO, "presage"):
        for number in range(8):
            serve(to, called(PLANS[0], {"code": "implement"}), number, tenant="acme")
    (told,) = [record.getMessage() for record in caplog.records if "implement" in record.getMessage()]
    assert told.startswith("workflow type 'app': ")
    assert "comes where the model expects 'code'" in told


def test_the_model_is_compared_with_counts_where_it_does_not_back_off() -> None:
    monitor = ForecastMonitor()
    to = Forecaster(predictor(), 1, back_off=OnlineCounts(), monitor=monitor, budget=PATIENT, clock=Clock())
    plan = ("plan", "lint", "code", "lint", "test", "write")
    for number in range(40):
        serve(to, plan, number)
    compared = monitor.status()["against_counts"]["app"]["steps"]
    known = sum(agent != "lint" for agent in plan)
    assert 30 * known < compared <= 40 * known


@settings(max_examples=60, deadline=None)
@given(
    numbered=st.booleans(),
    plans=st.lists(
        st.lists(st.sampled_from(["plan", "code", "test", "write", "x", "y", "z", ""]), min_size=1, max_size=8),
        min_size=1,
        max_size=12,
    ),
    agents=st.sampled_from([2, 32]),
)
def test_every_forecast_is_a_distribution_over_distinct_names(
    numbered: bool, plans: list[list[str]], agents: int
) -> None:
    counts = OnlineCounts(BackoffConfig(agents=agents, min_evidence=1))
    of = of_made_up() if numbered else predictor()
    to = Forecaster(of, 1, back_off=counts, budget=PATIENT, clock=Clock())
    for number, plan in enumerate(plans):
        for live in serve(to, tuple(plan), number):
            assert len(set(live.agents)) == len(live.agents) == live.probabilities.shape[1] - 1
            assert (live.probabilities >= 0).all()
            assert np.allclose(live.probabilities.sum(axis=1), 1, atol=1e-4)
    assert not to.errors
