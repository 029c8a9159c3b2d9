"""Reading from mixed sources: files, stores, and what does not belong together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_samples import row, trace, workflow

from presage.datasets.ingest import append
from presage.datasets.read import read_traces
from presage.errors import TraceError


def test_a_store_a_parquet_file_and_jsonl_read_as_one(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    append(trace(*workflow("in store", 2)), tmp_path / "store")
    pq.write_table(trace(row("in file", prefill_state=[1.0, 2.0])), tmp_path / "f.parquet")
    jsonl = write_jsonl(json.dumps(row("in lines")))
    table = read_traces([tmp_path / "store", str(tmp_path / "f.parquet"), jsonl]).table
    assert table["workflow_id"].to_pylist() == ["in file", "in lines", "in store", "in store"]
    assert table["prefill_state"].to_pylist() == [[1.0, 2.0], None, None, None]


def test_one_workflow_in_two_sources_is_refused_naming_both(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    one, two = write_jsonl(json.dumps(row()), name="1.jsonl"), write_jsonl(json.dumps(row(step=1)), name="2.jsonl")
    with pytest.raises(TraceError, match=r"2\.jsonl, line 1, .*also stands in .*1\.jsonl"):
        read_traces([one, two])


def test_a_parquet_file_of_before_there_were_finish_reasons_reads(tmp_path: Path) -> None:
    table = trace(*workflow("w", 2, output_tokens=4))
    pq.write_table(table.drop_columns(["finish_reason"]), tmp_path / "old.parquet")
    assert read_traces([tmp_path / "old.parquet"]).table.equals(table)


def test_states_of_two_sizes_are_refused(write_jsonl: Callable[..., Path]) -> None:
    one = write_jsonl(json.dumps(row("v", prefill_state=[1.0])), name="1.jsonl")
    two = write_jsonl(json.dumps(row("w", prefill_state=[1.0, 2.0])), name="2.jsonl")
    with pytest.raises(TraceError, match="mixed state sizes"):
        read_traces([one, two])


@pytest.mark.parametrize(
    ("name", "words"),
    [("absent.jsonl", "no such file"), ("notes.txt", "unknown kind of file"), ("folder", "neither a trace store")],
)
def test_a_path_that_is_no_trace_is_refused(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceError, match=words):
        read_traces([tmp_path / name])


def test_no_path_and_an_unknown_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no traces given"):
        read_traces([])
    (tmp_path / "t.log").write_text(json.dumps(row()))
    with pytest.raises(TraceError, match="unknown trace format 'xml'; known: auto, jsonl"):
        read_traces([tmp_path / "t.log"], source_format="xml")
    assert read_traces([tmp_path / "t.log"], source_format="jsonl").table.num_rows == 1


def test_a_corrupt_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(trace(row()), path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(TraceError, match="cannot be read as Parquet"):
        read_traces([path])


def test_parquet_of_another_schema_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist([row()]).replace_schema_metadata({"presage.schema_version": "9"}), path)
    with pytest.raises(TraceError, match="trace schema version '9'"):
        read_traces([path])


def test_a_bad_row_of_a_parquet_file_costs_its_workflow(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    rows = [*workflow("bad", 2, kind="llm"), *workflow("good", 2, kind="llm")]
    rows[1]["kind"] = "human"
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"presage.schema_version": "1"})
    pq.write_table(table, path)
    with pytest.raises(TraceError, match=r't\.parquet, row 2, column "kind"'):
        read_traces([path])
    result = read_traces([path], skip_bad=True)
    assert result.skipped == {"row with unknown kind": 1, "workflow with a skipped row": 1}
    assert set(result.table["workflow_id"].to_pylist()) == {"good"}
