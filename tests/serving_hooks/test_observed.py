"""What the HTTP server observed reaches the engine as sound names, or not at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.datasets.schema.names import MAX_NAME
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.workflows.metadata import check, read
from presage.serving_hooks.workflows.observed import KNOWN_AS, NOTHING, OBSERVED, UNSOUND, Observed, known_as, observed

WHOLE = {
    "session": "s-1",
    "trace": "0af7651916cd43dd8448eb211c80319c",
    "conversation": "c-1",
    "cache_key": "0198c5c4-11d0-7c31-b0a5-6d0c2a41f9be",
    "response": "resp_1",
    "agent": ["coder", 0.95],
    "workflow_type": "app-01234567",
}


def test_each_source_is_a_field() -> None:
    counts = EventCounts()
    assert observed({OBSERVED: WHOLE}, counts) == Observed(
        "s-1", WHOLE["trace"], "c-1", WHOLE["cache_key"], "resp_1", "coder", 0.95, "app-01234567"
    )
    assert observed({OBSERVED: {"agent": ("coder", 1.0)}}, counts) == Observed(agent="coder", agent_confidence=1.0)
    assert counts.by_key() == {}


@pytest.mark.parametrize("extra", [None, {}, {"workflow_id": "r1"}, "text", 1, [OBSERVED]])
def test_a_request_of_which_nothing_was_observed_costs_no_object(extra: Any) -> None:
    counts = EventCounts()
    assert observed(extra, counts) is NOTHING
    assert counts.by_key() == {}


UNSOUND_NAMES: list[Any] = ["", "a\n", "a" * (MAX_NAME + 1), 1, 1.5, True, b"s", [], {"id": "s"}, "\xa0"]


@pytest.mark.parametrize("value", UNSOUND_NAMES)
@pytest.mark.parametrize("source", ["session", "trace", "conversation", "cache_key", "response", "workflow_type"])
def test_an_unsound_name_is_left_out_and_counted(source: str, value: Any) -> None:
    counts = EventCounts()
    found = observed({OBSERVED: {**WHOLE, source: value}}, counts)
    assert getattr(found, source) in (None, "")
    assert found.agent == "coder"
    assert counts.by_key() == {UNSOUND: 1}


@pytest.mark.parametrize(
    "agent",
    [
        *([name, 0.9] for name in UNSOUND_NAMES),
        *(["coder", confidence] for confidence in (math.nan, math.inf, -0.1, 1.1, 1, True, "1", None)),
        *("coder", [], ["coder"], ["coder", 0.9, 0.9], {"coder": 0.9}, {"agent": "coder"}, 1),
    ],
)
def test_an_unsound_agent_is_left_out_and_counted(agent: Any) -> None:
    counts = EventCounts()
    assert observed({OBSERVED: {"agent": agent}}, counts) == NOTHING
    assert counts.by_key() == {UNSOUND: 1}


def test_what_the_models_know_an_agent_by_is_two_names() -> None:
    counts = EventCounts()
    assert known_as({OBSERVED: {KNOWN_AS: ["review", "coder"]}}, counts) == ("review", "coder")
    assert known_as({OBSERVED: {KNOWN_AS: ["", "coder"]}}, counts) == ("", "coder")
    assert [known_as(extra, counts) for extra in (None, {}, {OBSERVED: 1}, {OBSERVED: WHOLE})] == [None] * 4
    assert counts.by_key() == {}


@pytest.mark.parametrize(
    "value", [*([("review"), name] for name in UNSOUND_NAMES), "coder", [], ["coder"], ["a", "b", "c"], {"a": "b"}, 1]
)
def test_an_unsound_name_of_a_known_agent_is_left_out_and_counted(value: Any) -> None:
    counts = EventCounts()
    assert known_as({OBSERVED: {KNOWN_AS: value}}, counts) is None
    assert counts.by_key() == {UNSOUND: 1}


def test_an_observation_does_not_name_a_workflow_nor_look_like_a_mistake() -> None:
    counts = EventCounts()
    assert read({OBSERVED: WHOLE}, None, counts) is None
    check({OBSERVED: WHOLE, "workflow_type": "t", "workflow_id": "r", "agent": "a"}, None, counts)
    assert counts.by_key() == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=12,
)


@given(
    JSON
    | st.fixed_dictionaries(
        {OBSERVED: JSON | st.fixed_dictionaries({}, optional=dict.fromkeys([*WHOLE, KNOWN_AS], JSON))}
    )
)
def test_reading_never_raises(extra: Any) -> None:
    found = observed(extra, EventCounts())
    assert all(len(one) <= MAX_NAME and one.isprintable() for one in known_as(extra, EventCounts()) or ())
    for one in (found.session, found.trace, found.conversation, found.cache_key, found.response):
        assert one is None or (0 < len(one) <= MAX_NAME and one.isprintable())
    assert all(len(one) <= MAX_NAME and one.isprintable() for one in (found.agent, found.workflow_type))
    assert 0.0 <= found.agent_confidence <= 1.0
    assert bool(found.agent) or not found.agent_confidence
