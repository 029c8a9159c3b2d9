"""What clients send is read where it is sound, and counted where it is not; nothing of it raises."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.datasets.schema.names import MAX_NAME
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.workflows.identity import Step, workflow_key
from presage.serving_hooks.workflows.metadata import check, read


def counted(sent: object, session_id: object = None) -> tuple[Step | None, dict[str, int]]:
    counts = EventCounts()
    return read(sent, session_id, counts), counts.by_key()


def test_flat_names_are_read() -> None:
    sent = {"workflow_type": "review", "workflow_id": "r1", "agent": "coder", "step": 3, "workflow_end": True}
    assert counted(sent) == (Step("review", "r1", "coder", 3, True), {})


def test_pythias_names_are_read_flat_and_nested() -> None:
    names = {"workflow_type_id": 7, "workflow_id": "r1", "agent_id": 2}
    assert counted(names) == counted({"app_metadata": names}) == (Step("7", "r1", "2"), {})
    assert counted({"app_metadata": names, "agent_id": 5}) == (Step("7", "r1", "5"), {})  # what stands outside wins


def test_a_session_is_a_workflow_of_its_own() -> None:
    assert counted(None, "s1") == (Step("", "s1", ""), {})
    assert counted({"session_id": "s1"}) == (Step("", "s1", ""), {})
    assert counted({"workflow_id": "r1"}, "s1") == (Step("", "r1", ""), {})


def test_without_an_id_there_is_no_workflow() -> None:
    assert counted(None) == counted({}) == counted({"top": 1}) == (None, {})
    assert counted({"agent": "coder"}) == (None, {})


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("agent", "x" * (MAX_NAME + 1), "agent: too long"),
        ("agent", "a\nb", "agent: not printable"),
        ("agent", "a\x00b", "agent: not printable"),
        ("agent", "\ud800", "agent: not printable"),
        ("agent", 1.5, "agent: wrong type"),
        ("agent", True, "agent: wrong type"),
        ("agent", ["a"], "agent: wrong type"),
        pytest.param("agent", 10**5000, "agent: wrong type", id="agent-huge"),
        ("workflow_type", {"a": 1}, "workflow_type: wrong type"),
        ("step", -1, "step: no number from 0"),
        ("step", "9" * 5000, "step: no number from 0"),
        ("step", float("nan"), "step: no number from 0"),
        ("workflow_end", "perhaps", "workflow_end: neither true nor false"),
        pytest.param("workflow_end", 10**5000, "workflow_end: neither true nor false", id="end-huge"),
        ("app_metadata", "a", "app_metadata: wrong type"),
    ],
)
def test_what_is_unsound_is_left_out_and_counted(field: str, value: object, reason: str) -> None:
    assert counted({"workflow_id": "r1", field: value}) == (Step("", "r1", ""), {reason: 1})


def test_a_workflow_id_that_is_unsound_is_none() -> None:
    assert counted({"workflow_id": "r1\n"}) == (None, {"workflow_id: not printable": 1})
    assert counted([1]) == (None, {"extra_args: wrong type": 1})


@pytest.mark.parametrize(
    ("said", "meant"), [(True, True), (1, True), ("True", True), ("1", True), (0, False), ("false", False), ("", False)]
)
def test_the_end_is_said_in_several_ways(said: object, meant: bool) -> None:
    step, counts = counted({"workflow_id": "r1", "workflow_end": said})
    assert step is not None
    assert step.last is meant
    assert not counts


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
FIELDS = st.sampled_from(
    ["workflow_type", "workflow_type_id", "workflow_id", "agent", "agent_id", "step", "workflow_end", "app_metadata"]
)


@given(st.dictionaries(FIELDS, ANYTHING) | ANYTHING, ANYTHING)
def test_nothing_raises_and_what_comes_out_is_bounded(sent: Any, session_id: Any) -> None:
    step, counts = counted(sent, session_id)
    assert len(counts) <= 10  # a closed set of reasons, whatever is sent
    check(sent, session_id, EventCounts())
    if step is not None:
        for name in (step.workflow_type, step.workflow_id, step.agent):
            assert len(name) <= MAX_NAME
            assert name.isprintable()


@given(st.text(), st.text(), st.text(), st.text())
def test_no_two_workflows_have_one_key(a: str, b: str, c: str, d: str) -> None:
    first, _ = counted({"workflow_type": a, "workflow_id": b})
    second, _ = counted({"workflow_type": c, "workflow_id": d})
    if first and second:
        assert (first.workflow == second.workflow) == (first == second)
        assert first.workflow == workflow_key(first.workflow_type, first.workflow_id) != ""
