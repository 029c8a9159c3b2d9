"""Whatever an engine tells, in whatever order: nothing is raised, every answer is whole, memory stays bounded."""

from typing import Any

import numpy as np
import pytest
from by_name import Forecaster
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_samples import Clock, lengths_of
from tiny_model import STATE_SIZE, Tiny

from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.forecasting.online_counts import BackoffConfig, OnlineCounts
from presage.serving_hooks.workflows import EndReason
from presage.serving_hooks.workflows.identity import LONGEST_NAME, short
from presage.serving_hooks.workflows.live import LiveForecast

names: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(["retry", "planner", "coder", "a", "b", "", "x" * 100_000, "\ud800"]),
    st.text(max_size=5),
    st.sampled_from([None, 3, [], {}, b"bytes", float("nan"), ("a",)]),
)
numbers: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.integers(-5, 5000), st.floats(), st.sampled_from(["many", [1], 10**400, np.int64(3)])
)
texts: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.text(max_size=50), st.sampled_from([7, b"x", "word " * 1000, "\ud800"])
)
states: st.SearchStrategy[Any] = st.sampled_from(
    [None, np.ones(STATE_SIZE, np.float32), np.zeros(3), np.full(STATE_SIZE, np.nan), "state", [[1.0]], object()]
)
ids = (st.just("retry") | st.text("abé ", max_size=5), st.sampled_from(["a", "b", "x" * 500]))
begin = st.builds(
    lambda w, i, a, step, tokens, text, system, model, state: (
        "on_prefill",
        (w, i, a),
        {
            "step": step,
            "input_tokens": tokens,
            "input_text": text,
            "system_prompt": system,
            "model": model,
            "prefill_state": state,
        },
    ),
    *ids,
    names,
    st.one_of(st.none(), st.integers(-1, 4), numbers),
    numbers,
    texts,
    texts,
    names,
    states,
)
complete = st.builds(
    lambda w, i, tokens, text, state: (
        "on_completion",
        (w, i),
        {"output_tokens": tokens, "output_text": text, "completion_state": state},
    ),
    *ids,
    numbers,
    texts,
    states,
)
end = st.builds(lambda w, i, reason: ("close", (w, i), {"reason": reason}), *ids, st.sampled_from(EndReason))


@pytest.fixture(scope="module")
def predictor(tiny: Tiny) -> NextAgentPredictor:
    return NextAgentPredictor.load(tiny.folder)


@settings(max_examples=150)
@given(events=st.lists(st.one_of(begin, begin, complete, complete, end), max_size=40))
def test_law_no_sequence_of_events_raises_or_is_kept(
    tiny: Tiny, predictor: NextAgentPredictor, events: list[tuple[str, tuple[Any, ...], dict[str, Any]]]
) -> None:
    counts = OnlineCounts(BackoffConfig(types=2, agents=3, contexts=4, min_evidence=1))
    forecaster = Forecaster(
        predictor,
        lengths=lengths_of(tiny.store),
        back_off=counts,
        clock=Clock(),
    )
    answered = 0
    for event, given_ids, given_values in events:
        live = getattr(forecaster, event)(*given_ids, **given_values)
        if event != "close":
            answered += 1
            whole(live)
        assert len(counts) <= 2
    for guard in forecaster.breakers.values():
        assert guard.failed == 0, "what a request brings wrong is not held against the predictor"
    assert forecaster.counts.total() == 2 * answered, "one of next agents and one of lengths"
    for _, given_ids, _ in events:
        forecaster.close(*given_ids[:2])
    assert len(forecaster) == 0


def whole(live: LiveForecast) -> None:
    """A forecast is a distribution at every horizon, or nothing and a reason."""
    if live.source == "none":
        assert live.probabilities.size == 0
        assert live.reason
        assert len(live.reason) < 100
    else:
        assert live.probabilities.shape == (3, len(live.agents) + 1)
        assert live.probabilities.sum(axis=1) == pytest.approx(1, abs=1e-3)
        assert (live.probabilities >= 0).all()
        assert live.evidence >= 0
    left = live.remaining
    assert (left.source == "none") == (left.ranking is None)
    assert len(left.tokens) == len(left.quantiles)
    assert all(0 <= tokens < np.inf for tokens in left.tokens)


@given(st.text(max_size=400), st.text(max_size=400))
def test_law_short_names_are_bounded_and_differ_where_names_differ(one: str, other: str) -> None:
    assert len(short(one)) <= LONGEST_NAME
    assert (short(one) == short(other)) == (one == other)
