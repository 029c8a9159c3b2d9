"""Steps of one workflow that run at once: each is known by itself, and what is learnt is what a trace says."""

from __future__ import annotations

from typing import Any

import pytest
from by_name import Forecaster
from tiny_model import Tiny

from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.forecasting.online_counts import BackoffConfig, OnlineCounts
from presage.serving_hooks.workflows.choices import Choices, LeftStep
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import BESIDE, MISSED_STEP

PLAN, SEARCH, CODE, JOIN = [(0, "plan", 100), (1, "search", 1000), (2, "code", 20), (3, "join", 10)]


@pytest.fixture(scope="module")
def predictor(tiny: Tiny) -> NextAgentPredictor:
    return NextAgentPredictor.load(tiny.folder)


def begin(of: Forecaster, workflow: str, step: tuple[int, str, int], numbered: bool = True) -> Any:
    return of.on_prefill("t", workflow, step[1], step=step[0] if numbered else None, input_tokens=10)


def end(of: Forecaster, workflow: str, step: tuple[int, str, int], numbered: bool = True) -> Any:
    number = step[0] if numbered else None
    return of.on_completion("t", workflow, step=number, agent=step[1], output_tokens=step[2])


def left(counts: OnlineCounts) -> dict[str, float]:
    return {agent: values.median for agent, values in counts.of_type("t").lengths.items()}


def test_a_step_that_its_client_asks_for_again_is_the_same_step(predictor: NextAgentPredictor) -> None:
    counts = OnlineCounts(BackoffConfig(min_evidence=1))
    of = Forecaster(predictor, back_off=counts)
    for name, attempts in (("once", 1), ("thrice", 3)):
        begin(of, name, PLAN)
        end(of, name, PLAN)
        first = [begin(of, name, SEARCH) for _ in range(attempts)]  # those before the last were aborted
        assert all(one is first[0] for one in first)
        assert end(of, name, SEARCH).reason is None
    assert first[0].reason is None
    once, thrice = (begin(of, name, CODE) for name in ("once", "thrice"))
    assert once.reason is thrice.reason is None
    assert (once.probabilities == thrice.probabilities).all()


@pytest.mark.parametrize("number", [0, 1])
def test_a_number_seen_before_is_a_further_step_and_loses_no_forecast(
    predictor: NextAgentPredictor, number: int
) -> None:
    of, plain = Forecaster(predictor), Forecaster(predictor)
    for step in (PLAN, SEARCH):
        begin(of, "w", step)
        end(of, "w", step)
        begin(plain, "w", step, numbered=False)
        end(plain, "w", step, numbered=False)
    repeated, expected = begin(of, "w", (number, *CODE[1:])), begin(plain, "w", CODE, numbered=False)
    assert repeated.reason is None
    assert (repeated.probabilities == expected.probabilities).all()
    assert end(of, "w", (number, *CODE[1:])).reason is None


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("first", [SEARCH, CODE])
def test_what_counts_learn_of_a_fan_out_is_what_a_trace_of_it_says(numbered: bool, first: tuple[int, str, int]) -> None:
    live, offline = OnlineCounts(), OnlineCounts()
    of, trace = Forecaster(None, back_off=live), Forecaster(None, back_off=offline)
    for run in range(20):
        name = f"w{run}"
        begin(of, name, PLAN, numbered)
        end(of, name, PLAN, numbered)
        begin(of, name, SEARCH, numbered)
        begin(of, name, CODE, numbered)
        for step in (first, CODE if first is SEARCH else SEARCH):
            end(of, name, step, numbered)
        begin(of, name, JOIN, numbered)
        end(of, name, JOIN, numbered)
        of.close("t", name)
        for step in (PLAN, SEARCH, CODE, JOIN):  # a trace has one after the other, in the order of their starts
            begin(trace, name, step)
            end(trace, name, step)
        trace.close("t", name)
    assert left(live) == left(offline) == {"plan": 1130.0, "search": 1030.0, "code": 30.0, "join": 10.0}
    for agents in (["plan"], ["plan", "search"], ["plan", "search", "code"]):
        found, expected = live.next_agents("t", agents), offline.next_agents("t", agents)
        assert found is not None
        assert expected is not None
        assert (found.probabilities == expected.probabilities).all()


def test_a_completion_beside_a_later_step_forecasts_nothing_and_the_later_step_goes_on() -> None:
    of = Forecaster(None, back_off=OnlineCounts(BackoffConfig(min_evidence=1)))
    for name in ("teacher", "w"):
        begin(of, name, PLAN)
        end(of, name, PLAN)
        begin(of, name, SEARCH)
        begin(of, name, CODE)
        beside, after = end(of, name, SEARCH), end(of, name, CODE)
        begin(of, name, JOIN)
        end(of, name, JOIN)
        of.close("t", name)
    assert (beside.source, beside.reason) == ("none", BESIDE)
    assert after.source == "back-off"
    assert after.remaining.tokens == (10.0,), "what is left after code is join, whenever search ends"


@pytest.mark.parametrize("order", [(SEARCH, CODE), (CODE, SEARCH)])
def test_numbers_of_steps_that_run_at_once_come_in_any_order(
    predictor: NextAgentPredictor, order: tuple[tuple[int, str, int], ...]
) -> None:
    of = Forecaster(predictor)
    begin(of, "w", PLAN)
    end(of, "w", PLAN)
    for step in order:
        assert begin(of, "w", step).reason != MISSED_STEP
    for step in order:
        end(of, "w", step)
    assert begin(of, "w", JOIN).reason != MISSED_STEP
    assert end(of, "w", JOIN).reason != MISSED_STEP


def test_a_number_that_never_comes_is_a_missed_step_once_nothing_runs_beside_it(predictor: NextAgentPredictor) -> None:
    of = Forecaster(predictor)
    begin(of, "w", PLAN)
    end(of, "w", PLAN)
    assert begin(of, "w", CODE).reason != MISSED_STEP, "search may run beside it, and begin later"
    end(of, "w", CODE)
    assert begin(of, "w", JOIN).reason == MISSED_STEP
    assert begin(of, "gone", JOIN).reason == MISSED_STEP, "its beginning is unknown"


def test_choices_of_one_request_are_one_step() -> None:
    step, other, choices = Step("t", "w", "a", 0), Step("t", "w", "b", 1), Choices()
    assert [choices.arrives(name, step) for name in ("0_r", "1_r", "2_r")] == [True, False, False]
    assert choices.arrives("0_s", other)
    assert choices.arrives("plain", other)
    assert choices.ranking("0_s") is None
    choices.ranked("0_r", 7.0)
    assert choices.ranking("1_r") == (7.0,)
    assert [choices.begins(name) for name in ("1_r", "0_r", "1_r", "plain")] == [True, False, True, True]
    assert choices.leaves("0_r", True, 5, "stop") is None
    assert choices.leaves("plain", True, 5, "stop") == LeftStep("plain", True, 5, "stop")
    assert choices.leaves("2_r", False, 3, "abort") is None
    assert choices.leaves("1_r", True, 4, "length") == LeftStep("1_r", True, 12, "stop")
    assert choices.leaves("0_s", False, 0, "abort") == LeftStep("0_s", False, 0, "abort")
    assert not choices


def test_a_choice_that_arrives_after_all_others_have_left_is_no_further_step() -> None:
    step, choices = Step("t", "w", "a", 0), Choices()
    assert choices.arrives("0_r", step)
    choices.ranked("0_r", 7.0)
    assert choices.begins("0_r")
    assert choices.leaves("0_r", True, 1, "stop") == LeftStep("0_r", True, 1, "stop")
    assert not choices.arrives("1_r", step)
    assert choices.ranking("1_r") == (7.0,)
    assert not choices.begins("1_r")
    assert choices.leaves("1_r", True, 1, "stop") is None
    assert not choices


def test_choices_of_steps_long_gone_are_forgotten() -> None:
    step, choices = Step("t", "w", "a", None), Choices()
    for request in range(1000):
        assert choices.arrives(f"0_{request}", step)
        assert choices.leaves(f"0_{request}", True, 1, "stop") is not None
    assert choices.arrives("1_0", step), "its sibling left 999 steps ago"
