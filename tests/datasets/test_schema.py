"""Columns and rows: what conforms, what is refused, and what the digest sees."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from dataset_samples import raw, row, trace, traces, workflow
from hypothesis import given
from hypothesis import strategies as st

from presage.datasets.schema import SCHEMA_VERSION, check_version, concat, conform, digest, trace_schema
from presage.datasets.schema.validate import drop_invalid, validate
from presage.errors import TraceError


def test_schema_carries_its_version_and_the_columns_of_the_design_in_order() -> None:
    schema = trace_schema(8, 4)
    assert schema.metadata == {b"presage.schema_version": b"1"}
    assert SCHEMA_VERSION == 1
    assert schema.names[:4] == ["workflow_type", "workflow_id", "step", "agent"]
    assert schema.names[-6:-2] == ["prefill_state", "completion_state", "success", "complete"]
    assert schema.field("prefill_state").type == pa.list_(pa.float16(), 8)
    assert "prefill_state" not in trace_schema().names


def test_conform_fills_defaults_takes_aliases_and_drops_the_unknown() -> None:
    table = conform(raw(row(task_id="q", start_time=1.5, end_time=2.0, colour="blue")), "here")
    assert table.schema.equals(trace_schema(), check_metadata=True)
    first = table.to_pylist()[0]
    assert (first["kind"], first["complete"], first["task"]) == ("llm", True, "q")
    assert first["started_at"] == dt.datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=dt.UTC)
    assert "colour" not in table.column_names


def test_conform_reads_iso_times_and_takes_naive_timestamps_for_utc() -> None:
    naive = raw(row(started_at=dt.datetime(2026, 1, 1), ended_at="2026-01-01T01:00:00+01:00"))
    first = conform(naive, "here").to_pylist()[0]
    assert first["started_at"] == first["ended_at"] == dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("change", "column", "words"),
    [
        ({"step": 1.5}, "step", "whole number"),
        ({"step": "0"}, "step", "whole number"),
        ({"step": 2**40}, "step", "32 bits"),
        ({"step": None}, "step", "no value"),
        ({"agent": 3}, "agent", "a string"),
        ({"agent": None}, "agent", "no value"),
        ({"kind": "human"}, "kind", "llm"),
        ({"success": 2}, "success", "true or false"),
        ({"start_time": 1.7e12}, "start_time", "milliseconds"),
        ({"start_time": float("inf")}, "start_time", "epoch seconds"),
        ({"started_at": "yesterday"}, "started_at", "ISO 8601"),
        ({"parent_steps": ["0"]}, "parent_steps", "whole numbers"),
        ({"prefix_blocks": [0, 3]}, "prefix_blocks", "list of lists of whole numbers"),
        ({"prefix_blocks": [[0.5, 3]]}, "prefix_blocks", "list of lists of whole numbers"),
        ({"prefill_state": [1.0, float("nan")]}, "prefill_state", "NaN"),
        ({"prefill_state": [1.0, 1e6]}, "prefill_state", "65504"),
        ({"prefill_state": [1.0]}, "prefill_state", "mixed state sizes"),
        ({"prefill_state": [1.0, None]}, "prefill_state", "null inside"),
    ],
)
def test_conform_names_row_and_column(change: dict[str, Any], column: str, words: str) -> None:
    good = row(step=0, prefill_state=[0.5, 0.25], parent_steps=None) | {
        name: None for name in change if name not in ("step", "agent", "prefill_state")
    }
    rows = [good, good | change]
    columns = {name: pa.array([r.get(name) for r in rows[1:]]) for name in rows[1]}
    first = (
        {name: pa.array([r.get(name) for r in rows[:1]], columns[name].type) for name in rows[1]}
        if _fits(rows[0], columns)
        else None
    )
    if first is None:  # the column as a whole has a wrong type
        with pytest.raises(TraceError, match=f'column "{column}"'):
            conform(pa.table(columns), "here")
        return
    table = pa.concat_tables([pa.table(first), pa.table(columns)])
    with pytest.raises(TraceError, match=words) as caught:
        conform(table, "here")
    assert f'here, row 2, column "{column}"' in str(caught.value)


def _fits(values: dict[str, Any], columns: dict[str, pa.Array]) -> bool:
    try:
        for name, column in columns.items():
            pa.array([values.get(name)], column.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return False
    return True


def test_a_missing_column_is_named_with_what_was_found() -> None:
    with pytest.raises(TraceError, match=r"no column 'agent'; found: workflow_type, workflow_id, step"):
        conform(raw(row()).drop_columns(["agent"]), "here")


def test_states_of_any_float_become_float16_and_null_rows_stay_null() -> None:
    states = pa.array([None, [0.1, 2.0], None], pa.list_(pa.float64()))
    table = conform(pa.table(raw(*workflow("w", 3)).to_pydict() | {"prefill_state": states}), "here")
    assert table.schema.field("prefill_state").type == pa.list_(pa.float16(), 2)
    assert [v is None for v in table["prefill_state"].to_pylist()] == [True, False, True]
    assert table["prefill_state"][1].as_py() == [np.float16(0.1), 2.0]


def test_concat_fills_absent_states_and_refuses_mixed_sizes() -> None:
    none, two, three = (
        conform(raw(row(w, prefill_state=s) if s else row(w)), w)
        for w, s in [("x", None), ("y", [1.0] * 2), ("z", [1.0] * 3)]
    )
    assert concat([none, two], ["x", "y"])["prefill_state"].to_pylist() == [None, [1.0, 1.0]]
    with pytest.raises(TraceError, match="mixed state sizes in column 'prefill_state': 2 in y, 3 in z"):
        concat([two, three], ["y", "z"])


@pytest.mark.parametrize(
    ("rows", "column", "words"),
    [
        ([row(step=0), row(step=1), row(step=1)], "step", "came before"),
        ([row(step=0), row(step=2)], "step", "step 1 was expected"),
        ([row(step=1)], "step", "step 0 was expected"),
        ([row(step=-1)], "step", "step 0 was expected"),
        ([row(start_time=2.0, end_time=1.0)], "ended_at", "ends before it starts"),
        (
            [row(start_time=2.0), row(step=1, start_time=None), row(step=2, start_time=1.0)],
            "started_at",
            "starts before",
        ),
        ([row(), row(step=1, parent_steps=[1])], "parent_steps", "no earlier step"),
        ([row(parent_steps=[-1])], "parent_steps", "no earlier step"),
        ([row(complete=True), row(step=1, complete=False)], "complete", "belongs to the workflow"),
        ([row(success=True), row(step=1, success=None)], "success", "belongs to the workflow"),
        ([row(task="p"), row(step=1, task="q")], "task", "belongs to the workflow"),
        ([row(input_tokens=-1)], "input_tokens", "negative"),
        ([row(prefix_blocks=[[2, 1]])], "prefix_blocks", "the first not above the last"),
        ([row(identity_confidence=1.5)], "identity_confidence", "expected 0 to 1"),
        ([row(step_score=-0.5)], "step_score", "expected 0 to 1"),
        ([row(prefix_blocks=[[-1, 1]])], "prefix_blocks", "0 or more"),
        ([row(prefix_blocks=[[0, 1], [2]])], "prefix_blocks", r"runs \[first, last\]"),
        ([row(prefix_blocks=[[0, 1], None])], "prefix_blocks", r"runs \[first, last\]"),
        ([row(prefix_blocks=[[0, None]])], "prefix_blocks", r"runs \[first, last\]"),
        ([row(prefix_blocks=[[0, 1]], input_tokens=127)], "prefix_blocks", "128 tokens in a prompt of 127"),
        ([row(prefix_blocks=[[0, 4], [2, 3]])], "prefix_blocks", "occurs twice"),
        ([row(prefix_blocks=[[0, 4]]), row(step=1, prefix_blocks=[[9, 9], [3, 5]])], "prefix_blocks", "another place"),
        ([row(agent=" ")], "agent", "empty name"),
        ([row(agent="END")], "agent", "finishes"),
        ([row(workflow="")], "workflow_id", "empty name"),
    ],
)
def test_validate_names_the_broken_rule(rows: list[dict[str, Any]], column: str, words: str) -> None:
    good = workflow("good", 2)
    table = conform(raw(*good, *rows), "here")
    with pytest.raises(TraceError, match=words) as caught:
        validate(table, "here")
    assert f'column "{column}"' in str(caught.value)
    assert "here, row " in str(caught.value)
    left, skipped = drop_invalid(table, "here")
    assert left["workflow_id"].unique().to_pylist() == ["good"]
    assert sum(skipped.values()) == 1


def test_prefix_blocks_may_repeat_branch_and_mean_something_else_in_another_workflow() -> None:
    runs = [[[0, 4]], [[0, 4], [7, 8]], [[0, 2], [20, 30]], [[0, 2], [20, 25], [9, 9]], [], None]
    rows = [row(step=step, prefix_blocks=of, input_tokens=2048) for step, of in enumerate(runs)]
    table = trace(*rows, row("v", prefix_blocks=[[7, 7], [0, 4]]))
    assert table["prefix_blocks"].to_pylist() == [[[7, 7], [0, 4]], *runs]


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(TraceError, match="empty trace"):
        validate(trace_schema().empty_table(), "here")


def test_one_id_under_two_types_is_two_workflows() -> None:
    table = validate(conform(raw(*workflow("w", 2, "b"), *workflow("w", 1, "a")), "here"), "here")
    assert table.select(["workflow_type", "step"]).to_pylist() == [
        {"workflow_type": "a", "step": 0},
        {"workflow_type": "b", "step": 0},
        {"workflow_type": "b", "step": 1},
    ]


def test_texts_stay_out_of_errors() -> None:
    secret = "the patient's name"
    table = conform(raw(row(input_text=secret, output_text=secret, step=1)), "here")
    with pytest.raises(TraceError) as caught:
        validate(table, "here")
    assert secret not in str(caught.value)


def test_an_unknown_version_is_refused_and_none_is_a_table_of_somebody_else() -> None:
    assert check_version({b"presage.schema_version": b"1"}, "file.parquet")
    assert not check_version(None, "file.parquet")
    with pytest.raises(TraceError, match="'9'"):
        check_version({b"presage.schema_version": b"9"}, "file.parquet")


@given(traces(), st.randoms(use_true_random=False))
def test_validate_and_digest_do_not_depend_on_order_or_chunks(table: pa.Table, random: Any) -> None:
    order = list(range(table.num_rows))
    random.shuffle(order)
    shuffled = pa.concat_tables([table.slice(i, 1) for i in order])
    assert validate(conform(shuffled, "shuffled"), "shuffled").equals(table)
    assert digest(shuffled) == digest(table)


def test_a_column_that_came_later_leaves_the_digest_of_a_trace_without_it_as_it_was() -> None:
    table = trace(*workflow("w", 2, task="q", output_tokens=10), row("v", prefill_state=[1.0, 2.0], output_text="yes"))
    before_there_were_finish_reasons = "71d342564ec20cc9c9b61f4540780287ffb4c6b73f821e4707ef631799e308bb"
    assert digest(table) == before_there_were_finish_reasons
    assert digest(table.drop_columns(["finish_reason"])) == before_there_were_finish_reasons


@given(traces())
def test_digest_sees_every_cell(table: pa.Table) -> None:
    for name in table.column_names[4:]:
        empty = (
            table.set_column(
                table.column_names.index(name),
                table.schema.field(name),
                pa.nulls(table.num_rows, table.schema.field(name).type),
            )
            if table.schema.field(name).nullable
            else None
        )
        if empty is not None and table[name].null_count < table.num_rows:
            assert digest(empty) != digest(table), name
