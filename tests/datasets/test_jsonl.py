"""JSONL in: everything the public traces hold, and every way a file can be broken."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dataset_samples import row, trace, traces, workflow
from hypothesis import given, settings

from presage.datasets.read import read_traces
from presage.errors import TraceError

Writer = Callable[..., Path]


def lines(*rows: dict[str, Any]) -> list[str]:
    return [json.dumps(one) for one in rows]


def as_json(table: pa.Table) -> list[str]:
    rows = []
    for one in table.to_pylist():
        for name in ("started_at", "ended_at"):
            one[name] = one[name].isoformat() if one[name] is not None else None
        rows.append(one)
    return lines(*rows)


@settings(max_examples=50)
@given(table=traces())
def test_jsonl_round_trip(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "t.jsonl"
    path.write_text("\n".join(as_json(table)), encoding="utf-8")
    read = read_traces([path]).table
    without_states = [
        name for name in table.column_names if table[name].null_count < table.num_rows or name in read.column_names
    ]
    assert read.select(without_states).equals(table.select(without_states))


def test_gzip_blank_lines_a_byte_order_mark_and_extra_keys(tmp_path: Path) -> None:
    text = "\ufeff" + "\n\n".join(lines(*workflow("w", 3, colour="blue", output_chars=3))) + "\n"
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_traces([packed]).table.equals(trace(*workflow("w", 3)))


def test_whole_floats_are_whole_numbers(write_jsonl: Writer) -> None:
    path = write_jsonl(*lines(row(step=0.0, input_tokens=3.0)))
    assert read_traces([path]).table["input_tokens"].to_pylist() == [3]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"workflow_type": "t"', "line 2: not JSON"),
        ("[1, 2]", "line 2: a JSON list"),
        (json.dumps(row()) * 2, "line 2: not JSON"),
        (json.dumps(row(step="0")), 'line 2, column "step": type str; expected a whole number'),
        (json.dumps(row(step=True)), 'line 2, column "step": type bool'),
        (json.dumps(row(step=0.5)), 'line 2, column "step"'),
        (json.dumps(row(step=2**80)), 'line 2, column "step"'),
        (json.dumps(row(agent=["a"])), 'line 2, column "agent": type list'),
        (json.dumps(row(agent="\ud800")), 'line 2, column "agent"'),
        (json.dumps({"workflow_type": "t", "workflow_id": "w", "step": 0}), 'line 2, column "agent": no value'),
        (json.dumps(row(success="yes")), 'line 2, column "success"'),
        (json.dumps(row(start_time="noon")), 'line 2, column "start_time"'),
        (json.dumps(row(parent_steps=[0.5])), 'line 2, column "parent_steps"'),
        (json.dumps(row(prefill_state=[1.0])), 'line 2, column "prefill_state": a state of 1 numbers'),
        (json.dumps(row(prefill_state=[1.0, float("nan")])), 'line 2, column "prefill_state": NaN'),
        (json.dumps(row(prefill_state=[1.0, "2"])), 'line 2, column "prefill_state"'),
    ],
)
def test_a_bad_line_is_named_and_can_be_skipped(write_jsonl: Writer, line: str, words: str) -> None:
    good = lines(*workflow("good", 1, prefill_state=[0.5, 1.5]), row("later", 0))
    path = write_jsonl(good[0], line, good[1])
    with pytest.raises(TraceError) as caught:
        read_traces([path])
    assert f"{path}, {words}" in str(caught.value)
    result = read_traces([path], skip_bad=True)
    assert sum(result.skipped.values()) >= 1
    assert "later" in result.table["workflow_id"].to_pylist()
    assert "w" not in result.table["workflow_id"].to_pylist()


def test_the_workflow_before_an_unreadable_line_is_not_taken_for_finished(write_jsonl: Writer) -> None:
    path = write_jsonl(*lines(*workflow("cut", 2)), "{broken", *lines(*workflow("whole", 2)))
    result = read_traces([path], skip_bad=True)
    assert set(result.table["workflow_id"].to_pylist()) == {"whole"}
    assert result.skipped == {"line with no JSON": 1, "workflow with a skipped row": 1}


def test_a_file_of_nothing_but_bad_rows_is_refused_even_when_skipping(write_jsonl: Writer) -> None:
    path = write_jsonl(*lines(*(row(step="x") for _ in range(500))))
    with pytest.raises(TraceError, match="empty trace"):
        read_traces([path], skip_bad=True)


def test_a_truncated_gzip_is_named_and_its_last_workflow_is_not_kept(tmp_path: Path) -> None:
    text = "\n".join(lines(*workflow("first", 3), *(r for i in range(300) for r in workflow(f"w{i:03}", 3))))
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode())[:-200])
    with pytest.raises(TraceError, match="gzip data are cut after this line"):
        read_traces([path])
    result = read_traces([path], skip_bad=True)
    assert "line with cut gzip data after it" in result.skipped
    last = result.table["workflow_id"].to_pylist()
    assert "first" in last
    assert all(last.count(name) == 3 for name in set(last))


def test_a_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    packed = bytearray(gzip.compress("\n".join(lines(*(row(f"w{i}") for i in range(2000)))).encode()))
    packed[len(packed) // 2] ^= 0xFF
    path.write_bytes(bytes(packed))
    with pytest.raises(TraceError, match=r"gzip data are damaged|line \d+"):
        read_traces([path])


def test_progress_counts_every_step(write_jsonl: Writer) -> None:
    seen: list[int] = []
    read_traces([write_jsonl(*lines(*workflow("w", 5)))], progress=seen.append)
    assert sum(seen) == 5


@pytest.mark.realdata
def test_every_public_trace_reads(workflows_folder: Path) -> None:
    paths = sorted(workflows_folder.glob("*.jsonl.gz"))
    result = read_traces(paths)
    assert result.skipped == {}
    lines_given = 0
    for path in paths:
        with gzip.open(path, "rb") as file:
            lines_given += sum(1 for line in file if line.strip())
    assert result.table.num_rows == lines_given > 60_000
