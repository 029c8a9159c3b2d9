"""A forecast is held against what came, at the step it spoke of, and what is unknown counts nowhere."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from monitoring_samples import forecast_of, silent, sure_of

from presage.datasets.synthetic.workflows import generate
from presage.features.moment import COMPLETION, MOMENTS
from presage.features.prefixes import MASKED, prefixes_of
from presage.features.vocabulary import Vocabulary
from presage.serving_hooks.monitoring.outcomes import (
    BINS,
    COUNTS,
    END,
    TRANSITIONS_KEPT,
    Followed,
    Tally,
    WorkflowOutcomes,
    model_of,
)
from presage.serving_hooks.monitoring.retrain_check import TraceForecasts, followed_of
from presage.serving_hooks.workflows import EndReason
from presage.serving_hooks.workflows.live import LITTLE_SEEN, STATES_LEFT_OUT, LiveForecast
from presage.training.metrics import measure

Judged = dict[tuple[str, int], tuple[int, int, float]]


def judged(of: Followed, model: str = "version 1") -> Judged:
    """Positions, right ones, and the negative log-likelihood that the tally of a model has, by moment and horizon."""
    if model not in of.next_agent:
        return {}
    sums = of.next_agent[model].sums.sum(axis=-1)
    return {
        (moment, k + 1): (int(sums[0, at, k]), int(sums[2, at, k]), round(float(sums[3, at, k]), 5))
        for at, moment in enumerate(MOMENTS)
        for k in range(sums.shape[2])
        if sums[0, at, k]
    }


def nats(*given: float) -> float:
    return round(-float(np.log(given).sum()), 5)


def test_every_horizon_is_judged_by_its_step_and_none_farther() -> None:
    kept = WorkflowOutcomes("t")
    first = forecast_of([0.1, 0.6, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1])
    kept.begun("a", first, 0)
    kept.completed(forecast_of([0.0, 0.25, 0.75, 0.0], moment=COMPLETION), 5)
    for step, agent in enumerate("bbca", 1):
        kept.begun(agent, silent(), step)
        kept.completed(silent(COMPLETION), 5)
    whole = kept.ended()
    assert judged(whole) == {
        ("prefill", 1): (1, 1, nats(0.6)),
        ("prefill", 2): (1, 0, nats(0.2)),
        ("prefill", 3): (1, 0, nats(0.1)),
        ("completion", 1): (1, 0, nats(0.25)),
    }


def test_the_end_is_an_outcome_and_nothing_is_asked_after_it() -> None:
    kept = WorkflowOutcomes("t")
    rows = ([0.1, 0.6, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.1, 0.1, 0.1, 0.7])
    kept.begun("a", forecast_of(*rows), 0)
    kept.completed(silent(COMPLETION), 5)
    kept.begun("b", forecast_of(*rows), 1)
    kept.completed(silent(COMPLETION), 5)
    whole = kept.ended()
    assert judged(whole) == {("prefill", 1): (2, 1, nats(0.6, 0.1)), ("prefill", 2): (1, 1, nats(0.4))}
    assert whole.ended
    assert whole.transitions == {(END, "a"): 1, ("a", "b"): 1, ("b", END): 1}


@pytest.mark.parametrize("how", [EndReason.EXPIRED, EndReason.ABORTED, "within a step"])
def test_of_a_workflow_that_did_not_end_the_end_and_the_tokens_left_are_unknown(how: str) -> None:
    kept = WorkflowOutcomes("t")
    kept.begun("a", forecast_of([0.0, 0.0, 0.0, 1.0], tokens=(1.0, 2.0)), 0)
    if how != "within a step":
        kept.completed(silent(COMPLETION), 5)
    whole = kept.ended(EndReason(how) if how != "within a step" else EndReason.FINISHED)
    assert (whole.ended, whole.next_agent, whole.lengths) == (False, {}, {})
    assert whole.transitions == {(END, "a"): 1}


def test_an_agent_the_forecast_has_no_name_for_is_wrong() -> None:
    kept = WorkflowOutcomes("t")
    kept.begun("a", sure_of("b"), 0)
    kept.begun("stranger", silent(), 1)
    positions, confidence, right, nats_of_known, known = kept.ended().next_agent["version 1"].sums.sum((1, 2, 3))
    assert (positions, confidence, right, nats_of_known, known) == (1, 1, 0, 0, 0)


def test_tokens_left_are_judged_at_the_end_by_hand() -> None:
    kept = WorkflowOutcomes("t")
    kept.begun("a", forecast_of([1, 0, 0, 0], tokens=(10.0, 15.0)), 0)
    kept.completed(silent(COMPLETION), 8)
    kept.begun("b", forecast_of([1, 0, 0, 0], tokens=(3.0, 3.0)), 1)
    kept.completed(silent(COMPLETION), 4)
    (tally,) = kept.ended().lengths.values()  # 12 and 4 were left
    assert (tally.judged, tally.within.tolist()) == (2, [0, 1])


def test_what_was_left_is_unknown_up_to_a_step_without_a_count_and_known_behind_it() -> None:
    kept = WorkflowOutcomes("t")
    for number, tokens in enumerate([5, None, "many", 7]):
        kept.begun("a", forecast_of([1, 0, 0, 0], tokens=(6.9, 7.0)), number)
        kept.completed(silent(COMPLETION), tokens)
    (tally,) = kept.ended().lengths.values()
    assert (tally.judged, tally.within.tolist()) == (1, [0, 1])


def test_across_missed_steps_only_the_distance_is_known() -> None:
    kept = WorkflowOutcomes("t")
    kept.begun("a", forecast_of([0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], tokens=(1.0, 2.0)), 0)
    kept.completed(silent(COMPLETION), 5)
    kept.begun("c", silent(), 3)
    kept.completed(silent(COMPLETION), 5)
    whole = kept.ended()
    assert judged(whole) == {("prefill", 3): (1, 1, 0.0)}
    assert not whole.lengths, "what the missed steps produced is unknown"
    assert whole.transitions == {(END, "a"): 1, ("c", END): 1}


def test_a_step_told_again_changes_nothing() -> None:
    once, again = WorkflowOutcomes("t"), WorkflowOutcomes("t")
    for kept, times in ((once, 1), (again, 3)):
        for step, agent in enumerate("abca"):
            for _ in range(times):
                kept.begun(agent, sure_of("b", "c", "a"), step)
            for _ in range(times):
                kept.completed(sure_of("c", moment=COMPLETION), 5)
    first, second = once.ended(), again.ended()
    assert first.transitions == second.transitions
    assert np.array_equal(first.next_agent["version 1"].sums, second.next_agent["version 1"].sums)


def test_models_are_told_apart() -> None:
    assert model_of("champion", 3, None) == model_of("back-off", 3, None) == "version 3"
    assert model_of("back-off", None, LITTLE_SEEN) == COUNTS
    assert model_of("back-off", None, None) == model_of("back-off", None, STATES_LEFT_OUT) == "no version"


def test_the_figures_of_a_trace_are_those_of_evaluation() -> None:
    table = generate("retry", 60, 3, state_size=16, censored=0.3).table
    vocabulary = Vocabulary.from_table(table.slice(0, 40))
    prefixes = prefixes_of(table, vocabulary, 3)
    rng = np.random.default_rng(1)
    shape = (prefixes.steps, 3, vocabulary.outcomes)
    forecasts = {moment: rng.dirichlet(np.ones(shape[2]), shape[:2]).astype(np.float32) for moment in MOMENTS}
    whole = list(followed_of(table, TraceForecasts(vocabulary.agents, forecasts, version=1)))
    sums = np.sum([of.next_agent["version 1"].sums for of in whole if of.next_agent], axis=0)
    assert len(whole) == 60
    for place, moment in enumerate(MOMENTS):
        figures = measure(forecasts[moment], prefixes.outcomes, prefixes.workflow, rng, resamples=1)
        judged = (prefixes.outcomes != MASKED).sum(axis=0)
        assert sums[0, place].sum(axis=-1).tolist() == judged.tolist()
        assert np.allclose(sums[2, place].sum(axis=-1) / judged, figures.accuracy)
        assert np.allclose(sums[3, place].sum(axis=-1) / sums[4, place].sum(axis=-1), figures.nll, rtol=1e-4)


def test_a_workflow_that_never_ends_takes_bounded_memory() -> None:
    kept = WorkflowOutcomes("t")
    for step in range(5000):
        kept.begun(f"agent {step}", sure_of("a", "b", "c"), step)
        kept.completed(sure_of("a", "b", "c", moment=COMPLETION), 5)
    assert len(kept.open) <= 6
    assert len(kept.open_lengths) <= 64
    assert len(kept.ended().transitions) == TRANSITIONS_KEPT


anything: st.SearchStrategy[Any] = st.sampled_from(["t", "w", "a", "b", "", "x" * 500, "\ud800"])
forecasts: st.SearchStrategy[LiveForecast] = st.sampled_from(
    [silent(), sure_of("a", "b", "c"), sure_of(END), forecast_of([0.2, 0.2, 0.2, 0.4], tokens=(1.0, 9.0), version=2)]
)
events = st.one_of(
    st.tuples(st.just("begun"), anything, forecasts, st.sampled_from([None, 0, 1, 2, 9, -1, 10**30, "x"])),
    st.tuples(st.just("completed"), forecasts, st.sampled_from([None, 0, 7, -1, float("nan"), "x"])),
)


@given(calls=st.lists(events, max_size=60))
def test_law_whatever_comes_nothing_is_judged_twice(calls: list[tuple[Any, ...]]) -> None:
    kept = WorkflowOutcomes("t")
    for name, *arguments in calls:
        getattr(kept, name)(*arguments)
    tallied = sum(of.sums[0].sum() for of in kept.ended().next_agent.values())
    assert tallied <= 3 * len(calls)


floats = st.floats(0, 1, width=32)


@given(st.lists(st.tuples(st.sampled_from(MOMENTS), st.integers(1, 3), st.booleans(), floats, st.none() | floats)))
def test_few_forecasts_and_many_have_the_sums_of_float32(added: list[tuple[Any, ...]]) -> None:
    tally, wanted = Tally(3), np.zeros((5, 2, 3, BINS), np.float32)
    for number, (moment, horizon, right, confidence, given_) in enumerate(added * 5):
        tally.add(moment, horizon, right, confidence, given_)
        nats = 0.0 if given_ is None else -math.log(max(given_, 1e-12))
        at = MOMENTS.index(moment), horizon - 1, min(int(np.float32(confidence) * np.float32(BINS)), BINS - 1)
        for plane, more in enumerate((1.0, confidence, right, nats, given_ is not None)):
            wanted[plane][at] = np.float32(float(wanted[plane][at]) + more)
        if number % 37 == 0:
            assert np.array_equal(tally.sums, wanted)
    assert np.array_equal(tally.sums, wanted)
