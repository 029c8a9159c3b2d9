"""Rows of return times: labels by hand, clocks that lie, inputs that serving lacks, live rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from return_samples import sessions

from presage.datasets.schema import conform
from presage.errors import InputError
from presage.features.input_profiles import PROFILES
from presage.features.return_times import LEAST_MS, ReturnEncoder, ReturnWorkflow, last_row, return_rows

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float | None) -> datetime | None:
    return None if seconds is None else BEGIN + timedelta(seconds=seconds)


def step(number: int, start: float | None, end: float | None, workflow: str = "w", **more: Any) -> dict[str, Any]:
    of = {"workflow_type": "app", "workflow_id": workflow, "step": number, "agent": "main"}
    return {**of, "started_at": at(start), "ended_at": at(end), **more}


def table_of(*steps: dict[str, Any]) -> pa.Table:
    names = dict.fromkeys(name for s in steps for name in s)
    return conform(pa.Table.from_pylist([{name: s.get(name) for name in names} for s in steps]), "test")


def labels(*steps: dict[str, Any]) -> list[float]:
    table = table_of(*steps)
    return [float(ms) for ms in return_rows(table, ReturnEncoder.fit(table)).label]


def column(table: pa.Table, name: str, encoder: ReturnEncoder | None = None) -> list[float]:
    encoder = encoder or ReturnEncoder.fit(table)
    return [float(x) for x in return_rows(table, encoder).numbers[:, encoder.names.index(name)]]


def test_a_label_runs_from_the_end_of_a_step_to_the_next_request_and_is_infinite_at_the_end() -> None:
    assert labels(step(0, 0.0, 2.5), step(1, 4.0, 5.0), step(2, 65.25, 66.0)) == [1500.0, 60250.0, np.inf]


def test_a_workflow_that_was_cut_has_not_ended() -> None:
    found = labels(step(0, 0.0, 2.0, complete=False), step(1, 4.0, 5.0, complete=False))
    assert found[0] == 2000.0
    assert np.isnan(found[1])


def test_a_missing_time_hides_only_the_labels_that_need_it() -> None:
    found = labels(step(0, 0.0, None), step(1, 4.0, 5.0), step(2, None, 8.0), step(3, 9.0, None))
    assert np.isnan(found[:2]).all()
    assert found[2:] == [1000.0, np.inf]


def test_the_time_of_tool_calls_is_part_of_the_return_time() -> None:
    called = step(1, 2.0, 7.0, kind="tool", agent="grep")
    assert labels(step(0, 0.0, 1.0), called, step(2, 9.0, 10.0)) == [8000.0, np.inf]


def test_of_steps_that_run_side_by_side_the_next_arrival_counts() -> None:
    """Step 0 calls two agents at once; when the first is done, the second still runs, and the join comes last."""
    found = labels(step(0, 0.0, 1.5), step(1, 2.0, 4.0), step(2, 2.1, 9.0), step(3, 9.5, 10.0))
    assert found == pytest.approx([500.0, 5500.0, 500.0, np.inf])
    table = table_of(step(0, 0.0, 1.5), step(1, 2.0, 4.0), step(2, 2.1, 9.0), step(3, 9.5, 10.0))
    assert column(table, "in_flight") == [0, 1, 0, 0]
    assert np.exp(column(table, "return_1")[-1]) - 1 == pytest.approx(500.0, rel=1e-5)


def test_starts_that_were_rounded_down_to_seconds_still_follow_the_step_before() -> None:
    """The third step begins at 7.9, is stamped 7, and the second ended at 7.4."""
    assert labels(step(0, 0.0, 2.5), step(1, 5.0, 7.4), step(2, 7.0, 9.0)) == [2500.0, LEAST_MS, np.inf]


def test_a_session_that_is_resumed_after_days_has_a_label_of_days() -> None:
    assert labels(step(0, 0.0, 1.0), step(1, 3 * 86_400.0, None))[0] == pytest.approx((3 * 86_400 - 1) * 1e3)


def test_the_tools_that_an_answer_calls_are_its_columns_and_never_their_times() -> None:
    def called(*tools: str, seconds: float = 1.0) -> pa.Table:
        calls = [
            step(1 + i, 2.0 + seconds * i, 2.0 + seconds * (i + 1), kind="tool", agent=t) for i, t in enumerate(tools)
        ]
        return table_of(step(0, 0.0, 1.0), *calls, step(len(calls) + 1, 900.0, 901.0))

    encoder = ReturnEncoder.fit(called("grep", "pytest"))
    assert encoder.tools == ("grep", "pytest")
    table = called("pytest", "pytest", "unheard of")
    rows = return_rows(table, encoder)
    assert rows.numbers[0, -3:].tolist() == [3, 0, 1]
    slow = return_rows(called("pytest", "pytest", "unheard of", seconds=200.0), encoder)
    np.testing.assert_array_equal(slow.numbers[0], rows.numbers[0])
    assert np.isnan(return_rows(table_of(step(0, 0.0, 1.0)), encoder).numbers[0, -3:]).all()


def test_a_step_that_still_runs_has_produced_nothing_when_the_next_one_arrives() -> None:
    tokens = {"output_tokens": 7}
    overlapping = table_of(step(0, 0.0, 5.0, **tokens), step(1, 2.0, 4.0, **tokens), step(2, 6.0, 7.0, **tokens))
    assert column(overlapping, "produced_tokens") == [0, 0, 14]
    assert np.isnan(column(overlapping, "previous_output_tokens")[1])
    assert column(overlapping, "previous_output_tokens")[2] == 7


def test_tool_calls_are_no_steps_of_the_course_since_an_engine_does_not_see_them() -> None:
    llm = step(0, 0.0, 1.0), step(2, 9.0, 10.0)
    with_tool = table_of(llm[0], step(1, 2.0, 7.0, kind="tool", agent="grep"), llm[1])
    encoder = ReturnEncoder.fit(table_of(*llm))
    without = return_rows(table_of(llm[0], {**llm[1], "step": 1}), encoder).numbers
    np.testing.assert_array_equal(return_rows(with_tool, encoder).numbers, without)


def test_the_reasons_of_parsed_answers_are_unknown_without_these_and_those_of_an_engine_are_not() -> None:
    def reasons(*given: str) -> tuple[bool, bool]:
        table = table_of(*(step(i, 10.0 * i, 10.0 * i + 1, finish_reason=reason) for i, reason in enumerate(given)))
        encoder = ReturnEncoder.fit(table)
        seen = encoder.observed(return_rows(table, encoder), PROFILES["ids+tokens"]).numbers
        places = [place for place, name in enumerate(encoder.names) if "reason" in name and "last" not in name]
        return bool(np.isnan(seen[-1, places]).all()), bool(np.isnan(seen[-1, places[0]]))

    assert reasons("stop", "tool_calls", "stop") == (True, True)
    assert reasons("stop", "length", "stop") == (False, False)


def test_reasons_of_another_interface_are_those_of_openais() -> None:
    anthropic, openai = (
        table_of(*(step(i, 10.0 * i, 10.0 * i + 1, finish_reason=reason) for i, reason in enumerate(given)))
        for given in (("end_turn", "tool_use", "max_tokens", "refusal"), ("stop", "tool_calls", "length", "refusal"))
    )
    encoder = ReturnEncoder.fit(anthropic)
    assert encoder.reasons == ("length", "refusal", "stop", "tool_calls")
    found = return_rows(openai, encoder).numbers
    np.testing.assert_array_equal(found, return_rows(anthropic, encoder).numbers)


def test_without_answers_the_tools_and_without_token_counts_the_tokens_are_unknown() -> None:
    table = sessions(6, 0)
    encoder = ReturnEncoder.fit(table)
    rows = return_rows(table, encoder)
    ids = encoder.observed(rows, PROFILES["ids"]).numbers
    counted = encoder.observed(rows, PROFILES["ids+tokens"]).numbers
    engine = encoder.observed(rows, PROFILES["engine"]).numbers
    tools, tokens = -1 - len(encoder.tools), encoder.names.index("output_tokens")
    assert np.isnan(ids[:, tools:]).all()
    assert np.isnan(counted[:, tools:]).all()
    np.testing.assert_array_equal(engine[:, tools:], rows.numbers[:, tools:])
    assert np.isnan(ids[:, tokens]).all()
    np.testing.assert_array_equal(counted[:, tokens], rows.numbers[:, tokens])
    returned = encoder.names.index("return_1")
    np.testing.assert_array_equal(ids[:, returned], rows.numbers[:, returned])


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 1000))
def test_a_running_workflow_makes_the_rows_that_training_saw_bit_by_bit(seed: int) -> None:
    table = sessions(4, seed)
    encoder = ReturnEncoder.fit(sessions(8, 0))
    found = []
    for _, group in groupby(table.to_pylist(), lambda s: (s["workflow_type"], s["workflow_id"])):
        mine = list(group)
        for place, one in enumerate(mine):
            if one["kind"] == "llm":
                called = place + 1 < len(mine) and mine[place + 1]["kind"] == "tool"
                found.append(last_row(encoder, mine[: place + 1 + called])[3])
    expected = return_rows(table, encoder).numbers
    known = ~np.isnan(np.stack(found)[:, -1])  # before its first tool call a workflow is not known to record them
    np.testing.assert_array_equal(np.stack(found)[known], expected[known])
    before_tools = slice(None, -1 - len(encoder.tools))
    np.testing.assert_array_equal(np.stack(found)[:, before_tools], expected[:, before_tools])


REASONS = ("stop", "end_turn", "length", "tool_calls", "tool_use", "unheard of", None)


@st.composite
def workflows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Steps of one workflow in the order of their starts; any number of them run at once. Times are tenths of seconds,
    never full ones, which might have been rounded down."""
    steps, now = [], 0
    for number in range(draw(st.integers(1, 8))):
        now += draw(st.integers(0, 30))
        begin, lasts = now * 0.1 + 0.05, draw(st.integers(0, 60)) * 0.1
        counts = {name: draw(st.none() | st.integers(0, 5000)) for name in ("input_tokens", "output_tokens")}
        agent = draw(st.sampled_from(("main", "reader", "new")))
        reason = draw(st.sampled_from(REASONS))
        steps.append(step(number, begin, begin + lasts, **counts, agent=agent, finish_reason=reason))
    return steps


@settings(deadline=None, max_examples=100)
@given(workflows(), st.integers(0, 9))
def test_rows_with_unknown_names_are_those_of_a_trace_after_a_release_that_renames(
    steps: list[dict[str, Any]], seed: int
) -> None:
    encoder = ReturnEncoder.fit(table_of(*(step(i, i, i + 0.5, agent=of) for i, of in enumerate(("main", "reader")))))
    rows = return_rows(table_of(*steps), encoder)
    unnamed = encoder.with_unknown_names(rows, np.random.default_rng(seed))
    renamed = (unnamed.agent == encoder.vocabulary.unknown).tolist()
    assert any(renamed)
    workflow_type = "app" if unnamed.workflow_type[0] == 0 else "other"
    after = [
        {**of, "workflow_type": workflow_type, **({"agent": "other"} if unknown else {})}
        for of, unknown in zip(steps, renamed, strict=True)
    ]
    seen = return_rows(table_of(*after), encoder)
    for name in ("workflow_type", "agent", "numbers", "label"):
        np.testing.assert_array_equal(getattr(unnamed, name), getattr(seen, name))


@settings(deadline=None, max_examples=100)
@given(workflows(), st.sampled_from([("stop", "length"), ("stop", "tool_calls")]))
def test_events_of_overlapping_steps_make_the_rows_that_training_saw_bit_by_bit(
    steps: list[dict[str, Any]], learnt: tuple[str, ...]
) -> None:
    agents = ("main", "reader")
    encoder = ReturnEncoder.fit(
        table_of(*(step(i, i, i + 0.5, agent=agents[i], finish_reason=learnt[i]) for i in range(2)))
    )
    table = table_of(*steps)
    rows = return_rows(table, encoder)
    unparsed = encoder.observed(rows, PROFILES["ids+tokens"]).numbers
    times = [t for s in steps for t in (s["started_at"], s["ended_at"])]
    live, begun = ReturnWorkflow(encoder, "app"), {}
    for event in sorted(range(len(times)), key=times.__getitem__):
        number, now = event // 2, round(times[event].timestamp() * 1e6) / 1e3
        if event % 2 == 0:
            begun[number] = live.arrived(steps[number], now)
            continue
        *codes, numbers = live.completed(begun.pop(number), steps[number], now)
        assert codes == [rows.workflow_type[number], rows.agent[number], rows.model[number]]
        np.testing.assert_array_equal(numbers, unparsed[number])
        whole = live.answered(steps[number]["finish_reason"], [])
        assert whole is not None
        np.testing.assert_array_equal(whole[3], rows.numbers[number])
    assert live.answered("stop", []) is not None
    live.arrived(steps[0], now)
    assert live.answered("stop", []) is None


@pytest.mark.parametrize("last", [1, 2])
def test_of_steps_that_run_side_by_side_the_one_that_completed_last_is_forecast(last: int) -> None:
    """Two agents are called at once; the first or the second of them is the slower one."""
    ends = {1: (9.0, 4.0), 2: (4.0, 9.0)}[last]
    table = table_of(
        step(0, 0.0, 1.5, output_tokens=10),
        step(1, 2.0, ends[0], agent="reader", output_tokens=20),
        step(2, 2.1, ends[1], agent="writer", output_tokens=30),
    )
    encoder = ReturnEncoder.fit(table)
    rows = return_rows(table, encoder)
    *codes, numbers = last_row(encoder, table.to_pylist())
    assert codes == [rows.workflow_type[last], rows.agent[last], rows.model[last]]
    np.testing.assert_array_equal(numbers, rows.numbers[last])
    running = [{**one, "ended_at": None} if one["step"] == last else one for one in table.to_pylist()]
    assert last_row(encoder, running)[1] == rows.agent[3 - last]


@pytest.mark.parametrize("wrong", ["yesterday", float("nan"), float("inf"), [1]])
def test_a_time_that_is_none_is_refused(wrong: object) -> None:
    encoder = ReturnEncoder.fit(sessions(4, 0))
    with pytest.raises(InputError, match=r"started_at is .*expected a time"):
        last_row(encoder, [{"workflow_type": "coding", "agent": "main", "started_at": wrong}])
