"""Parquet, CSV and data frames with the columns of a trace read like the same rows in JSONL, and fail as clearly."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_samples import row, trace, traces, workflow
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.datasets.ingest import ingest
from presage.datasets.read import read_traces
from presage.datasets.store import read_store
from presage.errors import TraceError

Write = Callable[[pd.DataFrame, Path], Path]
HEADER = "workflow_type,workflow_id,step,agent,input_tokens,output_text\n"


def to_parquet(frame: pd.DataFrame, folder: Path) -> Path:
    frame.to_parquet(folder / "t.parquet")
    return folder / "t.parquet"


def to_csv(frame: pd.DataFrame, folder: Path) -> Path:
    frame.to_csv(folder / "t.csv", index=False)
    return folder / "t.csv"


def to_packed_csv_with_index(frame: pd.DataFrame, folder: Path) -> Path:
    frame.to_csv(folder / "t.csv.gz")
    return folder / "t.csv.gz"


FILES = [to_parquet, to_csv, to_packed_csv_with_index]


def csv(folder: Path, text: str | bytes, name: str = "t.csv") -> Path:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


def refused(source: Any) -> str:
    with pytest.raises(TraceError) as caught:
        read_traces(source)
    return str(caught.value)


def as_written(one: dict[str, Any], times: str, aliases: bool) -> dict[str, Any]:
    """A row of a trace under other names and with other spellings of times."""
    found = {name: value for name, value in one.items() if name not in ("started_at", "ended_at", "task")}
    found["task_id" if aliases else "task"] = one["task"]
    for column, alias in (("started_at", "start_time"), ("ended_at", "end_time")):
        moment = one[column]
        if moment is not None:
            moment = {"epoch": moment.timestamp(), "iso": moment.isoformat(), "naive": moment.replace(tzinfo=None)}.get(
                times, moment
            )
        found[alias if aliases else column] = moment
    return found


@st.composite
def rows_of(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows of any valid trace, in any order; a text in CSV is never empty and has no line end of an old Macintosh."""
    table = draw(traces())
    times, aliases = draw(st.sampled_from(["epoch", "iso", "datetime", "naive"])), draw(st.booleans())
    rows = [as_written(one, times, aliases) for one in draw(st.permutations(table.to_pylist()))]
    return [{name: _in_csv(value) for name, value in one.items()} for one in rows]


def _in_csv(value: Any) -> Any:
    return value.replace("\r", "\r\n") or None if isinstance(value, str) else value


@settings(max_examples=60)
@given(rows=rows_of(), dtypes=st.sampled_from(["plain", "nullable", "categories", "arrays"]))
def test_every_form_of_the_same_rows_is_the_same_trace(
    rows: list[dict[str, Any]], dtypes: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tables")
    lines = folder / "t.jsonl"
    lines.write_text("".join(json.dumps(one, default=str) + "\n" for one in rows), encoding="utf-8")
    wanted = read_traces(lines).table
    frame = pd.DataFrame(rows, index=range(7, 7 + len(rows)))
    if dtypes == "nullable":
        frame = frame.convert_dtypes()
    for name in ("agent", "workflow_id") if dtypes == "categories" else ():
        frame[name] = frame[name].astype("category")
    for name in {"prefill_state", "parent_steps"} & set(frame.columns) if dtypes == "arrays" else ():
        frame[name] = pd.Series([None if v is None else np.array(v) for v in frame[name]], frame.index, object)
    before = frame.copy()
    assert read_traces(frame).table.equals(wanted)
    assert frame.equals(before)
    for write in FILES[: 1 if dtypes == "arrays" else None]:
        assert read_traces(write(frame, folder)).table.equals(wanted), write.__name__


def test_what_other_tools_write_reads_too(tmp_path: Path) -> None:
    """polars, DuckDB, Spark: views, large strings, categories, decimals, whole floats with NaN, other time units."""
    rows = pa.table(
        {
            "workflow_type": pa.array(["t", "t"]).dictionary_encode(),
            "workflow_id": pa.array(["007", "007"], pa.large_string()),
            "step": pa.array([1, 0], pa.uint8()),
            "agent": pa.array(["b", "a"], pa.string_view()),
            "input_tokens": pa.array([float("nan"), 3.0]),
            "output_tokens": pa.array([7, None], pa.int64()).cast(pa.decimal128(38, 0)),
            "start_time": pa.array([1_767_225_601_000_000_999, 1_767_225_600_000_000_000], pa.timestamp("ns")),
            "end_time": pa.array(["2026-01-01 01:00:02+01", None], pa.string_view()),
            "parent_steps": pa.array([[0], None], pa.large_list(pa.int64())),
            "prefill_state": pa.array([[0.5, 1.0], [2.0, 3.0]], pa.list_(pa.float32(), 2)),
            "success": pa.array([1, 1], pa.int8()),
            "__index_level_0__": pa.array([5, 9]),
        }
    )
    pq.write_table(rows, tmp_path / "t.parquet", row_group_size=1)
    found = read_traces(tmp_path / "t.parquet").table.to_pylist()
    assert [(one["step"], one["agent"], one["input_tokens"], one["output_tokens"]) for one in found] == [
        (0, "a", 3, None),
        (1, "b", None, 7),
    ]
    assert [one["started_at"].timestamp() for one in found] == [1_767_225_600, 1_767_225_601]
    assert found[1]["ended_at"].timestamp() == 1_767_225_602
    assert (found[1]["parent_steps"], found[1]["prefill_state"], found[1]["success"]) == ([0], [0.5, 1.0], True)


def test_an_index_named_like_a_column_is_that_column(tmp_path: Path) -> None:
    frame = pd.DataFrame([*workflow("v", 2), *workflow("w", 2)])
    indexed = frame.set_index(["workflow_id", "step"])
    wanted = read_traces(frame).table
    assert read_traces(indexed).table.equals(wanted)
    assert read_traces(to_parquet(indexed, tmp_path)).table.equals(wanted)
    assert read_traces(to_packed_csv_with_index(indexed, tmp_path)).table.equals(wanted)


def test_names_in_csv_stay_text_and_an_empty_field_is_no_value(tmp_path: Path) -> None:
    path = csv(tmp_path, HEADER + "1,007,0,1.0,,\n1,007,1.0,NaN,3.0,NaN\n")
    found = read_traces(path).table.to_pylist()
    assert [(one["workflow_type"], one["workflow_id"], one["agent"]) for one in found] == [
        ("1", "007", "1.0"),
        ("1", "007", "NaN"),
    ]
    assert [(one["step"], one["input_tokens"], one["output_text"]) for one in found] == [(0, None, None), (1, 3, "NaN")]


def test_csv_from_windows_reads(tmp_path: Path) -> None:
    text = ("\ufeff" + HEADER + 't,w,0,a,1,"two\nlines, and ""quotes"""\n').replace("\n", "\r\n")
    read = read_traces(csv(tmp_path, text)).table
    assert read["output_text"].to_pylist() == ['two\r\nlines, and "quotes"']


def test_lists_in_csv_are_json_or_what_pandas_makes_of_arrays(tmp_path: Path) -> None:
    head = "workflow_type,workflow_id,step,agent,parent_steps\n"
    path = csv(tmp_path, head + 't,w,0,a,[]\nt,w,1,a,"[0]"\nt,w,2,a,[0 1]\nt,w,3,a,"[ 0,\n  2]"\nt,w,4,a,\n')
    assert read_traces(path).table["parent_steps"].to_pylist() == [[], [0], [0, 1], [0, 2], None]
    for wrong in ("0", "[0", "(0 1)", "[a]", "[0 ... 9]"):
        assert 'line 2, column "parent_steps"' in refused(csv(tmp_path, f'{head}t,w,0,a,"{wrong}"\n'))


def test_states_in_csv_are_json_and_a_field_may_be_long(tmp_path: Path) -> None:
    text = "workflow_type,workflow_id,step,agent,prefill_state,output_text\n" + f't,w,0,a,"[0.5, 1]",{"x" * 300_000}\n'
    read = read_traces(csv(tmp_path, text)).table
    assert read["prefill_state"].to_pylist() == [[0.5, 1.0]]
    assert len(read["output_text"][0].as_py()) == 300_000


BAD_CSV = {
    "a wrong type": (
        "t,w,0,a,many,x",
        'line 4, column "input_tokens": the value does not fit; expected a whole number',
    ),
    "half a token": ("t,w,0,a,3.5,x", 'line 4, column "input_tokens": the value does not fit; expected a whole number'),
    "too large": ("t,w,0,a,99999999999,x", 'line 4, column "input_tokens"'),
    "a missing value": ("t,w,,a,1,x", 'line 4, column "step": no value'),
    "too few fields": ("t,w,0,a", "line 4: 4 fields; expected 6"),
    "too many fields": ("t,w,0,a,1,x,y", "line 4: 7 fields; expected 6"),
    "text after quotes": ('t,w,0,a,1,"x"y', "line 4: not CSV"),
    "no UTF-8": (b"t,w,0,a,1,caf\xe9", "line 4: byte 14 of the line is not UTF-8"),
}


@pytest.mark.parametrize("kind", BAD_CSV)
@pytest.mark.parametrize("packed", [False, True])
def test_a_bad_line_of_csv_is_named_and_can_be_skipped(tmp_path: Path, kind: str, packed: bool) -> None:
    line, words = BAD_CSV[kind]
    text = (HEADER + 't,good,0,a,1,"two\nlines"\n').encode() + (line if isinstance(line, bytes) else str(line).encode())
    text += b"\nt,later,0,a,1,x\n"
    path = csv(tmp_path, gzip.compress(text) if packed else text, "t.csv.gz" if packed else "t.csv")
    assert f"{path}, {words}" in refused(path)
    result = read_traces(path, skip_bad=True)
    assert result.skipped.pop("workflow with a skipped row") == 1  # type: ignore[attr-defined]
    assert sum(result.skipped.values()) == 1
    assert "later" in result.table["workflow_id"].to_pylist()
    assert "w" not in result.table["workflow_id"].to_pylist()


def test_the_workflow_before_an_unreadable_line_is_not_taken_for_finished(tmp_path: Path) -> None:
    text = HEADER + 't,cut,0,a,1,x\nt,cut,1,b,1,x\n"t"?\nt,whole,0,a,1,x\n'
    result = read_traces(csv(tmp_path, text), skip_bad=True)
    assert result.table["workflow_id"].to_pylist() == ["whole"]
    assert result.skipped == {"line with no CSV": 1, "workflow with a skipped row": 1}


def test_cut_gzip_is_named_and_its_last_workflow_is_not_kept(tmp_path: Path) -> None:
    rows = [f"t,w{i:04},{step},a,{i * 7919 % 1000},x" for i in range(3000) for step in (0, 1)]
    packed = gzip.compress((HEADER + "\n".join(rows)).encode())
    path = csv(tmp_path, packed[:-500], "t.csv.gz")
    assert "the gzip data are cut after this line" in refused(path)
    result = read_traces(path, skip_bad=True)
    names = result.table["workflow_id"].to_pylist()
    assert "line with cut gzip data after it" in result.skipped
    assert names.count("w0000") == 2
    assert all(names.count(name) == 2 for name in set(names))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "an empty file; expected a first line with the column names"),
        (HEADER, "an empty trace"),
        (HEADER.replace(",", ";") + "t;w;0;a;1;x\n", "separated by semicolons; expected commas"),
        (HEADER.replace("agent", "agent,agent") + "t,w,0,a,a,1,x\n", "column 'agent' appears twice"),
        (HEADER.replace("workflow_id", "Workflow_ID"), "column 'Workflow_ID' is called 'workflow_id' in a trace"),
        (HEADER.replace("input_tokens", "Input Tokens"), "column 'Input Tokens' is called 'input_tokens'"),
        (
            "name,agent\na,b\n",
            "no column 'workflow_type' and no column 'workflow_id' and no column 'step'; found: name, a",
        ),
        (HEADER + 't,w,0,a,1,"never closed\n' * 3, "line 2: not CSV"),
        (HEADER.encode("utf-16"), "UTF-16 or not text at all; expected text in UTF-8"),
        (HEADER.encode("utf-16-le"), "UTF-16 or not text at all"),
        (b"PK\x03\x04\x14\0\x06\0spreadsheet", "UTF-16 or not text at all"),
    ],
)
def test_a_csv_that_is_no_trace_is_refused(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = csv(tmp_path, text)
    message = refused(path)
    assert message.startswith(str(path))
    assert words in message


def test_a_prompt_in_the_place_of_a_header_is_not_repeated(tmp_path: Path) -> None:
    assert "secret" not in refused(csv(tmp_path, "t,w,0,a,1,a secret of ours\n"))


def test_a_frame_that_is_no_trace_is_refused() -> None:
    frame = pd.DataFrame(workflow("w", 3, input_tokens=1))
    assert "no column 'agent'; found: workflow_type, workflow_id, step" in refused(frame.drop(columns="agent"))
    assert "column 'Agent' is called 'agent' in a trace" in refused(frame.rename(columns={"agent": "Agent"}))
    assert "DataFrame: column 'agent' appears twice" in refused(pd.concat([frame, frame[["agent"]]], axis=1))
    assert "DataFrame: an empty trace" in refused(frame[:0])
    assert 'DataFrame, row 0, column "workflow_id": type int64, expected a string' in refused(
        frame.assign(workflow_id=[7, 7, 7])
    )
    assert 'DataFrame, row 1, column "input_tokens": the value' in refused(frame.assign(input_tokens=[1, 3.5, None]))
    assert 'DataFrame, row 2, column "agent": type int; expected a string' in refused(frame.assign(agent=["a", "b", 3]))
    assert 'column "prefill_state": type large_string, expected a list' in refused(frame.assign(prefill_state="[1, 2]"))
    assert "also stands in DataFrame 0" in refused([frame, frame])


def test_a_bad_row_of_a_frame_costs_its_workflow() -> None:
    frame = pd.DataFrame([*workflow("v", 2), *workflow("w", 2), *workflow("x", 2)])
    result = read_traces(frame.assign(agent=["a", "b", 3, 4, "a", "b"]), skip_bad=True)
    assert result.skipped == {"row with agent of a wrong type": 2, "workflow with a skipped row": 1}
    assert result.table["workflow_id"].to_pylist() == ["v", "v", "x", "x"]


def test_frames_and_files_mix(tmp_path: Path) -> None:
    path = to_csv(pd.DataFrame(workflow("w", 2)), tmp_path)
    table = read_traces([pd.DataFrame(workflow("v", 1)), path, pd.DataFrame(workflow("x", 1))]).table
    assert table.equals(trace(*workflow("v", 1), *workflow("w", 2), *workflow("x", 1)))


@pytest.mark.parametrize("write", FILES)
def test_a_table_is_ingested_in_bounded_batches(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("presage.datasets.adapters.files.tables.CSV_BATCH_ROWS", 7)
    monkeypatch.setattr("presage.datasets.store.parts.CHUNK_ROWS", 7)
    rows = [one for i in range(20) for one in workflow(f"w{i}", 3, prefill_state=[0.5, i] if i > 9 else None)]
    done = ingest([write(pd.DataFrame(rows), tmp_path)], tmp_path / "store")
    assert (done.workflows, done.steps) == (20, 60)
    assert read_store(tmp_path / "store").equals(trace(*rows))


def test_parquet_of_a_foreign_writer_is_checked_for_utf8(tmp_path: Path) -> None:
    texts = pa.array([b"tea", b"caf\xe9", b"x"])
    broken = pa.StringArray.from_buffers(3, texts.buffers()[1], texts.buffers()[2])
    rows = [*workflow("w", 2), row("v")]
    pq.write_table(pa.Table.from_pylist(rows).append_column("output_text", broken), tmp_path / "t.parquet")
    assert 't.parquet, row 2, column "output_text": text that is no UTF-8' in refused(tmp_path / "t.parquet")
    assert read_traces(tmp_path / "t.parquet", skip_bad=True).table["workflow_id"].to_pylist() == ["v"]


def test_parquet_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"name": ["x"], "agent": ["a"]}), path)
    assert "no column 'workflow_type' and no column 'workflow_id' and no column 'step'; found: name, agent" in refused(
        path
    )
    pq.write_table(pa.table(pd.DataFrame(workflow("w", 1)).rename(columns={"step": "Step"})), path)
    assert "column 'Step' is called 'step' in a trace" in refused(path)


def test_telling_a_frame_from_a_path_does_not_import_pandas() -> None:
    code = "import sys; from presage.datasets.adapters.files.tables import is_frame; assert not is_frame('t.csv')"
    done = subprocess.run([sys.executable, "-c", f"{code}; sys.exit('pandas' in sys.modules)"], check=False)
    assert done.returncode == 0
