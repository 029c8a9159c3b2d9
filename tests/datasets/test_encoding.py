"""Bytes that are no UTF-8, other encodings, and JSON that only Python or JavaScript writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from dataset_samples import row, workflow
from span_samples import Recorder, agent, chat, envelope

from presage.datasets.ingest import ingest
from presage.datasets.read import read_traces
from presage.errors import TraceError

BROKEN = "caf\xe9".encode("latin-1")
NO_UTF8 = "of the line is not UTF-8; expected text in UTF-8: save or convert the file as UTF-8"


def spans(*names: str) -> list[dict[str, Any]]:
    """An OTLP document a name: a trace of one agent with one request, whose model is called so."""
    recorder = Recorder()
    documents = []
    for at, name in enumerate(names):
        with recorder.span("invoke_agent bot", at, at + 0.9, attributes=agent("bot")) as root:
            recorder.add("chat", at + 0.1, at + 0.2, root, chat(**{"gen_ai.request.model": name}))
        documents.append(envelope(recorder.spans[2 * at :]))
    return documents


def span_dump(number: int, model: str, **more: Any) -> dict[str, Any]:
    return {
        "name": "chat",
        "context": {"trace_id": f"{number:032x}", "span_id": f"{number:016x}"},
        "start_time": "2026-01-01T00:00:00Z",
        "end_time": "2026-01-01T00:00:01Z",
        "attributes": {"openinference.span.kind": "LLM", "agent.name": "a", "llm.model_name": model, **more},
    }


def mlflow_trace(number: int, model: str) -> dict[str, Any]:
    span = {
        "trace_id": "x",
        "span_id": f"{number:016x}",
        "name": "chat",
        "start_time_unix_nano": 10**18,
        "end_time_unix_nano": 10**18 + 10**9,
        "attributes": {"mlflow.spanType": '"LLM"', "llm.model_name": model},
    }
    return {"info": {"trace_id": f"tr-{number}"}, "data": {"spans": [span]}}


MODELS = ["m", "m", "BROKEN", "m", "m"]
FORMS: dict[str, list[dict[str, Any]]] = {
    "t.jsonl": [row(f"w{number}", model=model) for number, model in enumerate(MODELS)],
    "otlp.json": spans(*MODELS),
    "dump.json": [span_dump(number, model) for number, model in enumerate(MODELS)],
    "mlflow.json": [mlflow_trace(number, model) for number, model in enumerate(MODELS)],
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_bytes_that_are_no_utf8_are_named_with_file_line_and_byte(tmp_path: Path, name: str, packed: bool) -> None:
    lines = [json.dumps(one).encode().replace(b"BROKEN", BROKEN) for one in FORMS[name]]
    path = tmp_path / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(b"\n".join(lines)) if packed else b"\n".join(lines))
    byte = lines[2].index(b"\xe9") + 1
    for read in (lambda: read_traces(path), lambda: ingest([path], tmp_path / "store")):
        with pytest.raises(TraceError) as caught:
            read()
        assert f"{path}, line 3: byte {byte} {NO_UTF8}" in str(caught.value)
    result = read_traces(path, skip_bad=True)
    assert result.skipped["line with no UTF-8"] == 1
    # A line of JSONL still tells its workflow; spans in a lost line may have been of the traces beside it.
    assert result.table["model"].to_pylist() == ["m"] * (4 if name == "t.jsonl" else 2)


def test_the_first_line_is_named_too_and_so_is_the_line_of_a_document_on_many(tmp_path: Path) -> None:
    first, many = tmp_path / "first.json", tmp_path / "many.json"
    first.write_bytes(json.dumps(span_dump(1, "BROKEN")).encode().replace(b"BROKEN", BROKEN))
    text = json.dumps([span_dump(1, "m"), span_dump(2, "BROKEN")], indent=1).encode().replace(b"BROKEN", BROKEN)
    many.write_bytes(text)
    with pytest.raises(TraceError, match=r"first\.json, line 1: byte \d+ of the line is not UTF-8"):
        read_traces(first)
    line = next(number for number, one in enumerate(text.split(b"\n"), start=1) if b"\xe9" in one)
    with pytest.raises(TraceError, match=rf"many\.json, line {line}: byte \d+ of the line is not UTF-8"):
        read_traces(many)


def test_a_workflow_whose_own_name_is_no_utf8_costs_the_one_before_it_too(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [json.dumps(one).encode() for one in [*workflow("v", 2), row("BROKEN"), row("x")]]
    path.write_bytes(b"\n".join(lines).replace(b"BROKEN", BROKEN))
    assert read_traces(path, skip_bad=True).table["workflow_id"].to_pylist() == ["x"]


@pytest.mark.parametrize("name", ["t.jsonl", "t.json", "t.csv"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_refused_with_advice(tmp_path: Path, name: str, encoding: str) -> None:
    path = tmp_path / name
    path.write_bytes((json.dumps(row()) + "\n").encode(encoding))
    with pytest.raises(TraceError, match=r"UTF-16 or not text at all; expected text in UTF-8") as caught:
        read_traces(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("name", FORMS)
def test_a_byte_order_mark_is_passed_over(tmp_path: Path, name: str) -> None:
    lines = "\n".join(json.dumps(one) for one in FORMS[name])
    (tmp_path / name).write_text(lines, encoding="utf-8")
    plain = read_traces(tmp_path / name).table
    (tmp_path / name).write_text(lines, encoding="utf-8-sig")
    assert read_traces(tmp_path / name).table.equals(plain)


def test_zstd_is_refused_in_jsonl_too(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00\x00")
    with pytest.raises(TraceError, match="compressed with zstd; expected plain text or gzip"):
        read_traces(path)


def test_nan_that_python_writes_is_no_value(tmp_path: Path) -> None:
    nan = float("nan")
    path = tmp_path / "t.jsonl"
    path.write_text(
        "\n".join(json.dumps(row("w", step, model=m, input_tokens=t)) for step, m, t in [(0, "m", nan), (1, nan, 3.0)])
    )
    table = read_traces(path).table
    assert (table["model"].to_pylist(), table["input_tokens"].to_pylist()) == (["m", None], [None, 3])
    path.write_text(json.dumps(row(input_tokens=float("inf"))))
    with pytest.raises(TraceError, match='line 1, column "input_tokens"'):
        read_traces(path)
    dump = tmp_path / "dump.json"
    dump.write_text(json.dumps(span_dump(1, "m", score=nan)))
    assert read_traces(dump).table["model"].to_pylist() == ["m"]


def test_a_text_that_was_cut_inside_a_character_keeps_the_rest(tmp_path: Path) -> None:
    """JavaScript cuts strings between the halves of a character, and JSON can spell the half that is left."""
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(row(input_text="smile \ud83d", output_text="\U0001f600\\ud83d")))
    table = read_traces(path).table
    assert table["input_text"].to_pylist() == ["smile \ufffd"]
    dump = tmp_path / "dump.json"
    dump.write_text(json.dumps(span_dump(1, "m\ud83d")))
    assert read_traces(dump).table["model"].to_pylist() == ["m\ufffd"]


def test_times_and_truths_of_jsonl_come_in_every_spelling(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    spellings: list[dict[str, Any]] = [
        {"started_at": 1767225600, "success": True},
        {"start_time": "2026-01-01T00:00:00.000000999Z", "success": 1},
        {"started_at": "2026-01-01 00:00:00", "success": 1.0},
        {"start_time": "2026-01-01T01:00:00+01:00", "success": 1},
        {"start_time": "2026-01-01", "success": True},
    ]
    for spelling in spellings:
        path.write_text(json.dumps(row(**spelling)))
        one = read_traces(path).table.to_pylist()[0]
        assert (one["started_at"].timestamp(), one["success"]) == (1767225600, True), spelling
    for wrong in ("1767225600000", "20260101", "01/02/2026"):
        path.write_text(json.dumps(row(start_time=wrong)))
        with pytest.raises(TraceError, match=r'line 1, column "start_time": .*a time \(ISO 8601, or epoch seconds\)'):
            read_traces(path)


def test_a_name_that_is_nearly_right_is_named_in_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"workflowType": "t", "workflow_id": "w", "step": 0, "agent": "a"}))
    with pytest.raises(TraceError, match=r"column 'workflowType' is called 'workflow_type' in a trace"):
        read_traces(path)


def test_json_nested_past_all_reason_is_an_error_as_any_other(tmp_path: Path) -> None:
    for name in ("t.jsonl", "t.json"):
        (tmp_path / name).write_text('{"a": ' + "[" * 100_000)
        with pytest.raises(TraceError):
            read_traces(tmp_path / name)


def test_a_folder_of_tables_is_refused_with_advice(tmp_path: Path) -> None:
    for name in ("a.csv", "b.parquet"):
        (tmp_path / name).write_text("x")
    with pytest.raises(TraceError, match="nor files of spans: name its files one by one"):
        read_traces(tmp_path)
