"""Traces of plain requests are read for what they hold, and what they lack is said with the line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from presage.datasets.requests import PlainRequest, holds_requests, read_requests
from presage.errors import TraceError

CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def lines(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def row(timestamp: float = 0, input_length: int = 700, output_length: int = 5, **more: Any) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, **more}


def test_times_are_seconds_after_the_first_and_requests_in_their_order(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", row(4500, hash_ids=[3, 4]), row(3000, 20, 0))
    assert read_requests([path]) == [PlainRequest(0.0, 20, 0), PlainRequest(1.5, 700, 5, (3, 4))]


def test_compressed_lines_and_other_keys_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row(chat_id=7)).encode()))
    assert holds_requests(path)
    assert read_requests([path]) == [PlainRequest(0.0, 700, 5)]


def test_the_csv_of_a_cloud_is_read_to_the_fraction_of_a_second(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(CSV + "2026-01-02 18:15:47.5000000,40,8\n2026-01-02 18:15:46.6805900,4808,10\n")
    first, second = read_requests([path])
    assert (first.input_tokens, first.output_tokens, first.hash_ids) == (4808, 10, ())
    assert (second.arrives_s, second.input_tokens) == (pytest.approx(0.81941), 40)


def test_files_are_told_apart_by_their_first_line(tmp_path: Path) -> None:
    step = {"workflow_type": "t", "workflow_id": "w", "step": 0, "agent": "a"}
    assert not holds_requests(lines(tmp_path / "steps.jsonl", step))
    assert not holds_requests(lines(tmp_path / "empty.jsonl"))
    assert not holds_requests(lines(tmp_path / "sessions.jsonl", {"timestamp": 1, "input": "x"}))
    assert not holds_requests(lines(tmp_path / "steps.csv", "workflow_type,workflow_id,step,agent"))
    assert holds_requests(lines(tmp_path / "requests.csv", "TIMESTAMP,ContextTokens,model"))
    assert not holds_requests(tmp_path)
    (tmp_path / "steps.parquet").write_bytes(b"PAR1\x00\xff")  # not text
    assert not holds_requests(tmp_path / "steps.parquet")
    assert holds_requests(lines(tmp_path / "requests.jsonl", {"timestamp": 0, "input_length": 3}))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"timestamp": 0, "input_length": 3}, "line 2: no output_length: without sizes of prompts and outputs"),
        ({"input_length": 3, "output_length": 3}, "line 2: no timestamp, so when requests came cannot be replayed"),
        (row(input_length=-3), "line 2: .*input_length"),
        (row(output_length="9"), "line 2: .*output_length"),
        (row(hash_ids=[1, 2, 3]), "line 2: 3 hash_ids for 700 tokens"),
        ("{", "line 2: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: Any, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read_requests([lines(tmp_path / "t.jsonl", row(), bad)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("TIMESTAMP,ContextTokens\n", "no column 'GeneratedTokens'"),
        (CSV + "yesterday,1,2\n", "line 2: TIMESTAMP"),
        (CSV + "2026-01-02 18:15:46,1,2\n2026-01-02 18:15:46,1,-2\n", "line 3: GeneratedTokens"),
        (CSV + "2026-01-02 18:15:46,1\n", "line 2: 2 fields; expected 3"),
        (CSV + "2026-01-02 18:15:46,1,\n", "line 2: GeneratedTokens"),
        (CSV, "no request in"),
        ("\0", "UTF-16 or not text at all"),
        (CSV + "2026-01-02 18:15:46,1,2,3\n", "line 2: 4 fields; expected 3"),
    ],
)
def test_a_bad_csv_is_said_to_be_so(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=said):
        read_requests([path])
