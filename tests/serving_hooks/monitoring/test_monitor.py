"""The events of an engine beside its forecaster come out as figures and alarms, and nothing is raised."""

import logging
from typing import Any

import pytest
from by_name import Forecaster, ForecastMonitor
from hypothesis import given, settings
from hypothesis import strategies as st
from monitoring_samples import silent, sure_of
from tiny_model import Tiny

from presage.datasets.store import read_store
from presage.features.prefixes import prefixes_of
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.monitoring.drift import Drift, DriftConfig
from presage.serving_hooks.monitoring.live_accuracy import LiveAccuracy
from presage.serving_hooks.monitoring.retrain_check import TraceForecasts, followed_of
from presage.serving_hooks.workflows import EndReason
from presage.serving_hooks.workflows.live import DRIFTED


def test_beside_the_forecaster_it_tells_what_a_replay_of_the_trace_tells(tiny: Tiny) -> None:
    predictor, table = NextAgentPredictor.load(tiny.folder), read_store(tiny.held_out)
    forecaster, monitor = Forecaster(predictor, 4), ForecastMonitor()
    for step in table.to_pylist():
        ids = (step["workflow_type"], step["workflow_id"])
        given = {name: step[name] for name in ("input_tokens", "input_text", "prefill_state")}
        monitor.begun(
            *ids, step["agent"], forecaster.on_prefill(*ids, step["agent"], step=step["step"], **given), step["step"]
        )
        given = {name: step[name] for name in ("output_tokens", "output_text", "completion_state")}
        monitor.completed(*ids, forecaster.on_completion(*ids, **given), step["output_tokens"])
    for ids in sorted({(step["workflow_type"], step["workflow_id"]) for step in table.to_pylist()}):
        monitor.ended(*ids)
    prefixes = prefixes_of(table, predictor.vocabulary, predictor.horizon)
    both = predictor.predict_both(prefixes.with_states(predictor.source.states(table)))
    replayed = LiveAccuracy()
    for workflow in followed_of(table, TraceForecasts(predictor.vocabulary.agents, both, 4)):
        replayed.followed(workflow)
    ours, theirs = (live.agents("retry", "version 4", resamples=0) for live in (monitor.live, replayed))
    for moment, figures in theirs.items():
        assert ours[moment]["accuracy"] == pytest.approx(figures["accuracy"])
        assert ours[moment]["nll"] == pytest.approx(figures["nll"], rel=1e-4)
        assert ours[moment]["positions"] == figures["positions"]
    assert not monitor.errors


def test_an_alarm_is_told_to_the_log_once_and_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    monitor = ForecastMonitor(Drift(config=DriftConfig(learn_from=40)))
    with caplog.at_level(logging.WARNING):
        for number in range(300):
            word = "abc" if number < 150 else "axc"
            for step, agent in enumerate(word):
                monitor.begun("t", str(number), agent, silent(), step)
                monitor.completed("t", str(number), silent("completion"), 10)
            monitor.ended("t", str(number))
    assert monitor.falls_back("t", "next-agent") == DRIFTED
    assert monitor.falls_back("u", "next-agent") is None
    (message,) = [record.getMessage() for record in caplog.records if "has changed" in record.getMessage()]
    assert "agents never seen: " in message


def test_our_own_failure_is_counted_and_raises_nothing() -> None:
    class Broken(LiveAccuracy):
        def followed(self, workflow: Any) -> None:
            raise RuntimeError("the text of a request")

    monitor = ForecastMonitor(live=Broken())
    monitor.begun("t", "w", "a", silent(), 0)
    monitor.ended("t", "w")
    assert monitor.errors == {"RuntimeError": 1}


names = st.sampled_from(["t", "w", "", "x" * 500])
odd: st.SearchStrategy[Any] = st.sampled_from(["t", "w", "a", "", None, 3, [], {}, b"x", float("nan"), "x" * 100_000])


@settings(max_examples=150)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("begun"), names, names, odd, st.sampled_from([silent(), sure_of("a"), None]), odd),
            st.tuples(st.just("completed"), names, names, st.sampled_from([silent(), None]), odd),
            st.tuples(st.just("ended"), names, names, st.sampled_from(EndReason)),
            st.tuples(st.just("falls_back"), odd, odd),
        ),
        max_size=40,
    )
)
def test_law_nothing_an_engine_tells_raises(events: list[tuple[Any, ...]]) -> None:
    monitor = ForecastMonitor()
    for name, *arguments in events:
        getattr(monitor, name)(*arguments)
    assert monitor.following == len(monitor.outcomes)
