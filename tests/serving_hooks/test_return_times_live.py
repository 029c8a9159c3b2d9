"""Return times of running workflows: the model's forecasts, counts behind it, and whatever an engine may be told."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from by_name import ReturnTimeForecaster
from hypothesis import given, settings
from hypothesis import strategies as st
from return_samples import sessions
from serving_samples import Clock

from presage.features.return_times import ReturnEncoder, return_rows
from presage.predictors.return_time.predictor import ReturnTimeConfig, ReturnTimePredictor
from presage.serving_hooks.forecasting import return_times
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.forecasting.return_counts import QUANTILES, ReturnCounts, ReturnCountsConfig
from presage.serving_hooks.monitoring.live_returns import LiveReturns
from presage.serving_hooks.workflows import EndReason
from presage.serving_hooks.workflows.identity import Step, scoped
from presage.serving_hooks.workflows.live import DRIFTED, NO_MODEL, NO_STEP, SWITCHED_OFF, LiveReturn

WAITS = Budget(hang_s=None)


@pytest.fixture(scope="module")
def predictor() -> ReturnTimePredictor:
    table = sessions(160, 1)
    encoder = ReturnEncoder.fit(table)
    rows = return_rows(table, encoder)
    apart = rows.task % 4 == 0
    return ReturnTimePredictor(ReturnTimeConfig(estimator="forest"), 0).fit(
        rows.take(~apart), rows.take(apart), encoder=encoder
    )


def step(workflow: str, number: int | None = None, agent: str = "main", workflow_type: str = "coding") -> Step:
    return Step(workflow_type, workflow, agent, number)


def run(
    forecaster: ReturnTimeForecaster, workflow: str, away_s: list[float], reason: str | None = "stop", **of: Any
) -> list[LiveReturn]:
    """Steps of two seconds; before each but the first the workflow is away."""
    made, now = [], 100.0
    for number, away in enumerate([0.0, *away_s]):
        now += away
        forecaster.arrived(step(workflow, number, **of), 1000, now)
        now += 2.0
        made.append(forecaster.completed(step(workflow, number, **of), 50, reason, now))
    return made


def test_forecasts_are_those_of_the_same_steps_in_a_trace(predictor: ReturnTimePredictor) -> None:
    forecaster = ReturnTimeForecaster(predictor, 3, budget=WAITS)
    steps: list[dict[str, Any]] = []
    for place, row in enumerate(sessions(3, 7).to_pylist()):
        if row["kind"] != "llm":
            continue
        if row["step"] == 0:
            steps = []
        steps.append({**row, "step": len(steps)})
        of = step(row["workflow_id"], place)
        begin, end = (row[name].timestamp() - 1.7e9 for name in ("started_at", "ended_at"))
        forecaster.arrived(of, row["input_tokens"], begin)
        before = forecaster.completed(of, row["output_tokens"], "stop", end)
        assert (before.source, before.version) == ("champion", 3)
        tools = ["grep"] if row["finish_reason"] == "tool_calls" else []
        after = forecaster.answered(of, row["finish_reason"], tools)
        given_tools = [{**row, "kind": "tool", "agent": tool} for tool in tools]
        expected = predictor.forecast([*steps, *given_tools])
        assert after is not None
        if tools:  # a trace without tool calls so far does not say whether it records them
            np.testing.assert_allclose(after.seconds, list(expected.quantiles.values()), rtol=1e-5)
            assert after.end == pytest.approx(expected.end)
        assert forecaster.away(of.workflow) == (after, end)
    assert not forecaster.faults


def test_of_steps_that_run_side_by_side_each_keeps_its_arrival(predictor: ReturnTimePredictor) -> None:
    """The tokens of a step that still runs are not counted; equal steps complete in the order of their arrival."""
    forecaster = ReturnTimeForecaster(predictor, budget=WAITS)
    first, second = step("w", None), step("w", None)
    forecaster.arrived(first, 1000, 0.0)
    forecaster.arrived(second, 2000, 1.0)
    assert forecaster.away(first.workflow) is None
    live = forecaster.completed(second, 9, "stop", 5.0)
    again = ReturnTimeForecaster(predictor, budget=WAITS)
    again.arrived(first, 1000, 0.0)
    again.arrived(second, 2000, 1.0)
    assert again.completed(second, 9, "stop", 5.0) == live
    assert forecaster.completed(first, 9, "stop", 6.0).source == "champion"
    assert forecaster.completed(first, 9, "stop", 7.0).reason == NO_STEP


def test_an_answer_counts_only_while_its_workflow_is_away(predictor: ReturnTimePredictor) -> None:
    forecaster = ReturnTimeForecaster(predictor, budget=WAITS)
    assert forecaster.answered(step("w", 0), "stop", []) is None
    forecaster.arrived(step("w", 0), 1000, 0.0)
    assert forecaster.answered(step("w", 0), "stop", []) is None
    before = forecaster.completed(step("w", 0), 50, "stop", 1.0)
    assert forecaster.answered(step("w", 1), "stop", []) is None
    assert forecaster.answered(step("w", 0), None, None) is None
    assert forecaster.away(step("w").workflow) == (before, 1.0)
    tool = forecaster.answered(step("w", 0), "tool_calls", ["grep"])
    answer = forecaster.answered(step("w", 0), "stop", [])
    strange = forecaster.answered(step("w", 0), "no such reason", ["no such tool"] * 1000)
    assert tool is not None
    assert answer is not None
    assert strange is not None
    assert tool.seconds[3] < 0.5 * answer.seconds[3]
    assert tool.end < 0.5 * answer.end
    assert strange.source == "champion"
    forecaster.arrived(step("w", 1), 1000, 2.0)
    assert forecaster.answered(step("w", 0), "stop", []) is None


def test_without_a_model_counts_forecast_once_they_have_enough() -> None:
    forecaster = ReturnTimeForecaster()
    made = run(forecaster, "w", [10.0] * 8)
    assert [live.source for live in made[:5]] == ["none"] * 5
    assert made[0].reason == NO_MODEL
    assert (made[-1].source, made[-1].evidence, made[-1].reason, made[-1].version) == ("back-off", 8, NO_MODEL, None)
    assert made[-1].seconds == pytest.approx([10.0] * len(QUANTILES))
    assert (made[-1].quantiles, made[-1].end) == (QUANTILES, 0.0)
    forecaster.ended(step("w").workflow)
    assert run(forecaster, "v", [])[0].end > 0.1


@pytest.mark.parametrize("reason", [EndReason.EXPIRED, EndReason.ABORTED])
def test_only_a_finished_workflow_has_ended(reason: EndReason) -> None:
    forecaster = ReturnTimeForecaster()
    run(forecaster, "w", [10.0] * 8)
    forecaster.ended(step("w").workflow, reason)
    assert run(forecaster, "v", [])[0].end == 0.0


def test_an_unknown_agent_is_left_to_the_counts_and_a_known_one_to_the_model(predictor: ReturnTimePredictor) -> None:
    forecaster = ReturnTimeForecaster(predictor, 1, budget=WAITS)
    known, new = run(forecaster, "k", [1.0] * 9), run(forecaster, "n", [1.0] * 9, agent="new", workflow_type="new")
    assert {live.source for live in known} == {"champion"}
    assert {live.source for live in new} == {"back-off"}
    assert (new[0].version, new[-1].version, new[-1].evidence) == (1, None, 9)


def test_during_a_drift_alarm_counts_forecast(predictor: ReturnTimePredictor) -> None:
    forecaster = ReturnTimeForecaster(predictor, budget=WAITS, drifted=lambda name: name == "coding")
    made = run(forecaster, "w", [1.0] * 9)
    assert made[0].source == "champion", "until they have enough"
    assert (made[-1].source, made[-1].reason) == ("back-off", DRIFTED)


def test_a_running_workflow_keeps_the_model_it_began_with(predictor: ReturnTimePredictor) -> None:
    forecaster = ReturnTimeForecaster(predictor, 1, budget=WAITS)
    breaker = forecaster.breaker
    forecaster.take_over(predictor, 1)
    assert forecaster.breaker is breaker, "the same model keeps its breaker"
    forecaster.arrived(step("old"), 1, 0.0)
    other = ReturnTimePredictor.__new__(ReturnTimePredictor)
    other.__dict__.update(predictor.__dict__)
    forecaster.take_over(other, 2)
    assert forecaster.completed(step("old"), 1, "stop", 1.0).version == 1
    assert run(forecaster, "new", [])[0].version == 2
    forecaster.take_over(None, None)
    assert run(forecaster, "newest", [])[0].reason == NO_MODEL
    forecaster.arrived(step("old", 1), 1, 2.0)
    assert forecaster.completed(step("old", 1), 1, "stop", 3.0).version == 1


class Broken(ReturnTimePredictor):
    """Answers what it is told to."""

    answer: Any

    def forecast_row(self, *row: Any) -> Any:
        return self.answer(super().forecast_row(*row))


def infinite(of: Any) -> Any:
    return replace(of, quantiles={**of.quantiles, 0.99: math.inf})


def raises(_: Any) -> Any:
    raise RuntimeError("secret")


@pytest.mark.parametrize(
    "answer",
    [
        infinite,
        raises,
        lambda of: replace(of, quantiles=dict.fromkeys(of.quantiles, math.nan)),
        lambda of: replace(of, quantiles=dict.fromkeys(of.quantiles, -1.0)),
        lambda of: replace(of, quantiles=dict(zip(of.quantiles, reversed(of.quantiles.values()), strict=True))),
        lambda of: replace(of, quantiles={}),
        lambda of: replace(of, end=1.5),
        lambda of: replace(of, end=math.nan),
    ],
)
def test_a_model_that_answers_nonsense_is_served_by_counts_and_switched_off(
    predictor: ReturnTimePredictor, answer: Any
) -> None:
    broken = Broken.__new__(Broken)
    broken.__dict__.update(predictor.__dict__)
    broken.answer = staticmethod(answer)
    forecaster = ReturnTimeForecaster(broken, 1, budget=replace(WAITS, at_least=10, window=10), clock=Clock())
    made = run(forecaster, "w", [5.0] * 12)
    assert {live.source for live in made[:5]} == {"none"}
    assert made[0].reason in ("NotAForecast", "RuntimeError")
    assert (made[-1].source, made[-1].reason) == ("back-off", SWITCHED_OFF)
    assert forecaster.breaker is not None
    assert forecaster.breaker.off
    assert not forecaster.faults


TIMES = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([None, -1.0, 1e300, 3 * 86_400.0])
COUNTS = st.integers() | st.floats() | st.none()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("ace"), st.sampled_from("ab"), TIMES, COUNTS, st.text() | st.none())))
def test_whatever_comes_is_served_with_finite_numbers(predictor: ReturnTimePredictor, events: list[Any]) -> None:
    """Clocks that run backwards, pauses of days, times and counts that are none, completions without arrivals."""
    for model in (predictor, None):
        forecaster = ReturnTimeForecaster(model, budget=WAITS)
        for event, workflow, now, count, reason in events:
            of = step(workflow, None)
            if event == "a":
                forecaster.arrived(of, count, now)
            elif event == "e":
                forecaster.ended(of.workflow)
            else:
                for live in (
                    forecaster.completed(of, count, reason, now),
                    forecaster.answered(of, reason, [str(reason)]),
                ):
                    if live is not None:
                        assert all(0.0 <= seconds < math.inf for seconds in live.seconds)
                        assert list(live.seconds) == sorted(live.seconds)
                        assert 0.0 <= live.end <= 1.0


def test_a_clock_that_runs_backwards_is_counted_and_a_pause_of_days_is_a_return() -> None:
    forecaster = ReturnTimeForecaster()
    for number, now in enumerate((0.0, 3 * 86_400.0, 5.0, math.nan, -math.inf)):
        forecaster.arrived(step("w", number), 1, now)
        forecaster.completed(step("w", number), 1, "stop", now)
    assert forecaster.faults == {"time": 6}
    assert run(forecaster, "v", [3 * 86_400.0] * 5)[-1].seconds[-1] == 3 * 86_400.0


def test_token_counts_that_are_none_are_unknown(predictor: ReturnTimePredictor) -> None:
    forecaster, other = (ReturnTimeForecaster(predictor, budget=WAITS) for _ in range(2))
    wrong: list[Any] = [-1, math.nan, math.inf, "many"]
    for number, count in enumerate(wrong):
        for of, tokens in ((forecaster, count), (other, None)):
            of.arrived(step("w", number), tokens, 10.0 * number)
            of.completed(step("w", number), tokens, "stop", 10.0 * number + 1)
    assert forecaster.away(step("w").workflow) == other.away(step("w").workflow)
    assert (forecaster.faults, other.faults) == ({"tokens": 8}, {})


def test_a_session_resumed_under_its_id_is_new(predictor: ReturnTimePredictor) -> None:
    forecaster = ReturnTimeForecaster(predictor, budget=WAITS)
    first = run(forecaster, "w", [3.0, 4.0])
    forecaster.ended(step("w").workflow, EndReason.EXPIRED)
    assert run(forecaster, "w", [3.0, 4.0]) == first


def test_memory_is_bounded(predictor: ReturnTimePredictor, monkeypatch: pytest.MonkeyPatch) -> None:
    forecaster = ReturnTimeForecaster(predictor, budget=WAITS)
    monkeypatch.setattr(return_times, "MOST_FLYING", 4)
    for number in range(9):
        forecaster.arrived(step("w9", 100 + number), 1, 1e4)
    (record,) = forecaster.workflows.values()
    assert sum(map(len, record.return_state.flying.values())) <= 4
    counts = ReturnCounts(ReturnCountsConfig(types=2, groups=4, latest=8))
    for number in range(100):
        for tenant in ("", "key-1"):
            counts.returned(scoped(tenant, f"t{number}"), f"a{number}", "stop", 1.0)
            counts.returned(scoped(tenant, "t"), f"a{number}", "stop", float(number))
    assert len(counts) == 2
    live = counts.forecast(scoped("key-1", "t"), "new", None, None)
    assert live is not None
    assert (live.evidence, live.seconds[-1]) == (0, 99.0)


def test_each_quantile_comes_from_the_narrowest_group_with_returns_on_both_sides() -> None:
    counts = ReturnCounts()
    for seconds in np.linspace(1, 100, 100):
        counts.returned("t", "person", "stop", float(seconds))
    for _ in range(20):
        counts.returned("t", "tool", "tool_calls", 0.5)
    narrow = counts.forecast("t", "tool", "tool_calls", None)
    assert narrow is not None
    assert (narrow.evidence, narrow.seconds[3]) == (20, 0.5)
    assert narrow.seconds[-1] > 90.0, "of 20 returns none tells the 99 % quantile"
    other = counts.forecast("t", "person", "length", None)
    assert other is not None
    assert other.seconds[3] == pytest.approx(50.5)
    unknown_type = counts.forecast("new", "person", "stop", None)
    assert unknown_type is not None
    assert unknown_type.evidence == 0, "none of this agent in this type"
    assert counts.forecast(scoped("key-1", "t"), "tool", "tool_calls", None) is None, "tenants share nothing"


def test_returns_are_judged_by_the_forecast_in_force() -> None:
    forecaster = ReturnTimeForecaster()
    run(forecaster, "w", [10.0] * 8)
    run(forecaster, "v", [20.0, 5.0], workflow_type="other")
    figures = forecaster.status()["workflow_types"]
    assert figures["coding"]["back-off"]["judged"] == {"0.1": 3, "0.5": 3, "0.9": 3, "0.99": 3}
    assert figures["coding"]["back-off"]["within"] == figures["coding"]["back-off"]["judged"]
    assert figures["other"]["back-off"]["within"] == {"0.1": 1, "0.5": 1, "0.9": 1, "0.99": 1}
    assert figures["other"]["back-off"]["log_error"] == pytest.approx(2 * math.log(2))


def test_workflow_types_beyond_the_limit_are_judged_together() -> None:
    live = LiveReturns()
    forecast = LiveReturn("champion", 9, 0.0, (0.5,), (1.0,), 1)
    for number in range(60):
        live.returned(f"t{number}", forecast, 1.0)
    found = live.to_dict()
    assert len(found) == 51
    assert found["other"]["champion"]["judged"]["0.5"] == 10
